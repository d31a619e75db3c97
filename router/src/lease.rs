//! What the router has running where: one lease per attempt, given back by dropping it anywhere.
//!
//! Owns the in-flight counts per life of a worker and in total. Refuses to know what an attempt does. A lease is made in one place
//! ([`Gauge::lease`]) and everything it carries is returned by `Drop`, also on panic, timeout, disconnect, or when the worker is gone.
//!
//! Invariants
//! 1. Counts never fall below zero, and at rest every count is exactly 0.
//! 2. A worker that leaves and comes back in the same life keeps its counts: the gauge belongs to the life, not to the registration.

use crate::cost::OwnLoad;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// In-flight counts of one life of a worker.
#[derive(Debug, Default)]
pub struct Gauge {
    attempts: AtomicU64,
    slots: AtomicU64,
    tokens: AtomicU64,
    prefill_tokens: AtomicU64,
    blocks: AtomicU64,
    total: Arc<Total>,
}

/// In-flight counts of the whole router.
#[derive(Debug, Default)]
pub struct Total {
    attempts: AtomicU64,
    tokens: AtomicU64,
}

/// What one attempt may come to use on its worker.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Claim {
    /// Choices.
    pub slots: u64,
    /// Prompt tokens that are to be computed.
    pub prefill_tokens: u64,
    /// Prompt and output tokens.
    pub tokens: u64,
    /// KV blocks for them.
    pub blocks: u64,
}

/// One attempt's part of the counts.
#[derive(Debug)]
pub struct Lease {
    gauge: Arc<Gauge>,
    claim: Claim,
    /// Part of `claim.prefill_tokens` not yet given back.
    prefill_left: u64,
}

/// A reading of one gauge.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct InFlight {
    /// Attempts.
    pub attempts: u64,
    /// Choices.
    pub slots: u64,
    /// Prompt and output tokens that they may come to hold.
    pub tokens: u64,
    /// Prompt tokens whose first output has not come.
    pub prefill_tokens: u64,
    /// KV blocks that they may come to hold.
    pub blocks: u64,
}

// === impl Total ===

impl Total {
    /// Attempts in flight.
    pub fn attempts(&self) -> u64 {
        self.attempts.load(Ordering::Relaxed)
    }

    /// Tokens that they may come to hold.
    pub fn tokens(&self) -> u64 {
        self.tokens.load(Ordering::Relaxed)
    }
}

// === impl Gauge ===

impl Gauge {
    /// A gauge whose leases also count in `total`.
    pub fn new(total: Arc<Total>) -> Self {
        Self { total, ..Self::default() }
    }

    /// Takes a lease.
    pub fn lease(self: &Arc<Self>, claim: Claim) -> Lease {
        self.attempts.fetch_add(1, Ordering::Relaxed);
        self.slots.fetch_add(claim.slots, Ordering::Relaxed);
        self.tokens.fetch_add(claim.tokens, Ordering::Relaxed);
        self.prefill_tokens.fetch_add(claim.prefill_tokens, Ordering::Relaxed);
        self.blocks.fetch_add(claim.blocks, Ordering::Relaxed);
        self.total.attempts.fetch_add(1, Ordering::Relaxed);
        self.total.tokens.fetch_add(claim.tokens, Ordering::Relaxed);
        Lease { gauge: Arc::clone(self), claim, prefill_left: claim.prefill_tokens }
    }

    /// The counts now.
    pub fn read(&self) -> InFlight {
        InFlight {
            attempts: self.attempts.load(Ordering::Relaxed),
            slots: self.slots.load(Ordering::Relaxed),
            tokens: self.tokens.load(Ordering::Relaxed),
            prefill_tokens: self.prefill_tokens.load(Ordering::Relaxed),
            blocks: self.blocks.load(Ordering::Relaxed),
        }
    }

    /// The counts as the cost reads them.
    pub fn own_load(&self) -> OwnLoad {
        OwnLoad {
            slots: self.slots.load(Ordering::Relaxed),
            prefill_tokens: self.prefill_tokens.load(Ordering::Relaxed),
            blocks: self.blocks.load(Ordering::Relaxed),
        }
    }
}

// === impl Lease ===

impl Lease {
    /// The prompt is computed: it no longer makes others wait.
    pub fn first_output(&mut self) {
        self.gauge.prefill_tokens.fetch_sub(std::mem::take(&mut self.prefill_left), Ordering::Relaxed);
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.first_output();
        self.gauge.attempts.fetch_sub(1, Ordering::Relaxed);
        self.gauge.slots.fetch_sub(self.claim.slots, Ordering::Relaxed);
        self.gauge.tokens.fetch_sub(self.claim.tokens, Ordering::Relaxed);
        self.gauge.blocks.fetch_sub(self.claim.blocks, Ordering::Relaxed);
        self.gauge.total.attempts.fetch_sub(1, Ordering::Relaxed);
        self.gauge.total.tokens.fetch_sub(self.claim.tokens, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn counts_equal_the_open_leases_at_all_times_and_zero_at_rest(steps in prop::collection::vec((0u8..3, 0u64..100, any::<prop::sample::Index>()), 0..200)) {
            let total = Arc::new(Total::default());
            let gauge = Arc::new(Gauge::new(Arc::clone(&total)));
            let mut open: Vec<(Lease, u64)> = Vec::new();
            for (step, size, at) in steps {
                match step {
                    0 => {
                        let claim = Claim { slots: 1, prefill_tokens: size, tokens: 2 * size, blocks: size / 16 };
                        open.push((gauge.lease(claim), size));
                    }
                    1 if !open.is_empty() => drop(open.swap_remove(at.index(open.len()))),
                    2 if !open.is_empty() => {
                        let index = at.index(open.len());
                        open[index].0.first_output();
                        open[index].1 = 0;
                    }
                    _ => {}
                }
                let now = gauge.read();
                prop_assert_eq!(now.attempts, open.len() as u64);
                prop_assert_eq!(now.prefill_tokens, open.iter().map(|(_, size)| size).sum::<u64>());
                prop_assert_eq!(total.attempts(), now.attempts);
                prop_assert_eq!(total.tokens(), now.tokens);
            }
            drop(open);
            prop_assert_eq!(gauge.read(), InFlight::default());
            prop_assert_eq!((total.attempts(), total.tokens()), (0, 0));
        }
    }
}
