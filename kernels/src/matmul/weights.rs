//! Weights rearranged for the tile kernels, once, at load.
//!
//! A tile is 16 columns (output features). Its codes lie block by block, group of four inputs by group, the
//! four of each column together: a 64-byte register load is one group of all columns. Narrow codes stay
//! narrow:
//!
//! | bits | bytes of a tile's block | where group `g` (0..8) is |
//! | --- | --- | --- |
//! | 4 | 256 | register `g % 4`, low nibbles for `g < 4`, else high nibbles |
//! | 5 | 256 + 64 | as 4 bits; fifth bits in bit `g` of the last register |
//! | 6 | 256 + 128 | as 4 bits; upper two bits at bit `2 (g % 4)` of register `4 + g / 4` |
//! | 8 | 512 | register `g` |
//!
//! Scales lie apart, so that codes stay aligned to cache lines. Per tile and block: 16 f16 scales, then 16
//! f16 minimums if the format has them. For the K types, per tile and super-block: those, then for each block
//! 16 factors of the scale and 16 of the minimum (`Q6_K`: 16 factors for each half), one byte each.
//! Everything is the file's own numbers, so a packed matrix is as large as the file's within 3 %.
//!
//! Float weights lie input by input: 16 values, one per column.
//! The columns that fill up the last tile are zero and are never stored to an output.

use crate::error::KernelError;
use crate::pool::Pool;
use crate::quant::{Block, SUB_LEN, WeightType};

use super::lanes::{GROUP, GROUP_BYTES, GROUPS, TILE};
use super::shared::SharedMut;

/// A weight matrix of `n` output features by `k` input features, ready for products.
pub struct Weights {
    ty: WeightType,
    n: usize,
    k: usize,
    codes: Vec<CacheLine>,
    scales: Vec<CacheLine>,
}

/// 64 aligned bytes.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct CacheLine([u8; 64]);

/// Bytes of one tile in the two buffers.
#[derive(Clone, Copy)]
struct Stride {
    codes: usize,
    scales: usize,
}

impl Weights {
    /// Rearranges the `n` rows of `k` weights of a file (`bytes`, row after row) for the kernels.
    ///
    /// Errors name the size that does not fit: `k` not a whole number of blocks, `bytes` too long or short,
    /// a dimension of zero or over 2^24, no memory.
    pub fn pack(ty: WeightType, n: usize, k: usize, bytes: &[u8]) -> Result<Self, KernelError> {
        Self::pack_on(&Pool::new(1), ty, n, k, bytes)
    }

    /// [`Weights::pack`] on all threads of a pool.
    pub fn pack_on(pool: &Pool, ty: WeightType, n: usize, k: usize, bytes: &[u8]) -> Result<Self, KernelError> {
        ty.check(n, k, bytes.len())?;
        let stride = Stride::of(ty, k);
        let tiles = n.div_ceil(TILE);
        let mut codes = allocate("weights", tiles * stride.codes)?;
        let mut scales = allocate("weight scales", tiles * stride.scales)?;
        let code_bytes = SharedMut::new(as_bytes_mut(&mut codes));
        let scale_bytes = SharedMut::new(as_bytes_mut(&mut scales));
        let row_bytes = ty.row_bytes(k);
        pool.run(tiles, &|tile| {
            let rows = &bytes[tile * TILE * row_bytes..(tile * TILE + TILE).min(n) * row_bytes];
            // SAFETY: each tile is packed by one task, and tiles do not overlap.
            let (codes, scales) = unsafe {
                (code_bytes.slice(tile * stride.codes, stride.codes), scale_bytes.slice(tile * stride.scales, stride.scales))
            };
            for (column, row) in rows.chunks_exact(row_bytes).enumerate() {
                match ty {
                    WeightType::F32 => pack_floats::<4>(row, column, codes),
                    WeightType::F16 | WeightType::BF16 => pack_floats::<2>(row, column, codes),
                    _ => pack_blocks(ty, row, column, codes, scales),
                }
            }
        });
        Ok(Self { ty, n, k, codes, scales })
    }

    /// Output features.
    pub const fn n(&self) -> usize {
        self.n
    }

    /// Input features.
    pub const fn k(&self) -> usize {
        self.k
    }

    /// The format that the weights came in.
    pub const fn weight_type(&self) -> WeightType {
        self.ty
    }

    /// Bytes in memory, all of which a product reads once.
    pub const fn bytes(&self) -> usize {
        (self.codes.len() + self.scales.len()) * size_of::<CacheLine>()
    }

    /// Number of tiles.
    pub(crate) const fn tiles(&self) -> usize {
        self.n.div_ceil(TILE)
    }

    /// Codes and scales of a tile.
    pub(crate) fn tile(&self, tile: usize) -> (&[u8], &[u8]) {
        let stride = Stride::of(self.ty, self.k);
        let codes = &as_bytes(&self.codes)[tile * stride.codes..][..stride.codes];
        let scales = &as_bytes(&self.scales)[tile * stride.scales..][..stride.scales];
        (codes, scales)
    }
}

impl std::fmt::Debug for Weights {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { ty, n, k, .. } = self;
        f.debug_struct("Weights").field("ty", ty).field("n", n).field("k", k).finish_non_exhaustive()
    }
}

impl Stride {
    fn of(ty: WeightType, k: usize) -> Self {
        let blocks = k / SUB_LEN;
        let scales = match ty {
            WeightType::F32 => return Self { codes: k * TILE * 4, scales: 0 },
            WeightType::F16 | WeightType::BF16 => return Self { codes: k * TILE * 2, scales: 0 },
            WeightType::Q4_0 | WeightType::Q5_0 | WeightType::Q8_0 => blocks * 2 * TILE,
            WeightType::Q4_1 | WeightType::Q5_1 => blocks * 4 * TILE,
            WeightType::Q4K | WeightType::Q5K => k / 256 * 4 * TILE + blocks * 2 * TILE,
            WeightType::Q6K => k / 256 * 2 * TILE + blocks * 2 * TILE,
        };
        Self { codes: blocks * bits(ty) * GROUP_BYTES, scales }
    }
}

/// Bits of a code; also the registers that a tile's block fills.
const fn bits(ty: WeightType) -> usize {
    match ty {
        WeightType::Q4_0 | WeightType::Q4_1 | WeightType::Q4K => 4,
        WeightType::Q5_0 | WeightType::Q5_1 | WeightType::Q5K => 5,
        WeightType::Q6K => 6,
        WeightType::Q8_0 => 8,
        WeightType::F32 | WeightType::F16 | WeightType::BF16 => 0,
    }
}

/// Zeroed, aligned memory, or a typed refusal instead of an abort.
fn allocate(field: &'static str, bytes: usize) -> Result<Vec<CacheLine>, KernelError> {
    let lines = bytes.div_ceil(size_of::<CacheLine>());
    let mut memory = Vec::new();
    memory.try_reserve_exact(lines).map_err(|_| KernelError::Memory { field, bytes })?;
    memory.resize(lines, CacheLine([0; 64]));
    Ok(memory)
}

fn as_bytes(lines: &[CacheLine]) -> &[u8] {
    // SAFETY: a cache line is 64 plain bytes without padding.
    unsafe { std::slice::from_raw_parts(lines.as_ptr().cast(), size_of_val(lines)) }
}

fn as_bytes_mut(lines: &mut [CacheLine]) -> &mut [u8] {
    // SAFETY: as above, and every byte pattern is a cache line.
    unsafe { std::slice::from_raw_parts_mut(lines.as_mut_ptr().cast(), size_of_val(lines)) }
}

/// One row of `SIZE`-byte values into lane `column`.
fn pack_floats<const SIZE: usize>(row: &[u8], column: usize, tile: &mut [u8]) {
    for (value, lanes) in row.as_chunks::<SIZE>().0.iter().zip(tile.chunks_exact_mut(TILE * SIZE)) {
        lanes[column * SIZE..][..SIZE].copy_from_slice(value);
    }
}

/// One row of blocks into lane `column` of a tile.
fn pack_blocks(ty: WeightType, row: &[u8], column: usize, codes: &mut [u8], scales: &mut [u8]) {
    let block_codes = bits(ty) * GROUP_BYTES;
    let subs = ty.block_len() / SUB_LEN;
    let block_scales = scales.len() / (row.len() / ty.block_bytes());
    let mut unpacked = [0_u8; SUB_LEN];
    let blocks = row.chunks_exact(ty.block_bytes());
    let codes = codes.chunks_exact_mut(block_codes * subs);
    for ((raw, codes), scales) in blocks.zip(codes).zip(scales.chunks_exact_mut(block_scales)) {
        let block = Block::new(ty, raw);
        for (sub, codes) in codes.chunks_exact_mut(block_codes).enumerate() {
            block.codes(sub, &mut unpacked);
            place(&unpacked, bits(ty), column, codes);
        }
        place_scales(ty, block, column, scales);
    }
}

/// The 32 codes of one column into a tile's block.
fn place(codes: &[u8; SUB_LEN], bits: usize, column: usize, block: &mut [u8]) {
    let (groups, _) = codes.as_chunks::<GROUP>();
    let lane = column * GROUP;
    if bits == 8 {
        for (group, register) in groups.iter().zip(block.chunks_exact_mut(GROUP_BYTES)) {
            register[lane..lane + GROUP].copy_from_slice(group);
        }
        return;
    }
    let (nibbles, upper) = block.split_at_mut(GROUPS / 2 * GROUP_BYTES);
    for (g, register) in nibbles.chunks_exact_mut(GROUP_BYTES).enumerate() {
        for (i, byte) in register[lane..lane + GROUP].iter_mut().enumerate() {
            *byte = groups[g][i] & 0x0f | groups[g + GROUPS / 2][i] << 4;
        }
    }
    // 0, 1 or 2 registers of bits above the nibble, 8 or 4 groups each.
    let width = bits - 4;
    if width == 0 {
        return;
    }
    let per_register = GROUPS / width;
    for (register, groups) in upper.chunks_exact_mut(GROUP_BYTES).zip(groups.chunks_exact(per_register)) {
        for (i, byte) in register[lane..lane + GROUP].iter_mut().enumerate() {
            *byte = groups.iter().enumerate().fold(0, |byte, (g, group)| byte | group[i] >> 4 << (g * width));
        }
    }
}

/// The scales of one column of a block (or super-block).
fn place_scales(ty: WeightType, block: Block<'_>, column: usize, out: &mut [u8]) {
    let (scale, rest) = out.split_at_mut(2 * TILE);
    scale[2 * column..][..2].copy_from_slice(&block.scale_bits().to_le_bytes());
    let factors = match block.minimum_bits() {
        Some(minimum) => {
            let (minimums, factors) = rest.split_at_mut(2 * TILE);
            minimums[2 * column..][..2].copy_from_slice(&minimum.to_le_bytes());
            factors
        }
        None => rest,
    };
    for (sub, factors) in factors.chunks_exact_mut(2 * TILE).enumerate() {
        (factors[column], factors[TILE + column]) = match ty {
            WeightType::Q6K => {
                let halves = [block.factor_q6(2 * sub), block.factor_q6(2 * sub + 1)];
                (halves[0].cast_unsigned(), halves[1].cast_unsigned())
            }
            _ => block.factors_k(sub),
        };
    }
}
