//! The cost of a request on one worker, in seconds: wait + uncached prefill + restore + expected output × time per token.
//!
//! Pure. Knows a worker's reported load, what the router learned of it, and what the request needs. Refuses to know who else is a candidate.
//! Called by placement for each candidate; [`Learned`] is fed by attempts.
//!
//! Invariants
//! 1. The terms of [`Terms`] sum to its score, and each is finite and not negative.
//! 2. More credit never costs more; more waiting work never costs less.
//! 3. Workers that differ by less than measurement noise ([`DEVIATION_LOG_MIN`]) cost the same, so that rendezvous rank decides between them and
//!    every router decides alike.
//!
//! Costs: tens of nanoseconds, no allocation.

use crate::index::Match;
use kvasir_core::{Tier, WorkerLoad};
use tokio::time::Instant;

/// What a request needs.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Work {
    /// Prompt tokens.
    pub prompt_tokens: u32,
    /// Expected output tokens per choice.
    pub output_tokens: f64,
    /// Choices.
    pub choices: u32,
    /// Tokens per block.
    pub block_size: u32,
}

/// What the router itself has running on a worker, whatever the worker says.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct OwnLoad {
    /// Choices in flight.
    pub slots: u64,
    /// Prompt tokens sent whose first output has not come yet.
    pub prefill_tokens: u64,
    /// Blocks that requests in flight may come to hold.
    pub blocks: u64,
}

/// What is known of a worker's load: its last report, and the router's own part in it then and now.
#[derive(Clone, Copy, Debug)]
pub struct Seen<'a> {
    /// The last report.
    pub load: &'a WorkerLoad,
    /// Seconds since it was measured.
    pub age_s: f64,
    /// The router's own requests there when it was measured.
    pub own_then: OwnLoad,
    /// The router's own requests there now.
    pub own_now: OwnLoad,
}

/// Corrections of a worker's predicted times.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Factors {
    /// Of waiting and prefill.
    pub ttft: f64,
    /// Of time per output token.
    pub itl: f64,
}

/// The terms of a cost, in seconds.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Terms {
    /// Until the prompt's turn comes: queued prefill, and memory that must become free.
    pub wait_s: f64,
    /// Computing the part of the prompt that is not reused.
    pub prefill_s: f64,
    /// Bringing blocks back from host or disk.
    pub restore_s: f64,
    /// Expected output × time per token.
    pub decode_s: f64,
}

/// What the router learned: how much slower (or faster) than predicted a worker, or all workers of a model, are.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Learned {
    ttft: Factor,
    itl: Factor,
}

/// A running mean of log(observed ÷ predicted); it stays within ± [`FACTOR_LOG_MAX`].
#[derive(Clone, Copy, PartialEq, Debug, Default)]
struct Factor {
    log: f64,
    samples: u32,
    last: Option<Instant>,
}

/// Prefill rate until a worker has measured one, in tokens per second: a small model on a few CPU cores.
pub const PREFILL_PRIOR_TOKENS_PER_S: f64 = 2_000.0;
/// Time per output token until a worker has measured one, in seconds.
pub const TPOT_PRIOR_S: f64 = 0.03;
/// Seconds to restore one token's KV from host memory: 20 µs, about 23 KiB (SmolLM2-135M in f32 is 46 KiB) at 1–2 GB/s.
pub const RESTORE_HOST_S: f64 = 20e-6;
/// Seconds to restore one token's KV from a local disk.
pub const RESTORE_DISK_S: f64 = 80e-6;

/// Weight of the newest observation once enough have been seen; older ones fade within about ten requests.
const LEARN_RATE_MIN: f64 = 0.1;
/// Differences between a worker and its peers below a factor of 2 are taken for noise; of larger ones the excess counts. What differs by less is
/// in the rates that each worker measures and reports itself.
pub const DEVIATION_LOG_MIN: f64 = std::f64::consts::LN_2;
/// Observations before a difference counts.
const DEVIATION_SAMPLES_MIN: u32 = 8;
/// Time without an observation after which half of a difference is forgotten.
const DEVIATION_HALF_LIFE_S: f64 = 2.0;
/// Predicted seconds below which a first output says more of the network than of the worker.
const TTFT_MIN_S: f64 = 0.02;
/// Largest correction either way; beyond it an observation is an outlier (a paused process, a clock step).
const FACTOR_LOG_MAX: f64 = 3.5;

// === impl Terms ===

impl Terms {
    /// The cost.
    pub fn score_s(&self) -> f64 {
        self.wait_s + self.prefill_s + self.restore_s + self.decode_s
    }

    /// Seconds until the first output.
    pub fn ttft_s(&self) -> f64 {
        self.wait_s + self.prefill_s + self.restore_s
    }

    /// The terms with their names in receipts.
    pub fn named(&self) -> [(&'static str, f64); 4] {
        [("wait", self.wait_s), ("prefill", self.prefill_s), ("restore", self.restore_s), ("decode", self.decode_s)]
    }
}

// === impl Learned ===

impl Learned {
    /// A first output came `observed_s` after sending, where `predicted_s` was expected without correction.
    pub fn observe_ttft(&mut self, predicted_s: f64, observed_s: f64, now: Instant) {
        if predicted_s >= TTFT_MIN_S {
            self.ttft.observe(predicted_s, observed_s, now);
        }
    }

    /// Output tokens came `observed_s` apart on average, where `predicted_s` was expected without correction.
    pub fn observe_itl(&mut self, predicted_s: f64, observed_s: f64, now: Instant) {
        self.itl.observe(predicted_s, observed_s, now);
    }

    /// The corrections for a worker that learned this, among peers that learned `peers` together.
    pub fn factors(&self, peers: &Self, now: Instant) -> Factors {
        Factors { ttft: self.ttft.among(peers.ttft, now), itl: self.itl.among(peers.itl, now) }
    }
}

impl Factor {
    fn observe(&mut self, predicted_s: f64, observed_s: f64, now: Instant) {
        if !(predicted_s > 0.0 && observed_s > 0.0 && predicted_s.is_finite() && observed_s.is_finite()) {
            return;
        }
        self.samples = self.samples.saturating_add(1);
        let rate = (1.0 / f64::from(self.samples)).max(LEARN_RATE_MIN);
        let error = (observed_s / predicted_s).ln().clamp(-FACTOR_LOG_MAX, FACTOR_LOG_MAX);
        self.log += rate * (error - self.log);
        self.last = Some(now);
    }

    /// That of the peers, moved by what goes beyond noise. It fades: a worker that gets nothing because it was slow once is tried again.
    fn among(self, peers: Self, now: Instant) -> f64 {
        let Some(last) = self.last.filter(|_| self.samples >= DEVIATION_SAMPLES_MIN) else { return peers.log.exp() };
        let deviation = self.log - peers.log;
        let beyond = (deviation.abs() - DEVIATION_LOG_MIN).max(0.0).copysign(deviation);
        let half_lives = now.saturating_duration_since(last).as_secs_f64() / DEVIATION_HALF_LIFE_S;
        (peers.log + beyond * (-half_lives).exp2()).exp()
    }
}

// === impl Factors ===

impl Default for Factors {
    fn default() -> Self {
        Self { ttft: 1.0, itl: 1.0 }
    }
}

// === estimate ===

/// Prompt tokens of `credit` that a worker can reuse, by tier and discounted by confidence; at least the last token is computed.
pub fn reusable_tokens(work: &Work, credit: &Match) -> [f64; 3] {
    let mut left = f64::from(work.prompt_tokens.saturating_sub(1));
    credit.blocks.map(|blocks| {
        let tokens = f64::from(blocks) * f64::from(work.block_size) * f64::from(credit.confidence);
        let tokens = tokens.min(left);
        left -= tokens;
        tokens
    })
}

/// Predicted cost of `work` on a worker.
pub fn estimate(work: &Work, credit: &Match, seen: &Seen<'_>, factors: &Factors) -> Terms {
    let load = seen.load;
    let rate = prefill_rate(load);
    let token_s = factors.ttft / rate;
    let [device, host, disk] = reusable_tokens(work, credit);
    let uncached = f64::from(work.prompt_tokens) - device - host - disk;
    // Restoring is worth it only when cheaper than recomputing; the worker decides the same way.
    let restore_s = host * RESTORE_HOST_S.min(token_s) + disk * RESTORE_DISK_S.min(token_s);
    // The report lags: others' work in it has been worked on since, and of our own we know better.
    let others = load.queued_prefill_tokens.saturating_sub(seen.own_then.prefill_tokens) as f64;
    let queued = (others - seen.age_s.max(0.0) * rate).max(0.0) + seen.own_now.prefill_tokens as f64;
    let reported = u64::from(load.running) + u64::from(load.waiting);
    let rows = reported.saturating_sub(seen.own_then.slots) + seen.own_now.slots + u64::from(work.choices);
    let tpot_s = tpot_s(load, rows as f64) * factors.itl;
    Terms {
        wait_s: queued * token_s + memory_wait_s(work, uncached, seen, tpot_s),
        prefill_s: uncached * token_s,
        restore_s,
        decode_s: work.output_tokens * tpot_s,
    }
}

fn prefill_rate(load: &WorkerLoad) -> f64 {
    match f64::from(load.prefill_tokens_per_second) {
        rate if rate.is_finite() && rate > 0.0 => rate,
        _ => PREFILL_PRIOR_TOKENS_PER_S,
    }
}

/// Time until enough held blocks come back: the share of them that is missing, times the time in which a sequence ends.
fn memory_wait_s(work: &Work, uncached: f64, seen: &Seen<'_>, tpot_s: f64) -> f64 {
    let Some(device) = seen.load.tier(Tier::Device) else { return 0.0 };
    let total = f64::from(device.free) + f64::from(device.cached) + f64::from(device.held);
    let others = u64::from(device.held).saturating_sub(seen.own_then.blocks);
    let held = ((others + seen.own_now.blocks) as f64).min(total);
    let tokens = uncached + work.output_tokens * f64::from(work.choices);
    let missing = tokens / f64::from(work.block_size.max(1)) - (total - held);
    if missing <= 0.0 || held <= 0.0 {
        return 0.0;
    }
    (missing / held).min(1.0) * work.output_tokens * tpot_s
}

/// Time per output token with `rows` choices running: the measured rate (which includes speculative gain), moved along the cost curve.
fn tpot_s(load: &WorkerLoad, rows: f64) -> f64 {
    let curve = |rows: f64| curve_s(load, rows);
    let rate = f64::from(load.decode_tokens_per_second);
    if rate.is_finite() && rate > 0.0 {
        let here = curve(f64::from(load.running.max(1)));
        return match (here, curve(rows)) {
            (Some(here), Some(there)) if here > 0.0 => there / here / rate,
            _ => 1.0 / rate,
        };
    }
    curve(rows).unwrap_or(TPOT_PRIOR_S)
}

/// The cost curve at `rows`, linear between points, held flat before the first and extended by the last slope.
fn curve_s(load: &WorkerLoad, rows: f64) -> Option<f64> {
    let usable = |seconds: f32| seconds.is_finite() && seconds > 0.0;
    let points =
        || load.cost.iter().filter(|point| usable(point.seconds)).map(|point| (f64::from(point.rows), f64::from(point.seconds)));
    let first = points().next()?;
    let mut before = first;
    let mut last_slope = 0.0;
    for point in points() {
        if point.0 > before.0 {
            last_slope = ((point.1 - before.1) / (point.0 - before.0)).max(0.0);
        }
        if rows <= point.0 {
            return Some(if point.0 > before.0 { before.1 + (rows - before.0).max(0.0) * last_slope } else { point.1 });
        }
        before = point;
    }
    Some(before.1 + (rows - before.0) * last_slope)
}

#[cfg(test)]
mod tests;
