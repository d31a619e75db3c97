//! Reading one quantised block: codes in element order, scales and minimums as f32.
//!
//! All formats are seen alike: sub-blocks of 32 unsigned codes; an element is
//! `scale · (code − offset)`, or `scale · code + minimum`. Scales may change after 16 elements (`Q6_K`).

use half::f16;

use super::WeightType;

/// Elements of a sub-block; also the block length of activations.
pub(crate) const SUB_LEN: usize = 32;

/// A block of a quantised format, borrowed from the file.
#[derive(Clone, Copy)]
pub(crate) struct Block<'a> {
    ty: WeightType,
    raw: &'a [u8],
}

impl<'a> Block<'a> {
    /// `raw` holds exactly one block of `ty`, which is not a float type.
    pub(crate) fn new(ty: WeightType, raw: &'a [u8]) -> Self {
        debug_assert_eq!(raw.len(), ty.block_bytes(), "a block of {}", ty.name());
        Self { ty, raw }
    }

    /// The code that stands for zero in formats without a minimum.
    pub(crate) const fn offset(self) -> f32 {
        match self.ty {
            WeightType::Q4_0 => 8.0,
            WeightType::Q5_0 => 16.0,
            WeightType::Q8_0 => 128.0,
            WeightType::Q6K => 32.0,
            _ => 0.0,
        }
    }

    /// Unsigned codes of sub-block `sub`, in element order.
    #[inline]
    pub(crate) fn codes(self, sub: usize, out: &mut [u8; SUB_LEN]) {
        match self.ty {
            WeightType::Q4_0 => split_nibbles(&self.raw[2..18], out),
            WeightType::Q4_1 => split_nibbles(&self.raw[4..20], out),
            WeightType::Q5_0 => {
                split_nibbles(&self.raw[6..22], out);
                add_fifth_bit(&self.raw[2..6], out);
            }
            WeightType::Q5_1 => {
                split_nibbles(&self.raw[8..24], out);
                add_fifth_bit(&self.raw[4..8], out);
            }
            // Two's complement to offset binary: -128..=127 becomes 0..=255.
            WeightType::Q8_0 => out.iter_mut().zip(&self.raw[2..34]).for_each(|(c, b)| *c = b ^ 0x80),
            WeightType::Q4K => nibbles_k(&self.raw[16..144], sub, out),
            WeightType::Q5K => {
                nibbles_k(&self.raw[48..176], sub, out);
                for (code, high) in out.iter_mut().zip(&self.raw[16..48]) {
                    *code |= (high >> sub & 1) << 4;
                }
            }
            WeightType::Q6K => {
                let (half, quarter) = (sub / 4, sub % 4);
                let low = &self.raw[half * 64 + quarter % 2 * 32..][..SUB_LEN];
                let high = &self.raw[128 + half * 32..][..SUB_LEN];
                for ((code, low), high) in out.iter_mut().zip(low).zip(high) {
                    *code = low >> (quarter / 2 * 4) & 0x0f | (high >> (quarter * 2) & 3) << 4;
                }
            }
            WeightType::F32 | WeightType::F16 | WeightType::BF16 => {}
        }
    }

    /// Scale of the 16 elements `half` of sub-block `sub`; exact in f32 for every format.
    pub(crate) fn scale(self, sub: usize, half: usize) -> f32 {
        let d = f16::from_bits(self.scale_bits()).to_f32_const();
        match self.ty {
            WeightType::Q4K | WeightType::Q5K => d * f32::from(self.factors_k(sub).0),
            WeightType::Q6K => d * f32::from(self.factor_q6(sub * 2 + half)),
            _ => d,
        }
    }

    /// What is added to every element of sub-block `sub`, if the format has minimums.
    pub(crate) fn minimum(self, sub: usize) -> Option<f32> {
        let m = f16::from_bits(self.minimum_bits()?).to_f32_const();
        Some(match self.ty {
            WeightType::Q4K | WeightType::Q5K => m * f32::from(self.factors_k(sub).1),
            _ => m,
        })
    }

    /// The block's scale as binary16.
    pub(crate) fn scale_bits(self) -> u16 {
        self.half_at(if self.ty == WeightType::Q6K { 208 } else { 0 })
    }

    /// The block's minimum as binary16, if it has one. The K types subtract theirs in the file; here the
    /// sign is flipped so that all formats add.
    pub(crate) fn minimum_bits(self) -> Option<u16> {
        match self.ty {
            WeightType::Q4_1 | WeightType::Q5_1 => Some(self.half_at(2)),
            WeightType::Q4K | WeightType::Q5K => Some(self.half_at(2) ^ 0x8000),
            _ => None,
        }
    }

    /// The 6-bit factors of scale and minimum of sub-block `sub` of `Q4_K` and `Q5_K`.
    pub(crate) fn factors_k(self, sub: usize) -> (u8, u8) {
        let packed = &self.raw[4..16];
        if sub < 4 {
            (packed[sub] & 63, packed[sub + 4] & 63)
        } else {
            let low = packed[sub + 4];
            (low & 0x0f | packed[sub - 4] >> 6 << 4, low >> 4 | packed[sub] >> 6 << 4)
        }
    }

    /// The signed factor of the 16 elements `sixteenth` of `Q6_K`.
    pub(crate) fn factor_q6(self, sixteenth: usize) -> i8 {
        self.raw[192 + sixteenth].cast_signed()
    }

    fn half_at(self, at: usize) -> u16 {
        u16::from_le_bytes([self.raw[at], self.raw[at + 1]])
    }
}

/// 16 bytes: element `i` in the low, element `i + 16` in the high nibble of byte `i`.
fn split_nibbles(packed: &[u8], out: &mut [u8; SUB_LEN]) {
    let (low, high) = out.split_at_mut(SUB_LEN / 2);
    for ((low, high), byte) in low.iter_mut().zip(high).zip(packed) {
        (*low, *high) = (byte & 0x0f, byte >> 4);
    }
}

/// 32 bits: bit `i` is the fifth bit of element `i`.
fn add_fifth_bit(bits: &[u8], out: &mut [u8; SUB_LEN]) {
    for (i, code) in out.iter_mut().enumerate() {
        *code |= (bits[i / 8] >> (i % 8) & 1) << 4;
    }
}

/// K types: 32 bytes hold two sub-blocks, the even one in the low nibbles.
fn nibbles_k(packed: &[u8], sub: usize, out: &mut [u8; SUB_LEN]) {
    let packed = &packed[sub / 2 * SUB_LEN..][..SUB_LEN];
    for (code, byte) in out.iter_mut().zip(packed) {
        *code = byte >> (sub % 2 * 4) & 0x0f;
    }
}
