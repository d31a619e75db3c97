//! Sixteen lanes as one 512-bit register.

use super::Lanes;
#[allow(clippy::wildcard_imports, reason = "some forty intrinsics, all with one prefix")]
use std::arch::x86_64::*;

/// AVX-512 F, BW, DQ, VL.
#[derive(Clone, Copy)]
pub(crate) struct Avx512;

#[inline(always)]
fn mask(n: usize) -> __mmask16 {
    ((1_u32 << n) - 1) as __mmask16
}

/// An intrinsic on registers.
macro_rules! op {
    ($call:expr) => {
        // SAFETY: the trait's contract: the caller has AVX-512. Register operations touch no memory.
        unsafe { $call }
    };
}

impl Lanes for Avx512 {
    type F = __m512;
    type I = __m512i;
    type M = __mmask16;

    const WIDTH: usize = 16;
    const TILE_ROWS: usize = 4;

    #[inline(always)]
    unsafe fn prefetch(p: *const f32) {
        // SAFETY: a hint, which never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self::F {
        op!(_mm512_set1_ps(value))
    }

    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::F {
        // SAFETY: the caller gives 16 readable floats.
        unsafe { _mm512_loadu_ps(p) }
    }

    #[inline(always)]
    unsafe fn load_tail(p: *const f32, n: usize, fill: f32) -> Self::F {
        // SAFETY: a masked load reads only lanes `0..n`.
        unsafe { _mm512_mask_loadu_ps(_mm512_set1_ps(fill), mask(n), p) }
    }

    #[inline(always)]
    unsafe fn store(p: *mut f32, value: Self::F) {
        // SAFETY: the caller gives 16 writable floats.
        unsafe { _mm512_storeu_ps(p, value) }
    }

    #[inline(always)]
    unsafe fn store_tail(p: *mut f32, n: usize, value: Self::F) {
        // SAFETY: a masked store writes only lanes `0..n`.
        unsafe { _mm512_mask_storeu_ps(p, mask(n), value) }
    }

    #[inline(always)]
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F {
        op!(_mm512_add_ps(a, b))
    }

    #[inline(always)]
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F {
        op!(_mm512_sub_ps(a, b))
    }

    #[inline(always)]
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F {
        op!(_mm512_mul_ps(a, b))
    }

    #[inline(always)]
    unsafe fn div(a: Self::F, b: Self::F) -> Self::F {
        op!(_mm512_div_ps(a, b))
    }

    #[inline(always)]
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        op!(_mm512_fmadd_ps(a, b, c))
    }

    #[inline(always)]
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F {
        op!(_mm512_max_ps(a, b))
    }

    #[inline(always)]
    unsafe fn min(a: Self::F, b: Self::F) -> Self::F {
        op!(_mm512_min_ps(a, b))
    }

    #[inline(always)]
    unsafe fn lt(a: Self::F, b: Self::F) -> Self::M {
        op!(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b))
    }

    #[inline(always)]
    unsafe fn eq(a: Self::F, b: Self::F) -> Self::M {
        op!(_mm512_cmp_ps_mask::<_CMP_EQ_OQ>(a, b))
    }

    #[inline(always)]
    unsafe fn negative(a: Self::I) -> Self::M {
        op!(_mm512_movepi32_mask(a))
    }

    #[inline(always)]
    unsafe fn select(mask: Self::M, yes: Self::F, no: Self::F) -> Self::F {
        op!(_mm512_mask_blend_ps(mask, no, yes))
    }

    #[inline(always)]
    unsafe fn bits(a: Self::F) -> Self::I {
        op!(_mm512_castps_si512(a))
    }

    #[inline(always)]
    unsafe fn from_bits(a: Self::I) -> Self::F {
        op!(_mm512_castsi512_ps(a))
    }

    #[inline(always)]
    unsafe fn to_float(a: Self::I) -> Self::F {
        op!(_mm512_cvtepi32_ps(a))
    }

    #[inline(always)]
    unsafe fn int(value: i32) -> Self::I {
        op!(_mm512_set1_epi32(value))
    }

    #[inline(always)]
    unsafe fn load_int(p: *const u32) -> Self::I {
        // SAFETY: the caller gives 16 readable words.
        unsafe { _mm512_loadu_si512(p.cast()) }
    }

    #[inline(always)]
    unsafe fn load_int_tail(p: *const u32, n: usize) -> Self::I {
        // SAFETY: a masked load reads only lanes `0..n`.
        unsafe { _mm512_maskz_loadu_epi32(mask(n), p.cast()) }
    }

    #[inline(always)]
    unsafe fn int_add(a: Self::I, b: Self::I) -> Self::I {
        op!(_mm512_add_epi32(a, b))
    }

    #[inline(always)]
    unsafe fn int_sub(a: Self::I, b: Self::I) -> Self::I {
        op!(_mm512_sub_epi32(a, b))
    }

    #[inline(always)]
    unsafe fn int_and(a: Self::I, b: Self::I) -> Self::I {
        op!(_mm512_and_si512(a, b))
    }

    #[inline(always)]
    unsafe fn int_xor(a: Self::I, b: Self::I) -> Self::I {
        op!(_mm512_xor_si512(a, b))
    }

    #[inline(always)]
    unsafe fn shl<const N: u32>(a: Self::I) -> Self::I {
        op!(_mm512_slli_epi32::<N>(a))
    }

    #[inline(always)]
    unsafe fn sar<const N: u32>(a: Self::I) -> Self::I {
        op!(_mm512_srai_epi32::<N>(a))
    }

    #[inline(always)]
    unsafe fn shr<const N: u32>(a: Self::I) -> Self::I {
        op!(_mm512_srli_epi32::<N>(a))
    }

    #[inline(always)]
    unsafe fn mul_wide(a: Self::I, factor: u32) -> (Self::I, Self::I) {
        // SAFETY: see `op`.
        unsafe {
            let factor = _mm512_set1_epi64(i64::from(factor));
            let even = _mm512_mul_epu32(a, factor);
            let odd = _mm512_mul_epu32(_mm512_srli_epi64::<32>(a), factor);
            (
                _mm512_mask_mov_epi32(_mm512_srli_epi64::<32>(even), 0xaaaa, odd),
                _mm512_mask_mov_epi32(even, 0xaaaa, _mm512_slli_epi64::<32>(odd)),
            )
        }
    }
}
