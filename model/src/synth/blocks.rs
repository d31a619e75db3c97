//! Random weights as valid blocks of every type, with a chosen spread. Called by [`super::TinyModel`] and by kernel tests.
//!
//! Scales, minima and values are drawn apart, so that a kernel that mixes them up gives other numbers. Integer values keep to the range that
//! real quantisers write (no -128).

use half::{bf16, f16};

use crate::tensor::TensorType;

/// A small deterministic generator (splitmix64); the same seed gives the same stream everywhere.
#[derive(Clone, Debug)]
pub struct Noise(u64);

impl Noise {
    /// Starts a stream.
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 bits.
    pub const fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Uniform in [-1, 1).
    pub const fn unit(&mut self) -> f32 {
        ((self.bits() >> 40) as f32) / ((1_u64 << 23) as f32) - 1.0
    }

    /// Uniform in `low..=high`.
    const fn between(&mut self, low: i32, high: i32) -> i32 {
        low + (self.bits() >> 33) as i32 % (high - low + 1)
    }

    fn bytes(&mut self, out: &mut Vec<u8>, count: usize) {
        for _ in 0..count {
            out.push((self.bits() >> 24) as u8);
        }
    }
}

/// `rows × cols` random weights with about the standard deviation `spread`; `None` when a row is no whole number of blocks.
pub fn random_rows(noise: &mut Noise, ty: TensorType, rows: usize, cols: usize, spread: f32) -> Option<Vec<u8>> {
    let row_bytes = ty.row_bytes(cols)?;
    let mut out = Vec::with_capacity(row_bytes.checked_mul(rows)?);
    for _ in 0..rows * (cols / ty.block_len()) {
        block(noise, ty, spread, &mut out);
    }
    Some(out)
}

fn block(noise: &mut Noise, ty: TensorType, spread: f32, out: &mut Vec<u8>) {
    // Uniform over [-a, a] has the deviation a / √3.
    let width = 3.0_f32.sqrt() * spread;
    // Scales of neighbouring blocks differ, by up to a quarter.
    let vary = 1.0 + 0.25 * noise.unit();
    let half = |out: &mut Vec<u8>, value: f32| out.extend(f16::from_f32(value).to_le_bytes());
    match ty {
        TensorType::F32 => out.extend((width * noise.unit()).to_le_bytes()),
        TensorType::F16 => half(out, width * noise.unit()),
        TensorType::Bf16 => out.extend(bf16::from_f32(width * noise.unit()).to_le_bytes()),
        TensorType::Q4_0 => {
            half(out, vary * width / 8.0);
            noise.bytes(out, 16);
        }
        TensorType::Q4_1 => {
            half(out, vary * width / 7.5);
            half(out, -width * (1.0 + 0.1 * noise.unit()));
            noise.bytes(out, 16);
        }
        TensorType::Q5_0 => {
            half(out, vary * width / 16.0);
            noise.bytes(out, 20);
        }
        TensorType::Q5_1 => {
            half(out, vary * width / 15.5);
            half(out, -width * (1.0 + 0.1 * noise.unit()));
            noise.bytes(out, 20);
        }
        TensorType::Q8_0 => {
            half(out, vary * width / 127.0);
            (0..32).for_each(|_| out.push(noise.between(-127, 127) as i8 as u8));
        }
        TensorType::Q4K => k_block(noise, out, vary * width, 7.5, 128),
        TensorType::Q5K => k_block(noise, out, vary * width, 15.5, 160),
        TensorType::Q6K => {
            noise.bytes(out, 192);
            (0..16).for_each(|_| out.push((noise.between(24, 40) * (noise.between(0, 1) * 2 - 1)) as i8 as u8));
            half(out, vary * width / (32.0 * 32.0));
        }
    }
}

/// `Q4_K` and `Q5_K`: scales and minima of 24 to 40 around 32, values centred by the minimum.
fn k_block(noise: &mut Noise, out: &mut Vec<u8>, width: f32, centre: f32, value_bytes: usize) {
    let scale = width / (centre * 32.0);
    out.extend(f16::from_f32(scale).to_le_bytes());
    out.extend(f16::from_f32(scale * centre).to_le_bytes());
    let scales: [u8; 8] = std::array::from_fn(|_| noise.between(24, 40) as u8);
    let minima: [u8; 8] = std::array::from_fn(|_| noise.between(24, 40) as u8);
    // Six bits each: the first four in the low bits of bytes 0 to 7, the last four as nibbles with their top bits above the first four.
    for group in 0..4 {
        out.push(scales[group] | ((scales[group + 4] >> 4) << 6));
    }
    for group in 0..4 {
        out.push(minima[group] | ((minima[group + 4] >> 4) << 6));
    }
    for group in 4..8 {
        out.push((scales[group] & 0x0f) | ((minima[group] & 0x0f) << 4));
    }
    noise.bytes(out, value_bytes);
}
