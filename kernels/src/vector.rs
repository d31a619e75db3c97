//! Sixteen f32 lanes: the vocabulary of every kernel that is not a matrix product.
//!
//! Owns: the operations and how one kernel is compiled once per instruction set. Refuses to know: what is
//! computed. A kernel is a struct of its arguments with one generic body ([`Kernel`]); [`dispatch`] enters it
//! under the features of the chosen set.
//!
//! Invariants
//! 1. Every operation works lane by lane and is a single IEEE operation with default rounding or an exact
//!    integer operation. So a kernel gives equal bits on every implementation by construction.
//! 2. `max` and `min` return their second operand when an operand is NaN (the rule of `maxps`), on every set.
//! 3. A tail is masked by its load: memory behind it is never read, whatever lies there.
//! 4. NaN payloads are not defined by IEEE 754; what leaves a kernel and may be NaN passes `canonical` first.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod scalar;

use crate::isa::Isa;

pub(crate) use scalar::{One, Scalar};

/// Lanes of a full vector, and the stride of every reduction.
pub(crate) const LANES: usize = 16;

/// `WIDTH` lanes of f32 and of 32-bit integers.
///
/// # Safety
/// Every method requires the instruction set of the implementation; loads and stores require pointers valid
/// for the lanes they touch. No alignment is required.
pub(crate) trait Lanes: Copy {
    /// Floats.
    type F: Copy;
    /// Integers, wrapping.
    type I: Copy;
    /// One truth value per lane.
    type M: Copy;

    /// 16, but 1 for the implementation that evaluates a single number.
    const WIDTH: usize;
    /// Query rows that an attention tile holds in registers.
    const TILE_ROWS: usize;

    /// Asks for the cache line at any address, valid or not.
    #[inline(always)]
    unsafe fn prefetch(_: *const f32) {}

    unsafe fn splat(value: f32) -> Self::F;
    unsafe fn load(p: *const f32) -> Self::F;
    /// Reads the first `n < WIDTH` lanes and sets the rest to `fill`.
    unsafe fn load_tail(p: *const f32, n: usize, fill: f32) -> Self::F;
    unsafe fn store(p: *mut f32, value: Self::F);
    /// Writes the first `n < WIDTH` lanes.
    unsafe fn store_tail(p: *mut f32, n: usize, value: Self::F);

    unsafe fn add(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn div(a: Self::F, b: Self::F) -> Self::F;
    /// `a · b + c`, rounded once.
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `a > b ? a : b`.
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F;
    /// `a < b ? a : b`.
    unsafe fn min(a: Self::F, b: Self::F) -> Self::F;

    unsafe fn lt(a: Self::F, b: Self::F) -> Self::M;
    unsafe fn eq(a: Self::F, b: Self::F) -> Self::M;
    /// Lanes whose sign bit is set.
    unsafe fn negative(a: Self::I) -> Self::M;
    unsafe fn select(mask: Self::M, yes: Self::F, no: Self::F) -> Self::F;

    unsafe fn bits(a: Self::F) -> Self::I;
    unsafe fn from_bits(a: Self::I) -> Self::F;
    /// Nearest float of each signed integer, ties to even.
    unsafe fn to_float(a: Self::I) -> Self::F;

    unsafe fn int(value: i32) -> Self::I;
    unsafe fn load_int(p: *const u32) -> Self::I;
    /// Reads the first `n < WIDTH` lanes and sets the rest to 0.
    unsafe fn load_int_tail(p: *const u32, n: usize) -> Self::I;
    unsafe fn int_add(a: Self::I, b: Self::I) -> Self::I;
    unsafe fn int_sub(a: Self::I, b: Self::I) -> Self::I;
    unsafe fn int_and(a: Self::I, b: Self::I) -> Self::I;
    unsafe fn int_xor(a: Self::I, b: Self::I) -> Self::I;
    unsafe fn shl<const N: u32>(a: Self::I) -> Self::I;
    /// Arithmetic shift.
    unsafe fn sar<const N: u32>(a: Self::I) -> Self::I;
    /// Logical shift.
    unsafe fn shr<const N: u32>(a: Self::I) -> Self::I;
    /// High and low halves of the unsigned 64-bit product with one factor.
    unsafe fn mul_wide(a: Self::I, factor: u32) -> (Self::I, Self::I);

    /// Any NaN becomes the one quiet NaN without payload.
    #[inline(always)]
    unsafe fn canonical(a: Self::F) -> Self::F {
        unsafe { Self::select(Self::eq(a, a), a, Self::splat(f32::NAN)) }
    }

    /// Loads lanes `from..` of `x`, at most `WIDTH`, the rest set to `fill`.
    #[inline(always)]
    unsafe fn load_slice(x: &[f32], from: usize, fill: f32) -> Self::F {
        let left = x.len() - from;
        unsafe {
            let p = x.as_ptr().add(from);
            if left >= Self::WIDTH { Self::load(p) } else { Self::load_tail(p, left, fill) }
        }
    }

    /// Stores lanes to `x[from..]`, at most `WIDTH`.
    #[inline(always)]
    unsafe fn store_slice(x: &mut [f32], from: usize, value: Self::F) {
        let left = x.len() - from;
        unsafe {
            let p = x.as_mut_ptr().add(from);
            if left >= Self::WIDTH { Self::store(p, value) } else { Self::store_tail(p, left, value) }
        }
    }
}

/// Arguments of a kernel together with its one body.
pub(crate) trait Kernel {
    /// What it returns.
    type Output;

    /// The body; must be `#[inline(always)]` so that it is compiled under the features of its caller.
    ///
    /// # Safety
    /// The machine has the instruction set of `V`.
    unsafe fn run<V: Lanes>(self) -> Self::Output;
}

/// Runs a kernel on an instruction set. A set that this machine lacks is replaced by the scalar one, which
/// changes no bit.
#[inline]
pub(crate) fn dispatch<K: Kernel>(isa: Isa, kernel: K) -> K::Output {
    match isa {
        // SAFETY: the guard has just seen the features that the entry enables.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 if isa.is_available() => unsafe { on_avx512(kernel) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 if isa.is_available() => unsafe { on_avx2(kernel) },
        _ => reference::<Scalar, K>(kernel),
    }
}

/// Evaluates a kernel for a single number.
#[inline]
pub(crate) fn single<K: Kernel>(kernel: K) -> K::Output {
    reference::<One, K>(kernel)
}

#[inline]
fn reference<V: Lanes, K: Kernel>(kernel: K) -> K::Output {
    #[cfg(target_arch = "x86_64")]
    if Isa::scalar_has_fma() {
        // SAFETY: the guard has just seen the feature.
        return unsafe { on_fma::<V, K>(kernel) };
    }
    // SAFETY: the scalar implementations need no instruction set.
    unsafe { kernel.run::<V>() }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "fma")]
unsafe fn on_fma<V: Lanes, K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: `V` is scalar code; the feature only makes its `mul_add` an instruction.
    unsafe { kernel.run::<V>() }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn on_avx2<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: the features are those of this function.
    unsafe { kernel.run::<avx2::Avx2>() }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn on_avx512<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: the features are those of this function.
    unsafe { kernel.run::<avx512::Avx512>() }
}

#[cfg(test)]
mod tests;
