//! The paged KV pool's bookkeeping: which block is whose, what may be reused, what left and why.
//!
//! Owns block states, the prefix index, the memory of what was evicted, and the event log. Refuses to know requests, time budgets and what a
//! block's bytes are (a backend's). Called only by the engine thread.

mod event;
mod history;
mod pool;

pub use event::{EventFeed, EventStream};
pub use pool::{BlockCounts, Entry, FlushScope, Full, Owner, Pool, PoolSettings, Published, Retention};

use kvasir_core::{BlockKey, KeyChain, TokenId};

/// Replaces every key, so that a test can force collisions; the identity in production.
pub type KeyMap = fn(BlockKey) -> BlockKey;

/// Extends `keys` to all full blocks of `tokens` on `chain`.
pub fn extend_keys(chain: &mut KeyChain, keys: &mut Vec<BlockKey>, block_size: u32, tokens: &[TokenId], map: KeyMap) {
    for block in tokens.chunks_exact(block_size as usize).skip(keys.len()) {
        keys.push(map(chain.push(block, None)));
    }
}
