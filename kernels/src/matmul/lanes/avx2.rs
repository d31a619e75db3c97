//! Eight lanes in AVX2 with FMA; a tile is two passes.

use std::arch::x86_64::{
    __m128i, __m256, __m256i, _CMP_UNORD_Q, _MM_HINT_T0, _mm_cvtsi32_si128, _mm_loadl_epi64, _mm_loadu_si128, _mm_prefetch,
    _mm256_abs_epi8, _mm256_add_epi16, _mm256_add_epi32, _mm256_and_si256, _mm256_blendv_ps, _mm256_castsi256_ps, _mm256_cmp_ps,
    _mm256_cvtepi8_epi32, _mm256_cvtepi32_ps, _mm256_cvtepu8_epi32, _mm256_cvtepu16_epi32, _mm256_cvtph_ps, _mm256_fmadd_ps,
    _mm256_loadu_ps, _mm256_loadu_si256, _mm256_madd_epi16, _mm256_maddubs_epi16, _mm256_mul_ps, _mm256_or_si256,
    _mm256_set1_epi8, _mm256_set1_epi16, _mm256_set1_epi32, _mm256_set1_ps, _mm256_setzero_ps, _mm256_setzero_si256,
    _mm256_sign_epi8, _mm256_sll_epi16, _mm256_slli_epi32, _mm256_srl_epi16, _mm256_srli_epi16, _mm256_storeu_ps,
    _mm256_xor_si256,
};

use super::{CANONICAL_NAN, GROUP, Lanes};

/// Half of the columns of a tile in one register.
pub(crate) struct Avx2;

/// How many groups of products of two activations with codes of `bits` bits add up within 16 bits.
///
/// A product pair is at most `2 · 127 · (2^bits − 1)`.
const fn groups_in_i16(bits: u32) -> usize {
    (i16::MAX as usize) / (2 * 127 * ((1 << bits) - 1))
}

impl Lanes for Avx2 {
    type F = __m256;
    type I = __m256i;
    type B = __m256i;

    const WIDTH: usize = 8;
    const MAX_ROWS: usize = 4;

    // SAFETY, all methods: the trait's contract gives the instruction set and the readable or writable bytes.

    #[inline(always)]
    unsafe fn zero() -> Self::F {
        unsafe { _mm256_setzero_ps() }
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self::F {
        unsafe { _mm256_set1_ps(value) }
    }

    #[inline(always)]
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F {
        unsafe { _mm256_mul_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    unsafe fn load_f32(p: *const u8) -> Self::F {
        unsafe { _mm256_loadu_ps(p.cast::<f32>()) }
    }

    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> Self::F {
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast::<__m128i>())) }
    }

    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> Self::F {
        unsafe {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast::<__m128i>()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        }
    }

    #[inline(always)]
    unsafe fn load_u8(p: *const u8) -> Self::F {
        unsafe { _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast::<__m128i>()))) }
    }

    #[inline(always)]
    unsafe fn load_i8(p: *const u8) -> Self::F {
        unsafe { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast::<__m128i>()))) }
    }

    #[inline(always)]
    unsafe fn store(p: *mut f32, value: Self::F) {
        unsafe {
            let nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(value, value);
            _mm256_storeu_ps(p, _mm256_blendv_ps(value, _mm256_set1_ps(CANONICAL_NAN), nan));
        }
    }

    #[inline(always)]
    unsafe fn to_float(value: Self::I) -> Self::F {
        unsafe { _mm256_cvtepi32_ps(value) }
    }

    #[inline(always)]
    fn prefetch(p: *const u8) {
        // SAFETY: a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast::<i8>()) };
    }

    #[inline(always)]
    unsafe fn load_bytes(p: *const u8) -> Self::B {
        unsafe { _mm256_loadu_si256(p.cast::<__m256i>()) }
    }

    #[inline(always)]
    unsafe fn low(bytes: Self::B) -> Self::B {
        unsafe { _mm256_and_si256(bytes, _mm256_set1_epi8(0x0f)) }
    }

    #[inline(always)]
    unsafe fn high(bytes: Self::B) -> Self::B {
        unsafe { _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), _mm256_set1_epi8(0x0f)) }
    }

    #[inline(always)]
    unsafe fn merge<const S: i32, const MASK: u8>(codes: Self::B, bits: Self::B) -> Self::B {
        // The counts are constants: one shift vanishes, the other gets an immediate. Bits that cross into the neighbour
        // byte of a 16-bit lane are outside of the mask.
        unsafe {
            let left = _mm256_sll_epi16(bits, _mm_cvtsi32_si128(S.max(0)));
            let shifted = _mm256_srl_epi16(left, _mm_cvtsi32_si128((-S).max(0)));
            _mm256_or_si256(codes, _mm256_and_si256(shifted, _mm256_set1_epi8(MASK.cast_signed())))
        }
    }

    #[inline(always)]
    unsafe fn dot<const R: usize, const N: usize, const BITS: u32>(
        codes: [Self::B; N],
        q: [*const i8; R],
        correction: [*const i32; R],
    ) -> [Self::I; R] {
        unsafe { if BITS == 8 { dot_bytes(codes, q) } else { dot_narrow::<R, N, BITS>(codes, q, correction) } }
    }
}

/// Codes below 64: pairs of products, and several groups of them, fit 16 bits exactly.
#[inline(always)]
unsafe fn dot_narrow<const R: usize, const N: usize, const BITS: u32>(
    codes: [__m256i; N],
    q: [*const i8; R],
    correction: [*const i32; R],
) -> [__m256i; R] {
    // SAFETY: the contract of `Lanes::dot`.
    unsafe {
        let ones = _mm256_set1_epi16(1);
        let mut sums = correction.map(|p| _mm256_set1_epi32(p.read()));
        for (sum, q) in sums.iter_mut().zip(q) {
            let mut pairs = _mm256_setzero_si256();
            for (group, codes) in codes.into_iter().enumerate() {
                let four = q.add(group * GROUP).cast::<i32>().read_unaligned();
                pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(codes, _mm256_set1_epi32(four)));
                if (group + 1).is_multiple_of(groups_in_i16(BITS)) || group + 1 == N {
                    *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(pairs, ones));
                    pairs = _mm256_setzero_si256();
                }
            }
        }
        sums
    }
}

/// Codes of eight bits around 128: a pair of unsigned products would pass 16 bits, so the sign moves to the
/// activation (128 · 127 · 2 = 32,512 fits) and there is nothing to correct.
#[inline(always)]
unsafe fn dot_bytes<const R: usize, const N: usize>(codes: [__m256i; N], q: [*const i8; R]) -> [__m256i; R] {
    // SAFETY: the contract of `Lanes::dot`.
    unsafe {
        let (ones, middle) = (_mm256_set1_epi16(1), _mm256_set1_epi8(-128));
        let mut sums = [_mm256_setzero_si256(); R];
        for (sum, q) in sums.iter_mut().zip(q) {
            for (group, codes) in codes.into_iter().enumerate() {
                let q = _mm256_set1_epi32(q.add(group * GROUP).cast::<i32>().read_unaligned());
                let signed = _mm256_xor_si256(codes, middle);
                let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(signed), _mm256_sign_epi8(q, signed));
                *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(pairs, ones));
            }
        }
        sums
    }
}
