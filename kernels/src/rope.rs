//! Rotary position embedding (Su et al. 2021) at absolute positions.
//!
//! Owns: the tables of cosines and sines. Refuses to know: models' configuration files. Called by the forward
//! passes for queries and keys before keys are stored.
//!
//! Pair `i` of a head turns by `position / linear_scale · base^(−2i / dims) / factor[i]`. Angles, cosines and
//! sines are computed in f64 by the `libm` crate, which has one algorithm on every machine, and stored as f32.
//! A rotation is two products and a sum per element, each rounded.
//!
//! Costs: a table row of `dims` floats per position, about 50 ns an entry, made when a position is first
//! [reserved](RopeTable::reserve); a rotation runs at memory speed.

use crate::error::KernelError;
use crate::isa::Isa;
use crate::matmul::shared::SharedMut;
use crate::pool::Pool;
use crate::vector::{Kernel, Lanes, dispatch};

/// The most positions a table can hold: 2^24, more than any published context.
pub const MAX_POSITIONS: usize = 1 << 24;

/// Elements that a task takes.
const TASK_ELEMENTS: usize = 8 * 1024;

/// Which elements of a head form a pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RopePairs {
    /// `2i` and `2i + 1`.
    Interleaved,
    /// `i` and `i + dims / 2`.
    HalfSplit,
}

/// What the angles are made of.
#[derive(Clone, PartialEq, Debug)]
pub struct RopeParams {
    /// Elements at the head's front that turn; even. The rest of a head is left alone.
    pub dims: usize,
    /// Base of the frequencies, such as 10,000.
    pub base: f64,
    /// Positions are divided by this; 1 leaves them.
    pub linear_scale: f64,
    /// Divisor of each pair's frequency; `None` is 1 for all.
    pub factors: Option<Vec<f32>>,
    /// Which elements form a pair.
    pub pairs: RopePairs,
}

/// Cosines and sines of all reserved positions.
#[derive(Clone, Debug)]
pub struct RopeTable {
    /// Per position: `dims / 2` cosines, then as many sines.
    table: Vec<f32>,
    frequencies: Vec<f64>,
    linear_scale: f64,
    pairs: RopePairs,
}

// === impl RopeTable ===

impl RopeTable {
    /// An empty table.
    pub fn new(params: &RopeParams) -> Result<Self, KernelError> {
        let half = params.dims / 2;
        if !params.dims.is_multiple_of(2) {
            return Err(KernelError::Multiple { field: "dims", got: params.dims, multiple: 2, format: "rope" });
        }
        if let Some(factors) = params.factors.as_ref().filter(|factors| factors.len() != half) {
            return Err(KernelError::Length { field: "factors", got: factors.len(), want: half });
        }
        let frequencies = (0..half).map(|i| {
            let factor = params.factors.as_ref().map_or(1.0, |factors| f64::from(factors[i]));
            libm::pow(params.base, -2.0 * i as f64 / params.dims as f64) / factor
        });
        Ok(Self { table: Vec::new(), frequencies: frequencies.collect(), linear_scale: params.linear_scale, pairs: params.pairs })
    }

    /// Positions that [`apply`](Self::apply) accepts.
    pub fn positions(&self) -> usize {
        self.table.len().checked_div(self.dims()).unwrap_or(MAX_POSITIONS)
    }

    /// Makes the entries of positions `0 .. positions`. Existing ones stay.
    pub fn reserve(&mut self, positions: usize) -> Result<(), KernelError> {
        if positions > MAX_POSITIONS {
            return Err(KernelError::Range { field: "positions", got: positions, limit: MAX_POSITIONS });
        }
        for position in self.positions()..positions {
            let angle = |frequency: &f64| position as f64 / self.linear_scale * frequency;
            self.table.extend(self.frequencies.iter().map(|frequency| libm::cos(angle(frequency)) as f32));
            self.table.extend(self.frequencies.iter().map(|frequency| libm::sin(angle(frequency)) as f32));
        }
        Ok(())
    }

    /// Turns every head of every row of `x` to the row's position.
    ///
    /// `x` holds one row per position, each a whole number of heads of `head_dim` elements.
    pub fn apply(&self, pool: &Pool, isa: Isa, positions: &[u32], head_dim: usize, x: &mut [f32]) -> Result<(), KernelError> {
        let rows = positions.len();
        if head_dim == 0 || self.dims() > head_dim {
            return Err(KernelError::Range { field: "dims", got: self.dims(), limit: head_dim });
        }
        let width = x.len().checked_div(rows).unwrap_or(0);
        if x.len() != width * rows || !width.is_multiple_of(head_dim) || (width == 0) != (rows == 0) {
            let want = rows * width.next_multiple_of(head_dim).max(head_dim);
            return Err(KernelError::Length { field: "x", got: x.len(), want });
        }
        if rows == 0 {
            return Ok(());
        }
        let reserved = self.positions();
        if let Some(position) = positions.iter().find(|position| **position as usize >= reserved) {
            return Err(KernelError::Index { field: "positions", got: *position as usize, count: reserved });
        }
        let step = (TASK_ELEMENTS / width).max(1);
        let shared = SharedMut::new(x);
        pool.run(rows.div_ceil(step), &|task| {
            let first = task * step;
            let positions = &positions[first..rows.min(first + step)];
            // SAFETY: tasks have disjoint rows.
            let x = unsafe { shared.slice(first * width, positions.len() * width) };
            for (position, row) in positions.iter().zip(x.chunks_exact_mut(width)) {
                let (cos, sin) = self.row(*position as usize);
                dispatch(isa, Rotate { cos, sin, pairs: self.pairs, head_dim, row });
            }
        });
        Ok(())
    }

    fn dims(&self) -> usize {
        self.frequencies.len() * 2
    }

    fn row(&self, position: usize) -> (&[f32], &[f32]) {
        self.table[position * self.dims()..][..self.dims()].split_at(self.frequencies.len())
    }
}

struct Rotate<'a> {
    cos: &'a [f32],
    sin: &'a [f32],
    pairs: RopePairs,
    head_dim: usize,
    row: &'a mut [f32],
}

impl Kernel for Rotate<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Lanes>(self) {
        let half = self.cos.len();
        for head in self.row.chunks_exact_mut(self.head_dim) {
            match self.pairs {
                RopePairs::HalfSplit => {
                    let (x, rest) = head.split_at_mut(half);
                    let y = &mut rest[..half];
                    let mut from = 0;
                    while from < half {
                        // SAFETY: `from` is inside four slices of one length.
                        unsafe {
                            let (a, b) = (V::load_slice(x, from, 0.0), V::load_slice(y, from, 0.0));
                            let (cos, sin) = (V::load_slice(self.cos, from, 0.0), V::load_slice(self.sin, from, 0.0));
                            let turned = V::sub(V::mul(a, cos), V::mul(b, sin));
                            V::store_slice(x, from, V::canonical(turned));
                            let turned = V::add(V::mul(a, sin), V::mul(b, cos));
                            V::store_slice(y, from, V::canonical(turned));
                        }
                        from += V::WIDTH;
                    }
                }
                RopePairs::Interleaved => {
                    // Plain Rust on every set: the compiler may vectorise it but neither fuses nor reorders.
                    for (pair, (cos, sin)) in head.as_chunks_mut::<2>().0.iter_mut().zip(self.cos.iter().zip(self.sin)) {
                        let [a, b] = *pair;
                        let (x, y) = (a * cos - b * sin, a * sin + b * cos);
                        *pair = [if x.is_nan() { f32::NAN } else { x }, if y.is_nan() { f32::NAN } else { y }];
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    fn params(dims: usize, pairs: RopePairs) -> RopeParams {
        RopeParams { dims, base: 100_000.0, linear_scale: 1.0, factors: None, pairs }
    }

    fn heads(len: usize) -> Vec<f32> {
        (0..len as u32).map(|i| (i.wrapping_mul(0x9e37_79b9) >> 8) as f32 / 8_388_608.0 - 1.0).collect()
    }

    fn rotated(table: &RopeTable, isa: Isa, threads: usize, positions: &[u32], head_dim: usize, x: &[f32]) -> Vec<u32> {
        let mut x = x.to_vec();
        table.apply(&Pool::new(threads), isa, positions, head_dim, &mut x).unwrap();
        x.iter().map(|v| v.to_bits()).collect()
    }

    #[test]
    fn pairs_turn_by_the_angle_of_the_paper() {
        for pairs in [RopePairs::Interleaved, RopePairs::HalfSplit] {
            let scaled = RopeParams { linear_scale: 4.0, factors: Some(vec![1.0, 2.0, 8.0]), ..params(6, pairs) };
            let mut table = RopeTable::new(&scaled).unwrap();
            table.reserve(1_000).unwrap();
            // One head of 8 of which 6 turn.
            let x = heads(8);
            let got = rotated(&table, Isa::Scalar, 1, &[999], 8, &x);
            for i in 0..3 {
                let angle = 999.0 / 4.0 * libm::pow(100_000.0, -2.0 * i as f64 / 6.0) / [1.0, 2.0, 8.0][i];
                let (a, b) = if pairs == RopePairs::Interleaved { (2 * i, 2 * i + 1) } else { (i, i + 3) };
                let (x0, x1) = (f64::from(x[a]), f64::from(x[b]));
                let near = |bits: u32, want: f64| (f64::from(f32::from_bits(bits)) - want).abs() < 2e-7;
                assert!(near(got[a], x0 * angle.cos() - x1 * angle.sin()), "{pairs:?} {i}");
                assert!(near(got[b], x0 * angle.sin() + x1 * angle.cos()), "{pairs:?} {i}");
            }
            assert_eq!(got[6..], [x[6].to_bits(), x[7].to_bits()]);
        }
    }

    #[test]
    fn all_sets_batches_and_threads_give_equal_bits() {
        for pairs in [RopePairs::Interleaved, RopePairs::HalfSplit] {
            for head_dim in [2, 6, 34, 64, 128] {
                let mut table = RopeTable::new(&params(head_dim, pairs)).unwrap();
                table.reserve(300).unwrap();
                let positions: Vec<u32> = (0..200).map(|i| i * 7 % 300).collect();
                let mut x = heads(200 * 3 * head_dim);
                x[5] = f32::from_bits(0xffc0_1111);
                let want = rotated(&table, Isa::Scalar, 1, &positions, head_dim, &x);
                assert_eq!(want[5], f32::NAN.to_bits());
                for isa in Isa::available() {
                    assert_eq!(rotated(&table, isa, 3, &positions, head_dim, &x), want, "{isa} {pairs:?} {head_dim}");
                    let row = 3 * head_dim * 9..3 * head_dim * 10;
                    assert_eq!(rotated(&table, isa, 1, &positions[9..10], head_dim, &x[row.clone()]), want[row]);
                }
            }
        }
    }

    #[test]
    fn a_table_grown_in_steps_equals_one_made_at_once() {
        let mut grown = RopeTable::new(&params(64, RopePairs::HalfSplit)).unwrap();
        for positions in [1, 2, 50, 20, 400] {
            grown.reserve(positions).unwrap();
        }
        let mut whole = RopeTable::new(&params(64, RopePairs::HalfSplit)).unwrap();
        whole.reserve(400).unwrap();
        assert_eq!(grown.positions(), 400);
        assert_eq!(grown.table, whole.table);
    }

    #[test]
    fn wrong_shapes_and_positions_are_refused() {
        assert!(RopeTable::new(&params(7, RopePairs::HalfSplit)).is_err());
        assert!(RopeTable::new(&RopeParams { factors: Some(vec![1.0]), ..params(8, RopePairs::HalfSplit) }).is_err());
        let mut table = RopeTable::new(&params(8, RopePairs::HalfSplit)).unwrap();
        table.reserve(4).unwrap();
        assert!(table.reserve(MAX_POSITIONS + 1).is_err());
        let pool = Pool::new(1);
        let mut x = [0.0; 16];
        assert!(table.apply(&pool, Isa::Scalar, &[3, 4], 8, &mut x).is_err());
        assert!(table.apply(&pool, Isa::Scalar, &[1, 2, 3], 8, &mut x).is_err());
        assert!(table.apply(&pool, Isa::Scalar, &[1, 2], 4, &mut x).is_err());
        assert!(table.apply(&pool, Isa::Scalar, &[], 8, &mut x).is_err());
        assert!(table.apply(&pool, Isa::Scalar, &[], 8, &mut []).is_ok());
    }
}
