//! Element types and views of stored tensors.
//!
//! Owns the block geometry of each supported type. Refuses to know arithmetic: dequantisation lives in the kernels. Called by both file
//! readers and by whoever loads weights. Everything here is a few integer operations.

/// How the elements of a tensor are stored. The block layouts are those of ggml; integers and half floats are little-endian.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub enum TensorType {
    /// 32-bit float.
    F32,
    /// 16-bit IEEE float.
    F16,
    /// 16-bit brain float.
    Bf16,
    /// 32 elements: f16 scale, 16 bytes of 4-bit values, offset 8.
    Q4_0,
    /// 32 elements: f16 scale, f16 minimum, 16 bytes of 4-bit values.
    Q4_1,
    /// 32 elements: f16 scale, 4 bytes of fifth bits, 16 bytes of low bits, offset 16.
    Q5_0,
    /// 32 elements: f16 scale, f16 minimum, 4 bytes of fifth bits, 16 bytes of low bits.
    Q5_1,
    /// 32 elements: f16 scale, 32 signed bytes.
    Q8_0,
    /// 256 elements: f16 scale and minimum scale, 12 bytes of 6-bit scales and minima, 128 bytes of 4-bit values.
    Q4K,
    /// 256 elements: as `Q4K` with 32 bytes of fifth bits before the low bits.
    Q5K,
    /// 256 elements: 128 bytes of low bits, 64 bytes of high bits, 16 signed scales, f16 scale, offset 32.
    Q6K,
}

/// One tensor of a model file: `rows` output features of `cols` inputs each, row after row.
///
/// A vector is one row. `bytes` has exactly `rows × row_bytes` bytes and is not aligned to anything.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    /// How the elements are stored.
    pub ty: TensorType,
    /// Output features; 1 for a vector.
    pub rows: usize,
    /// Elements of one row.
    pub cols: usize,
    /// The stored bytes.
    pub bytes: &'a [u8],
}

// === impl TensorType ===

impl TensorType {
    /// Every supported type.
    pub const ALL: [Self; 11] = [
        Self::F32,
        Self::F16,
        Self::Bf16,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
    ];

    /// Elements of one block; a row is a whole number of blocks.
    pub const fn block_len(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => 1,
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 | Self::Q8_0 => 32,
            Self::Q4K | Self::Q5K | Self::Q6K => 256,
        }
    }

    /// Bytes of one block.
    pub const fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
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

    /// Bytes of a row of `cols` elements; `None` when `cols` is no whole number of blocks or the product overflows.
    pub const fn row_bytes(self, cols: usize) -> Option<usize> {
        if !cols.is_multiple_of(self.block_len()) {
            return None;
        }
        (cols / self.block_len()).checked_mul(self.block_bytes())
    }

    /// The type's number in a GGUF file.
    pub const fn ggml_id(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q4_0 => 2,
            Self::Q4_1 => 3,
            Self::Q5_0 => 6,
            Self::Q5_1 => 7,
            Self::Q8_0 => 8,
            Self::Q4K => 12,
            Self::Q5K => 13,
            Self::Q6K => 14,
            Self::Bf16 => 30,
        }
    }

    /// Reads a GGUF type number; `None` for what is not supported.
    pub fn from_ggml_id(id: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|ty| ty.ggml_id() == id)
    }

    /// The field's usual spelling, such as `Q4_K`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
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
}

/// Spelling of any ggml type number, also of those that are refused.
pub(crate) fn ggml_type_name(id: u32) -> String {
    let known = match id {
        10 => "Q2_K",
        11 => "Q3_K",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        20 => "IQ4_NL",
        21 => "IQ3_S",
        22 => "IQ2_S",
        23 => "IQ4_XS",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        28 => "F64",
        29 => "IQ1_M",
        34 => "TQ1_0",
        35 => "TQ2_0",
        39 => "MXFP4",
        _ => return TensorType::from_ggml_id(id).map_or_else(|| format!("number {id}"), |ty| ty.name().to_owned()),
    };
    known.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_is_found_by_its_number_and_no_other() {
        for ty in TensorType::ALL {
            assert_eq!(TensorType::from_ggml_id(ty.ggml_id()), Some(ty));
        }
        assert_eq!(TensorType::from_ggml_id(4), None);
        assert_eq!(TensorType::from_ggml_id(u32::MAX), None);
    }

    #[test]
    fn a_row_is_a_whole_number_of_blocks() {
        assert_eq!(TensorType::Q4_0.row_bytes(64), Some(36));
        assert_eq!(TensorType::Q6K.row_bytes(512), Some(420));
        assert_eq!(TensorType::Q4K.row_bytes(128), None);
        assert_eq!(TensorType::F32.row_bytes(usize::MAX), None);
    }
}
