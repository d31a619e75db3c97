//! temporary
#![allow(clippy::all, clippy::pedantic)]
use kvasir_kernels::attention::*;
use kvasir_kernels::{Isa, Pool};
use std::time::Instant;
fn main() {
    let pool = Pool::new(1);
    let shape = KvShape { layers: 30, kv_heads: 3, head_dim: 64, block_size: 16, dtype: KvDtype::F32 };
    let n = 2048usize;
    let mut kv = KvPool::new(shape, n / 16 + 100).unwrap();
    let t = Instant::now();
    let tables: Vec<u32> = (0..n as u32 / 16).map(|b| (b * 77) % (n as u32 / 16 + 100)).collect();
    let slots: Vec<KvSlot> = (0..n).map(|p| KvSlot { block: tables[p / 16], slot: (p % 16) as u32 }).collect();
    let k: Vec<f32> = (0..n * 192).map(|i| ((i * 7919 % 1000) as f32 - 500.0) / 500.0).collect();
    for l in 0..30 { kv.write(&pool, l, &slots, &k, &k).unwrap(); }
    println!("write {:?}", t.elapsed());
    let mut scratch = AttentionScratch::new();
    for isa in [Isa::Avx512, Isa::Avx2] {
        for (name, start, count) in [("prefill 512", 0usize, 512usize), ("prefill 1024", 0, 1024), ("decode @512", 511, 1), ("decode @2047", 2047, 1), ("verify 5 @2043", 2043, 5)] {
            let q = &k[..count * 576 % k.len().max(1)];
            let q: Vec<f32> = (0..count * 576).map(|i| k[i % k.len()] * 3.0).collect::<Vec<_>>().into_iter().chain(q.iter().copied().take(0)).collect();
            let mut out = vec![0.0; q.len()];
            let rows = [AttentionRow { table: 0, blocks: tables.len(), start: start as u32, queries: count as u32 }];
            let mut best = f64::MAX;
            for _ in 0..7 {
                let t = Instant::now();
                for l in 0..30 { attend(&pool, isa, &kv, l, &rows, &tables, &q, 9, &mut scratch, &mut out).unwrap(); }
                best = best.min(t.elapsed().as_secs_f64());
            }
            let keys: usize = (start..start + count).map(|p| p + 1).sum();
            let gflop = keys as f64 * 9.0 * 64.0 * 4.0 * 30.0 / 1e9;
            println!("{isa} {name}: {:.2} ms for 30 layers, {:.1} GFLOP/s, {:.1} GB/s of kv", best * 1e3, gflop / best, (start + count) as f64 * 192.0 * 8.0 * 30.0 / best / 1e9);
        }
    }
}
