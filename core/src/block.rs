//! Block keys: the only name under which KV of a run of tokens is stored, looked up, and announced.
//!
//! Owns the chain of `contracts` §1: each key covers its whole prefix, starting from a [`Root`]. Refuses to know where blocks live. Router
//! and worker compute the same chain; the worker's is the authority.
//!
//! Invariants
//! 1. Only full blocks have keys.
//! 2. The first block after a registered shared prefix is re-rooted into the tenant's domain, so nothing after it is shared.
//! 3. Raw tokens are never a key.
//!
//! Costs: one short BLAKE3 hash per block, about 150 ns for 16 tokens.

use crate::TokenId;
use crate::frame::{Digest, Framer};
use crate::identity::{ModelIdentity, ReuseDomain, Root, SharedDomain};
use std::fmt;

/// Key of one full block together with everything before it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockKey(Digest);

/// Which domain each block of a prompt belongs to.
#[derive(Clone, Copy, Debug)]
pub struct Prefix {
    /// Root of the tenant's domain.
    pub root: Root,
    /// Root of the pool's shared domain and the number of leading tokens that are a registered shared prefix.
    pub shared: Option<(Root, u32)>,
}

/// Extends a chain of keys block by block.
#[derive(Clone, Debug)]
pub struct KeyChain {
    prefix: Prefix,
    block_size: u32,
    last: Option<BlockKey>,
    blocks: u32,
}

/// Keys of all full blocks of `tokens`.
pub fn block_keys(prefix: Prefix, block_size: u32, tokens: &[TokenId]) -> Vec<BlockKey> {
    let mut chain = KeyChain::new(prefix, block_size);
    tokens.chunks_exact(block_size as usize).map(|block| chain.push(block, None)).collect()
}

// === impl BlockKey ===

impl BlockKey {
    /// Takes a key that came over the wire.
    pub const fn from_digest(digest: Digest) -> Self {
        Self(digest)
    }

    /// The digest.
    pub const fn digest(&self) -> &Digest {
        &self.0
    }

    /// The first eight bytes as a number, for rendezvous hashing and compact tables.
    pub fn low_u64(&self) -> u64 {
        let mut bytes = [0u8; 8];
        bytes.copy_from_slice(&self.0.as_bytes()[..8]);
        u64::from_le_bytes(bytes)
    }
}

impl fmt::Debug for BlockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BlockKey({})", &self.0.to_hex()[..8])
    }
}

// === impl Prefix ===

impl Prefix {
    /// The roots of one request: tenant domain, and shared domain with the length of its registered prefix.
    pub fn new(identity: &ModelIdentity, domain: &ReuseDomain, shared: Option<(&SharedDomain, u32)>) -> Self {
        Self {
            root: Root::of(identity, domain),
            shared: shared.map(|(domain, tokens)| (Root::of_shared(identity, domain), tokens)),
        }
    }

    /// Leading blocks that lie wholly inside the registered shared prefix.
    pub fn shared_blocks(&self, block_size: u32) -> u32 {
        self.shared.map_or(0, |(_, tokens)| tokens / block_size)
    }

    /// The root that block number `index` is stored under.
    pub fn root_of_block(&self, index: u32, block_size: u32) -> Root {
        match self.shared {
            Some((shared, _)) if index < self.shared_blocks(block_size) => shared,
            _ => self.root,
        }
    }
}

// === impl KeyChain ===

impl KeyChain {
    /// An empty chain.
    pub fn new(prefix: Prefix, block_size: u32) -> Self {
        debug_assert!(block_size > 0, "a block holds at least one token");
        Self { prefix, block_size, last: None, blocks: 0 }
    }

    /// Adds the next full block; `extra` holds digests of multimodal content with its offsets, if there is any.
    pub fn push(&mut self, tokens: &[TokenId], extra: Option<&[u8]>) -> BlockKey {
        debug_assert_eq!(tokens.len(), self.block_size as usize, "only full blocks have keys");
        let shared_blocks = self.prefix.shared_blocks(self.block_size);
        let mut framer = match self.last {
            None => {
                let mut framer = Framer::new("kvasir/block/v1");
                framer.bytes(self.prefix.root_of_block(0, self.block_size).digest().as_bytes());
                framer
            }
            Some(parent) if shared_blocks > 0 && self.blocks == shared_blocks => {
                let mut framer = Framer::new("kvasir/reroot/v1");
                framer.bytes(parent.0.as_bytes()).bytes(self.prefix.root.digest().as_bytes());
                framer
            }
            Some(parent) => {
                let mut framer = Framer::new("kvasir/block/v1");
                framer.bytes(parent.0.as_bytes());
                framer
            }
        };
        let key = BlockKey(framer.u32s(tokens).option(extra).finish());
        self.last = Some(key);
        self.blocks += 1;
        key
    }

    /// The key of the last block.
    pub fn last(&self) -> Option<BlockKey> {
        self.last
    }

    /// Number of blocks so far.
    pub fn blocks(&self) -> u32 {
        self.blocks
    }
}

#[cfg(test)]
mod tests;
