//! What an engine did, recorded by the worker service.

use super::{
    EncodeLabelSet, Family, Gauge, Histogram, HistogramFamily, OutcomeLabel, Reason, Registry, Tier, level, ratios, seconds,
    secs, set_total, short_seconds, token_counts,
};
use crate::names;
use prometheus_client::metrics::counter::Counter;
use std::time::Duration;

/// Metrics of one worker.
#[derive(Clone)]
pub struct WorkerMetrics {
    prefix_requests: Counter,
    prompt_lengths: Histogram,
    hit_lengths: HistogramFamily<Tier>,
    hit_ratio: Histogram,
    prompt_tokens: Family<Source, Counter>,
    lookup: Histogram,
    queue: Histogram,
    misses: Family<Reason, Counter>,
    evictions: Family<Cause, Counter>,
    blocks: Family<BlockState, Gauge>,
    retained: Family<Tier, Gauge>,
    running: Gauge,
    waiting: Gauge,
    requests: Family<OutcomeLabel, Counter>,
    totals: Totals,
}

#[derive(Clone)]
struct Totals {
    steps: Counter,
    preemptions: Counter,
    blocked: Counter,
    violations: Counter,
    speculation_steps: Counter,
    draft_tokens: Family<OutcomeLabel, Counter>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Source {
    source: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Cause {
    cause: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct BlockState {
    tier: &'static str,
    state: &'static str,
}

/// What the cache did for one prompt at first admission.
#[derive(Clone, Debug)]
pub struct AdmittedPrompt<'a> {
    /// Prompt tokens.
    pub prompt_tokens: u32,
    /// Reused tokens by tier name.
    pub hits: &'a [(&'static str, u32)],
    /// Tokens to compute.
    pub computed: u32,
    /// Why not more was reused.
    pub miss: Option<&'static str>,
    /// Time of the lookup.
    pub lookup: Duration,
    /// Time in the engine's queue.
    pub queue: Duration,
}

/// Levels of an engine at one moment.
#[derive(Clone, Copy, Debug, Default)]
pub struct WorkerLevels {
    /// Device blocks without content.
    pub free: u64,
    /// Device blocks that are reusable and unreferenced.
    pub cached: u64,
    /// Device blocks held by sequences.
    pub held: u64,
    /// Bytes of one block.
    pub block_bytes: u64,
    /// Sequences in steps.
    pub running: u64,
    /// Requests that wait.
    pub waiting: u64,
}

/// Totals that the engine counts itself, since its start.
#[derive(Clone, Copy, Debug, Default)]
pub struct WorkerTotals<'a> {
    /// Steps.
    pub steps: u64,
    /// Preemptions.
    pub preemptions: u64,
    /// Tokens recomputed after preemption.
    pub recomputed_tokens: u64,
    /// Admissions that waited for retained blocks.
    pub admission_blocked_by_retention: u64,
    /// Broken laws.
    pub violations: u64,
    /// Evicted blocks by cause.
    pub evictions: &'a [(&'static str, u64)],
    /// Steps with a draft.
    pub speculation_steps: u64,
    /// Drafted tokens by outcome.
    pub draft_tokens: &'a [(&'static str, u64)],
}

// === impl WorkerMetrics ===

impl WorkerMetrics {
    /// Registers all worker metrics.
    pub fn new(registry: &Registry) -> Self {
        Self {
            prefix_requests: registry.add(names::PREFIX_REQUESTS, "Requests that reached the prefix cache", Counter::default()),
            prompt_lengths: registry.histogram(
                names::PROMPT_TOKENS_PER_REQUEST,
                "Prompt tokens per request (L_in)",
                token_counts,
            ),
            hit_lengths: registry.histograms(
                names::HIT_TOKENS_PER_REQUEST,
                "Reused tokens per request (L_hit) by tier",
                token_counts,
            ),
            hit_ratio: registry.histogram(names::HIT_RATIO, "Reused share of the prompt (H)", ratios),
            prompt_tokens: registry.add(names::PROMPT_TOKENS, "Prompt tokens by source", Family::default()),
            lookup: registry.histogram(names::LOOKUP_SECONDS, "Time of prefix lookups", short_seconds),
            queue: registry.histogram(names::QUEUE_SECONDS, "Time in the engine's queue", seconds),
            misses: registry.add(names::PREFIX_MISSES, "Prompts not wholly reused, by reason", Family::default()),
            evictions: registry.add(names::EVICTIONS, "Evicted blocks by cause", Family::default()),
            blocks: registry.add(names::BLOCKS, "Blocks by tier and state", Family::default()),
            retained: registry.add(names::RETAINED_BYTES, "Bytes of unreferenced reusable blocks", Family::default()),
            running: registry.add(names::RUNNING, "Sequences that take part in steps", Gauge::default()),
            waiting: registry.add(names::WAITING, "Requests that wait in the engine", Gauge::default()),
            requests: registry.add(names::ENGINE_REQUESTS, "Requests that ended in the engine, by outcome", Family::default()),
            totals: Totals {
                steps: registry.add(names::STEPS, "Engine steps", Counter::default()),
                preemptions: registry.add(names::PREEMPTIONS, "Sequences that gave their blocks back", Counter::default()),
                blocked: registry.add(
                    names::ADMISSION_BLOCKED_BY_RETENTION,
                    "Admissions that waited for retained blocks",
                    Counter::default(),
                ),
                violations: registry.add(names::RECONCILE_VIOLATIONS, "Broken counter laws; must stay 0", Counter::default()),
                speculation_steps: registry.add(names::SPECULATION_STEPS, "Target steps with a draft", Counter::default()),
                draft_tokens: registry.add(names::DRAFT_TOKENS, "Drafted tokens by outcome", Family::default()),
            },
        }
    }

    /// A prompt was admitted for the first time.
    pub fn admitted(&self, prompt: &AdmittedPrompt<'_>) {
        self.prefix_requests.inc();
        self.prompt_lengths.observe(prompt.prompt_tokens.into());
        let mut reused = 0u32;
        for (tier, tokens) in prompt.hits {
            reused += tokens;
            self.hit_lengths.get_or_create(&Tier { tier }).observe((*tokens).into());
            self.prompt_tokens.get_or_create(&Source { source: tier }).inc_by((*tokens).into());
        }
        self.hit_ratio.observe(f64::from(reused) / f64::from(prompt.prompt_tokens.max(1)));
        self.prompt_tokens.get_or_create(&Source { source: "computed" }).inc_by(prompt.computed.into());
        if let Some(reason) = prompt.miss {
            self.misses.get_or_create(&Reason { reason }).inc();
        }
        self.lookup.observe(secs(prompt.lookup));
        self.queue.observe(secs(prompt.queue));
    }

    /// A request ended in the engine: `ok` or a reason's code.
    pub fn finished(&self, outcome: &'static str) {
        self.requests.get_or_create(&OutcomeLabel { outcome }).inc();
    }

    /// Levels at this moment.
    pub fn levels(&self, levels: &WorkerLevels) {
        for (state, value) in [("free", levels.free), ("cached", levels.cached), ("held", levels.held)] {
            level(&self.blocks.get_or_create(&BlockState { tier: "device", state }), value);
        }
        level(&self.retained.get_or_create(&Tier { tier: "device" }), levels.cached * levels.block_bytes);
        level(&self.running, levels.running);
        level(&self.waiting, levels.waiting);
    }

    /// Totals since start; never lowers a counter.
    pub fn totals(&self, totals: &WorkerTotals<'_>) {
        set_total(&self.totals.steps, totals.steps);
        set_total(&self.totals.preemptions, totals.preemptions);
        set_total(&self.totals.blocked, totals.admission_blocked_by_retention);
        set_total(&self.totals.violations, totals.violations);
        set_total(&self.totals.speculation_steps, totals.speculation_steps);
        set_total(&self.prompt_tokens.get_or_create(&Source { source: "recomputed" }), totals.recomputed_tokens);
        for (cause, count) in totals.evictions {
            set_total(&self.evictions.get_or_create(&Cause { cause }), *count);
        }
        for (outcome, count) in totals.draft_tokens {
            set_total(&self.totals.draft_tokens.get_or_create(&OutcomeLabel { outcome }), *count);
        }
    }
}
