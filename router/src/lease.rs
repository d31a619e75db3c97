//! What the router has running where: one lease per attempt, given back by dropping it anywhere.
//!
//! Owns the in-flight counts per life of a worker and in total. Refuses to know what an attempt does. A lease is made in one place
//! ([`Gauge::lease`]) and everything it carries is returned by `Drop`, also on panic, timeout, disconnect, or when the worker is gone.
//!
//! Invariants
//! 1. Counts never fall below zero, and at rest every count is exactly 0.
//! 2. A worker that leaves and comes back in the same life keeps its counts: the gauge belongs to the life, not to the registration.
//! 3. What ran at a moment of the last [`KEPT`] is known to [`STEP`]: a load report is compared with the router's own part in it when it was
//!    measured, not when it arrived. Without that, a report of a busy worker that comes in just after its only request ended would look like
//!    somebody else's work, and the follow-up would be sent away from its prefix.
//!
//! Costs: a change of the counts is a few atomic additions and one uncontended lock; 48 bytes per remembered change.

use crate::cost::OwnLoad;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// In-flight counts of one life of a worker.
#[derive(Debug, Default)]
pub struct Gauge {
    attempts: AtomicU64,
    slots: AtomicU64,
    tokens: AtomicU64,
    prefill_tokens: AtomicU64,
    blocks: AtomicU64,
    total: Arc<Total>,
    past: Mutex<VecDeque<(Instant, OwnLoad)>>,
}

/// How far back the counts are remembered: reports come at least every second.
const KEPT: Duration = Duration::from_secs(2);
/// Changes closer together than this are remembered as one.
const STEP: Duration = Duration::from_millis(1);
/// Remembered changes at most; of more, the oldest go.
const CHANGES_MAX: usize = 512;

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
        let past = Mutex::new(VecDeque::from([(Instant::now(), OwnLoad::default())]));
        Self { total, past, ..Self::default() }
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
        self.remember();
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

    /// The counts as they were at a moment; of one before everything that is remembered, the oldest.
    pub fn own_load_at(&self, at: Instant) -> OwnLoad {
        let past = self.past.lock().unwrap_or_else(PoisonError::into_inner);
        let then = past.iter().rev().find(|(since, _)| *since <= at).or_else(|| past.front());
        then.map_or_else(|| self.own_load(), |(_, own)| *own)
    }

    /// The counts are read under the lock, so that the newest entry is never older than the newest count.
    fn remember(&self) {
        let mut past = self.past.lock().unwrap_or_else(PoisonError::into_inner);
        let (now, own) = (Instant::now(), self.own_load());
        match past.back_mut() {
            Some((since, last)) if now.saturating_duration_since(*since) < STEP => *last = own,
            _ => past.push_back((now, own)),
        }
        while past.len() > CHANGES_MAX || past.get(1).is_some_and(|(since, _)| now.saturating_duration_since(*since) > KEPT) {
            past.pop_front();
        }
    }
}

// === impl Lease ===

impl Lease {
    /// The prompt is computed: it no longer makes others wait.
    pub fn first_output(&mut self) {
        let computed = std::mem::take(&mut self.prefill_left);
        if computed > 0 {
            self.gauge.prefill_tokens.fetch_sub(computed, Ordering::Relaxed);
            self.gauge.remember();
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.gauge.prefill_tokens.fetch_sub(self.prefill_left, Ordering::Relaxed);
        self.gauge.attempts.fetch_sub(1, Ordering::Relaxed);
        self.gauge.slots.fetch_sub(self.claim.slots, Ordering::Relaxed);
        self.gauge.tokens.fetch_sub(self.claim.tokens, Ordering::Relaxed);
        self.gauge.blocks.fetch_sub(self.claim.blocks, Ordering::Relaxed);
        self.gauge.total.attempts.fetch_sub(1, Ordering::Relaxed);
        self.gauge.total.tokens.fetch_sub(self.claim.tokens, Ordering::Relaxed);
        self.gauge.remember();
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

    #[tokio::test(start_paused = true)]
    async fn what_ran_at_a_moment_is_known_afterwards_and_the_memory_of_it_is_bounded() {
        let gauge = Arc::new(Gauge::new(Arc::default()));
        let claim = |slots| Claim { slots, prefill_tokens: 10, tokens: 20, blocks: 2 };
        let began = Instant::now();
        let later = |millis: u64| began + Duration::from_millis(millis);
        tokio::time::advance(Duration::from_millis(100)).await;
        let mut lease = gauge.lease(claim(3));
        tokio::time::advance(Duration::from_millis(100)).await;
        lease.first_output();
        tokio::time::advance(Duration::from_millis(100)).await;
        drop(lease);
        assert_eq!(gauge.own_load_at(later(99)), OwnLoad::default());
        assert_eq!(gauge.own_load_at(later(100)), OwnLoad { slots: 3, prefill_tokens: 10, blocks: 2 });
        assert_eq!(gauge.own_load_at(later(250)), OwnLoad { slots: 3, prefill_tokens: 0, blocks: 2 });
        assert_eq!(gauge.own_load_at(later(300)), OwnLoad::default());
        for _ in 0..2 * CHANGES_MAX {
            let _lease = gauge.lease(claim(1));
            tokio::time::advance(2 * STEP).await;
        }
        assert_eq!(gauge.past.lock().unwrap().len(), CHANGES_MAX);
        assert_eq!(gauge.own_load_at(Instant::now()), gauge.own_load());
        tokio::time::advance(2 * KEPT).await;
        let _lease = gauge.lease(claim(1));
        assert_eq!(gauge.past.lock().unwrap().len(), 2, "one change, and what was before it");
    }
}
