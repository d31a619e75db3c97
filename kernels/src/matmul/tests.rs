//! One row, one thread, scalar is the truth; everything else must give its bits.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use super::*;
use crate::quant::tests::{Random, slow, tensor};

const ROWS: [usize; 11] = [1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33];
const MOST_ROWS: usize = 33;

/// Row lengths that a format permits, short and not round where possible.
fn inputs(ty: WeightType) -> &'static [usize] {
    match ty.block_len() {
        1 => &[1, 33, 300],
        32 => &[32, 96, 576],
        _ => &[256, 768],
    }
}

fn normal_rows(m: usize, k: usize, random: &mut Random) -> Vec<f32> {
    (0..m * k).map(|_| random.normal()).collect()
}

fn product(pool: &Pool, isa: Isa, w: &Weights, x: &[f32], m: usize) -> Vec<f32> {
    let mut out = vec![-1.0; m * w.n()];
    matmul(pool, isa, w, x, m, &mut Scratch::new(), &mut out).unwrap();
    out
}

/// Each row alone, scalar, on one thread.
fn truth(w: &Weights, x: &[f32]) -> Vec<f32> {
    let pool = Pool::new(1);
    x.chunks_exact(w.k()).flat_map(|row| product(&pool, Isa::Scalar, w, row, 1)).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

#[test]
fn bits_are_equal_for_every_row_count_thread_count_and_instruction_set() {
    let mut random = Random(2);
    let pools = [1, 2, 3].map(Pool::new);
    for ty in WeightType::ALL {
        for &k in inputs(ty) {
            for n in [1, 16, 37] {
                let w = Weights::pack(ty, n, k, &tensor(ty, n, k, &mut random)).unwrap();
                let x = normal_rows(MOST_ROWS, k, &mut random);
                let truth = truth(&w, &x);
                for isa in Isa::available() {
                    for pool in &pools {
                        for m in ROWS {
                            let out = product(pool, isa, &w, &x[..m * k], m);
                            let threads = pool.threads();
                            assert_eq!(
                                bits(&out),
                                bits(&truth[..m * n]),
                                "{} n {n} k {k} m {m} {isa} {threads} threads",
                                ty.name()
                            );
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn bits_are_equal_across_chunks_of_rows_and_runs_of_tiles() {
    let mut random = Random(3);
    let (n, k) = (1601, 8192);
    let pool = Pool::new(2);
    let w = Weights::pack(WeightType::Q4K, n, k, &tensor(WeightType::Q4K, n, k, &mut random)).unwrap();
    let m = CHUNK_BYTES / (2 * k) + 9;
    let x = normal_rows(m, k, &mut random);
    let isa = Isa::detect();
    let out = product(&pool, isa, &w, &x, m);
    for row in [0, 7, 8, CHUNK_BYTES / (2 * k) - 1, CHUNK_BYTES / (2 * k), m - 1] {
        let alone = product(&pool, isa, &w, &x[row * k..][..k], 1);
        assert_eq!(bits(&out[row * n..][..n]), bits(&alone), "row {row}");
    }
}

/// The activations as the contract says they are seen, computed apart from the kernel, in f64.
fn seen(x: &[f32]) -> Vec<f64> {
    let see = |block: &[f32]| {
        let largest = block.iter().fold(0.0_f32, |most, v| most.max(v.abs()));
        let (scale, inverse) = (largest / 127.0, 127.0 / largest);
        block.iter().map(|v| f64::from((v * inverse).round_ties_even()) * f64::from(scale)).collect::<Vec<_>>()
    };
    x.chunks(32).flat_map(see).collect()
}

#[test]
fn products_are_near_those_of_expanded_weights_in_f64() {
    let mut random = Random(4);
    let pool = Pool::new(2);
    for ty in WeightType::ALL {
        let (n, k, m) = (21, *inputs(ty).last().unwrap(), 5);
        let bytes = tensor(ty, n, k, &mut random);
        let expanded = slow(ty, &bytes);
        let w = Weights::pack(ty, n, k, &bytes).unwrap();
        let x = normal_rows(m, k, &mut random);
        let seen = if is_quantised(ty) { seen(&x) } else { x.iter().map(|&v| f64::from(v)).collect() };
        let out = product(&pool, Isa::detect(), &w, &x, m);
        for (row, column) in (0..m).flat_map(|row| (0..n).map(move |column| (row, column))) {
            let w = &expanded[column * k..][..k];
            let got = f64::from(out[row * n + column]);
            let (mut exact, mut slack, mut real, mut coarse) = (0.0, 0.0, 0.0, 0.0);
            for (i, &w) in w.iter().enumerate() {
                let (w, x) = (f64::from(w), &x[row * k..][..k]);
                let block = &x[i / 32 * 32..(i / 32 * 32 + 32).min(k)];
                let largest = block.iter().fold(0.0_f32, |most, v| most.max(v.abs()));
                exact += w * seen[row * k + i];
                real += w * f64::from(x[i]);
                // A weight is code · d + m: its parts may be larger than it, by at most the block's range.
                slack += (w.abs() + 1.0) * f64::from(largest) * 1e-6;
                coarse += w.abs() * f64::from(largest) / 254.0;
            }
            assert!((got - exact).abs() <= slack, "{} {row},{column}: {got} against {exact}", ty.name());
            assert!((got - real).abs() <= coarse + slack, "{} {row},{column}: {got} of {real}", ty.name());
        }
    }
}

#[test]
fn the_largest_codes_and_activations_do_not_saturate() {
    let pool = Pool::new(1);
    for ty in WeightType::ALL.into_iter().filter(|&ty| is_quantised(ty)) {
        for fill in [0x00_u8, 0x7f, 0x80, 0xff] {
            let (n, k) = (16, 256);
            let mut bytes = vec![fill; n * ty.row_bytes(k)];
            for block in bytes.chunks_exact_mut(ty.block_bytes()) {
                let at = if ty == WeightType::Q6K { 208 } else { 0 };
                block[at..at + 2].copy_from_slice(&0x3c00_u16.to_le_bytes());
                if matches!(ty, WeightType::Q4_1 | WeightType::Q5_1 | WeightType::Q4K | WeightType::Q5K) {
                    block[2..4].copy_from_slice(&0x3c00_u16.to_le_bytes());
                }
            }
            let w = Weights::pack(ty, n, k, &bytes).unwrap();
            let expanded = slow(ty, &bytes);
            for sign in [1.0, -1.0] {
                let x = vec![sign * 127.0; k];
                let want = expanded[..k].iter().map(|&w| f64::from(w) * f64::from(sign) * 127.0).sum::<f64>();
                for isa in Isa::available() {
                    let got = product(&pool, isa, &w, &x, 1);
                    let error = (f64::from(got[3]) - want).abs();
                    assert!(error <= want.abs() * 1e-5, "{} {fill:#x} {isa}: {} against {want}", ty.name(), got[3]);
                }
            }
        }
    }
}

#[test]
fn hard_values_give_equal_bits_and_stay_in_their_row() {
    let mut random = Random(5);
    let pool = Pool::new(2);
    let rows: [fn(usize) -> f32; 10] = [
        |_| 0.0,
        |_| -0.0,
        |i| if i % 3 == 0 { f32::from_bits(1) } else { -f32::MIN_POSITIVE },
        |i| if i % 2 == 0 { f32::MAX } else { f32::MIN },
        |i| if i == 17 { f32::NAN } else { 1.0 },
        |i| if i == 40 { f32::INFINITY } else { 1.0 },
        |i| if i % 2 == 0 { f32::NEG_INFINITY } else { f32::INFINITY },
        |i| f32::from_bits(0xff80_0001 + i as u32),
        |i| (i as f32 - 100.0) * 1.2e-36,
        |i| if i % 32 == 5 { 3e38 } else { 0.5 },
    ];
    let poisoned = [4, 5, 6, 7];
    for ty in WeightType::ALL {
        let (n, k) = (19, 256);
        let w = Weights::pack(ty, n, k, &tensor(ty, n, k, &mut random)).unwrap();
        let mut x: Vec<f32> = rows.iter().flat_map(|row| (0..k).map(row)).collect();
        x.extend(normal_rows(2, k, &mut random));
        let m = rows.len() + 2;
        let truth = truth(&w, &x);
        for isa in Isa::available() {
            let out = product(&pool, isa, &w, &x, m);
            assert_eq!(bits(&out), bits(&truth), "{} {isa}", ty.name());
        }
        for (row, out) in truth.chunks_exact(n).enumerate() {
            let nan = out.iter().filter(|v| v.is_nan()).count();
            assert!(out.iter().all(|v| !v.is_nan() || v.to_bits() == 0x7fc0_0000), "{} row {row}", ty.name());
            if poisoned.contains(&row) && (is_quantised(ty) || row == 4 || row == 7) {
                assert_eq!(nan, n, "{} row {row} must be NaN", ty.name());
            }
            if !poisoned.contains(&row) && row != 3 && row != 9 {
                assert_eq!(nan, 0, "{} row {row} must be clean: {out:?}", ty.name());
            }
        }
    }
}

#[test]
fn weights_that_are_not_finite_give_equal_bits() {
    let mut random = Random(6);
    let pool = Pool::new(2);
    for ty in WeightType::ALL {
        let (n, k, m) = (16, 256, 3);
        let w = Weights::pack(ty, n, k, &random.bytes(n * ty.row_bytes(k))).unwrap();
        let x = normal_rows(m, k, &mut random);
        let truth = truth(&w, &x);
        for isa in Isa::available() {
            assert_eq!(bits(&product(&pool, isa, &w, &x, m)), bits(&truth), "{} {isa}", ty.name());
        }
    }
}

#[test]
fn a_group_gives_the_bits_of_its_products() {
    let mut random = Random(7);
    let pool = Pool::new(2);
    let (k, m) = (256, 5);
    let matrices = [(WeightType::Q4K, 40), (WeightType::Q6K, 16), (WeightType::F16, 3), (WeightType::Q8_0, 33)];
    let weights = matrices.map(|(ty, n)| Weights::pack(ty, n, k, &tensor(ty, n, k, &mut random)).unwrap());
    let x = normal_rows(m, k, &mut random);
    for isa in Isa::available() {
        let mut outs = weights.each_ref().map(|w| vec![0.0; m * w.n()]);
        let mut products: Vec<Product<'_>> =
            weights.iter().zip(&mut outs).map(|(weights, out)| Product { weights, out }).collect();
        matmul_group(&pool, isa, &x, m, &mut Scratch::new(), &mut products).unwrap();
        for (w, out) in weights.iter().zip(&outs) {
            assert_eq!(bits(out), bits(&product(&pool, isa, w, &x, m)), "{isa} {w:?}");
        }
    }
}

#[test]
fn activations_quantise_to_the_nearest_byte_on_every_instruction_set() {
    let mut random = Random(8);
    // The largest is 127, so the scale is 1 and halves are ties.
    let mut ties = [0.0_f32; SUB_LEN];
    ties[..8].copy_from_slice(&[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, -126.5]);
    let mut values = ties.to_vec();
    values.extend(normal_rows(200, SUB_LEN, &mut random));
    values.extend((0..100 * SUB_LEN).map(|_| f32::from_bits(random.next() as u32)));
    for isa in Isa::available() {
        for (i, block) in values.chunks_exact(SUB_LEN).enumerate() {
            let mut scratch = Scratch::new();
            let lines = scratch.lines(1, 1).unwrap();
            dispatch::quantize(isa, block, 1, lines);
            let line = lines[0];
            let largest = block.iter().fold(0.0_f32, |most, v| most.max(v.abs()));
            if i == 0 {
                assert_eq!(line.q[..8], [127, 0, 2, 2, 0, -2, 126, -126], "{isa}");
            }
            if block.iter().any(|v| !v.is_finite()) {
                assert!(line.scale.is_nan() && line.q == [0; SUB_LEN], "{isa} block {i}");
                continue;
            }
            let sum: i32 = line.q.iter().map(|&q| i32::from(q)).sum();
            assert!(line.q.iter().all(|&q| q != i8::MIN));
            assert_eq!(*line.correction(activations::Correction::Half), -128 * sum);
            assert_eq!(line.scaled_sum.to_bits(), (line.scale * sum as f32).to_bits());
            for (q, v) in line.q.iter().zip(block) {
                let error = (f64::from(*q) * f64::from(line.scale) - f64::from(*v)).abs();
                assert!(error <= f64::from(largest) / 253.9 + 1e-36, "{isa} block {i}: {q} for {v}");
            }
        }
    }
}

#[test]
fn sizes_that_do_not_fit_are_refused() {
    let length = |field, got, want| Err(KernelError::Length { field, got, want });
    let pack = |ty, n, k, len: usize| Weights::pack(ty, n, k, &vec![0; len]).map(|_| ());
    let whole = KernelError::Multiple { field: "cols", got: 48, multiple: 32, format: "Q4_0" };
    assert_eq!(pack(WeightType::Q4_0, 1, 48, 27), Err(whole));
    assert_eq!(pack(WeightType::Q4_0, 2, 32, 18), length("bytes", 18, 36));
    assert_eq!(pack(WeightType::F16, 0, 32, 0), Err(KernelError::Range { field: "rows", got: 0, limit: MAX_DIM }));
    let huge = usize::MAX & !255;
    assert_eq!(pack(WeightType::Q6K, huge, 256, 0), Err(KernelError::Range { field: "rows", got: huge, limit: MAX_DIM }));
    assert_eq!(pack(WeightType::Q6K, 1, huge, 0), Err(KernelError::Range { field: "cols", got: huge, limit: MAX_DIM }));
    assert!(pack(WeightType::F32, MAX_DIM, MAX_DIM, 64).is_err());

    let pool = Pool::new(1);
    let w = Weights::pack(WeightType::Q8_0, 3, 32, &[0; 102]).unwrap();
    let run =
        |x: usize, m, out: usize| matmul(&pool, Isa::Scalar, &w, &vec![0.0; x], m, &mut Scratch::new(), &mut vec![0.0; out]);
    assert_eq!(run(64, 2, 6), Ok(()));
    assert_eq!(run(0, 0, 0), Ok(()));
    assert_eq!(run(63, 2, 6), length("x", 63, 64));
    assert_eq!(run(64, 2, 7), length("out", 7, 6));
    assert_eq!(run(0, usize::MAX, 0), Err(KernelError::Range { field: "m", got: usize::MAX, limit: MAX_ROWS }));
}

#[test]
fn the_scratch_grows_once() {
    let pool = Pool::new(2);
    let w = Weights::pack(WeightType::Q8_0, 16, 64, &[0; 16 * 68]).unwrap();
    let mut scratch = Scratch::new();
    let mut sizes = Vec::new();
    for m in [9, 1, 16, 4] {
        let mut out = vec![0.0; m * 16];
        matmul(&pool, Isa::detect(), &w, &vec![1.0; m * 64], m, &mut scratch, &mut out).unwrap();
        sizes.push(scratch.bytes());
    }
    assert_eq!(sizes, [16 * 2 * 64; 4]);
}

#[test]
fn packing_on_threads_gives_the_same_matrix_at_about_the_size_of_the_file() {
    let mut random = Random(9);
    for ty in WeightType::ALL {
        let (n, k) = (48, 512);
        let bytes = tensor(ty, n, k, &mut random);
        let one = Weights::pack(ty, n, k, &bytes).unwrap();
        let three = Weights::pack_on(&Pool::new(3), ty, n, k, &bytes).unwrap();
        for tile in 0..one.tiles() {
            assert_eq!(one.tile(tile), three.tile(tile), "{} tile {tile}", ty.name());
        }
        let ratio = one.bytes() as f64 / bytes.len() as f64;
        assert!((0.99..1.04).contains(&ratio), "{} takes {ratio} of its file", ty.name());
    }
}

/// The order of operations is part of every cached block's identity: if a bit of these changes, the numerics
/// revision must, or a worker would continue blocks that another revision computed.
#[test]
fn bits_are_those_of_this_numerics_revision() {
    let mut random = Random(10);
    let pool = Pool::new(1);
    let digests = WeightType::ALL.map(|ty| {
        let w = Weights::pack(ty, 17, 256, &tensor(ty, 17, 256, &mut random)).unwrap();
        let out = product(&pool, Isa::detect(), &w, &normal_rows(3, 256, &mut random), 3);
        // FNV-1a.
        bits(&out)
            .iter()
            .flat_map(|bits| bits.to_le_bytes())
            .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
    });
    let want = [
        0x2bd3_47a5_2921_223f_u64,
        0xb400_dbf8_e906_ac57,
        0x419c_ed41_fbb2_7e19,
        0x6c5e_74d9_bb81_79a5,
        0xe2b2_48a5_fc8b_c8ce,
        0x12c1_9e90_410c_d78c,
        0x315c_d46a_0558_fadd,
        0xc2c4_31b9_aed3_f86a,
        0xdb8e_893b_18f7_a49c,
        0x6dd3_ebdc_0e6c_2303,
        0x0283_5c70_b649_7fa7,
    ];
    assert_eq!(digests, want, "{digests:#x?}");
}
