#![allow(clippy::unwrap_used, reason = "tests")]

use super::*;
use crate::isa::Isa;
use crate::pool::Pool;

struct Case {
    heads: usize,
    shape: KvShape,
    /// Tokens of the sequence.
    len: usize,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

fn values(len: usize, seed: u32, spread: f32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(747_796_405).wrapping_add(1);
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / 8_388_608.0 - 1.0
    };
    (0..len).map(|_| next() * spread).collect()
}

fn case(heads: usize, kv_heads: usize, head_dim: usize, block_size: usize, len: usize) -> Case {
    let shape = KvShape { layers: 2, kv_heads, head_dim, block_size, dtype: KvDtype::F32 };
    Case {
        heads,
        shape,
        len,
        q: values(len * heads * head_dim, 1, 3.0),
        k: values(len * kv_heads * head_dim, 2, 3.0),
        v: values(len * kv_heads * head_dim, 3, 1.0),
    }
}

/// A store where all slots are NaN but those of the sequence, its blocks in a scattered order.
struct Stored {
    kv: KvPool,
    table: Vec<u32>,
}

fn stored(case: &Case, spare: usize, order: usize) -> Stored {
    let blocks = case.len.div_ceil(case.shape.block_size);
    let mut kv = KvPool::new(case.shape, blocks + spare).unwrap();
    let all = (blocks + spare) as u32;
    (0..all).for_each(|block| kv.poison(block).unwrap());
    let mut table: Vec<u32> = (0..all).collect();
    match order {
        0 => {}
        1 => table.reverse(),
        _ => table.sort_by_key(|block| block.wrapping_mul(0x9e37_79b9)),
    }
    table.truncate(blocks);
    Stored { kv, table }
}

impl Stored {
    fn slot(&self, position: usize) -> KvSlot {
        let size = self.kv.shape().block_size;
        KvSlot { block: self.table[position / size], slot: (position % size) as u32 }
    }

    /// Runs the sequence in chunks of these lengths, on layer 1, and returns the bits of all outputs.
    fn run(&mut self, case: &Case, chunks: &[usize], isa: Isa, pool: &Pool) -> Vec<u32> {
        let (q_width, width) = (case.heads * case.shape.head_dim, case.shape.width());
        let mut scratch = AttentionScratch::new();
        let (mut start, mut all) = (0, Vec::new());
        for &chunk in chunks {
            let end = start + chunk;
            let slots: Vec<_> = (start..end).map(|position| self.slot(position)).collect();
            self.kv.write(pool, 1, &slots, &case.k[start * width..end * width], &case.v[start * width..end * width]).unwrap();
            let row = AttentionRow { table: 0, blocks: self.table.len(), start: start as u32, queries: chunk as u32 };
            let mut out = vec![f32::NAN; chunk * q_width];
            let q = &case.q[start * q_width..end * q_width];
            attend(pool, isa, &self.kv, 1, &[row], &self.table, q, case.heads, &mut scratch, &mut out).unwrap();
            all.extend(out.iter().map(|v| v.to_bits()));
            start = end;
        }
        assert_eq!(start, case.len);
        all
    }
}

fn exact(case: &Case) -> Vec<f64> {
    let (d, width, group) = (case.shape.head_dim, case.shape.width(), case.heads / case.shape.kv_heads);
    let mut out = Vec::new();
    for token in 0..case.len {
        for head in 0..case.heads {
            let q = &case.q[(token * case.heads + head) * d..][..d];
            let at = |position: usize| position * width + head / group * d;
            let dot = |position: usize| -> f64 {
                q.iter().zip(&case.k[at(position)..]).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum()
            };
            let scores: Vec<f64> = (0..=token).map(|position| dot(position) / (d as f64).sqrt()).collect();
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
            let total: f64 = weights.iter().sum();
            out.extend((0..d).map(|i| {
                weights.iter().enumerate().map(|(position, w)| w * f64::from(case.v[at(position) + i])).sum::<f64>() / total
            }));
        }
    }
    out
}

fn shapes() -> Vec<Case> {
    vec![
        case(9, 3, 64, 16, 300),
        case(2, 2, 128, 32, 270),
        case(7, 1, 17, 16, 60),
        case(4, 2, 80, 64, 90),
        case(3, 3, 1, 16, 40),
        case(4, 4, 16, 256, 530),
        case(6, 2, 34, 128, 33),
    ]
}

#[test]
fn attention_agrees_with_f64() {
    let pool = Pool::new(2);
    for case in shapes() {
        let got = stored(&case, 2, 2).run(&case, &[case.len], Isa::detect(), &pool);
        for (i, (got, want)) in got.iter().zip(exact(&case)).enumerate() {
            let got = f64::from(f32::from_bits(*got));
            assert!((got - want).abs() < 2e-6, "{:?} element {i}: {got} {want}", case.shape);
        }
    }
}

#[test]
fn chunks_block_tables_threads_and_sets_give_equal_bits_among_poison() {
    let pools = [Pool::new(1), Pool::new(2), Pool::new(3)];
    for case in shapes() {
        let want = stored(&case, 1, 0).run(&case, &[case.len], Isa::Scalar, &pools[0]);
        assert!(want.iter().all(|bits| f32::from_bits(*bits).is_finite()));
        let one_by_one = vec![1; case.len];
        let uneven: Vec<usize> = {
            let (mut left, mut next) = (case.len, 1);
            std::iter::from_fn(|| {
                let chunk = next.min(left);
                (next, left) = (next % 37 + 5, left - chunk);
                (chunk > 0).then_some(chunk)
            })
            .collect()
        };
        for isa in Isa::available() {
            for (threads, pool) in pools.iter().enumerate() {
                for (order, chunks) in [&[case.len][..], &one_by_one, &uneven].into_iter().enumerate() {
                    let got = stored(&case, 3, order).run(&case, chunks, isa, pool);
                    let differs = got.iter().zip(&want).position(|(got, want)| got != want);
                    assert_eq!(differs, None, "{isa} {threads} order {order} {:?}", case.shape);
                }
            }
        }
    }
}

#[test]
fn neighbours_in_the_batch_change_nothing() {
    let pool = Pool::new(3);
    let case = case(6, 2, 64, 16, 290);
    let alone = stored(&case, 0, 0).run(&case, &[case.len], Isa::detect(), &pool);
    let q_width = case.heads * case.shape.head_dim;
    let width = case.shape.width();
    for isa in Isa::available() {
        // Three sequences of one store: a short one, ours from position 250, a one-token one.
        let mut store = stored(&case, 8, 2);
        let others: Vec<u32> = (0..store.kv.blocks() as u32).filter(|block| !store.table.contains(block)).collect();
        let slots: Vec<_> = (0..case.len).map(|position| store.slot(position)).collect();
        store.kv.write(&pool, 1, &slots, &case.k, &case.v).unwrap();
        for (index, block) in others.iter().enumerate() {
            let slots: Vec<_> = (0..16).map(|slot| KvSlot { block: *block, slot }).collect();
            let (k, v) = (values(16 * width, 90 + index as u32, 50.0), values(16 * width, 70 + index as u32, 50.0));
            store.kv.write(&pool, 1, &slots, &k, &v).unwrap();
        }
        let mut tables = others[..3].to_vec();
        tables.extend(&store.table);
        tables.extend(&others[3..]);
        let rows = [
            AttentionRow { table: 0, blocks: 3, start: 7, queries: 33 },
            AttentionRow { table: 3, blocks: store.table.len(), start: 250, queries: 40 },
            AttentionRow { table: 3 + store.table.len(), blocks: 5, start: 79, queries: 1 },
        ];
        let mut q = values(33 * q_width, 5, 4.0);
        q.extend(&case.q[250 * q_width..]);
        q.extend(values(q_width, 6, 4.0));
        let mut out = vec![0.0; q.len()];
        attend(&pool, isa, &store.kv, 1, &rows, &tables, &q, case.heads, &mut AttentionScratch::new(), &mut out).unwrap();
        let ours: Vec<u32> = out[33 * q_width..73 * q_width].iter().map(|v| v.to_bits()).collect();
        assert_eq!(ours, alone[250 * q_width..], "{isa}");
        assert!(out.iter().all(|v| v.is_finite()));
    }
}

#[test]
fn extreme_scores_and_nan_are_the_same_on_every_set() {
    let pool = Pool::new(2);
    let mut case = case(4, 2, 64, 16, 280);
    case.q.iter_mut().step_by(977).for_each(|v| *v = 1e4);
    case.k.iter_mut().step_by(1_013).for_each(|v| *v = -3e4);
    case.k[200 * 128 + 5] = 1e-42;
    case.v[270 * 128 + 70] = f32::from_bits(0xffc0_0bad);
    case.k[275 * 128 + 3] = f32::INFINITY;
    let want = stored(&case, 0, 0).run(&case, &[case.len], Isa::Scalar, &pool);
    assert!(want.contains(&f32::NAN.to_bits()), "the NaN must be seen by later queries of its head");
    let nan = want.iter().filter(|bits| f32::from_bits(**bits).is_nan()).count();
    assert!(nan < want.len() / 10, "and by nobody else");
    for isa in Isa::available() {
        assert_eq!(stored(&case, 0, 1).run(&case, &[100, 180], isa, &pool), want, "{isa}");
    }
}

#[test]
fn a_copied_block_has_the_copied_slots_and_nothing_more() {
    let case = case(4, 2, 20, 32, 32);
    let pool = Pool::new(1);
    let mut store = stored(&case, 2, 0);
    let slots: Vec<_> = (0..32).map(|slot| KvSlot { block: 0, slot }).collect();
    for layer in 0..2 {
        store.kv.write(&pool, layer, &slots, &case.k, &case.v).unwrap();
    }
    let poisoned = store.kv.fingerprint(1, 32).unwrap();
    store.kv.copy_slots(0, 1, 19).unwrap();
    for slots in 0..=19 {
        assert_eq!(store.kv.fingerprint(0, slots).unwrap(), store.kv.fingerprint(1, slots).unwrap());
    }
    assert_ne!(store.kv.fingerprint(0, 20).unwrap(), store.kv.fingerprint(1, 20).unwrap());
    let nan = store.kv.as_slice()[store.kv.shape().block_elements()..][..store.kv.shape().block_elements()]
        .iter()
        .filter(|v| v.is_nan())
        .count();
    assert_eq!(nan, 2 * 2 * case.shape.width() * (32 - 19), "slots behind the copied ones stay as they were");
    store.kv.poison(1).unwrap();
    assert_eq!(store.kv.fingerprint(1, 32).unwrap(), poisoned);
}

#[test]
fn a_fingerprint_sees_every_layer_head_element_and_slot() {
    let shape = KvShape { layers: 2, kv_heads: 2, head_dim: 3, block_size: 16, dtype: KvDtype::F32 };
    let pool = Pool::new(1);
    let mut kv = KvPool::new(shape, 1).unwrap();
    let mut seen = vec![kv.fingerprint(0, 16).unwrap()];
    for layer in 0..2 {
        for slot in [0, 15] {
            for element in 0..12 {
                let mut kv_values = [0.0; 12];
                kv_values[element] = 1.0;
                let at = [KvSlot { block: 0, slot }];
                kv.write(&pool, layer, &at, &kv_values[..6], &kv_values[6..]).unwrap();
                seen.push(kv.fingerprint(0, 16).unwrap());
                kv.write(&pool, layer, &at, &[0.0; 6], &[0.0; 6]).unwrap();
            }
        }
    }
    let count = seen.len();
    seen.sort_unstable();
    seen.dedup();
    assert_eq!(seen.len(), count);
}

#[test]
fn operands_that_do_not_fit_are_refused() {
    let shape = KvShape { layers: 1, kv_heads: 2, head_dim: 8, block_size: 16, dtype: KvDtype::F32 };
    for broken in [
        KvShape { block_size: 24, ..shape },
        KvShape { block_size: 8, ..shape },
        KvShape { block_size: 512, ..shape },
        KvShape { head_dim: MAX_HEAD_DIM + 1, ..shape },
        KvShape { layers: 0, ..shape },
    ] {
        assert!(KvPool::new(broken, 1).is_err(), "{broken:?}");
    }
    assert!(matches!(KvPool::new(shape, 1 << 25), Err(KernelError::Range { .. })));
    let huge = KvShape { layers: 1 << 20, kv_heads: 1 << 20, ..shape };
    assert!(matches!(KvPool::new(huge, 1 << 20), Err(KernelError::Memory { .. })));
    let pool = Pool::new(1);
    let mut kv = KvPool::new(shape, 2).unwrap();
    let at = |block, slot| [KvSlot { block, slot }];
    assert!(kv.write(&pool, 1, &at(0, 0), &[0.0; 16], &[0.0; 16]).is_err());
    assert!(kv.write(&pool, 0, &at(2, 0), &[0.0; 16], &[0.0; 16]).is_err());
    assert!(kv.write(&pool, 0, &at(0, 16), &[0.0; 16], &[0.0; 16]).is_err());
    assert!(kv.write(&pool, 0, &at(0, 0), &[0.0; 15], &[0.0; 16]).is_err());
    assert!(kv.copy_slots(0, 2, 1).is_err() && kv.copy_slots(0, 1, 17).is_err() && kv.poison(2).is_err());
    let run = |row: AttentionRow, tables: &[u32], heads: usize| {
        let mut out = vec![0.0; row.queries as usize * heads * 8];
        let q = out.clone();
        attend(&pool, Isa::Scalar, &kv, 0, &[row], tables, &q, heads, &mut AttentionScratch::new(), &mut out)
    };
    let row = AttentionRow { table: 0, blocks: 1, start: 15, queries: 1 };
    assert!(run(row, &[1], 4).is_ok());
    assert!(run(row, &[1], 3).is_err());
    assert!(run(row, &[2], 4).is_err());
    assert!(run(row, &[], 4).is_err());
    assert!(run(AttentionRow { start: 16, ..row }, &[1], 4).is_err());
    assert!(run(AttentionRow { table: usize::MAX, ..row }, &[1], 4).is_err());
}
