//! Sixteen lanes in AVX-512 with the VNNI dot product.

use std::arch::x86_64::{
    __m128i, __m256i, __m512, __m512i, _CMP_UNORD_Q, _MM_HINT_T0, _mm_cvtsi32_si128, _mm_loadu_si128, _mm_prefetch,
    _mm256_loadu_si256, _mm512_and_si512, _mm512_castsi512_ps, _mm512_cmp_ps_mask, _mm512_cvtepi8_epi32, _mm512_cvtepi32_ps,
    _mm512_cvtepu8_epi32, _mm512_cvtepu16_epi32, _mm512_cvtph_ps, _mm512_dpbusd_epi32, _mm512_fmadd_ps, _mm512_loadu_ps,
    _mm512_loadu_si512, _mm512_mask_mov_ps, _mm512_mul_ps, _mm512_or_si512, _mm512_set1_epi8, _mm512_set1_epi32, _mm512_set1_ps,
    _mm512_setzero_ps, _mm512_sll_epi16, _mm512_slli_epi32, _mm512_srl_epi16, _mm512_srli_epi16, _mm512_storeu_ps,
};

use super::{CANONICAL_NAN, GROUP, Lanes, TILE};

/// All columns of a tile in one register.
pub(crate) struct Avx512;

impl Lanes for Avx512 {
    type F = __m512;
    type I = __m512i;
    type B = __m512i;

    const WIDTH: usize = TILE;
    const MAX_ROWS: usize = 8;

    // SAFETY, all methods: the trait's contract gives the instruction set and the readable or writable bytes.

    #[inline(always)]
    unsafe fn zero() -> Self::F {
        unsafe { _mm512_setzero_ps() }
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self::F {
        unsafe { _mm512_set1_ps(value) }
    }

    #[inline(always)]
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F {
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    unsafe fn load_f32(p: *const u8) -> Self::F {
        unsafe { _mm512_loadu_ps(p.cast::<f32>()) }
    }

    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> Self::F {
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast::<__m256i>())) }
    }

    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> Self::F {
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast::<__m256i>()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }
    }

    #[inline(always)]
    unsafe fn load_u8(p: *const u8) -> Self::F {
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast::<__m128i>()))) }
    }

    #[inline(always)]
    unsafe fn load_i8(p: *const u8) -> Self::F {
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast::<__m128i>()))) }
    }

    #[inline(always)]
    unsafe fn store(p: *mut f32, value: Self::F) {
        unsafe {
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(value, value);
            _mm512_storeu_ps(p, _mm512_mask_mov_ps(value, nan, _mm512_set1_ps(CANONICAL_NAN)));
        }
    }

    #[inline(always)]
    unsafe fn to_float(value: Self::I) -> Self::F {
        unsafe { _mm512_cvtepi32_ps(value) }
    }

    #[inline(always)]
    fn prefetch(p: *const u8) {
        // SAFETY: a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast::<i8>()) };
    }

    #[inline(always)]
    unsafe fn load_bytes(p: *const u8) -> Self::B {
        unsafe { _mm512_loadu_si512(p.cast::<__m512i>()) }
    }

    #[inline(always)]
    unsafe fn low(bytes: Self::B) -> Self::B {
        unsafe { _mm512_and_si512(bytes, _mm512_set1_epi8(0x0f)) }
    }

    #[inline(always)]
    unsafe fn high(bytes: Self::B) -> Self::B {
        unsafe { _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), _mm512_set1_epi8(0x0f)) }
    }

    #[inline(always)]
    unsafe fn merge<const S: i32, const MASK: u8>(codes: Self::B, bits: Self::B) -> Self::B {
        // The counts are constants: one shift vanishes, the other gets an immediate. Bits that cross into the neighbour
        // byte of a 16-bit lane are outside of the mask.
        unsafe {
            let left = _mm512_sll_epi16(bits, _mm_cvtsi32_si128(S.max(0)));
            let shifted = _mm512_srl_epi16(left, _mm_cvtsi32_si128((-S).max(0)));
            _mm512_or_si512(codes, _mm512_and_si512(shifted, _mm512_set1_epi8(MASK.cast_signed())))
        }
    }

    #[inline(always)]
    unsafe fn dot<const R: usize, const N: usize, const BITS: u32>(
        codes: [Self::B; N],
        q: [*const i8; R],
        correction: [*const i32; R],
    ) -> [Self::I; R] {
        unsafe {
            let mut sums = correction.map(|p| _mm512_set1_epi32(p.read()));
            for (group, codes) in codes.into_iter().enumerate() {
                for (sum, q) in sums.iter_mut().zip(q) {
                    let four = q.add(group * GROUP).cast::<i32>().read_unaligned();
                    *sum = _mm512_dpbusd_epi32(*sum, codes, _mm512_set1_epi32(four));
                }
            }
            sums
        }
    }
}
