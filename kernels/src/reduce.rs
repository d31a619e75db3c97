//! Sums, maxima and the log-sum-exp of slices, in one fixed order.
//!
//! Owns: the order in which elements are combined. Refuses to know: what they mean. Element `i` goes to
//! accumulator `i mod 16`; the sixteen are then folded as a tree (`j` with `j + 8`, `+ 4`, `+ 2`, `+ 1`). Sums
//! close their tree every [`SPAN`] elements and add the spans in f64, ascending, so that a vocabulary-long
//! sum keeps its precision and spans may be summed apart. A length that is no multiple of 16 is masked by the
//! load.
//!
//! NaN: a sum with a NaN is the canonical NaN. A maximum ignores NaN; of nothing (or of NaNs only) it is −∞.
//!
//! Functions without an instruction set use the machine's fastest; all sets give equal bits.

use crate::isa::Isa;
use crate::math::{exp_lanes, ln};
use crate::vector::{Kernel, LANES, Lanes, dispatch};

/// Elements of one f32 tree.
pub const SPAN: usize = 4_096;

/// Sum of all elements; 0 of nothing.
pub fn sum(x: &[f32]) -> f32 {
    sum_on(Isa::detect(), x)
}

/// [`sum`] on a given instruction set.
pub fn sum_on(isa: Isa, x: &[f32]) -> f32 {
    spans(x, |span| dispatch(isa, Sum(span))) as f32
}

/// Sum of the squares of all elements.
pub fn sum_of_squares_on(isa: Isa, x: &[f32]) -> f32 {
    dispatch(isa, SumOfSquares(x))
}

/// Largest element.
pub fn max(x: &[f32]) -> f32 {
    max_on(Isa::detect(), x)
}

/// [`max`] on a given instruction set.
pub fn max_on(isa: Isa, x: &[f32]) -> f32 {
    dispatch(isa, Max(x))
}

/// Index of the largest element, the first of equals; `None` of nothing and of NaNs only. Equals are compared
/// as numbers: −0 equals 0.
pub fn argmax(x: &[f32]) -> Option<usize> {
    let max = max(x);
    x.iter().position(|v| *v == max)
}

/// Σ e^(x − `shift`).
pub fn sum_exp(x: &[f32], shift: f32) -> f32 {
    sum_exp_on(Isa::detect(), x, shift)
}

/// [`sum_exp`] on a given instruction set.
pub fn sum_exp_on(isa: Isa, x: &[f32], shift: f32) -> f32 {
    spans(x, |span| dispatch(isa, SumExp { x: span, shift })) as f32
}

/// ln Σ e^x, without overflow; −∞ of nothing.
pub fn log_sum_exp(x: &[f32]) -> f32 {
    log_sum_exp_on(Isa::detect(), x)
}

/// [`log_sum_exp`] on a given instruction set.
pub fn log_sum_exp_on(isa: Isa, x: &[f32]) -> f32 {
    let max = max_on(isa, x);
    if max == f32::NEG_INFINITY && x.iter().all(|v| !v.is_nan()) || max == f32::INFINITY {
        return max;
    }
    max + ln(sum_exp_on(isa, x, max))
}

/// Replaces each element by e^(x − `shift`) and returns their sum: with the maximum as shift the numerators
/// and denominator of a softmax. The sum equals [`sum_exp`].
pub fn exp_and_sum_on(isa: Isa, x: &mut [f32], shift: f32) -> f32 {
    let mut total = 0.0_f64;
    for span in x.chunks_mut(SPAN) {
        total += f64::from(dispatch(isa, ExpAndSum { x: span, shift }));
    }
    canonical(total) as f32
}

/// Sums of spans, added ascending.
fn spans(x: &[f32], one: impl Fn(&[f32]) -> f32) -> f64 {
    canonical(x.chunks(SPAN).map(|span| f64::from(one(span))).fold(0.0, |total, span| total + span))
}

fn canonical(x: f64) -> f64 {
    if x.is_nan() { f64::NAN } else { x }
}

struct Sum<'a>(&'a [f32]);
struct SumOfSquares<'a>(&'a [f32]);
struct Max<'a>(&'a [f32]);

struct SumExp<'a> {
    x: &'a [f32],
    shift: f32,
}

struct ExpAndSum<'a> {
    x: &'a mut [f32],
    shift: f32,
}

/// Folds sixteen accumulators.
#[inline(always)]
pub(crate) unsafe fn fold_sum<V: Lanes>(x: V::F) -> f32 {
    let mut lanes = [0.0_f32; LANES];
    // SAFETY: room for `V::WIDTH ≤ 16` lanes.
    unsafe { V::store(lanes.as_mut_ptr(), x) };
    let mut width = LANES / 2;
    while width > 0 {
        let mut i = 0;
        while i < width {
            lanes[i] += lanes[i + width];
            i += 1;
        }
        width /= 2;
    }
    lanes[0]
}

/// Folds sixteen maxima.
#[inline(always)]
pub(crate) unsafe fn fold_max<V: Lanes>(x: V::F) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    // SAFETY: room for `V::WIDTH ≤ 16` lanes.
    unsafe { V::store(lanes.as_mut_ptr(), x) };
    let mut width = LANES / 2;
    while width > 0 {
        let mut i = 0;
        while i < width {
            lanes[i] = if lanes[i + width] > lanes[i] { lanes[i + width] } else { lanes[i] };
            i += 1;
        }
        width /= 2;
    }
    lanes[0]
}

/// Largest element, NaNs ignored.
#[inline(always)]
pub(crate) unsafe fn max_lanes<V: Lanes>(x: &[f32]) -> f32 {
    // SAFETY: `from` is inside the slice.
    unsafe {
        let mut acc = V::splat(f32::NEG_INFINITY);
        let mut from = 0;
        while from < x.len() {
            acc = V::max(V::load_slice(x, from, f32::NEG_INFINITY), acc);
            from += V::WIDTH;
        }
        fold_max::<V>(acc)
    }
}

/// Sum of the squares of all elements, span by span.
#[inline(always)]
pub(crate) unsafe fn sum_of_squares_lanes<V: Lanes>(x: &[f32]) -> f32 {
    let mut total = 0.0_f64;
    let mut start = 0;
    while start < x.len() {
        let end = if x.len() - start > SPAN { start + SPAN } else { x.len() };
        let span = &x[start..end];
        // SAFETY: `from` is inside the span. A zero leaves an accumulator as it is.
        unsafe {
            let mut acc = V::splat(0.0);
            let mut from = 0;
            while from < span.len() {
                let x = V::load_slice(span, from, 0.0);
                acc = V::fma(x, x, acc);
                from += V::WIDTH;
            }
            total += f64::from(fold_sum::<V>(acc));
        }
        start = end;
    }
    canonical(total) as f32
}

/// Replaces each element by e^(x − shift) and returns the sum of one tree.
#[inline(always)]
pub(crate) unsafe fn exp_and_sum_lanes<V: Lanes>(x: &mut [f32], shift: f32) -> f32 {
    // SAFETY: `from` is inside the slice.
    unsafe {
        let shift = V::splat(shift);
        let mut acc = V::splat(0.0);
        let mut from = 0;
        while from < x.len() {
            // Lanes behind the end become e^−∞ = 0, which leaves an accumulator as it is.
            let e = exp_lanes::<V>(V::sub(V::load_slice(x, from, f32::NEG_INFINITY), shift));
            acc = V::add(acc, e);
            V::store_slice(x, from, e);
            from += V::WIDTH;
        }
        fold_sum::<V>(acc)
    }
}

impl Kernel for Sum<'_> {
    type Output = f32;

    #[inline(always)]
    unsafe fn run<V: Lanes>(self) -> f32 {
        // SAFETY: `from` is inside the slice. A zero leaves an accumulator as it is: none is ever −0.
        unsafe {
            let mut acc = V::splat(0.0);
            let mut from = 0;
            while from < self.0.len() {
                acc = V::add(acc, V::load_slice(self.0, from, 0.0));
                from += V::WIDTH;
            }
            fold_sum::<V>(acc)
        }
    }
}

impl Kernel for SumOfSquares<'_> {
    type Output = f32;

    #[inline(always)]
    unsafe fn run<V: Lanes>(self) -> f32 {
        // SAFETY: `dispatch` gives the set.
        unsafe { sum_of_squares_lanes::<V>(self.0) }
    }
}

impl Kernel for Max<'_> {
    type Output = f32;

    #[inline(always)]
    unsafe fn run<V: Lanes>(self) -> f32 {
        // SAFETY: `dispatch` gives the set.
        unsafe { max_lanes::<V>(self.0) }
    }
}

impl Kernel for SumExp<'_> {
    type Output = f32;

    #[inline(always)]
    unsafe fn run<V: Lanes>(self) -> f32 {
        // SAFETY: `from` is inside the slice.
        unsafe {
            let shift = V::splat(self.shift);
            let mut acc = V::splat(0.0);
            let mut from = 0;
            while from < self.x.len() {
                let x = V::load_slice(self.x, from, f32::NEG_INFINITY);
                acc = V::add(acc, exp_lanes::<V>(V::sub(x, shift)));
                from += V::WIDTH;
            }
            fold_sum::<V>(acc)
        }
    }
}

impl Kernel for ExpAndSum<'_> {
    type Output = f32;

    #[inline(always)]
    unsafe fn run<V: Lanes>(self) -> f32 {
        // SAFETY: `dispatch` gives the set.
        unsafe { exp_and_sum_lanes::<V>(self.x, self.shift) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::math::exp;

    /// Values over many magnitudes, from a fixed multiplicative generator.
    fn values(len: usize) -> Vec<f32> {
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        (0..len)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                ((state >> 40) as f32 / 8_388_608.0 - 1.0) * if (state >> 33).is_multiple_of(16) { 1e4 } else { 9.0 }
            })
            .collect()
    }

    /// The order of the module doc, written down element by element.
    fn by_definition(x: &[f32]) -> f32 {
        let mut total = 0.0_f64;
        for span in x.chunks(SPAN) {
            let mut acc = [0.0_f32; 16];
            for (i, v) in span.iter().enumerate() {
                acc[i % 16] += v;
            }
            for width in [8, 4, 2, 1] {
                for i in 0..width {
                    acc[i] += acc[i + width];
                }
            }
            total += f64::from(acc[0]);
        }
        total as f32
    }

    #[test]
    fn sums_follow_the_defined_order_on_every_set_and_length() {
        for len in (0..100).chain([4_095, 4_096, 4_097, 49_152, 50_001]) {
            let x = values(len);
            let want = by_definition(&x).to_bits();
            let squares: Vec<f32> = x.iter().map(|v| v.mul_add(*v, 0.0)).collect();
            let want_squares = sum_of_squares_on(Isa::Scalar, &x).to_bits();
            let near = by_definition(&squares);
            assert!((f32::from_bits(want_squares) - near).abs() <= near * 1e-5);
            for isa in Isa::available() {
                assert_eq!(sum_on(isa, &x).to_bits(), want, "{isa} {len}");
                assert_eq!(sum_of_squares_on(isa, &x).to_bits(), want_squares, "{isa} {len}");
            }
        }
    }

    #[test]
    fn log_sum_exp_agrees_with_f64_and_between_sets() {
        for len in [1, 2, 15, 16, 17, 100, 4_100, 151_936] {
            let x: Vec<f32> = values(len).iter().map(|v| v.clamp(-30.0, 30.0)).collect();
            let exact = libm::log(x.iter().map(|v| libm::exp(f64::from(*v))).sum());
            let got = log_sum_exp_on(Isa::Scalar, &x);
            assert!((f64::from(got) - exact).abs() <= 2e-7 * exact.abs().max(1.0), "{len}: {got} {exact}");
            for isa in Isa::available() {
                assert_eq!(log_sum_exp_on(isa, &x).to_bits(), got.to_bits(), "{isa} {len}");
                let mut e = x.clone();
                let max = max_on(isa, &x);
                assert_eq!(exp_and_sum_on(isa, &mut e, max).to_bits(), sum_exp_on(isa, &x, max).to_bits());
                assert!(e.iter().zip(&x).all(|(e, x)| e.to_bits() == exp(x - max).to_bits()));
            }
        }
    }

    #[test]
    fn infinities_and_nan_are_defined() {
        let inf = f32::INFINITY;
        for isa in Isa::available() {
            assert_eq!(max_on(isa, &[]), -inf);
            assert_eq!(max_on(isa, &[f32::NAN, -inf, f32::NAN]), -inf);
            assert_eq!(max_on(isa, &[f32::NAN, 3.0, f32::NAN, 2.0]), 3.0);
            assert_eq!(log_sum_exp_on(isa, &[]), -inf);
            assert_eq!(log_sum_exp_on(isa, &[-inf; 20]), -inf);
            assert_eq!(log_sum_exp_on(isa, &[-inf, 1.0]), 1.0);
            assert_eq!(log_sum_exp_on(isa, &[inf, 1.0]), inf);
            assert_eq!(log_sum_exp_on(isa, &[f32::from_bits(0xffc0_0001), 1.0]).to_bits(), f32::NAN.to_bits());
            assert!(log_sum_exp_on(isa, &[f32::NAN; 3]).is_nan());
            assert_eq!(sum_on(isa, &[inf, -inf]).to_bits(), f32::NAN.to_bits());
        }
    }

    #[test]
    fn argmax_is_the_first_of_equals() {
        let mut x = values(1_000);
        x[400] = 1e9;
        x[401] = 1e9;
        x[3] = f32::NAN;
        assert_eq!(argmax(&x), Some(400));
        assert_eq!(argmax(&[f32::NEG_INFINITY; 3]), Some(0));
        assert_eq!(argmax(&[f32::NAN]), None);
        assert_eq!(argmax(&[]), None);
    }

    #[test]
    fn memory_behind_the_end_is_not_read_into_a_result() {
        for isa in Isa::available() {
            for len in 0..48 {
                let mut x = values(64);
                let clean = (sum_on(isa, &x[..len]), max_on(isa, &x[..len]), log_sum_exp_on(isa, &x[..len]));
                x[len..].fill(f32::NAN);
                assert_eq!((sum_on(isa, &x[..len]), max_on(isa, &x[..len]), log_sum_exp_on(isa, &x[..len])), clean);
            }
        }
    }
}
