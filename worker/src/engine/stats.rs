//! Counters of an engine as plain data; a service maps them to metrics.

use kvasir_core::{FinishReason, MissReason, Reason, RemovalCause, TenantTag, Tokens};

use crate::kv::BlockCounts;

/// Everything counted since start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EngineStats {
    /// Requests by outcome.
    pub requests: RequestStats,
    /// Prompt tokens by source.
    pub prompt: PromptStats,
    /// Output tokens.
    pub output: OutputStats,
    /// Steps.
    pub steps: StepStats,
    /// Blocks that left, by [`RemovalCause`].
    pub evictions: [u64; 5],
    /// Hits refused because the content differed under an equal key.
    pub collisions: u64,
    /// Broken laws; must stay 0.
    pub reconcile_violations: u64,
}

/// Requests by outcome.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestStats {
    /// Taken from the mailbox.
    pub received: u64,
    /// Admitted to a first step.
    pub started: u64,
    /// Ended well.
    pub finished: u64,
    /// Ended because the reader left.
    pub cancelled: u64,
    /// Ended in a failure, by place in [`Reason::ALL`].
    pub failed: [u64; Reason::ALL.len()],
    /// Choices that ended with `stop` and with `length`.
    pub finish_reasons: [u64; 2],
}

/// Prompt tokens by source, counted at first admission; recompute apart.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PromptStats {
    /// Of admitted requests.
    pub tokens: u64,
    /// Reused from the device tier.
    pub hit_device: u64,
    /// To be computed.
    pub computed: u64,
    /// Computed once more after preemption.
    pub recomputed: u64,
    /// Requests by place in [`MissReason::ALL`].
    pub misses: [u64; MissReason::ALL.len()],
}

/// Output tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OutputStats {
    /// Committed.
    pub committed: u64,
    /// Chosen by the target itself.
    pub sampled: u64,
    /// Drafted and accepted.
    pub accepted: u64,
    /// Committed, but no part of the visible output.
    pub trimmed: u64,
    /// Given out.
    pub visible: u64,
}

/// Steps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepStats {
    /// Steps run.
    pub steps: u64,
    /// Rows run.
    pub rows: u64,
    /// Tokens run in rows of more than one.
    pub prefill_tokens: u64,
    /// Rows of one token.
    pub decode_rows: u64,
    /// Sequences that lost their blocks to others.
    pub preemptions: u64,
    /// Requests that waited for a prefix that another was computing.
    pub joins: u64,
    /// Of those, waits that took too long and were given up.
    pub joins_given_up: u64,
    /// Results dropped because their sequence was gone.
    pub stale_rows: u64,
    /// Steps that ran out of memory.
    pub out_of_memory: u64,
}

/// A picture of the engine for administrators.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inspection {
    /// Sequences that hold blocks.
    pub running: u32,
    /// Sequences that wait.
    pub waiting: u32,
    /// Requests.
    pub requests: u32,
    /// Blocks by state.
    pub blocks: BlockCounts,
    /// Published blocks by tenant: (cached, held).
    pub tenants: Vec<(TenantTag, u32, u32)>,
    /// Requests by tenant.
    pub requests_by_tenant: Vec<(TenantTag, u32)>,
}

// === impl EngineStats ===

impl EngineStats {
    /// Blocks that left for a cause.
    pub fn evicted(&self, cause: RemovalCause) -> u64 {
        self.evictions[cause as usize]
    }

    /// Requests that failed for a reason.
    pub fn failed(&self, reason: Reason) -> u64 {
        position(reason).map_or(0, |index| self.requests.failed[index])
    }

    /// Requests whose reuse ended for a reason.
    pub fn missed(&self, reason: MissReason) -> u64 {
        self.prompt.misses[reason as usize]
    }

    pub(super) fn count_failure(&mut self, reason: Reason) {
        if let Some(index) = position(reason) {
            self.requests.failed[index] += 1;
        }
    }

    pub(super) fn count_finish(&mut self, reason: FinishReason) {
        self.requests.finish_reasons[usize::from(reason == FinishReason::Length)] += 1;
    }

    pub(super) fn count_visible(&mut self, tokens: &Tokens) {
        self.output.visible += tokens.ids.len() as u64;
    }
}

fn position(reason: Reason) -> Option<usize> {
    Reason::ALL.iter().position(|other| *other == reason)
}
