//! Row-wise steps between the products of a layer: RMS norm, residual, bias, gated activation.
//!
//! Owns: their order of operations. Refuses to know: layers. All work on `m` rows that lie one after another;
//! a row's result depends on that row alone. NaN results are canonical.
//!
//! - RMS norm (Zhang and Sennrich 2019): `x · (1 / √(mean(x²) + eps)) · weight`, the sum of squares in the
//!   order of [`crate::reduce`].
//! - SiLU gate: `gate / (1 + e^−gate) · up`.
//!
//! Costs: memory speed. Up to 8 k elements run on the calling thread; more are spread over the pool by rows.

use crate::error::KernelError;
use crate::isa::Isa;
use crate::math::exp_lanes;
use crate::matmul::shared::SharedMut;
use crate::pool::Pool;
use crate::reduce::sum_of_squares_lanes;
use crate::vector::{Kernel, Lanes, dispatch};

/// Elements that a task takes: about two microseconds.
const TASK_ELEMENTS: usize = 8 * 1024;

/// `out = norm(x) · weight` for every row of `x`.
pub fn rms_norm(pool: &Pool, isa: Isa, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) -> Result<(), KernelError> {
    check("x", x.len(), weight.len())?;
    same("out", out.len(), x.len())?;
    let shared = SharedMut::new(out);
    by_rows(pool, x.len(), weight.len(), &|at, len| {
        // SAFETY: tasks have disjoint rows.
        let out = unsafe { shared.slice(at, len) };
        dispatch(isa, RmsNorm { x: &x[at..at + len], weight, eps, out });
    });
    Ok(())
}

/// `x += delta`, then `out = norm(x) · weight`, for every row.
pub fn add_rms_norm(
    pool: &Pool,
    isa: Isa,
    x: &mut [f32],
    delta: &[f32],
    weight: &[f32],
    eps: f32,
    out: &mut [f32],
) -> Result<(), KernelError> {
    check("x", x.len(), weight.len())?;
    same("delta", delta.len(), x.len())?;
    same("out", out.len(), x.len())?;
    let (shared_x, shared_out) = (SharedMut::new(x), SharedMut::new(out));
    by_rows(pool, delta.len(), weight.len(), &|at, len| {
        // SAFETY: tasks have disjoint rows.
        let (x, out) = unsafe { (shared_x.slice(at, len), shared_out.slice(at, len)) };
        dispatch(isa, Add { x, delta: &delta[at..at + len] });
        dispatch(isa, RmsNorm { x, weight, eps, out });
    });
    Ok(())
}

/// `x += delta`.
pub fn add(isa: Isa, x: &mut [f32], delta: &[f32]) -> Result<(), KernelError> {
    same("delta", delta.len(), x.len())?;
    dispatch(isa, Add { x, delta });
    Ok(())
}

/// Adds `bias` to every row of `x`.
pub fn add_bias(isa: Isa, x: &mut [f32], bias: &[f32]) -> Result<(), KernelError> {
    check("x", x.len(), bias.len())?;
    for row in x.chunks_exact_mut(bias.len()) {
        dispatch(isa, Add { x: row, delta: bias });
    }
    Ok(())
}

/// `gate = silu(gate) · up`.
pub fn silu_mul(pool: &Pool, isa: Isa, gate: &mut [f32], up: &[f32]) -> Result<(), KernelError> {
    same("up", up.len(), gate.len())?;
    let shared = SharedMut::new(gate);
    by_rows(pool, up.len(), 1, &|at, len| {
        // SAFETY: tasks have disjoint elements.
        let gate = unsafe { shared.slice(at, len) };
        dispatch(isa, SiluMul { gate, up: &up[at..at + len] });
    });
    Ok(())
}

fn same(field: &'static str, got: usize, want: usize) -> Result<(), KernelError> {
    if got == want { Ok(()) } else { Err(KernelError::Length { field, got, want }) }
}

fn check(field: &'static str, got: usize, width: usize) -> Result<(), KernelError> {
    if width > 0 && got.is_multiple_of(width) {
        return Ok(());
    }
    Err(KernelError::Length { field, got, want: got.div_ceil(width.max(1)) * width })
}

/// Cuts `len` elements in rows of `width` into tasks of whole rows.
fn by_rows(pool: &Pool, len: usize, width: usize, task: &(dyn Fn(usize, usize) + Sync)) {
    let step = (TASK_ELEMENTS / width).max(1) * width;
    pool.run(len.div_ceil(step), &|index| {
        let at = index * step;
        task(at, step.min(len - at));
    });
}

struct RmsNorm<'a> {
    x: &'a [f32],
    weight: &'a [f32],
    eps: f32,
    out: &'a mut [f32],
}

struct Add<'a> {
    x: &'a mut [f32],
    delta: &'a [f32],
}

struct SiluMul<'a> {
    gate: &'a mut [f32],
    up: &'a [f32],
}

impl Kernel for RmsNorm<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Lanes>(self) {
        let width = self.weight.len();
        for (x, out) in self.x.chunks_exact(width).zip(self.out.chunks_exact_mut(width)) {
            // SAFETY: `from` is inside three slices of one length.
            unsafe {
                let mean = sum_of_squares_lanes::<V>(x) / width as f32;
                let scale = V::splat(1.0 / (mean + self.eps).sqrt());
                let mut from = 0;
                while from < width {
                    let scaled = V::mul(V::load_slice(x, from, 0.0), scale);
                    let value = V::mul(scaled, V::load_slice(self.weight, from, 0.0));
                    V::store_slice(out, from, V::canonical(value));
                    from += V::WIDTH;
                }
            }
        }
    }
}

impl Kernel for Add<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Lanes>(self) {
        let mut from = 0;
        while from < self.x.len() {
            // SAFETY: `from` is inside two slices of one length.
            unsafe {
                let sum = V::add(V::load_slice(self.x, from, 0.0), V::load_slice(self.delta, from, 0.0));
                V::store_slice(self.x, from, V::canonical(sum));
            }
            from += V::WIDTH;
        }
    }
}

impl Kernel for SiluMul<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Lanes>(self) {
        let mut from = 0;
        while from < self.gate.len() {
            // SAFETY: `from` is inside two slices of one length.
            unsafe {
                let gate = V::load_slice(self.gate, from, 0.0);
                let e = exp_lanes::<V>(V::sub(V::splat(0.0), gate));
                let silu = V::div(gate, V::add(V::splat(1.0), e));
                let value = V::mul(silu, V::load_slice(self.up, from, 0.0));
                V::store_slice(self.gate, from, V::canonical(value));
            }
            from += V::WIDTH;
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    fn values(len: usize, seed: u32) -> Vec<f32> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / 8_388_608.0 - 1.0
        };
        (0..len).map(|_| next() * if next() > 0.9 { 40.0 } else { 2.0 }).collect()
    }

    fn bits(x: &[f32]) -> Vec<u32> {
        x.iter().map(|v| v.to_bits()).collect()
    }

    #[test]
    fn rms_norm_agrees_with_f64_and_between_sets_batches_and_threads() {
        for width in [1, 7, 16, 17, 576, 896, 5_000] {
            let (x, weight) = (values(width * 5, 3), values(width, 4));
            let mut want = vec![0.0; x.len()];
            rms_norm(&Pool::new(1), Isa::Scalar, &x, &weight, 1e-5, &mut want).unwrap();
            for (x, want) in x.chunks(width).zip(want.chunks(width)) {
                let mean = x.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / width as f64;
                for i in 0..width {
                    let exact = f64::from(x[i]) / (mean + f64::from(1e-5_f32)).sqrt() * f64::from(weight[i]);
                    assert!((f64::from(want[i]) - exact).abs() <= 1e-6 * exact.abs() + 1e-12);
                }
            }
            for isa in Isa::available() {
                for threads in [1, 3] {
                    let pool = Pool::new(threads);
                    let mut got = vec![0.0; x.len()];
                    rms_norm(&pool, isa, &x, &weight, 1e-5, &mut got).unwrap();
                    assert_eq!(bits(&got), bits(&want), "{isa} {width}");
                    let row = &x[width * 2..width * 3];
                    rms_norm(&pool, isa, row, &weight, 1e-5, &mut got[..width]).unwrap();
                    assert_eq!(bits(&got[..width]), bits(&want[width * 2..width * 3]), "a row alone");
                }
            }
        }
    }

    #[test]
    fn residual_and_norm_fused_equal_the_two_steps() {
        let (x, delta, weight) = (values(576 * 40, 1), values(576 * 40, 2), values(576, 3));
        let mut sum = x.clone();
        add(Isa::Scalar, &mut sum, &delta).unwrap();
        let mut want = vec![0.0; x.len()];
        rms_norm(&Pool::new(1), Isa::Scalar, &sum, &weight, 1e-6, &mut want).unwrap();
        for isa in Isa::available() {
            let (mut x, mut out) = (x.clone(), vec![0.0; x.len()]);
            add_rms_norm(&Pool::new(2), isa, &mut x, &delta, &weight, 1e-6, &mut out).unwrap();
            assert_eq!((bits(&x), bits(&out)), (bits(&sum), bits(&want)), "{isa}");
        }
    }

    #[test]
    fn silu_gate_agrees_with_f64_and_between_sets() {
        let mut gate = values(30_011, 5);
        gate[..6].copy_from_slice(&[100.0, -100.0, -87.0, 0.0, -0.0, f32::NEG_INFINITY]);
        let up = values(gate.len(), 6);
        let mut want = gate.clone();
        silu_mul(&Pool::new(1), Isa::Scalar, &mut want, &up).unwrap();
        assert!(want[..5].iter().all(|v| v.is_finite()));
        for i in 6..gate.len() {
            let g = f64::from(gate[i]);
            let exact = g / (1.0 + libm::exp(-g)) * f64::from(up[i]);
            assert!((f64::from(want[i]) - exact).abs() <= 4e-7 * exact.abs() + 1e-36, "{g}: {} {exact}", want[i]);
        }
        for isa in Isa::available() {
            let mut got = gate.clone();
            silu_mul(&Pool::new(3), isa, &mut got, &up).unwrap();
            assert_eq!(bits(&got), bits(&want), "{isa}");
        }
    }

    #[test]
    fn bias_goes_to_every_row_and_nan_is_canonical() {
        for isa in Isa::available() {
            let mut x = vec![1.0, 2.0, 3.0, 4.0, 5.0, f32::from_bits(0xffc0_0007)];
            add_bias(isa, &mut x, &[10.0, 20.0, 30.0]).unwrap();
            assert_eq!(bits(&x), bits(&[11.0, 22.0, 33.0, 14.0, 25.0, f32::NAN]), "{isa}");
        }
    }

    #[test]
    fn lengths_that_do_not_fit_are_refused() {
        let pool = Pool::new(1);
        let mut out = [0.0; 4];
        assert!(rms_norm(&pool, Isa::Scalar, &[0.0; 4], &[1.0; 3], 1e-5, &mut out).is_err());
        assert!(rms_norm(&pool, Isa::Scalar, &[0.0; 6], &[1.0; 3], 1e-5, &mut out).is_err());
        assert!(rms_norm(&pool, Isa::Scalar, &[0.0; 4], &[], 1e-5, &mut out).is_err());
        assert!(add_bias(Isa::Scalar, &mut out, &[1.0; 3]).is_err());
        assert!(silu_mul(&pool, Isa::Scalar, &mut out, &[1.0; 3]).is_err());
    }
}
