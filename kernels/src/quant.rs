//! The weight formats of GGUF files: sizes, and exact expansion to f32.
//!
//! Owns: what the bytes of a block mean. Refuses to know: files, tensors' names, tiles. Called by the
//! matmul packer, by embedding look-ups and by every test that needs the f32 truth.
//!
//! Formats follow ggml's block definitions (`ggml-common.h`, `ggml-quants.c`): integers are little-endian,
//! halves are IEEE binary16, sums are evaluated left to right with a rounding after each step, so
//! [`dequantize`] gives ggml's bits.

mod blocks;

use half::{bf16, f16};

pub(crate) use blocks::{Block, SUB_LEN};

use crate::error::KernelError;

/// The longest permitted row and the most rows of a matrix: 2^24, ten times the largest published.
pub(crate) const MAX_DIM: usize = 1 << 24;

/// How the numbers of a weight tensor are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WeightType {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// The upper half of binary32.
    BF16,
    /// 32 weights: f16 scale, 4-bit codes around 8.
    Q4_0,
    /// 32 weights: f16 scale and minimum, 4-bit codes.
    Q4_1,
    /// 32 weights: f16 scale, 5-bit codes around 16.
    Q5_0,
    /// 32 weights: f16 scale and minimum, 5-bit codes.
    Q5_1,
    /// 32 weights: f16 scale, signed bytes.
    Q8_0,
    /// 256 weights: f16 scale and minimum, a 6-bit factor of each per 32, 4-bit codes.
    Q4K,
    /// As `Q4K` with 5-bit codes.
    Q5K,
    /// 256 weights: f16 scale, a signed 8-bit factor per 16, 6-bit codes around 32.
    Q6K,
}

impl WeightType {
    /// Every format.
    pub const ALL: [Self; 11] = [
        Self::F32,
        Self::F16,
        Self::BF16,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
    ];

    /// Weights in one block; a row is a whole number of blocks.
    pub const fn block_len(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::BF16 => 1,
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 | Self::Q8_0 => 32,
            Self::Q4K | Self::Q5K | Self::Q6K => 256,
        }
    }

    /// Bytes of one block.
    pub const fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q8_0 => 34,
            Self::Q4K => 144,
            Self::Q5K => 176,
            Self::Q6K => 210,
        }
    }

    /// Bytes of a row of `cols` weights; a last partial block counts whole (no valid row has one).
    pub const fn row_bytes(self, cols: usize) -> usize {
        cols.div_ceil(self.block_len()).saturating_mul(self.block_bytes())
    }

    /// The name that GGUF tools print.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::BF16 => "BF16",
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q5_0 => "Q5_0",
            Self::Q5_1 => "Q5_1",
            Self::Q8_0 => "Q8_0",
            Self::Q4K => "Q4_K",
            Self::Q5K => "Q5_K",
            Self::Q6K => "Q6_K",
        }
    }

    /// Checks that `bytes` holds exactly `rows` rows of `cols` weights.
    pub(crate) fn check(self, rows: usize, cols: usize, bytes: usize) -> Result<(), KernelError> {
        for (field, got) in [("rows", rows), ("cols", cols)] {
            if got == 0 || got > MAX_DIM {
                return Err(KernelError::Range { field, got, limit: MAX_DIM });
            }
        }
        self.check_whole_blocks("cols", cols)?;
        let want = self.row_bytes(cols).saturating_mul(rows);
        if want == bytes { Ok(()) } else { Err(KernelError::Length { field: "bytes", got: bytes, want }) }
    }

    fn check_whole_blocks(self, field: &'static str, got: usize) -> Result<(), KernelError> {
        let multiple = self.block_len();
        if got.is_multiple_of(multiple) {
            Ok(())
        } else {
            Err(KernelError::Multiple { field, got, multiple, format: self.name() })
        }
    }
}

/// Expands a contiguous run of blocks to f32, with ggml's bits.
///
/// `out.len()` must be a multiple of the block length and `bytes` hold exactly those blocks. Costs about a
/// nanosecond a weight: meant for embedding rows and as reference, not for products.
pub fn dequantize(ty: WeightType, bytes: &[u8], out: &mut [f32]) -> Result<(), KernelError> {
    ty.check_whole_blocks("out", out.len())?;
    let want = ty.row_bytes(out.len());
    if bytes.len() != want {
        return Err(KernelError::Length { field: "bytes", got: bytes.len(), want });
    }
    match ty {
        WeightType::F32 => {
            for (value, raw) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *value = f32::from_le_bytes(*raw);
            }
        }
        WeightType::F16 => {
            for (value, raw) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *value = f16::from_le_bytes(*raw).to_f32_const();
            }
        }
        WeightType::BF16 => {
            for (value, raw) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *value = bf16::from_le_bytes(*raw).to_f32_const();
            }
        }
        _ => {
            for (values, raw) in out.chunks_exact_mut(ty.block_len()).zip(bytes.chunks_exact(ty.block_bytes())) {
                expand(Block::new(ty, raw), values);
            }
        }
    }
    Ok(())
}

/// One block: `code · scale`, and `+ minimum` for the formats that have one.
fn expand(block: Block<'_>, out: &mut [f32]) {
    let mut codes = [0_u8; SUB_LEN];
    for (sub, values) in out.chunks_exact_mut(SUB_LEN).enumerate() {
        block.codes(sub, &mut codes);
        let offset = block.offset();
        for (half, values) in values.chunks_exact_mut(SUB_LEN / 2).enumerate() {
            let scale = block.scale(sub, half);
            let codes = codes[half * SUB_LEN / 2..].iter();
            match block.minimum(sub) {
                Some(minimum) => values.iter_mut().zip(codes).for_each(|(v, &c)| *v = scale * f32::from(c) + minimum),
                None => values.iter_mut().zip(codes).for_each(|(v, &c)| *v = scale * (f32::from(c) - offset)),
            }
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
