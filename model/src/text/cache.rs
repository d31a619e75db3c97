//! A bounded cache of encoded segments.
//!
//! Owns eviction: least recently used, by bytes. Refuses to know tenants: the partition is part of the key, so one partition never sees another's
//! entries. Called by [`crate::Text::encode_segments`]. A hit costs one hash of the segment and a map lookup.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvasir_core::{Digest, Framer, TokenId};

/// Shorter segments are encoded anew: that costs less than the entry.
pub(super) const MIN_SEGMENT_BYTES: usize = 64;
/// Book-keeping of one entry in bytes, a rounded estimate of keys and maps.
const ENTRY_OVERHEAD_BYTES: usize = 160;

/// Encoded segments, least recently used out first. Shared by reference.
#[derive(Debug)]
pub struct SegmentCache {
    limit_bytes: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    entries: HashMap<Digest, Entry>,
    by_age: BTreeMap<u64, Digest>,
    clock: u64,
    bytes: usize,
    hits: u64,
    misses: u64,
}

#[derive(Debug)]
struct Entry {
    ids: Arc<[TokenId]>,
    age: u64,
}

pub(super) fn key(partition: &[u8; 32], tokenizer: &Digest, text: &str) -> Digest {
    Framer::new("kvasir/segment/v1").bytes(partition).bytes(tokenizer.as_bytes()).bytes(text.as_bytes()).finish()
}

impl SegmentCache {
    /// A cache that holds at most `limit_bytes` of ids and book-keeping; 0 keeps nothing.
    pub fn new(limit_bytes: usize) -> Self {
        Self { limit_bytes, state: Mutex::default() }
    }

    /// (hits, misses) so far.
    pub fn counts(&self) -> (u64, u64) {
        let state = self.state();
        (state.hits, state.misses)
    }

    /// Bytes held now.
    pub fn bytes(&self) -> usize {
        self.state().bytes
    }

    /// Forgets everything, for example after a secret was rotated.
    pub fn clear(&self) {
        let mut state = self.state();
        state.entries.clear();
        state.by_age.clear();
        state.bytes = 0;
    }

    pub(super) fn get(&self, key: &Digest) -> Option<Arc<[TokenId]>> {
        let mut guard = self.state();
        let state = &mut *guard;
        state.clock += 1;
        let Some(entry) = state.entries.get_mut(key) else {
            state.misses += 1;
            return None;
        };
        state.hits += 1;
        state.by_age.remove(&entry.age);
        entry.age = state.clock;
        state.by_age.insert(state.clock, *key);
        Some(Arc::clone(&entry.ids))
    }

    pub(super) fn put(&self, key: Digest, ids: Vec<TokenId>) {
        let size = entry_bytes(ids.len());
        if size > self.limit_bytes {
            return;
        }
        let mut guard = self.state();
        let state = &mut *guard;
        state.clock += 1;
        let entry = Entry { ids: ids.into(), age: state.clock };
        if let Some(old) = state.entries.insert(key, entry) {
            state.by_age.remove(&old.age);
            state.bytes -= entry_bytes(old.ids.len());
        }
        state.by_age.insert(state.clock, key);
        state.bytes += size;
        while state.bytes > self.limit_bytes {
            let Some((_, oldest)) = state.by_age.pop_first() else { break };
            if let Some(entry) = state.entries.remove(&oldest) {
                state.bytes -= entry_bytes(entry.ids.len());
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // The state is consistent between statements that can panic, of which there are none.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

const fn entry_bytes(ids: usize) -> usize {
    ids * size_of::<TokenId>() + ENTRY_OVERHEAD_BYTES
}
