//! What a worker says of itself so that others can predict what a request would cost there.

use crate::event::Tier;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Stable name of a worker (pod name, or address in a static list).
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct WorkerUid(pub Arc<str>);

/// One life of a worker: random per process start, so that old events never count for a new life.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Incarnation(pub [u8; 8]);

/// Blocks of one tier.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TierLoad {
    /// Which tier.
    pub tier: Tier,
    /// Never used or given back.
    pub free: u32,
    /// Reusable, not held by a sequence.
    pub cached: u32,
    /// Held by sequences.
    pub held: u32,
}

/// One point of the measured cost curve: a step over `rows` tokens took `seconds`.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct CostPoint {
    /// Tokens in the step.
    pub rows: u32,
    /// Time of the step.
    pub seconds: f32,
}

/// A worker's load at one moment.
#[derive(Clone, PartialEq, Debug)]
pub struct WorkerLoad {
    /// Which life of the worker.
    pub incarnation: Incarnation,
    /// Number of this report.
    pub seq: u64,
    /// Sequences that take part in steps.
    pub running: u32,
    /// Sequences that wait.
    pub waiting: u32,
    /// Per tier.
    pub tiers: Vec<TierLoad>,
    /// Prompt tokens not yet computed, of running and waiting sequences.
    pub queued_prefill_tokens: u64,
    /// Measured; 0 while unknown.
    pub prefill_tokens_per_second: f32,
    /// Measured per sequence; 0 while unknown.
    pub decode_tokens_per_second: f32,
    /// Measured cost curve.
    pub cost: Vec<CostPoint>,
    /// Mean accepted share by drafter name.
    pub acceptance: Vec<(String, f32)>,
    /// Whether the worker refuses new work.
    pub draining: bool,
}

// === impl WorkerUid ===

impl fmt::Display for WorkerUid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

// === impl Incarnation ===

impl fmt::Debug for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

// === impl WorkerLoad ===

impl WorkerLoad {
    /// Oldest report that still counts as a signal.
    pub const AGE_MAX: Duration = Duration::from_secs(3);

    /// Load of one tier, if the worker has it.
    pub fn tier(&self, tier: Tier) -> Option<&TierLoad> {
        self.tiers.iter().find(|load| load.tier == tier)
    }
}
