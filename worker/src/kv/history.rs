//! What each reuse domain once had and lost: the memory behind the miss reasons `evicted` and `cold`.
//!
//! Owns a bounded set of evicted keys per domain. A domain's answer depends on its own keys only, so a reason never tells of other tenants.
//! Costs: O(1) per eviction and question; memory at most `domains × keys` times about 24 bytes.

use kvasir_core::{BlockKey, Root};
use std::collections::{HashMap, HashSet, VecDeque};

/// Evicted keys remembered per domain.
const KEYS_MAX: usize = 1024;
/// Domains remembered; the one that was added first is forgotten first.
const DOMAINS_MAX: usize = 1024;

/// Evicted keys by domain.
#[derive(Debug, Default)]
pub(super) struct History {
    domains: HashMap<Root, Domain>,
    order: VecDeque<Root>,
}

#[derive(Debug, Default)]
struct Domain {
    keys: HashSet<BlockKey>,
    order: VecDeque<BlockKey>,
}

// === impl History ===

impl History {
    /// Remembers that `key` had to leave.
    pub(super) fn add(&mut self, root: Root, key: BlockKey) {
        if !self.domains.contains_key(&root) {
            if self.order.len() == DOMAINS_MAX
                && let Some(oldest) = self.order.pop_front()
            {
                self.domains.remove(&oldest);
            }
            self.order.push_back(root);
        }
        let domain = self.domains.entry(root).or_default();
        if domain.keys.insert(key) {
            domain.order.push_back(key);
            if domain.order.len() > KEYS_MAX
                && let Some(oldest) = domain.order.pop_front()
            {
                domain.keys.remove(&oldest);
            }
        }
    }

    /// Forgets a key that is stored again.
    pub(super) fn remove(&mut self, root: &Root, key: &BlockKey) {
        if let Some(domain) = self.domains.get_mut(root)
            && domain.keys.remove(key)
        {
            domain.order.retain(|other| other != key);
        }
    }

    /// Whether the domain had this block and lost it.
    pub(super) fn evicted(&self, root: &Root, key: &BlockKey) -> bool {
        self.domains.get(root).is_some_and(|domain| domain.keys.contains(key))
    }

    /// Forgets everything (device loss).
    pub(super) fn clear(&mut self) {
        self.domains.clear();
        self.order.clear();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::expect_used, reason = "tests state their assumptions")]
    use super::*;
    use kvasir_core::{Framer, ModelIdentity, PoolSecret, ReuseDomain};

    fn root(name: &str) -> Root {
        let secret = PoolSecret::new(&[7; 32]).expect("long enough");
        Root::of(&ModelIdentity(Framer::new("m").finish()), &ReuseDomain::derive(&secret, name, 0, None))
    }

    fn key(number: u32) -> BlockKey {
        BlockKey::from_digest(Framer::new("k").u32(number).finish())
    }

    #[test]
    fn a_domain_answers_only_from_its_own_evictions() {
        let mut history = History::default();
        history.add(root("a"), key(1));
        assert!(history.evicted(&root("a"), &key(1)));
        assert!(!history.evicted(&root("b"), &key(1)));
        history.remove(&root("a"), &key(1));
        assert!(!history.evicted(&root("a"), &key(1)));
    }

    #[test]
    fn memory_is_bounded_and_the_oldest_is_forgotten_first() {
        let mut history = History::default();
        for number in 0..=KEYS_MAX as u32 {
            history.add(root("a"), key(number));
        }
        assert!(!history.evicted(&root("a"), &key(0)));
        assert!(history.evicted(&root("a"), &key(KEYS_MAX as u32)));
        for number in 0..DOMAINS_MAX {
            history.add(root(&format!("d{number}")), key(0));
        }
        assert!(!history.evicted(&root("a"), &key(KEYS_MAX as u32)), "the first domain made room");
        assert_eq!(history.domains.len(), DOMAINS_MAX);
    }
}
