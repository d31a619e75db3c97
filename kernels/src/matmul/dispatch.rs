//! From (instruction set, format, rows) to the compiled kernel.
//!
//! Each instruction set has one entry per family, compiled under its features; everything below it is
//! `inline(always)`, so the whole kernel takes on those features.

use super::activations::{Line, PANEL, quantize_panel};
use super::dense::{self, BF16, F16, F32, Rows, Storage};
use super::lanes::Lanes;
use super::lanes::scalar::Scalar;
use super::tile::{self, Format, Panel};
use crate::isa::Isa;
use crate::quant::WeightType;

/// Multiplies one tile by a panel. Safety: as [`tile::multiply`], on the instruction set chosen for.
pub(crate) type PanelKernel = unsafe fn(&Panel);
/// Multiplies one tile by rows. Safety: as [`dense::multiply`], on the instruction set chosen for.
pub(crate) type RowsKernel = unsafe fn(&Rows);

/// Rows that one call can take, on the set that takes most.
const MOST: usize = PANEL;

/// A family of kernels for one tile; index `r − 1` computes `r` rows, up to [`max_rows`].
#[derive(Clone, Copy)]
pub(crate) enum Kernels {
    /// Quantised weights and activations.
    Panels([PanelKernel; MOST]),
    /// Float weights and activations.
    Rows([RowsKernel; MOST]),
}

/// The kernels of a format; the set must be available.
pub(crate) fn kernels(isa: Isa, ty: WeightType) -> Kernels {
    match ty {
        WeightType::F32 => Kernels::Rows(rows_kernels::<F32>(isa)),
        WeightType::F16 => Kernels::Rows(rows_kernels::<F16>(isa)),
        WeightType::BF16 => Kernels::Rows(rows_kernels::<BF16>(isa)),
        WeightType::Q4_0 => Kernels::Panels(panel_kernels::<tile::Q4_0>(isa)),
        WeightType::Q4_1 => Kernels::Panels(panel_kernels::<tile::Q4_1>(isa)),
        WeightType::Q5_0 => Kernels::Panels(panel_kernels::<tile::Q5_0>(isa)),
        WeightType::Q5_1 => Kernels::Panels(panel_kernels::<tile::Q5_1>(isa)),
        WeightType::Q8_0 => Kernels::Panels(panel_kernels::<tile::Q8_0>(isa)),
        WeightType::Q4K => Kernels::Panels(panel_kernels::<tile::Q4K>(isa)),
        WeightType::Q5K => Kernels::Panels(panel_kernels::<tile::Q5K>(isa)),
        WeightType::Q6K => Kernels::Panels(panel_kernels::<tile::Q6K>(isa)),
    }
}

/// Most rows of one call.
pub(crate) fn max_rows(isa: Isa) -> usize {
    match isa {
        Isa::Scalar => Scalar::MAX_ROWS,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => super::lanes::avx2::Avx2::MAX_ROWS,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => super::lanes::avx512::Avx512::MAX_ROWS,
        #[cfg(not(target_arch = "x86_64"))]
        Isa::Avx2 | Isa::Avx512 => Scalar::MAX_ROWS,
    }
}

/// [`quantize_panel`] under an instruction set, which must be available.
pub(crate) fn quantize(isa: Isa, x: &[f32], blocks: usize, lines: &mut [Line]) {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the set is available.
        Isa::Avx512 => unsafe { x86::quantize_avx512(x, blocks, lines) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx2 => unsafe { x86::quantize_avx2(x, blocks, lines) },
        _ => quantize_panel(x, blocks, lines),
    }
}

/// `[name::<T, 1>, …]`, where counts above the set's most repeat the last and are never asked for.
#[cfg(target_arch = "x86_64")]
macro_rules! by_rows {
    ($name:path, $t:ident, $($rows:literal)*) => {{
        use $name as kernel;
        [$(kernel::<$t, $rows>),*]
    }};
}

fn panel_kernels<F: Format>(isa: Isa) -> [PanelKernel; MOST] {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => by_rows!(x86::panel_avx512, F, 1 2 3 4 5 6 7 8),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => by_rows!(x86::panel_avx2, F, 1 2 3 4 4 4 4 4),
        #[cfg(target_arch = "x86_64")]
        Isa::Scalar if Isa::scalar_has_fma() => [x86::panel_fma::<F>; MOST],
        _ => [tile::multiply::<Scalar, F, 1>; MOST],
    }
}

fn rows_kernels<S: Storage>(isa: Isa) -> [RowsKernel; MOST] {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => by_rows!(x86::rows_avx512, S, 1 2 3 4 5 6 7 8),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => by_rows!(x86::rows_avx2, S, 1 2 3 4 4 4 4 4),
        #[cfg(target_arch = "x86_64")]
        Isa::Scalar if Isa::scalar_has_fma() => [x86::rows_fma::<S>; MOST],
        _ => [dense::multiply::<Scalar, S, 1>; MOST],
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    //! Entry points. Safety of each: the features that it enables, and the contract of what it calls.
    use super::super::lanes::avx2::Avx2;
    use super::super::lanes::avx512::Avx512;
    use super::{Format, Line, Panel, Rows, Scalar, Storage, dense, quantize_panel, tile};

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
    pub(super) unsafe fn panel_avx512<F: Format, const R: usize>(panel: &Panel) {
        // SAFETY: see the module.
        unsafe { tile::multiply::<Avx512, F, R>(panel) }
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) unsafe fn panel_avx2<F: Format, const R: usize>(panel: &Panel) {
        // SAFETY: see the module.
        unsafe { tile::multiply::<Avx2, F, R>(panel) }
    }

    #[target_feature(enable = "fma")]
    pub(super) unsafe fn panel_fma<F: Format>(panel: &Panel) {
        // SAFETY: see the module.
        unsafe { tile::multiply::<Scalar, F, 1>(panel) }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
    pub(super) unsafe fn rows_avx512<S: Storage, const R: usize>(rows: &Rows) {
        // SAFETY: see the module.
        unsafe { dense::multiply::<Avx512, S, R>(rows) }
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) unsafe fn rows_avx2<S: Storage, const R: usize>(rows: &Rows) {
        // SAFETY: see the module.
        unsafe { dense::multiply::<Avx2, S, R>(rows) }
    }

    #[target_feature(enable = "fma")]
    pub(super) unsafe fn rows_fma<S: Storage>(rows: &Rows) {
        // SAFETY: see the module.
        unsafe { dense::multiply::<Scalar, S, 1>(rows) }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    pub(super) fn quantize_avx512(x: &[f32], blocks: usize, lines: &mut [Line]) {
        quantize_panel(x, blocks, lines);
    }

    #[target_feature(enable = "avx2,fma")]
    pub(super) fn quantize_avx2(x: &[f32], blocks: usize, lines: &mut [Line]) {
        quantize_panel(x, blocks, lines);
    }
}
