//! One tile of float weights times a few rows.
//!
//! The order per (row, column): `acc = fma(w, x, acc)` over the inputs, ascending. Weights of 16 bits are
//! widened exactly; activations stay f32.

use super::lanes::{Lanes, TILE};
use super::tile::{Target, store};

/// One call's inputs: a tile, and `R` rows of activations.
pub(crate) struct Rows {
    /// `k` times `TILE` weights.
    pub(crate) weights: *const u8,
    /// Inputs.
    pub(crate) k: usize,
    /// First row of activations; the next is `k` elements on.
    pub(crate) x: *const f32,
    pub(crate) target: Target,
}

/// How a float weight is stored.
pub(crate) trait Storage {
    /// Bytes of a weight.
    const SIZE: usize;
    /// Reads `WIDTH` weights.
    ///
    /// # Safety
    /// The instruction set of `L`; the bytes are readable.
    unsafe fn load<L: Lanes>(p: *const u8) -> L::F;
}

/// IEEE binary32.
pub(crate) struct F32;
/// IEEE binary16.
pub(crate) struct F16;
/// The upper half of binary32.
pub(crate) struct BF16;

impl Storage for F32 {
    const SIZE: usize = 4;

    #[inline(always)]
    unsafe fn load<L: Lanes>(p: *const u8) -> L::F {
        // SAFETY: the caller's promises.
        unsafe { L::load_f32(p) }
    }
}

impl Storage for F16 {
    const SIZE: usize = 2;

    #[inline(always)]
    unsafe fn load<L: Lanes>(p: *const u8) -> L::F {
        // SAFETY: the caller's promises.
        unsafe { L::load_f16(p) }
    }
}

impl Storage for BF16 {
    const SIZE: usize = 2;

    #[inline(always)]
    unsafe fn load<L: Lanes>(p: *const u8) -> L::F {
        // SAFETY: the caller's promises.
        unsafe { L::load_bf16(p) }
    }
}

/// Multiplies `R` rows and stores the sums.
///
/// # Safety
/// The instruction set of `L`; `weights` and `R` rows of `x` readable; `R` rows of `target` writable.
#[inline(always)]
pub(crate) unsafe fn multiply<L: Lanes, S: Storage, const R: usize>(rows: &Rows) {
    for first in (0..TILE).step_by(L::WIDTH) {
        // SAFETY: the caller's promises.
        unsafe {
            let x: [*const f32; R] = std::array::from_fn(|r| rows.x.add(r * rows.k));
            let mut acc = [L::zero(); R];
            let mut weights = rows.weights.add(first * S::SIZE);
            for i in 0..rows.k {
                let w = S::load::<L>(weights);
                for r in 0..R {
                    acc[r] = L::fma(w, L::splat(x[r].add(i).read()), acc[r]);
                }
                weights = weights.add(TILE * S::SIZE);
            }
            store::<L, R>(&rows.target, first, acc);
        }
    }
}
