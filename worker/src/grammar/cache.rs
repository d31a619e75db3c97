//! A bounded map that forgets what was used longest ago.
//!
//! Owns recency. Refuses to know what is kept. Costs: constant look-up; eviction scans all entries, of which there are few.

use kvasir_core::Digest;
use std::collections::HashMap;

/// At most `capacity` values by digest.
pub(super) struct Cache<V> {
    capacity: usize,
    clock: u64,
    entries: HashMap<Digest, (u64, V)>,
}

// === impl Cache ===

impl<V: Clone> Cache<V> {
    pub(super) fn new(capacity: usize) -> Self {
        Self { capacity, clock: 0, entries: HashMap::new() }
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn get(&mut self, key: &Digest) -> Option<V> {
        self.clock += 1;
        let (used, value) = self.entries.get_mut(key)?;
        *used = self.clock;
        Some(value.clone())
    }

    pub(super) fn insert(&mut self, key: Digest, value: V) {
        self.clock += 1;
        if self.entries.len() >= self.capacity && !self.entries.contains_key(&key) {
            let oldest = self.entries.iter().min_by_key(|(_, (used, _))| *used).map(|(key, _)| *key);
            if let Some(oldest) = oldest {
                self.entries.remove(&oldest);
            }
        }
        self.entries.insert(key, (self.clock, value));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_entry_used_longest_ago_leaves_first() {
        let key = |byte| Digest::new([byte; 32]);
        let mut cache = Cache::new(2);
        cache.insert(key(1), "one");
        cache.insert(key(2), "two");
        assert_eq!(cache.get(&key(1)), Some("one"));
        cache.insert(key(3), "three");
        assert_eq!(cache.len(), 2);
        assert_eq!(cache.get(&key(2)), None);
        assert_eq!(cache.get(&key(1)), Some("one"));
        cache.insert(key(1), "again");
        assert_eq!((cache.len(), cache.get(&key(1)), cache.get(&key(3))), (2, Some("again"), Some("three")));
    }
}
