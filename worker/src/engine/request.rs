//! A request inside the engine: its stream, its clock and its ledger; its sequences live beside it.
//!
//! Invariants
//! 1. The states of a request partition its time: [`Meter`] knows exactly one state at any moment.
//! 2. While chunks wait in the outbox the request's sequences get no rows, so the outbox holds at most what one step made.

use super::constraint::Constraint;
use super::handle::Ticket;
use super::stream::ChunkSender;
use crate::kv::{Owner, Retention};
use crate::plan::{Chosen, SampleParams, SequenceId};
use crate::text::Stops;
use kvasir_core::{
    CacheMode, Chunk, Counters, FinishReason, Finished, Request, Started, State, StateTimes, TokenId, TokenLogprob, Usage,
};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

/// Name of a request inside one engine.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub(super) struct JobId(pub(super) u64);

/// A checked request on its way to the engine.
pub(super) struct Submission {
    pub(super) id: JobId,
    pub(super) request: Request,
    pub(super) stops: Arc<Stops>,
    /// One per choice, or none; a choice takes its own when it begins.
    pub(super) constraints: VecDeque<Box<dyn Constraint>>,
    pub(super) stream: ChunkSender,
    pub(super) received_at: Duration,
    pub(super) ticket: Ticket,
}

/// A request that the engine works on.
pub(super) struct Job {
    pub(super) id: JobId,
    pub(super) request: Request,
    pub(super) params: Arc<SampleParams>,
    pub(super) owner: Owner,
    pub(super) stops: Arc<Stops>,
    /// One per choice, or none; a choice takes its own when it begins.
    pub(super) constraints: VecDeque<Box<dyn Constraint>>,
    pub(super) delivery: Delivery,
    pub(super) timing: Timing,
    pub(super) ledger: Ledger,
    /// By choice; more than one from the first fork on.
    pub(super) sequences: Vec<SequenceId>,
    /// By choice.
    pub(super) reasons: Vec<Option<FinishReason>>,
    /// Place in the queue, given back at first admission.
    pub(super) ticket: Option<Ticket>,
}

/// Where chunks go.
pub(super) struct Delivery {
    pub(super) stream: ChunkSender,
    outbox: VecDeque<Chunk>,
    stalled_since: Option<Duration>,
}

/// When things happen.
pub(super) struct Timing {
    pub(super) received_at: Duration,
    /// Moment at which the request fails.
    pub(super) deadline: Option<Duration>,
    pub(super) meter: Meter,
}

/// What was used.
#[derive(Default)]
pub(super) struct Ledger {
    pub(super) usage: Usage,
    pub(super) counters: Counters,
    pub(super) started: Option<Started>,
    /// Prompt positions computed for the first time.
    pub(super) prompt_computed: u32,
    /// Prompt positions that an admission after preemption found in the cache before they were ever computed here.
    pub(super) prompt_found_later: u32,
    /// Log-probability of each prompt token's successor, as far as computed.
    pub(super) scores: Vec<Option<Chosen>>,
    /// Whether they were handed over; a later recomputation does not ask for them again.
    pub(super) scores_told: bool,
}

/// Knows what a request is doing, and for how long it did what.
pub(super) struct Meter {
    state: State,
    since: Duration,
    times: StateTimes,
}

// === impl Job ===

impl Job {
    pub(super) fn new(submission: Submission, params: SampleParams) -> Self {
        let request = submission.request;
        let owner = Owner {
            prefix: request.prefix(),
            identity: request.identity,
            tenant: request.tenant.clone(),
            secret_epoch: request.secret_epoch,
            retention: Retention::default(),
        };
        let usage = Usage { prompt_tokens: request.prompt.len() as u32, ..Usage::default() };
        Self {
            id: submission.id,
            params: Arc::new(params),
            owner,
            stops: submission.stops,
            constraints: submission.constraints,
            delivery: Delivery { stream: submission.stream, outbox: VecDeque::new(), stalled_since: None },
            timing: Timing {
                received_at: submission.received_at,
                deadline: request.deadline.map(|left| submission.received_at + left),
                meter: Meter { state: State::EngineWait, since: submission.received_at, times: StateTimes::default() },
            },
            ledger: Ledger { usage, ..Ledger::default() },
            sequences: Vec::new(),
            reasons: vec![None; request.sampling.n as usize],
            ticket: Some(submission.ticket),
            request,
        }
    }

    pub(super) fn prompt_len(&self) -> u32 {
        self.request.prompt.len() as u32
    }

    /// Whether the prefix cache may be read and written, given the pool's mode.
    pub(super) fn caches(&self, pool: CacheMode) -> bool {
        pool != CacheMode::Off && self.request.cache.mode != CacheMode::Off
    }

    /// Whether prompt log-probabilities are still to be computed.
    pub(super) fn wants_scores(&self) -> bool {
        self.request.sampling.prompt_logprobs.is_some()
            && !self.ledger.scores_told
            && self.ledger.scores.len() < self.request.prompt.len()
    }

    /// Takes the scores of a row that began at prompt position `start`; a prompt that is computed again after preemption scores again, and
    /// the later scores (equal bits) replace the earlier ones.
    pub(super) fn take_scores(&mut self, start: u32, scores: Vec<Option<Chosen>>) {
        if !scores.is_empty() && !self.ledger.scores_told {
            self.ledger.scores.truncate(start as usize);
            self.ledger.scores.extend(scores);
        }
    }

    pub(super) fn is_end(&self, id: TokenId) -> bool {
        self.params.end_tokens.contains(&id)
    }

    pub(super) fn is_done(&self) -> bool {
        self.reasons.iter().all(Option::is_some)
    }

    /// The array of prompt log-probabilities: one entry per prompt token, none for the first.
    pub(super) fn prompt_logprobs(&mut self) -> Vec<Option<TokenLogprob>> {
        self.ledger.scores_told = true;
        let scores = std::mem::take(&mut self.ledger.scores);
        let known = scores.into_iter().take(self.request.prompt.len() - 1);
        std::iter::once(None).chain(known.map(|score| score.map(logprob))).collect()
    }

    pub(super) fn finished(&self) -> Chunk {
        Chunk::Finished(Box::new(Finished {
            reasons: self.reasons.iter().flatten().copied().collect(),
            usage: self.ledger.usage,
            states: self.timing.meter.times,
            counters: self.ledger.counters,
            contract: self.request.contract,
        }))
    }
}

/// The reported form of a chosen token.
pub(super) fn logprob(chosen: Chosen) -> TokenLogprob {
    TokenLogprob { id: chosen.id, logprob: chosen.logprob, top: chosen.top }
}

// === impl Delivery ===

impl Delivery {
    /// Sends a chunk, behind those that wait.
    pub(super) fn send(&mut self, now: Duration, chunk: Chunk) {
        let back = if self.outbox.is_empty() { self.stream.try_send(chunk) } else { Err(chunk) };
        if let Err(chunk) = back {
            self.outbox.push_back(chunk);
            self.stalled_since.get_or_insert(now);
        }
    }

    /// Sends what waits, as far as the reader has room.
    pub(super) fn flush(&mut self, now: Duration) {
        let before = self.outbox.len();
        while let Some(chunk) = self.outbox.pop_front() {
            if let Err(chunk) = self.stream.try_send(chunk) {
                self.outbox.push_front(chunk);
                break;
            }
        }
        if self.outbox.is_empty() {
            self.stalled_since = None;
        } else if self.outbox.len() < before {
            self.stalled_since = Some(now);
        }
    }

    /// Whether the reader keeps up.
    pub(super) fn is_clear(&self) -> bool {
        self.outbox.is_empty()
    }

    /// Since when the reader has taken nothing while chunks waited.
    pub(super) fn stalled_since(&self) -> Option<Duration> {
        self.stalled_since
    }
}

// === impl Meter ===

impl Meter {
    pub(super) fn switch(&mut self, now: Duration, state: State) {
        if state != self.state {
            self.settle(now);
            self.state = state;
        }
    }

    /// Books the time of the present state.
    pub(super) fn settle(&mut self, now: Duration) {
        self.times.add(self.state, now.saturating_sub(self.since));
        self.since = now;
    }

    pub(super) fn state(&self) -> State {
        self.state
    }

    pub(super) fn times(&self) -> StateTimes {
        self.times
    }
}
