//! Sixteen lanes in plain Rust: the reference, and the code of machines without vectors of ours.

use half::{bf16, f16};

use super::{CANONICAL_NAN, GROUP, GROUP_BYTES, Lanes, TILE};

/// All columns of a tile as arrays.
pub(crate) struct Scalar;

/// Reads `N` bytes.
#[inline(always)]
unsafe fn bytes<const N: usize>(p: *const u8) -> [u8; N] {
    // SAFETY: the caller vouches for `N` readable bytes; arrays of bytes have no alignment.
    unsafe { p.cast::<[u8; N]>().read() }
}

#[inline(always)]
fn halves(raw: [u8; 2 * TILE]) -> [u16; TILE] {
    std::array::from_fn(|lane| u16::from_le_bytes([raw[2 * lane], raw[2 * lane + 1]]))
}

impl Lanes for Scalar {
    type F = [f32; TILE];
    type I = [i32; TILE];
    type B = [u8; GROUP_BYTES];

    const WIDTH: usize = TILE;
    const MAX_ROWS: usize = 1;

    #[inline(always)]
    unsafe fn zero() -> Self::F {
        [0.0; TILE]
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self::F {
        [value; TILE]
    }

    #[inline(always)]
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F {
        std::array::from_fn(|lane| a[lane] * b[lane])
    }

    #[inline(always)]
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        std::array::from_fn(|lane| a[lane].mul_add(b[lane], c[lane]))
    }

    #[inline(always)]
    unsafe fn load_f32(p: *const u8) -> Self::F {
        // SAFETY: the caller vouches for `TILE` floats.
        let raw = unsafe { bytes::<{ 4 * TILE }>(p) };
        std::array::from_fn(|lane| f32::from_le_bytes(std::array::from_fn(|i| raw[4 * lane + i])))
    }

    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> Self::F {
        // SAFETY: the caller vouches for `TILE` halves.
        halves(unsafe { bytes(p) }).map(|bits| f16::from_bits(bits).to_f32_const())
    }

    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> Self::F {
        // SAFETY: as above.
        halves(unsafe { bytes(p) }).map(|bits| bf16::from_bits(bits).to_f32_const())
    }

    #[inline(always)]
    unsafe fn load_u8(p: *const u8) -> Self::F {
        // SAFETY: the caller vouches for `TILE` bytes.
        unsafe { bytes::<TILE>(p) }.map(f32::from)
    }

    #[inline(always)]
    unsafe fn load_i8(p: *const u8) -> Self::F {
        // SAFETY: as above.
        unsafe { bytes::<TILE>(p) }.map(|byte| f32::from(byte.cast_signed()))
    }

    #[inline(always)]
    unsafe fn store(p: *mut f32, value: Self::F) {
        let value = value.map(|lane| if lane.is_nan() { CANONICAL_NAN } else { lane });
        // SAFETY: the caller vouches for room for `TILE` floats.
        unsafe { p.cast::<[f32; TILE]>().write_unaligned(value) }
    }

    #[inline(always)]
    unsafe fn to_float(value: Self::I) -> Self::F {
        value.map(|lane| lane as f32)
    }

    #[inline(always)]
    fn prefetch(_: *const u8) {}

    #[inline(always)]
    unsafe fn load_bytes(p: *const u8) -> Self::B {
        // SAFETY: the caller vouches for `GROUP_BYTES`.
        unsafe { bytes(p) }
    }

    #[inline(always)]
    unsafe fn low(bytes: Self::B) -> Self::B {
        bytes.map(|byte| byte & 0x0f)
    }

    #[inline(always)]
    unsafe fn high(bytes: Self::B) -> Self::B {
        bytes.map(|byte| byte >> 4)
    }

    #[inline(always)]
    unsafe fn merge<const S: i32, const MASK: u8>(codes: Self::B, bits: Self::B) -> Self::B {
        std::array::from_fn(|i| codes[i] | if S >= 0 { bits[i] << S & MASK } else { bits[i] >> -S & MASK })
    }

    #[inline(always)]
    unsafe fn dot<const R: usize, const N: usize, const BITS: u32>(
        codes: [Self::B; N],
        q: [*const i8; R],
        correction: [*const i32; R],
    ) -> [Self::I; R] {
        std::array::from_fn(|row| {
            // SAFETY: the caller vouches for the correction and `GROUP · N` activations.
            let (start, q) = unsafe { (correction[row].read(), std::slice::from_raw_parts(q[row], GROUP * N)) };
            let mut sums = [start; TILE];
            for (codes, q) in codes.iter().zip(q.as_chunks::<GROUP>().0) {
                for (lane, sum) in sums.iter_mut().enumerate() {
                    for i in 0..GROUP {
                        *sum += i32::from(codes[lane * GROUP + i]) * i32::from(q[i]);
                    }
                }
            }
            sums
        })
    }
}
