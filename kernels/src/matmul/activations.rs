//! Activations as signed bytes: 32 consecutive inputs of a row share one f32 scale.
//!
//! Invariants
//! - A row's bytes depend on that row alone, and are the same on every instruction set: the largest
//!   magnitude is found on integers, everything else is one IEEE operation per element.
//! - Bytes lie in −127..=127, rounded to nearest, ties to even.
//! - A block with a NaN or an infinity has the scale NaN and zero bytes: it makes its own row NaN and no
//!   other. A block of values under 127 · 2^-126 is zero (its scale would be denormal).
//!
//! A row's block fills one cache line, with all that a tile needs beside the bytes. Lines of up to
//! [`PANEL`] rows lie together block by block, so a kernel reads memory in one direction.

use crate::error::KernelError;
use crate::quant::SUB_LEN;

/// Rows whose lines are interleaved; the most rows that one kernel call takes.
pub(crate) const PANEL: usize = 8;

/// One block of one row.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Line {
    pub(crate) q: [i8; SUB_LEN],
    /// The scale `d`: an activation is about `d · q`.
    pub(crate) scale: f32,
    /// `d · Σ q`, for formats with minimums.
    pub(crate) scaled_sum: f32,
    /// See [`Correction`].
    corrections: [i32; 6],
}

/// `−offset · Σ q` for each offset that a format has; the position in [`Line::corrections`].
#[derive(Clone, Copy)]
#[repr(usize)]
pub(crate) enum Correction {
    /// No offset.
    None = 0,
    /// `Q4_0`.
    Eight = 1,
    /// `Q5_0`.
    Sixteen = 2,
    /// `Q8_0`.
    Half = 3,
    /// `Q6_K`, the first 16 elements.
    First = 4,
    /// `Q6_K`, the last 16 elements.
    Second = 5,
}

impl Line {
    const ZERO: Self = Self { q: [0; SUB_LEN], scale: 0.0, scaled_sum: 0.0, corrections: [0; 6] };

    #[inline]
    pub(crate) const fn correction(&self, which: Correction) -> &i32 {
        &self.corrections[which as usize]
    }
}

/// Buffers that products reuse from step to step: no allocation once the largest shape was seen.
#[derive(Default)]
pub struct Scratch {
    lines: Vec<Line>,
}

impl std::fmt::Debug for Scratch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Scratch").field("bytes", &self.bytes()).finish()
    }
}

impl Scratch {
    /// An empty scratch; it grows on first use.
    pub const fn new() -> Self {
        Self { lines: Vec::new() }
    }

    /// Bytes held.
    pub const fn bytes(&self) -> usize {
        self.lines.capacity() * size_of::<Line>()
    }

    /// Room for `rows` rows of `blocks` blocks, whole panels.
    pub(crate) fn lines(&mut self, rows: usize, blocks: usize) -> Result<&mut [Line], KernelError> {
        let bytes = rows.saturating_mul(blocks).saturating_mul(size_of::<Line>());
        let memory = KernelError::Memory { field: "quantised activations", bytes };
        let count = rows.checked_next_multiple_of(PANEL).and_then(|rows| rows.checked_mul(blocks));
        let count = count.ok_or(memory.clone())?;
        if count > self.lines.len() {
            self.lines.try_reserve_exact(count - self.lines.len()).map_err(|_| memory)?;
            self.lines.resize(count, Line::ZERO);
        }
        Ok(&mut self.lines[..count])
    }
}

/// Quantises up to [`PANEL`] rows of `blocks · 32` values into the panel's lines.
///
/// `x` holds the rows one after another; lines of absent rows keep what they held (valid bytes of an earlier
/// product, whose results are never stored).
#[inline(always)]
pub(crate) fn quantize_panel(x: &[f32], blocks: usize, lines: &mut [Line]) {
    for (row, values) in x.chunks_exact(blocks * SUB_LEN).enumerate() {
        for (block, values) in values.as_chunks::<SUB_LEN>().0.iter().enumerate() {
            quantize_block(values, &mut lines[block * PANEL + row]);
        }
    }
}

#[inline(always)]
fn quantize_block(values: &[f32; SUB_LEN], line: &mut Line) {
    /// Adding it leaves the nearest integer (ties to even) in the low mantissa bits, for |v| < 2^22.
    const ROUND: f32 = 12_582_912.0;
    const INFINITY_BITS: u32 = 0x7f80_0000;

    // Magnitudes of floats order as their bits do, and NaNs come last.
    let largest = values.iter().fold(0, |most, v| (v.to_bits() & 0x7fff_ffff).max(most));
    if largest >= INFINITY_BITS {
        *line = Line { scale: f32::NAN, scaled_sum: f32::NAN, ..Line::ZERO };
        return;
    }
    let largest = f32::from_bits(largest);
    let scale = largest / 127.0;
    if scale < f32::MIN_POSITIVE {
        *line = Line::ZERO;
        return;
    }
    let inverse = 127.0 / largest;
    let rounded = values.map(|v| (v * inverse + ROUND).to_bits().wrapping_sub(ROUND.to_bits()).cast_signed());
    line.q = rounded.map(|q| q as i8);
    let (first, second) = rounded.split_at(SUB_LEN / 2);
    let sums = [first.iter().sum::<i32>(), second.iter().sum::<i32>()];
    let sum = sums[0] + sums[1];
    line.scale = scale;
    line.scaled_sum = scale * sum as f32;
    line.corrections = [0, -8 * sum, -16 * sum, -128 * sum, -32 * sums[0], -32 * sums[1]];
}
