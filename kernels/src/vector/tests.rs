#![allow(clippy::unwrap_used, reason = "tests")]
//! Each operation on each set against the reference, bit by bit, on adversarial values.

use super::*;

struct Everything<'a> {
    a: &'a [f32],
    b: &'a [f32],
    c: &'a [f32],
    out: &'a mut Vec<u32>,
}

impl Kernel for Everything<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Lanes>(self) {
        let mut from = 0;
        while from < self.a.len() {
            // SAFETY: all three slices have one length, a multiple of 16.
            unsafe {
                let (a, b, c) =
                    (V::load(self.a.as_ptr().add(from)), V::load(self.b.as_ptr().add(from)), V::load(self.c.as_ptr().add(from)));
                let (i, j) = (V::bits(a), V::bits(b));
                let (high, low) = V::mul_wide(i, 0xd251_1f53);
                let floats = [
                    V::canonical(V::add(a, b)),
                    V::canonical(V::sub(a, b)),
                    V::canonical(V::mul(a, b)),
                    V::canonical(V::div(a, b)),
                    V::canonical(V::fma(a, b, c)),
                    V::max(a, b),
                    V::min(a, b),
                    V::select(V::lt(a, b), b, c),
                    V::select(V::eq(a, b), b, c),
                    V::select(V::negative(i), b, c),
                    V::to_float(i),
                    V::from_bits(V::int_add(i, j)),
                    V::from_bits(V::int_sub(i, j)),
                    V::from_bits(V::int_and(i, j)),
                    V::from_bits(V::int_xor(i, j)),
                    V::from_bits(V::shl::<3>(i)),
                    V::from_bits(V::sar::<7>(i)),
                    V::from_bits(V::shr::<9>(i)),
                    V::from_bits(high),
                    V::from_bits(low),
                    V::load_tail(self.a.as_ptr().add(from), from / 16 % 16, 7.0),
                    V::from_bits(V::load_int_tail(self.a.as_ptr().add(from).cast(), from / 16 % 16)),
                ];
                for value in floats {
                    let mut lanes = [0.0_f32; LANES];
                    V::store(lanes.as_mut_ptr(), value);
                    self.out.extend(lanes.map(f32::to_bits));
                    let mut tail = [9.0_f32; LANES];
                    V::store_tail(tail.as_mut_ptr(), from / 16 % 16, value);
                    self.out.extend(tail.map(f32::to_bits));
                }
            }
            from += V::WIDTH;
        }
    }
}

#[test]
fn every_operation_gives_the_reference_bits_on_every_set() {
    let special = [
        0.0,
        -0.0,
        1.0,
        -1.5,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        1e-45,
        -1e-40,
        f32::MAX,
        f32::MIN_POSITIVE,
        16_777_217.0,
        f32::from_bits(0xff80_0001),
    ];
    let mut state = 1_u32;
    let mut random = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        if state >> 30 == 0 { special[(state >> 8) as usize % special.len()] } else { f32::from_bits(state) }
    };
    let mut fill = || (0..16 * 512).map(|_| random()).collect::<Vec<f32>>();
    let (a, b, c) = (fill(), fill(), fill());
    let run = |isa| {
        let mut out = Vec::new();
        dispatch(isa, Everything { a: &a, b: &b, c: &c, out: &mut out });
        out
    };
    let want = run(Isa::Scalar);
    for isa in Isa::available() {
        let got = run(isa);
        let differs = got.iter().zip(&want).position(|(got, want)| got != want);
        assert_eq!(differs.map(|i| (isa, i / 32 % 22, got[i], want[i])), None);
    }
}
