//! Placement: which worker a request goes to, and why.
//!
//! Pure: a function of the view, the index, the request's placement and a source of random numbers. Refuses to know clocks, connections and
//! retries; the caller passes what was tried. Called once per attempt.
//!
//! Flow: ready workers of the identity in rendezvous order → the first [`PickSettings::candidates`] that may be used, and those that hold the longest
//! prefix → one cost each → the least, ties by rendezvous rank. When even the best makes the request wait longer than its whole prompt
//! would take to compute, the walk goes on along the same order: a hot prefix spreads without a threshold.
//!
//! Guarantees: equal membership gives every router the same order; the receipt's terms sum to its score.
//!
//! Costs: O(workers of the identity) for the order (a nanosecond each), then a bounded number of candidates.

use crate::cost::{Factors, Seen, Terms, Work, estimate, reusable_tokens};
use crate::index::{Index, Match, MemberId};
use crate::lease::Claim;
use crate::rendezvous;
use crate::view::{View, WorkerView};
use kvasir_core::{BlockKey, Error, ModelIdentity, Reason, WorkerUid};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// What of a request matters for its placement.
#[derive(Clone, Debug)]
pub struct Placement<'a> {
    /// The identity that the worker must serve.
    pub identity: ModelIdentity,
    /// Keys of the prompt's full blocks that can be reused; empty when the cache is off for this request.
    pub keys: &'a [BlockKey],
    /// What it needs.
    pub work: Work,
    /// Workers that failed this request already.
    pub tried: &'a [WorkerUid],
}

/// How far placement looks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PickSettings {
    /// Prompt tokens that decide the rendezvous order.
    pub affinity_tokens: u32,
    /// Candidates by rendezvous order.
    pub candidates: usize,
    /// Candidates by longest prefix.
    pub holders: usize,
}

/// Why a worker was chosen, for receipts and metrics.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Branch {
    /// It holds the longest indexed prefix.
    Prefix,
    /// It is the first in rendezvous order, and nobody holds more.
    Rendezvous,
    /// It costs less than the holder of the longest prefix, or than the first in rendezvous order.
    Spill,
    /// The prompt has no full block: the order was drawn.
    Random,
}

/// A placement decision.
#[derive(Clone, Debug)]
pub struct Pick {
    /// The worker.
    pub worker: Arc<WorkerView>,
    /// Why.
    pub branch: Branch,
    /// Its cost.
    pub terms: Terms,
    /// The corrections in it.
    pub factors: Factors,
    /// Workers that were compared.
    pub candidates: usize,
    /// Prompt tokens expected to be reused there.
    pub predicted_cached_tokens: u32,
}

/// How far the walk goes at most when candidates are busy.
const WALK_MAX: usize = 64;

struct Candidate<'a> {
    worker: &'a Arc<WorkerView>,
    rank: u64,
    credit: Match,
    terms: Terms,
    factors: Factors,
}

/// Time source of one decision: the clock for load ages, and the same moment as the index counts time.
#[derive(Clone, Copy, Debug)]
pub struct Moment {
    /// For load reports and breakers.
    pub now: Instant,
    /// For the index.
    pub index: Duration,
}

// === impl PickSettings ===

impl Default for PickSettings {
    fn default() -> Self {
        // 1,024 tokens: several blocks deep, so that a system prompt that everybody shares does not send everybody to one worker.
        Self { affinity_tokens: 1_024, candidates: 4, holders: 8 }
    }
}

// === impl Branch ===

impl Branch {
    /// The word in receipts and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Prefix => "prefix",
            Self::Rendezvous => "rendezvous",
            Self::Spill => "spill",
            Self::Random => "random",
        }
    }
}

// === impl Pick ===

impl Pick {
    /// What an attempt there may come to use.
    pub fn claim(&self, work: &Work) -> Claim {
        let tokens = u64::from(work.prompt_tokens) + (work.output_tokens.max(0.0) as u64) * u64::from(work.choices);
        Claim {
            slots: work.choices.into(),
            prefill_tokens: work.prompt_tokens.saturating_sub(self.predicted_cached_tokens).into(),
            tokens,
            blocks: tokens.div_ceil(work.block_size.max(1).into()),
        }
    }
}

// === pick ===

/// Chooses a worker.
pub fn pick(
    view: &View,
    index: &Index,
    placement: &Placement<'_>,
    settings: &PickSettings,
    at: Moment,
    rng: &mut dyn FnMut() -> u64,
) -> Result<Pick, Error> {
    let pool = view.pool(&placement.identity);
    let drawn = rendezvous::affinity_of(placement.keys, placement.work.block_size, settings.affinity_tokens);
    let affinity = drawn.unwrap_or_else(rng);
    let mut order = usable(view, pool, affinity, WALK_MAX, placement, at);
    if order.is_empty() && pool.len() > WALK_MAX {
        // Everyone at the head is tried, stale or gated: somebody further down may not be.
        order = usable(view, pool, affinity, pool.len(), placement, at);
    }
    if order.is_empty() {
        return Err(nobody(view, placement));
    }
    let head = order.len().min(settings.candidates.max(1));
    let asked: Vec<MemberId> = order[..head].iter().filter_map(|worker| worker.described.as_ref().map(|it| it.member)).collect();
    let matches = index.matches(placement.keys, affinity, &asked, settings.holders, at.index);
    let mut credits: HashMap<MemberId, Match> = asked.into_iter().zip(matches.asked).collect();
    credits.extend(matches.holders.iter().copied());

    let mut candidates: Vec<Candidate<'_>> = Vec::with_capacity(head + matches.holders.len());
    for worker in &order[..head] {
        candidates.extend(candidate(worker, &credits, affinity, placement, at));
    }
    for (member, _) in &matches.holders {
        let holder = view.member(*member).filter(|worker| worker.serves(&placement.identity) && may_use(worker, placement, at));
        if let Some(worker) = holder.filter(|worker| candidates.iter().all(|other| other.worker.uid != worker.uid)) {
            candidates.extend(candidate(worker, &credits, affinity, placement, at));
        }
    }
    widen(&mut candidates, &order[head..], &credits, affinity, placement, at);
    let longest = candidates.iter().map(|candidate| candidate.credit.total()).max().unwrap_or(0);
    let count = candidates.len();
    let first = order[0].uid.clone();
    let best = candidates.into_iter().min_by(|a, b| {
        a.terms.score_s().total_cmp(&b.terms.score_s()).then(b.rank.cmp(&a.rank)).then_with(|| a.worker.uid.cmp(&b.worker.uid))
    });
    let best = best.ok_or_else(|| nobody(view, placement))?;
    let branch = match drawn {
        None => Branch::Random,
        Some(_) if longest > 0 && best.credit.total() == longest => Branch::Prefix,
        Some(_) if longest == 0 && best.worker.uid == first => Branch::Rendezvous,
        Some(_) => Branch::Spill,
    };
    let cached: f64 = reusable_tokens(&placement.work, &best.credit).iter().sum();
    Ok(Pick {
        worker: Arc::clone(best.worker),
        branch,
        terms: best.terms,
        factors: best.factors,
        candidates: count,
        predicted_cached_tokens: cached as u32,
    })
}

/// The first `count` of the pool in rendezvous order, less those that may not be used now.
fn usable<'a>(
    view: &'a View,
    pool: &[(usize, u64)],
    affinity: u64,
    count: usize,
    placement: &Placement<'_>,
    at: Moment,
) -> Vec<&'a Arc<WorkerView>> {
    rendezvous::first(pool.iter().copied(), affinity, count)
        .into_iter()
        .filter_map(|index| view.workers().get(index))
        .filter(|worker| may_use(worker, placement, at))
        .collect()
}

/// Whether an attempt may be made on a ready worker: fresh load, closed gate, not tried.
fn may_use(worker: &WorkerView, placement: &Placement<'_>, at: Moment) -> bool {
    worker.fresh_load(at.now).is_some_and(|report| !report.load.draining)
        && worker.live.breaker.allows(at.now)
        && !placement.tried.contains(&worker.uid)
}

fn candidate<'a>(
    worker: &'a Arc<WorkerView>,
    credits: &HashMap<MemberId, Match>,
    affinity: u64,
    placement: &Placement<'_>,
    at: Moment,
) -> Option<Candidate<'a>> {
    let report = worker.fresh_load(at.now)?;
    let member = worker.described.as_ref()?.member;
    let credit = credits.get(&member).copied().unwrap_or_default();
    let age_s = at.now.saturating_duration_since(report.measured).as_secs_f64();
    let seen = Seen { load: &report.load, age_s, own_then: report.own, own_now: worker.live.gauge.own_load() };
    let factors = worker.live.factors(at.now);
    let terms = estimate(&placement.work, &credit, &seen, &factors);
    Some(Candidate { worker, rank: rendezvous::rank(worker.salt, affinity), credit, terms, factors })
}

/// Takes more workers of the order in, twice as many each time, while the best so far makes the request wait longer than its whole prompt
/// would take to compute there.
fn widen<'a>(
    candidates: &mut Vec<Candidate<'a>>,
    mut rest: &[&'a Arc<WorkerView>],
    credits: &HashMap<MemberId, Match>,
    affinity: u64,
    placement: &Placement<'_>,
    at: Moment,
) {
    while !rest.is_empty() {
        let Some(best) = candidates.iter().min_by(|a, b| a.terms.score_s().total_cmp(&b.terms.score_s())) else { return };
        let uncached =
            f64::from(placement.work.prompt_tokens) - reusable_tokens(&placement.work, &best.credit).iter().sum::<f64>();
        let cold_s = best.terms.prefill_s * f64::from(placement.work.prompt_tokens) / uncached.max(1.0);
        if best.terms.wait_s <= cold_s {
            return;
        }
        let (next, later) = rest.split_at(rest.len().min(candidates.len().max(1)));
        for worker in next {
            if candidates.iter().all(|other| other.worker.uid != worker.uid) {
                candidates.extend(candidate(worker, credits, affinity, placement, at));
            }
        }
        rest = later;
    }
}

/// Why nobody can take the request.
fn nobody(view: &View, placement: &Placement<'_>) -> Error {
    let error = if placement.tried.is_empty() {
        let known = view.workers().iter().filter(|worker| worker.serves(&placement.identity)).count();
        let message = match known {
            0 => "no worker serves the model now; it may be starting or have been replaced".to_owned(),
            known => format!(
                "none of the {known} workers of the model takes requests now: they are starting, draining or cannot be reached"
            ),
        };
        Error::new(Reason::NoWorker, message)
    } else {
        let tried = placement.tried.len();
        Error::new(Reason::NoWorker, format!("{tried} workers failed this request and no other takes requests now"))
    };
    error.with_retry_after(NOBODY_RETRY_AFTER)
}

/// A worker is probed every second, so that a new one is known by then.
const NOBODY_RETRY_AFTER: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests;
