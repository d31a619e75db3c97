//! Plain Rust lanes: the reference, 16 at a time ([`Scalar`]) or a single one ([`One`]).

use super::{LANES, Lanes};

/// Sixteen lanes in arrays.
#[derive(Clone, Copy)]
pub(crate) struct Scalar;

/// One lane, for functions of a single number.
#[derive(Clone, Copy)]
pub(crate) struct One;

/// Applies an expression to every lane. A loop rather than a closure: a closure would be compiled without
/// the features of the function it is inlined into.
macro_rules! each {
    ($zero:expr, $i:ident => $value:expr) => {{
        let mut out = [$zero; LANES];
        let mut $i = 0;
        while $i < LANES {
            out[$i] = $value;
            $i += 1;
        }
        out
    }};
}

#[inline(always)]
fn wide(a: i32, factor: u32) -> (i32, i32) {
    let product = u64::from(a.cast_unsigned()) * u64::from(factor);
    (((product >> 32) as u32).cast_signed(), (product as u32).cast_signed())
}

impl Lanes for Scalar {
    type F = [f32; LANES];
    type I = [i32; LANES];
    type M = [bool; LANES];

    const WIDTH: usize = LANES;
    const TILE_ROWS: usize = 2;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self::F {
        [value; LANES]
    }

    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::F {
        // SAFETY: the caller gives 16 readable floats.
        unsafe { p.cast::<Self::F>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn load_tail(p: *const f32, n: usize, fill: f32) -> Self::F {
        // SAFETY: only the first `n` lanes are read.
        each!(0.0, i => if i < n { unsafe { p.add(i).read_unaligned() } } else { fill })
    }

    #[inline(always)]
    unsafe fn store(p: *mut f32, value: Self::F) {
        // SAFETY: the caller gives 16 writable floats.
        unsafe { p.cast::<Self::F>().write_unaligned(value) }
    }

    #[inline(always)]
    unsafe fn store_tail(p: *mut f32, n: usize, value: Self::F) {
        let mut i = 0;
        while i < n {
            // SAFETY: only the first `n` lanes are written.
            unsafe { p.add(i).write_unaligned(value[i]) };
            i += 1;
        }
    }

    #[inline(always)]
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F {
        each!(0.0, i => a[i] + b[i])
    }

    #[inline(always)]
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F {
        each!(0.0, i => a[i] - b[i])
    }

    #[inline(always)]
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F {
        each!(0.0, i => a[i] * b[i])
    }

    #[inline(always)]
    unsafe fn div(a: Self::F, b: Self::F) -> Self::F {
        each!(0.0, i => a[i] / b[i])
    }

    #[inline(always)]
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        each!(0.0, i => a[i].mul_add(b[i], c[i]))
    }

    #[inline(always)]
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F {
        each!(0.0, i => if a[i] > b[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    unsafe fn min(a: Self::F, b: Self::F) -> Self::F {
        each!(0.0, i => if a[i] < b[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    unsafe fn lt(a: Self::F, b: Self::F) -> Self::M {
        each!(false, i => a[i] < b[i])
    }

    #[inline(always)]
    unsafe fn eq(a: Self::F, b: Self::F) -> Self::M {
        each!(false, i => a[i] == b[i])
    }

    #[inline(always)]
    unsafe fn negative(a: Self::I) -> Self::M {
        each!(false, i => a[i] < 0)
    }

    #[inline(always)]
    unsafe fn select(mask: Self::M, yes: Self::F, no: Self::F) -> Self::F {
        each!(0.0, i => if mask[i] { yes[i] } else { no[i] })
    }

    #[inline(always)]
    unsafe fn bits(a: Self::F) -> Self::I {
        each!(0, i => a[i].to_bits().cast_signed())
    }

    #[inline(always)]
    unsafe fn from_bits(a: Self::I) -> Self::F {
        each!(0.0, i => f32::from_bits(a[i].cast_unsigned()))
    }

    #[inline(always)]
    unsafe fn to_float(a: Self::I) -> Self::F {
        each!(0.0, i => a[i] as f32)
    }

    #[inline(always)]
    unsafe fn int(value: i32) -> Self::I {
        [value; LANES]
    }

    #[inline(always)]
    unsafe fn load_int(p: *const u32) -> Self::I {
        // SAFETY: the caller gives 16 readable words.
        unsafe { p.cast::<Self::I>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn load_int_tail(p: *const u32, n: usize) -> Self::I {
        // SAFETY: only the first `n` lanes are read.
        each!(0, i => if i < n { unsafe { p.add(i).read_unaligned().cast_signed() } } else { 0 })
    }

    #[inline(always)]
    unsafe fn int_add(a: Self::I, b: Self::I) -> Self::I {
        each!(0, i => a[i].wrapping_add(b[i]))
    }

    #[inline(always)]
    unsafe fn int_sub(a: Self::I, b: Self::I) -> Self::I {
        each!(0, i => a[i].wrapping_sub(b[i]))
    }

    #[inline(always)]
    unsafe fn int_and(a: Self::I, b: Self::I) -> Self::I {
        each!(0, i => a[i] & b[i])
    }

    #[inline(always)]
    unsafe fn int_xor(a: Self::I, b: Self::I) -> Self::I {
        each!(0, i => a[i] ^ b[i])
    }

    #[inline(always)]
    unsafe fn shl<const N: u32>(a: Self::I) -> Self::I {
        each!(0, i => a[i] << N)
    }

    #[inline(always)]
    unsafe fn sar<const N: u32>(a: Self::I) -> Self::I {
        each!(0, i => a[i] >> N)
    }

    #[inline(always)]
    unsafe fn shr<const N: u32>(a: Self::I) -> Self::I {
        each!(0, i => (a[i].cast_unsigned() >> N).cast_signed())
    }

    #[inline(always)]
    unsafe fn mul_wide(a: Self::I, factor: u32) -> (Self::I, Self::I) {
        (each!(0, i => wide(a[i], factor).0), each!(0, i => wide(a[i], factor).1))
    }
}

impl Lanes for One {
    type F = f32;
    type I = i32;
    type M = bool;

    const WIDTH: usize = 1;
    const TILE_ROWS: usize = 1;

    #[inline(always)]
    unsafe fn splat(value: f32) -> f32 {
        value
    }

    #[inline(always)]
    unsafe fn load(p: *const f32) -> f32 {
        // SAFETY: the caller gives a readable float.
        unsafe { p.read_unaligned() }
    }

    #[inline(always)]
    unsafe fn load_tail(_: *const f32, _: usize, fill: f32) -> f32 {
        fill
    }

    #[inline(always)]
    unsafe fn store(p: *mut f32, value: f32) {
        // SAFETY: the caller gives a writable float.
        unsafe { p.write_unaligned(value) }
    }

    #[inline(always)]
    unsafe fn store_tail(_: *mut f32, _: usize, _: f32) {}

    #[inline(always)]
    unsafe fn add(a: f32, b: f32) -> f32 {
        a + b
    }

    #[inline(always)]
    unsafe fn sub(a: f32, b: f32) -> f32 {
        a - b
    }

    #[inline(always)]
    unsafe fn mul(a: f32, b: f32) -> f32 {
        a * b
    }

    #[inline(always)]
    unsafe fn div(a: f32, b: f32) -> f32 {
        a / b
    }

    #[inline(always)]
    unsafe fn fma(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }

    #[inline(always)]
    unsafe fn max(a: f32, b: f32) -> f32 {
        if a > b { a } else { b }
    }

    #[inline(always)]
    unsafe fn min(a: f32, b: f32) -> f32 {
        if a < b { a } else { b }
    }

    #[inline(always)]
    unsafe fn lt(a: f32, b: f32) -> bool {
        a < b
    }

    #[inline(always)]
    unsafe fn eq(a: f32, b: f32) -> bool {
        a == b
    }

    #[inline(always)]
    unsafe fn negative(a: i32) -> bool {
        a < 0
    }

    #[inline(always)]
    unsafe fn select(mask: bool, yes: f32, no: f32) -> f32 {
        if mask { yes } else { no }
    }

    #[inline(always)]
    unsafe fn bits(a: f32) -> i32 {
        a.to_bits().cast_signed()
    }

    #[inline(always)]
    unsafe fn from_bits(a: i32) -> f32 {
        f32::from_bits(a.cast_unsigned())
    }

    #[inline(always)]
    unsafe fn to_float(a: i32) -> f32 {
        a as f32
    }

    #[inline(always)]
    unsafe fn int(value: i32) -> i32 {
        value
    }

    #[inline(always)]
    unsafe fn load_int(p: *const u32) -> i32 {
        // SAFETY: the caller gives a readable word.
        unsafe { p.read_unaligned().cast_signed() }
    }

    #[inline(always)]
    unsafe fn load_int_tail(_: *const u32, _: usize) -> i32 {
        0
    }

    #[inline(always)]
    unsafe fn int_add(a: i32, b: i32) -> i32 {
        a.wrapping_add(b)
    }

    #[inline(always)]
    unsafe fn int_sub(a: i32, b: i32) -> i32 {
        a.wrapping_sub(b)
    }

    #[inline(always)]
    unsafe fn int_and(a: i32, b: i32) -> i32 {
        a & b
    }

    #[inline(always)]
    unsafe fn int_xor(a: i32, b: i32) -> i32 {
        a ^ b
    }

    #[inline(always)]
    unsafe fn shl<const N: u32>(a: i32) -> i32 {
        a << N
    }

    #[inline(always)]
    unsafe fn sar<const N: u32>(a: i32) -> i32 {
        a >> N
    }

    #[inline(always)]
    unsafe fn shr<const N: u32>(a: i32) -> i32 {
        (a.cast_unsigned() >> N).cast_signed()
    }

    #[inline(always)]
    unsafe fn mul_wide(a: i32, factor: u32) -> (i32, i32) {
        wide(a, factor)
    }
}
