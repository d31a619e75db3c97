//! Decoders against slow ones written element by element from the format's definition.
#![allow(clippy::unwrap_used, reason = "tests")]

use super::*;

/// Splitmix64: enough randomness for bytes, and the same on every run.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// Roughly normal around 0 with deviation 1.
    pub(crate) fn normal(&mut self) -> f32 {
        (0..12).map(|_| (self.next() >> 40) as f32 / 16_777_216.0).sum::<f32>() - 6.0
    }

    pub(crate) fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count).map(|_| self.next() as u8).collect()
    }
}

/// A tensor of random codes with scales of the size that models have.
pub(crate) fn tensor(ty: WeightType, rows: usize, cols: usize, random: &mut Random) -> Vec<u8> {
    let mut bytes = random.bytes(rows * ty.row_bytes(cols));
    for block in bytes.chunks_exact_mut(ty.block_bytes()) {
        let half = f16::from_f32(random.normal() * 0.02).to_le_bytes();
        let other = f16::from_f32(random.normal() * 0.02).to_le_bytes();
        match ty {
            WeightType::F32 => block.copy_from_slice(&random.normal().to_le_bytes()),
            WeightType::F16 => block.copy_from_slice(&half),
            WeightType::BF16 => block.copy_from_slice(&bf16::from_f32(random.normal()).to_le_bytes()),
            WeightType::Q4_0 | WeightType::Q5_0 | WeightType::Q8_0 => block[..2].copy_from_slice(&half),
            WeightType::Q4_1 | WeightType::Q5_1 | WeightType::Q4K | WeightType::Q5K => {
                block[..2].copy_from_slice(&half);
                block[2..4].copy_from_slice(&other);
            }
            WeightType::Q6K => block[208..].copy_from_slice(&half),
        }
    }
    bytes
}

/// Binary16 by its definition, in f64.
fn half(block: &[u8], at: usize) -> f32 {
    let bits = u32::from(block[at]) + 256 * u32::from(block[at + 1]);
    let sign = if bits >> 15 == 1 { -1.0 } else { 1.0 };
    let (exponent, mantissa) = (bits >> 10 & 31, f64::from(bits & 1023));
    let magnitude = match exponent {
        0 => mantissa * 2_f64.powi(-24),
        31 if mantissa == 0.0 => f64::INFINITY,
        31 => f64::NAN,
        _ => (1024.0 + mantissa) * 2_f64.powi(exponent as i32 - 25),
    };
    (sign * magnitude) as f32
}

/// Bit `index` of a little-endian bit string.
fn bit(bytes: &[u8], index: usize) -> u8 {
    bytes[index / 8] >> (index % 8) & 1
}

/// Six-bit scale (`which` 0) or minimum (1) of sub-block `sub`, from the 12 packed bytes: the first four of
/// each in the low six bits of bytes 0..4 and 4..8, the others in a nibble of 8..12 plus two top bits.
fn six_bits(packed: &[u8], sub: usize, which: usize) -> f32 {
    let value = if sub < 4 {
        packed[4 * which + sub] % 64
    } else {
        let nibble = if which == 0 { packed[sub + 4] % 16 } else { packed[sub + 4] / 16 };
        nibble + 16 * (packed[4 * which + sub - 4] / 64)
    };
    f32::from(value)
}

/// Element `e` of a block.
fn element(ty: WeightType, b: &[u8], e: usize) -> f32 {
    // The 32-element formats keep element e in the low nibble of byte e, or the high one of byte e − 16.
    let nibble = |qs: &[u8]| if e < 16 { qs[e] % 16 } else { qs[e - 16] / 16 };
    // The K types keep 64 elements in 32 bytes, the first 32 in the low nibbles.
    let nibble_k = |qs: &[u8]| {
        let byte = qs[e / 64 * 32 + e % 32];
        if e % 64 < 32 { byte % 16 } else { byte / 16 }
    };
    match ty {
        WeightType::F32 => f32::from_bits(u32::from_le_bytes(b.try_into().unwrap())),
        WeightType::F16 => half(b, 0),
        WeightType::BF16 => f32::from_bits(u32::from(b[0]) << 16 | u32::from(b[1]) << 24),
        WeightType::Q4_0 => (f32::from(nibble(&b[2..])) - 8.0) * half(b, 0),
        WeightType::Q4_1 => f32::from(nibble(&b[4..])) * half(b, 0) + half(b, 2),
        WeightType::Q5_0 => (f32::from(nibble(&b[6..]) + 16 * bit(&b[2..6], e)) - 16.0) * half(b, 0),
        WeightType::Q5_1 => f32::from(nibble(&b[8..]) + 16 * bit(&b[4..8], e)) * half(b, 0) + half(b, 2),
        WeightType::Q8_0 => f32::from(b[2 + e] as i8) * half(b, 0),
        WeightType::Q4K => {
            let (d, m) = (six_bits(&b[4..16], e / 32, 0), six_bits(&b[4..16], e / 32, 1));
            half(b, 0) * d * f32::from(nibble_k(&b[16..])) - half(b, 2) * m
        }
        WeightType::Q5K => {
            let (d, m) = (six_bits(&b[4..16], e / 32, 0), six_bits(&b[4..16], e / 32, 1));
            let q = nibble_k(&b[48..]) + 16 * (b[16 + e % 32] >> (e / 32) & 1);
            half(b, 0) * d * f32::from(q) - half(b, 2) * m
        }
        WeightType::Q6K => {
            // 128 elements per half: 64 bytes of nibbles, 32 bytes with two bits for each quarter.
            let (part, within) = (e / 128, e % 128);
            let byte = b[part * 64 + within % 64];
            let low = if within < 64 { byte % 16 } else { byte / 16 };
            let high = b[128 + part * 32 + within % 32] >> (2 * (within / 32)) & 3;
            half(b, 208) * f32::from(b[192 + e / 16] as i8) * (f32::from(low + 16 * high) - 32.0)
        }
    }
}

/// The slow expansion of a whole tensor.
pub(crate) fn slow(ty: WeightType, bytes: &[u8]) -> Vec<f32> {
    let blocks = bytes.chunks_exact(ty.block_bytes());
    blocks.flat_map(|block| (0..ty.block_len()).map(move |e| element(ty, block, e))).collect()
}

fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()
}

#[test]
fn blocks_expand_as_their_definition_says() {
    let mut random = Random(1);
    for ty in WeightType::ALL {
        for round in 0..40 {
            let cols = 3 * 256;
            // Wild bytes reach infinities, NaNs, denormal and negative scales; tame ones give real weights.
            let bytes = if round % 2 == 0 { random.bytes(ty.row_bytes(cols)) } else { tensor(ty, 1, cols, &mut random) };
            let mut fast = vec![0.0; cols];
            dequantize(ty, &bytes, &mut fast).unwrap();
            for (i, (fast, slow)) in fast.iter().zip(slow(ty, &bytes)).enumerate() {
                assert!(same(*fast, slow), "{} element {i}: {fast} against {slow}", ty.name());
            }
        }
    }
}

#[test]
fn a_block_written_by_hand() {
    // d = 0.5, m = −1, byte 0 = 0x3f: element 0 is 15 · 0.5 − 1, element 16 is 3 · 0.5 − 1.
    let mut block = [0_u8; 20];
    block[..4].copy_from_slice(&[0x00, 0x38, 0x00, 0xbc]);
    block[4] = 0x3f;
    let mut out = [0.0; 32];
    dequantize(WeightType::Q4_1, &block, &mut out).unwrap();
    assert_eq!((out[0], out[1], out[16], out[17]), (6.5, -1.0, 0.5, -1.0));
}

#[test]
fn sizes_that_do_not_fit_are_refused() {
    let mut out = [0.0; 48];
    let refused = dequantize(WeightType::Q4_0, &[0; 18], &mut out);
    assert_eq!(refused, Err(KernelError::Multiple { field: "out", got: 48, multiple: 32, format: "Q4_0" }));
    let refused = dequantize(WeightType::Q4_0, &[0; 35], &mut out[..32]);
    assert_eq!(refused, Err(KernelError::Length { field: "bytes", got: 35, want: 18 }));
    assert_eq!(dequantize(WeightType::Q6K, &[], &mut []), Ok(()));
}
