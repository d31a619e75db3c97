//! One tile: up to four query rows against the keys of one partition, and the combination of partitions.
//!
//! Registers: four rows by four vectors of keys (or of a head's elements) on AVX-512, two by two on AVX2. How
//! rows and vectors are grouped changes no bit: each row, key and element has its own chain of operations.

#![expect(clippy::needless_range_loop, reason = "loops over registers: the index names the row and the vector")]

use super::{MAX_HEAD_DIM, PARTITION};
use crate::math::exp_lanes;
use crate::reduce::{exp_and_sum_lanes, max_lanes};
use crate::vector::{LANES, Lanes, One};

/// Most query rows of a tile.
pub(super) const TILE_ROWS: usize = 4;

/// Softmax state of a tile's rows: over one partition, or over all so far.
pub(super) struct Partial {
    /// Largest score.
    max: [f32; TILE_ROWS],
    /// Σ e^(score − max); 0 where no key was visible yet.
    sum: [f32; TILE_ROWS],
    /// Σ e^(score − max) · value.
    out: [[f32; MAX_HEAD_DIM]; TILE_ROWS],
}

/// Keys and values of one layer and one key/value head, through a sequence's block table.
#[derive(Clone, Copy)]
pub(super) struct Source<'a> {
    /// Keys of block 0.
    pub(super) keys: *const f32,
    /// Values of block 0.
    pub(super) values: *const f32,
    /// Elements from one block to the next.
    pub(super) block_stride: usize,
    pub(super) block_size: usize,
    pub(super) head_dim: usize,
    /// Blocks from position 0.
    pub(super) table: &'a [u32],
}

/// Query rows of a tile.
#[derive(Clone, Copy)]
pub(super) struct Queries {
    pub(super) rows: usize,
    pub(super) q: [*const f32; TILE_ROWS],
    /// Absolute positions, ascending.
    pub(super) positions: [usize; TILE_ROWS],
    /// 1 / √head_dim.
    pub(super) scale: f32,
}

type Scores = [[f32; PARTITION]; TILE_ROWS];

// === impl Partial ===

impl Partial {
    pub(super) const EMPTY: Self = Self { max: [0.0; TILE_ROWS], sum: [0.0; TILE_ROWS], out: [[0.0; MAX_HEAD_DIM]; TILE_ROWS] };
}

// === impl Source ===

impl Source<'_> {
    /// The keys of 16 positions from `position`, a multiple of 16: element `d` lies at `d · block_size`.
    #[inline(always)]
    unsafe fn keys_at(&self, position: usize) -> *const f32 {
        let block = self.table[position / self.block_size] as usize;
        // SAFETY: the caller asks for a position of the table, whose blocks were checked.
        unsafe { self.keys.add(block * self.block_stride + position % self.block_size) }
    }

    /// A position to prefetch: `position` if the sequence has a block for it, else `otherwise`.
    #[inline(always)]
    fn ahead(&self, position: usize, otherwise: usize) -> usize {
        if position < self.table.len() * self.block_size { position } else { otherwise }
    }

    /// The value of a position.
    #[inline(always)]
    unsafe fn value_at(&self, position: usize) -> *const f32 {
        let block = self.table[position / self.block_size] as usize;
        // SAFETY: as in `keys_at`.
        unsafe { self.values.add(block * self.block_stride + position % self.block_size * self.head_dim) }
    }
}

// === impl Queries ===

impl Queries {
    /// Keys of a partition that each row sees.
    #[inline(always)]
    fn visible(&self, partition: usize) -> [usize; TILE_ROWS] {
        let mut seen = [0; TILE_ROWS];
        let mut row = 0;
        while row < self.rows {
            seen[row] = (self.positions[row] + 1).saturating_sub(partition * PARTITION).min(PARTITION);
            row += 1;
        }
        seen
    }

    /// Partitions that the last row sees.
    pub(super) fn partitions(&self) -> usize {
        self.positions[self.rows - 1] / PARTITION + 1
    }
}

/// Attention of the tile over one partition.
///
/// # Safety
/// The set of `V` is there; pointers are valid for `head_dim` elements a query and for all positions up to the
/// last row's; all slots up to it were written.
#[inline(always)]
pub(super) unsafe fn partition<V: Lanes>(source: &Source<'_>, queries: &Queries, index: usize, into: &mut Partial) {
    // SAFETY: passed on. A tile has one to four rows.
    unsafe {
        match queries.rows {
            1 => partition_rows::<V, 1>(source, queries, 0, index, into),
            2 => partition_rows::<V, 2>(source, queries, 0, index, into),
            3 if V::TILE_ROWS == 4 => partition_rows::<V, 3>(source, queries, 0, index, into),
            4 if V::TILE_ROWS == 4 => partition_rows::<V, 4>(source, queries, 0, index, into),
            3 => {
                partition_rows::<V, 2>(source, queries, 0, index, into);
                partition_rows::<V, 1>(source, queries, 2, index, into);
            }
            _ => {
                partition_rows::<V, 2>(source, queries, 0, index, into);
                partition_rows::<V, 2>(source, queries, 2, index, into);
            }
        }
    }
}

/// Rows `first .. first + R` over one partition.
#[inline(always)]
unsafe fn partition_rows<V: Lanes, const R: usize>(
    source: &Source<'_>,
    queries: &Queries,
    first: usize,
    index: usize,
    into: &mut Partial,
) {
    let visible = queries.visible(index);
    let mut seen = [0; R];
    seen.copy_from_slice(&visible[first..first + R]);
    let most = seen[R - 1];
    let start = index * PARTITION;
    let mut scores: Scores = [[0.0; PARTITION]; TILE_ROWS];
    // SAFETY: positions below `start + most` are visible to a row, so they have blocks and are written.
    unsafe {
        let mut key = 0;
        if V::TILE_ROWS == 4 {
            while most - key >= 4 * LANES {
                score::<V, R, 4>(source, queries, first, start, key, LANES, &mut scores);
                key += 4 * LANES;
            }
        }
        while most - key >= 2 * LANES {
            score::<V, R, 2>(source, queries, first, start, key, LANES, &mut scores);
            key += 2 * LANES;
        }
        while key < most {
            score::<V, R, 1>(source, queries, first, start, key, (most - key).min(LANES), &mut scores);
            key += LANES;
        }
        for row in 0..R {
            let scores = &mut scores[row][..seen[row]];
            let max = max_lanes::<V>(scores);
            into.max[first + row] = max;
            into.sum[first + row] = exp_and_sum_lanes::<V>(scores, max);
        }
        let mut from = 0;
        if V::TILE_ROWS == 4 {
            while source.head_dim - from >= 4 * LANES {
                weigh::<V, R, 4>(source, start, &seen, &scores, from, LANES, first, into);
                from += 4 * LANES;
            }
        }
        while source.head_dim - from >= 2 * LANES {
            weigh::<V, R, 2>(source, start, &seen, &scores, from, LANES, first, into);
            from += 2 * LANES;
        }
        while from < source.head_dim {
            weigh::<V, R, 1>(source, start, &seen, &scores, from, (source.head_dim - from).min(LANES), first, into);
            from += LANES;
        }
    }
}

/// Loads a full vector, or the first `lanes` of one.
#[inline(always)]
unsafe fn load<V: Lanes>(p: *const f32, lanes: usize) -> V::F {
    // SAFETY: passed on.
    unsafe { if lanes == LANES { V::load(p) } else { V::load_tail(p, lanes, 0.0) } }
}

/// Scores of `G` groups of 16 keys from `key`; of a last group only `lanes` keys are read (`G` is then 1).
#[inline(always)]
unsafe fn score<V: Lanes, const R: usize, const G: usize>(
    source: &Source<'_>,
    queries: &Queries,
    first: usize,
    start: usize,
    key: usize,
    lanes: usize,
    scores: &mut Scores,
) {
    // SAFETY: the keys are visible to a row; queries have `head_dim` elements.
    unsafe {
        // Groups of a block lie apart and blocks anywhere: the hardware cannot guess where the next keys are.
        let (mut keys, mut ahead) = ([std::ptr::null::<f32>(); G], [std::ptr::null::<f32>(); G]);
        for group in 0..G {
            let position = start + key + group * LANES;
            keys[group] = source.keys_at(position);
            ahead[group] = source.keys_at(source.ahead(position + G * LANES, position));
        }
        let mut acc = [[V::splat(0.0); G]; R];
        for d in 0..source.head_dim {
            let mut k = [V::splat(0.0); G];
            for group in 0..G {
                k[group] = load::<V>(keys[group].add(d * source.block_size), lanes);
                V::prefetch(ahead[group].wrapping_add(d * source.block_size));
            }
            for row in 0..R {
                let q = V::splat(queries.q[first + row].add(d).read());
                for group in 0..G {
                    acc[row][group] = V::fma(q, k[group], acc[row][group]);
                }
            }
        }
        let scale = V::splat(queries.scale);
        for row in 0..R {
            for group in 0..G {
                V::store(scores[row].as_mut_ptr().add(key + group * LANES), V::mul(acc[row][group], scale));
            }
        }
    }
}

/// Σ weight · value of `C` vectors of a head's elements from `from`; of a last vector only `lanes` elements are
/// read (`C` is then 1).
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "one inlined step of a kernel; a struct would only rename them")]
unsafe fn weigh<V: Lanes, const R: usize, const C: usize>(
    source: &Source<'_>,
    start: usize,
    seen: &[usize; R],
    weights: &Scores,
    from: usize,
    lanes: usize,
    first: usize,
    into: &mut Partial,
) {
    // SAFETY: the keys are visible to a row; values have `head_dim` elements.
    unsafe {
        let mut acc = [[V::splat(0.0); C]; R];
        let mut key = 0;
        // Rows ascend in position: the first sees the fewest keys.
        let (common, most) = (seen[0], seen[R - 1]);
        while key < most {
            let values = source.value_at(start + key).add(from);
            let end = (key / source.block_size + 1) * source.block_size;
            let base = key;
            let next = source.value_at(source.ahead(start + end, start + key)).wrapping_add(from);
            while key < end.min(common) {
                let value = values.add((key - base) * source.head_dim);
                let mut v = [V::splat(0.0); C];
                for part in 0..C {
                    v[part] = load::<V>(value.add(part * LANES), lanes);
                    V::prefetch(next.wrapping_add((key - base) * source.head_dim + part * LANES));
                }
                for row in 0..R {
                    let weight = V::splat(weights[row][key]);
                    for part in 0..C {
                        acc[row][part] = V::fma(weight, v[part], acc[row][part]);
                    }
                }
                key += 1;
            }
            while key < end.min(most) {
                let value = values.add((key - base) * source.head_dim);
                for row in 0..R {
                    if key < seen[row] {
                        let weight = V::splat(weights[row][key]);
                        for part in 0..C {
                            let v = load::<V>(value.add(part * LANES), lanes);
                            acc[row][part] = V::fma(weight, v, acc[row][part]);
                        }
                    }
                }
                key += 1;
            }
        }
        for row in 0..R {
            for part in 0..C {
                // Room for a whole vector: a row of `out` is a multiple of 16 long.
                V::store(into.out[first + row].as_mut_ptr().add(from + part * LANES), acc[row][part]);
            }
        }
    }
}

/// Takes partition `index`, not the first, into the state of all before it.
#[inline(always)]
pub(super) unsafe fn combine<V: Lanes>(state: &mut Partial, next: &Partial, queries: &Queries, index: usize, head_dim: usize) {
    let seen = queries.visible(index);
    let mut row = 0;
    while row < queries.rows {
        if seen[row] > 0 {
            // SAFETY: rows of `out` have room for whole vectors up to `head_dim`.
            unsafe { combine_row::<V>(state, next, row, head_dim) };
        }
        row += 1;
    }
}

#[inline(always)]
unsafe fn combine_row<V: Lanes>(state: &mut Partial, next: &Partial, row: usize, head_dim: usize) {
    let max = if next.max[row] > state.max[row] { next.max[row] } else { state.max[row] };
    // SAFETY: single numbers need no set; `from` is inside rows with room for whole vectors.
    unsafe {
        let keep = exp_lanes::<One>(state.max[row] - max);
        let take = exp_lanes::<One>(next.max[row] - max);
        state.max[row] = max;
        state.sum[row] = state.sum[row].mul_add(keep, next.sum[row] * take);
        let (keep, take) = (V::splat(keep), V::splat(take));
        let mut from = 0;
        while from < head_dim {
            let p = state.out[row].as_mut_ptr().add(from);
            let taken = V::mul(V::load(next.out[row].as_ptr().add(from)), take);
            V::store(p, V::fma(V::load(p), keep, taken));
            from += V::WIDTH;
        }
    }
}

/// Writes a row's result, the weighted values divided by the sum of weights.
#[inline(always)]
pub(super) unsafe fn finish<V: Lanes>(state: &Partial, row: usize, out: &mut [f32]) {
    // SAFETY: `from` is inside `out`, which is as long as a head.
    unsafe {
        let sum = V::splat(state.sum[row]);
        let mut from = 0;
        while from < out.len() {
            let value = V::div(V::load(state.out[row].as_ptr().add(from)), sum);
            V::store_slice(out, from, V::canonical(value));
            from += V::WIDTH;
        }
    }
}
