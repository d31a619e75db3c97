//! The memory of a key/value store.
//!
//! Owns: the bytes and their layout. Refuses to know: who holds a block. Costs: zeroed pages are mapped when
//! first touched, so a large store costs nothing until it is used.

use super::{KvShape, MAX_COUNT};
use crate::error::KernelError;
use crate::matmul::shared::SharedMut;
use crate::pool::Pool;
use memmap2::MmapMut;

/// Where a token's key and value lie.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KvSlot {
    /// Block.
    pub block: u32,
    /// Slot within the block.
    pub slot: u32,
}

/// Keys and values of all layers in blocks; see [`KvShape::LAYOUT`].
#[derive(Debug)]
pub struct KvPool {
    shape: KvShape,
    blocks: usize,
    memory: Memory,
}

/// Zeroed pages read as floats; `None` for none.
#[derive(Debug)]
struct Memory {
    pages: Option<MmapMut>,
    len: usize,
}

/// Tokens times elements from which storing is worth waking the pool.
const PARALLEL_ELEMENTS: usize = 8 * 1024;

// === impl KvPool ===

impl KvPool {
    /// A store of `blocks` blocks, all zero.
    pub fn new(shape: KvShape, blocks: usize) -> Result<Self, KernelError> {
        shape.check()?;
        if blocks > MAX_COUNT {
            return Err(KernelError::Range { field: "blocks", got: blocks, limit: MAX_COUNT });
        }
        let elements = [2, shape.layers, shape.kv_heads, shape.head_dim, shape.block_size]
            .into_iter()
            .try_fold(blocks, usize::checked_mul)
            .ok_or(KernelError::Memory { field: "kv pool", bytes: usize::MAX })?;
        Ok(Self { shape, blocks, memory: Memory::zeroed(elements)? })
    }

    /// Geometry.
    pub fn shape(&self) -> &KvShape {
        &self.shape
    }

    /// Number of blocks.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// Stores keys and values of one layer: row `i` of `k` and `v` (each [`KvShape::width`] elements) in
    /// `slots[i]`. Heads are spread over the threads.
    pub fn write(&mut self, pool: &Pool, layer: usize, slots: &[KvSlot], k: &[f32], v: &[f32]) -> Result<(), KernelError> {
        let shape = self.shape;
        let want = slots.len() * shape.width();
        for (field, got) in [("k", k.len()), ("v", v.len())] {
            if got != want {
                return Err(KernelError::Length { field, got, want });
            }
        }
        index("layer", layer, shape.layers)?;
        for slot in slots {
            index("block", slot.block as usize, self.blocks)?;
            index("slot", slot.slot as usize, shape.block_size)?;
        }
        let memory = SharedMut::new(self.memory.as_mut_slice());
        let task = |task: usize| {
            let (head, values) = (task / 2, task % 2 == 1);
            let (source, kind) = if values { (v, 1) } else { (k, 0) };
            let head_elements = shape.head_dim * shape.block_size;
            for (row, slot) in source.chunks_exact(shape.width()).zip(slots) {
                let at = slot.block as usize * shape.block_elements()
                    + (layer * 2 + kind) * shape.layer_elements()
                    + head * head_elements;
                // SAFETY: a task has its own head of its own kind: no other task touches this part.
                let stored = unsafe { memory.slice(at, head_elements) };
                let row = &row[head * shape.head_dim..][..shape.head_dim];
                if values {
                    stored[slot.slot as usize * shape.head_dim..][..shape.head_dim].copy_from_slice(row);
                } else {
                    let column = stored[slot.slot as usize..].iter_mut().step_by(shape.block_size);
                    column.zip(row).for_each(|(stored, value)| *stored = *value);
                }
            }
        };
        if want < PARALLEL_ELEMENTS {
            (0..shape.kv_heads * 2).for_each(task);
        } else {
            pool.run(shape.kv_heads * 2, &task);
        }
        Ok(())
    }

    /// Copies the first `slots` slots of a block, all layers, into another block.
    pub fn copy_slots(&mut self, from: u32, to: u32, slots: u32) -> Result<(), KernelError> {
        let shape = self.shape;
        index("from", from as usize, self.blocks)?;
        index("to", to as usize, self.blocks)?;
        if slots as usize > shape.block_size {
            return Err(KernelError::Range { field: "slots", got: slots as usize, limit: shape.block_size });
        }
        let (from, to) = (from as usize * shape.block_elements(), to as usize * shape.block_elements());
        let memory = self.memory.as_mut_slice();
        shape.runs(slots as usize, |at, len| memory.copy_within(from + at..from + at + len, to + at));
        Ok(())
    }

    /// Fills a block with NaN: a read of memory that nobody owns then shows in every result.
    pub fn poison(&mut self, block: u32) -> Result<(), KernelError> {
        index("block", block as usize, self.blocks)?;
        let elements = self.shape.block_elements();
        self.memory.as_mut_slice()[block as usize * elements..][..elements].fill(f32::NAN);
        Ok(())
    }

    /// Digest of the bits of the first `slots` slots of a block, all layers. Not cryptographic: for tests.
    pub fn fingerprint(&self, block: u32, slots: u32) -> Result<u64, KernelError> {
        index("block", block as usize, self.blocks)?;
        let base = block as usize * self.shape.block_elements();
        let memory = self.memory.as_slice();
        let mut digest = 0xcbf2_9ce4_8422_2325_u64;
        self.shape.runs((slots as usize).min(self.shape.block_size), |at, len| {
            for value in &memory[base + at..base + at + len] {
                digest = (digest ^ u64::from(value.to_bits())).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
            }
        });
        Ok(digest)
    }

    pub(super) fn as_slice(&self) -> &[f32] {
        self.memory.as_slice()
    }
}

fn index(field: &'static str, got: usize, count: usize) -> Result<(), KernelError> {
    if got < count { Ok(()) } else { Err(KernelError::Index { field, got, count }) }
}

// === impl KvShape ===

impl KvShape {
    /// Calls `run(at, len)` for each contiguous run of the first `slots` slots of a block.
    fn runs(&self, slots: usize, mut run: impl FnMut(usize, usize)) {
        let columns = self.width();
        for layer in 0..self.layers {
            let keys = layer * 2 * self.layer_elements();
            for column in 0..columns {
                run(keys + column * self.block_size, slots);
            }
            let values = keys + self.layer_elements();
            for head in 0..self.kv_heads {
                run(values + head * self.head_dim * self.block_size, slots * self.head_dim);
            }
        }
    }
}

// === impl Memory ===

impl Memory {
    fn zeroed(len: usize) -> Result<Self, KernelError> {
        let bytes = len.saturating_mul(size_of::<f32>());
        if bytes == 0 {
            return Ok(Self { pages: None, len });
        }
        let pages = MmapMut::map_anon(bytes).map_err(|_| KernelError::Memory { field: "kv pool", bytes })?;
        // A step reads a few KiB here and there of each block: large pages save a table walk for each. A system
        // without them serves small ones.
        #[cfg(target_os = "linux")]
        let _ = pages.advise(memmap2::Advice::HugePage);
        Ok(Self { pages: Some(pages), len })
    }

    fn as_slice(&self) -> &[f32] {
        let Some(pages) = &self.pages else { return &[] };
        // SAFETY: the mapping holds `len` floats, is aligned to a page, and any bits are a float.
        unsafe { std::slice::from_raw_parts(pages.as_ptr().cast(), self.len) }
    }

    fn as_mut_slice(&mut self) -> &mut [f32] {
        let Some(pages) = &mut self.pages else { return &mut [] };
        // SAFETY: as above, and exclusive by `&mut self`.
        unsafe { std::slice::from_raw_parts_mut(pages.as_mut_ptr().cast(), self.len) }
    }
}
