//! Attention over a paged store of keys and values.
//!
//! Owns: the store's memory and layout ([`KvPool`]) and the order of operations of attention ([`attend`]).
//! Refuses to know: which sequence a block belongs to, prefix keys, free lists. Called by the forward passes.
//!
//! Glossary
//! - *block*: `block_size` token slots of one sequence, all layers together.
//! - *group*: the query heads that share one key/value head.
//! - *partition*: 256 keys at absolute positions `256 j ..`; softmax and sums are closed per partition.
//! - *tile*: up to 4 query rows (token × head of a group) that pass by the keys together.
//!
//! Invariants
//! 1. The result of one query depends on its own vector, its position and the keys and values at positions up
//!    to its own: not on other queries, chunking, block numbers, threads or instruction set.
//! 2. Slots behind a query's position are never read into a result: tails are masked by their load.
//! 3. Within a partition: scores sum over the head dimension ascending (a lane is a key), their maximum and
//!    exponential sum have the order of [`crate::reduce`], values are summed over keys ascending (a lane is an
//!    element of the head). Partitions are combined ascending.

mod attend;
mod pool;
mod tile;

use crate::error::KernelError;

pub use attend::{AttentionRow, AttentionScratch, attend};
pub use pool::{KvPool, KvSlot};

/// Keys of one partition.
pub const PARTITION: usize = 256;

/// The widest head.
pub const MAX_HEAD_DIM: usize = 512;

/// Most layers, heads and blocks of a store: keeps all sizes far from overflow.
const MAX_COUNT: usize = 1 << 24;

/// How stored keys and values are represented.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KvDtype {
    /// IEEE binary32.
    F32,
}

/// Geometry of a store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KvShape {
    /// Layers of the model.
    pub layers: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Elements of a head, 1 to [`MAX_HEAD_DIM`].
    pub head_dim: usize,
    /// Token slots of a block: 16, 32, 64, 128 or 256.
    pub block_size: usize,
    /// Representation.
    pub dtype: KvDtype,
}

// === impl KvDtype ===

impl KvDtype {
    /// Name as it enters a numerics identity.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
        }
    }

    /// Bytes of an element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
        }
    }
}

// === impl KvShape ===

impl KvShape {
    /// Name of the layout as it enters a numerics identity: a block is, per layer, its keys as
    /// `[kv head][element][slot]`, then its values as `[kv head][slot][element]`.
    pub const LAYOUT: &'static str = "block/layer/k[head,dim,slot]/v[head,slot,dim]";

    /// Elements of all keys (or of all values) of one layer in a block.
    pub const fn layer_elements(&self) -> usize {
        self.kv_heads * self.head_dim * self.block_size
    }

    /// Elements of a block.
    pub const fn block_elements(&self) -> usize {
        self.layers * 2 * self.layer_elements()
    }

    /// Bytes of a block.
    pub const fn block_bytes(&self) -> u64 {
        (self.block_elements() * self.dtype.bytes()) as u64
    }

    /// Elements of a token's keys (or values) in one layer.
    pub const fn width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Refuses what the kernels cannot do.
    pub fn check(&self) -> Result<(), KernelError> {
        let in_range = |field, got, limit| {
            if (1..=limit).contains(&got) { Ok(()) } else { Err(KernelError::Range { field, got, limit }) }
        };
        in_range("head_dim", self.head_dim, MAX_HEAD_DIM)?;
        in_range("layers", self.layers, MAX_COUNT)?;
        in_range("kv_heads", self.kv_heads, MAX_COUNT)?;
        in_range("block_size", self.block_size, PARTITION)?;
        if !self.block_size.is_power_of_two() || !self.block_size.is_multiple_of(crate::vector::LANES) {
            let (field, got) = ("block_size", self.block_size);
            return Err(KernelError::Multiple {
                field,
                got,
                multiple: crate::vector::LANES,
                format: "the key/value store (a power of two)",
            });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
