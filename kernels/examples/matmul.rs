//! How fast the products are on this machine: `cargo run --release -p kvasir-kernels --example matmul`.
//!
//! For each matrix and row count: time of a product (median of several), MAC/s, bytes of weights per second
//! and the cost relative to one row, c(m). Run it alone; figures of two runs on a shared machine differ.
//! Arguments: the number of threads (default: all), then a word that the matrix's name must contain (or `isas`:
//! all matrices on all instruction sets), then one row count.
#![expect(clippy::unwrap_used, reason = "a measurement: sizes are constants and any failure should stop it")]

use std::time::Instant;

use kvasir_kernels::{Isa, Pool, Scratch, WeightType, Weights, matmul};

/// Name, format, outputs, inputs.
const MATRICES: [(&str, WeightType, usize, usize); 9] = [
    ("smollm2 attention", WeightType::Q4_1, 576, 576),
    ("smollm2 up", WeightType::Q4_1, 1536, 576),
    ("smollm2 down", WeightType::Q4_1, 576, 1536),
    ("smollm2 head", WeightType::Q8_0, 49152, 576),
    ("qwen 0.5b up", WeightType::Q5_0, 4864, 896),
    ("qwen 1.5b up", WeightType::Q4K, 8960, 1536),
    ("qwen 1.5b down", WeightType::Q6K, 1536, 8960),
    ("float up", WeightType::F16, 1536, 576),
    ("float down", WeightType::F32, 576, 1536),
];

const ROWS: [usize; 9] = [1, 2, 3, 4, 5, 8, 9, 16, 128];

/// Time given to each figure.
const BUDGET_MS: u128 = 150;

fn main() {
    let mut args = std::env::args().skip(1);
    let all = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let threads = args.next().and_then(|arg| arg.parse().ok()).unwrap_or(all);
    let wanted = args.next().unwrap_or_default();
    let pool = Pool::new(threads);
    let rows: Vec<usize> = args.next().map_or(ROWS.to_vec(), |arg| vec![arg.parse().unwrap()]);
    let isas = if wanted == "isas" { Isa::available() } else { vec![Isa::detect()] };
    println!("{threads} threads; best instruction set {}", Isa::detect());
    println!("read bandwidth {:.1} GB/s", read_bandwidth(&pool));
    for (name, ty, n, k) in MATRICES {
        if wanted != "isas" && !name.contains(&wanted) {
            continue;
        }
        // Enough copies that one row streams from memory as in a model, not from a cache.
        let bytes = tensor(ty, n, k);
        let copies = (64 * 1024 * 1024 / bytes.len()).clamp(1, 64);
        let begin = Instant::now();
        let copies: Vec<Weights> = (0..copies).map(|_| Weights::pack_on(&pool, ty, n, k, &bytes).unwrap()).collect();
        let packed = (copies.len() * bytes.len()) as f64 / begin.elapsed().as_secs_f64() / 1e9;
        println!("{name}: packs {packed:.2} GB/s");
        for &isa in &isas {
            println!("{name}: {} {n} x {k}, {isa}", ty.name());
            measure(&pool, isa, &copies, &rows);
        }
    }
}

/// One line per row count.
fn measure(pool: &Pool, isa: Isa, copies: &[Weights], rows: &[usize]) {
    let (n, k) = (copies[0].n(), copies[0].k());
    let mut scratch = Scratch::new();
    let mut one_row = None;
    for &m in rows {
        let x: Vec<f32> = (0..m * k).map(|i| ((i * 7919) % 1009) as f32 / 504.0 - 1.0).collect();
        let mut out = vec![0.0; m * n];
        let mut times = Vec::new();
        let start = Instant::now();
        let mut copy = 0;
        while start.elapsed().as_millis() < BUDGET_MS || times.len() < 5 {
            let begin = Instant::now();
            matmul(pool, isa, &copies[copy % copies.len()], &x, m, &mut scratch, &mut out).unwrap();
            times.push(begin.elapsed().as_secs_f64());
            copy += 1;
        }
        times.sort_by(f64::total_cmp);
        let seconds = times[times.len() / 2];
        let one = *one_row.get_or_insert(seconds);
        println!(
            "  m {m:4}  {:9.1} us  {:7.1} GMAC/s  {:6.2} GB/s  c(m) {:6.2}",
            seconds * 1e6,
            (m * n * k) as f64 / seconds / 1e9,
            copies[0].bytes() as f64 / seconds / 1e9,
            seconds / one
        );
    }
}

/// Random codes with harmless scales.
fn tensor(ty: WeightType, n: usize, k: usize) -> Vec<u8> {
    let mut state = 1_u32;
    let mut bytes = vec![0_u8; n * ty.row_bytes(k)];
    for block in bytes.chunks_exact_mut(ty.block_bytes()) {
        for byte in block.iter_mut() {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            *byte = (state >> 24) as u8;
        }
        // The high byte of a binary16 (or binary32) around 0.01.
        match ty {
            WeightType::Q6K => block[209] = 0x20,
            WeightType::F32 => block[3] = 0x3c,
            _ => {
                block[1] = 0x20;
                if block.len() > 3 {
                    block[3] = 0x20;
                }
            }
        }
    }
    bytes
}

/// GB/s of summing a buffer larger than the caches on all threads.
fn read_bandwidth(pool: &Pool) -> f64 {
    let buffer = vec![1_u64; 32 * 1024 * 1024];
    let tasks = pool.threads() * 8;
    let part = buffer.len() / tasks;
    let best = (0..5).map(|_| {
        let begin = Instant::now();
        pool.run(tasks, &|task| {
            let sum = buffer[task * part..][..part].iter().fold(0_u64, |sum, v| sum.wrapping_add(*v));
            std::hint::black_box(sum);
        });
        begin.elapsed().as_secs_f64()
    });
    (tasks * part * 8) as f64 / best.fold(f64::INFINITY, f64::min) / 1e9
}
