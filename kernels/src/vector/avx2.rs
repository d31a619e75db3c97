//! Sixteen lanes as two 256-bit registers.

use super::Lanes;
#[allow(clippy::wildcard_imports, reason = "some forty intrinsics, all with one prefix")]
use std::arch::x86_64::*;

/// AVX2 with FMA.
#[derive(Clone, Copy)]
pub(crate) struct Avx2;

/// Lanes `0..n` of each half as all-ones words.
#[inline(always)]
unsafe fn masks(n: usize) -> [__m256i; 2] {
    // SAFETY: the caller has AVX2; no memory is touched.
    unsafe {
        let count = _mm256_set1_epi32(n as i32);
        let low = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        let high = _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15);
        [_mm256_cmpgt_epi32(count, low), _mm256_cmpgt_epi32(count, high)]
    }
}

/// `[f(a0, b0), f(a1, b1)]`.
macro_rules! both {
    ($f:ident($($arg:expr),*)) => {
        // SAFETY: the trait's contract: the caller has AVX2 and FMA. Register operations touch no memory.
        unsafe { [$f($($arg[0]),*), $f($($arg[1]),*)] }
    };
}

impl Lanes for Avx2 {
    type F = [__m256; 2];
    type I = [__m256i; 2];
    type M = [__m256; 2];

    const WIDTH: usize = 16;
    const TILE_ROWS: usize = 2;

    #[inline(always)]
    unsafe fn prefetch(p: *const f32) {
        // SAFETY: a hint, which never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self::F {
        // SAFETY: see `both`.
        unsafe { [_mm256_set1_ps(value); 2] }
    }

    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::F {
        // SAFETY: the caller gives 16 readable floats.
        unsafe { [_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))] }
    }

    #[inline(always)]
    unsafe fn load_tail(p: *const f32, n: usize, fill: f32) -> Self::F {
        // SAFETY: a masked load reads only lanes `0..n`. The second pointer may lie behind the buffer, hence
        // `wrapping_add`: it is then not read at all.
        unsafe {
            let [low, high] = masks(n);
            let fill = _mm256_set1_ps(fill);
            [
                _mm256_blendv_ps(fill, _mm256_maskload_ps(p, low), _mm256_castsi256_ps(low)),
                _mm256_blendv_ps(fill, _mm256_maskload_ps(p.wrapping_add(8), high), _mm256_castsi256_ps(high)),
            ]
        }
    }

    #[inline(always)]
    unsafe fn store(p: *mut f32, value: Self::F) {
        // SAFETY: the caller gives 16 writable floats.
        unsafe {
            _mm256_storeu_ps(p, value[0]);
            _mm256_storeu_ps(p.add(8), value[1]);
        }
    }

    #[inline(always)]
    unsafe fn store_tail(p: *mut f32, n: usize, value: Self::F) {
        // SAFETY: as in `load_tail`, only lanes `0..n` are written.
        unsafe {
            let [low, high] = masks(n);
            _mm256_maskstore_ps(p, low, value[0]);
            _mm256_maskstore_ps(p.wrapping_add(8), high, value[1]);
        }
    }

    #[inline(always)]
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_add_ps(a, b))
    }

    #[inline(always)]
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_sub_ps(a, b))
    }

    #[inline(always)]
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_mul_ps(a, b))
    }

    #[inline(always)]
    unsafe fn div(a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_div_ps(a, b))
    }

    #[inline(always)]
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        both!(_mm256_fmadd_ps(a, b, c))
    }

    #[inline(always)]
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_max_ps(a, b))
    }

    #[inline(always)]
    unsafe fn min(a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_min_ps(a, b))
    }

    #[inline(always)]
    unsafe fn lt(a: Self::F, b: Self::F) -> Self::M {
        // SAFETY: see `both`.
        unsafe { [_mm256_cmp_ps::<_CMP_LT_OQ>(a[0], b[0]), _mm256_cmp_ps::<_CMP_LT_OQ>(a[1], b[1])] }
    }

    #[inline(always)]
    unsafe fn eq(a: Self::F, b: Self::F) -> Self::M {
        // SAFETY: see `both`.
        unsafe { [_mm256_cmp_ps::<_CMP_EQ_OQ>(a[0], b[0]), _mm256_cmp_ps::<_CMP_EQ_OQ>(a[1], b[1])] }
    }

    #[inline(always)]
    unsafe fn negative(a: Self::I) -> Self::M {
        // A blend looks at the sign bit only.
        both!(_mm256_castsi256_ps(a))
    }

    #[inline(always)]
    unsafe fn select(mask: Self::M, yes: Self::F, no: Self::F) -> Self::F {
        both!(_mm256_blendv_ps(no, yes, mask))
    }

    #[inline(always)]
    unsafe fn bits(a: Self::F) -> Self::I {
        both!(_mm256_castps_si256(a))
    }

    #[inline(always)]
    unsafe fn from_bits(a: Self::I) -> Self::F {
        both!(_mm256_castsi256_ps(a))
    }

    #[inline(always)]
    unsafe fn to_float(a: Self::I) -> Self::F {
        both!(_mm256_cvtepi32_ps(a))
    }

    #[inline(always)]
    unsafe fn int(value: i32) -> Self::I {
        // SAFETY: see `both`.
        unsafe { [_mm256_set1_epi32(value); 2] }
    }

    #[inline(always)]
    unsafe fn load_int(p: *const u32) -> Self::I {
        // SAFETY: the caller gives 16 readable words.
        unsafe { [_mm256_loadu_si256(p.cast()), _mm256_loadu_si256(p.add(8).cast())] }
    }

    #[inline(always)]
    unsafe fn load_int_tail(p: *const u32, n: usize) -> Self::I {
        // SAFETY: as in `load_tail`.
        unsafe {
            let [low, high] = masks(n);
            [_mm256_maskload_epi32(p.cast(), low), _mm256_maskload_epi32(p.wrapping_add(8).cast(), high)]
        }
    }

    #[inline(always)]
    unsafe fn int_add(a: Self::I, b: Self::I) -> Self::I {
        both!(_mm256_add_epi32(a, b))
    }

    #[inline(always)]
    unsafe fn int_sub(a: Self::I, b: Self::I) -> Self::I {
        both!(_mm256_sub_epi32(a, b))
    }

    #[inline(always)]
    unsafe fn int_and(a: Self::I, b: Self::I) -> Self::I {
        both!(_mm256_and_si256(a, b))
    }

    #[inline(always)]
    unsafe fn int_xor(a: Self::I, b: Self::I) -> Self::I {
        both!(_mm256_xor_si256(a, b))
    }

    #[inline(always)]
    unsafe fn shl<const N: u32>(a: Self::I) -> Self::I {
        // SAFETY: see `both`. The count is a constant: it becomes an immediate.
        unsafe {
            let n = _mm_cvtsi32_si128(N as i32);
            [_mm256_sll_epi32(a[0], n), _mm256_sll_epi32(a[1], n)]
        }
    }

    #[inline(always)]
    unsafe fn sar<const N: u32>(a: Self::I) -> Self::I {
        // SAFETY: as in `shl`.
        unsafe {
            let n = _mm_cvtsi32_si128(N as i32);
            [_mm256_sra_epi32(a[0], n), _mm256_sra_epi32(a[1], n)]
        }
    }

    #[inline(always)]
    unsafe fn shr<const N: u32>(a: Self::I) -> Self::I {
        // SAFETY: as in `shl`.
        unsafe {
            let n = _mm_cvtsi32_si128(N as i32);
            [_mm256_srl_epi32(a[0], n), _mm256_srl_epi32(a[1], n)]
        }
    }

    #[inline(always)]
    unsafe fn mul_wide(a: Self::I, factor: u32) -> (Self::I, Self::I) {
        // SAFETY: see `both`.
        unsafe {
            let factor = _mm256_set1_epi64x(i64::from(factor));
            let mut high = [_mm256_setzero_si256(); 2];
            let mut low = high;
            let mut i = 0;
            while i < 2 {
                let even = _mm256_mul_epu32(a[i], factor);
                let odd = _mm256_mul_epu32(_mm256_srli_epi64::<32>(a[i]), factor);
                high[i] = _mm256_blend_epi32::<0b1010_1010>(_mm256_srli_epi64::<32>(even), odd);
                low[i] = _mm256_blend_epi32::<0b1010_1010>(even, _mm256_slli_epi64::<32>(odd));
                i += 1;
            }
            (high, low)
        }
    }
}
