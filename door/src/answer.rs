//! The answer to one call: chunks of one or several requests as one stream of [`Event`]s, for both doors.
//!
//! Owns the end of a call: whatever the server of a request does, an answer ends with exactly one `Finished` or `Failed`, and nothing follows.
//! Refuses to know how events are shown. Dropping an answer drops every request's stream, which cancels them everywhere.
//!
//! Invariants
//! 1. A stream that just stops is a failure, never a short success.
//! 2. Choices of prompt `p` are numbered from `p * n`.
//! 3. One failed request fails the call and cancels the others.
//! 4. When the server has no time left ([`Ending`]) the answer fails, and what was handed out until then is its usage.

use crate::call::Call;
use crate::params::{GRAMMAR_FIELD, Wishes};
use crate::prepare::Batch;
use crate::serve::{Prepared, Receipt, ReceiptSlot, Serve, ServedModel};
use crate::server::Ending;
use futures::StreamExt as _;
use futures::stream::{self, BoxStream, SelectAll};
use kvasir_core::{
    Chunk, Contract, Counters, Error, FinishReason, Finished, MissReason, Reason, Started, StateTimes, Tier, TierHit, TokenId,
    Tokens, Usage,
};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// When to come back to a server that stops: another one, or the next life of this one, takes about this long.
const STOPPING_RETRY_AFTER: Duration = Duration::from_secs(2);

/// One step of an answer.
#[derive(Debug)]
pub(crate) enum Event {
    /// A request was admitted.
    Started(Started),
    /// Output of one choice; the index counts over all prompts.
    Output(Tokens),
    /// The good end.
    Finished(Box<End>),
    /// The bad end.
    Failed(Error),
}

/// How a call ended well.
#[derive(Debug)]
pub(crate) struct End {
    /// One per choice over all prompts.
    pub(crate) reasons: Vec<FinishReason>,
    pub(crate) usage: Usage,
    /// Present when asked for.
    pub(crate) report: Option<Report>,
}

/// What happened to the requests of a call.
#[derive(Debug)]
pub(crate) struct Report {
    pub(crate) hits: Vec<TierHit>,
    pub(crate) computed: u32,
    pub(crate) miss_reason: Option<MissReason>,
    pub(crate) contract: Contract,
    pub(crate) seed: u64,
    pub(crate) counters: Counters,
    pub(crate) states: StateTimes,
    pub(crate) receipt: Option<Receipt>,
}

/// An answer that is being produced.
pub(crate) struct Answer {
    call: Call,
    chunks: SelectAll<BoxStream<'static, (usize, Option<Chunk>)>>,
    parts: Vec<Part>,
    choices_per_part: u32,
    last_output: Vec<Option<Instant>>,
    seed: u64,
    report: bool,
    grammar_name: &'static str,
    /// Output tokens handed out.
    delivered: u32,
    ending: Option<Ending>,
    ended: bool,
}

#[derive(Default)]
struct Part {
    started: Option<Started>,
    finished: Option<Box<Finished>>,
    receipt: ReceiptSlot,
    prepared: StateTimes,
}

/// What a door needs to show an answer.
pub(crate) struct Head {
    /// Hexadecimal name of the first request.
    pub(crate) id: String,
    pub(crate) model: ServedModel,
    pub(crate) wishes: Wishes,
    pub(crate) echoes: Vec<String>,
    /// The prompts as tokens.
    pub(crate) prompts: Vec<Arc<[TokenId]>>,
}

// === impl Answer ===

impl Answer {
    /// Hands every request of a call over. Nothing runs until the answer is polled. `ending` is that of the server that the call came through.
    pub(crate) fn start(serve: &Arc<dyn Serve>, batch: Batch, call: Call, ending: Option<Ending>) -> (Head, Self) {
        let Batch { model, prepared, wishes, echoes, prompts } = batch;
        let id = prepared.first().map(|first| first.request.id.to_string()).unwrap_or_default();
        let parts: Vec<Part> =
            prepared.iter().map(|one| Part { receipt: one.receipt.clone(), prepared: one.states, ..Part::default() }).collect();
        let chunks = prepared.into_iter().enumerate().map(|(index, one)| run(serve.clone(), index, one)).collect();
        let n = wishes.sampling.n;
        let answer = Self {
            call,
            chunks,
            last_output: vec![None; parts.len() * n as usize],
            parts,
            choices_per_part: n,
            seed: wishes.sampling.seed,
            report: wishes.report,
            grammar_name: wishes.grammar_name,
            delivered: 0,
            ending,
            ended: false,
        };
        (Head { id, model, wishes, echoes, prompts }, answer)
    }

    /// When the call came in.
    pub(crate) fn received(&self) -> Instant {
        self.call.received()
    }

    /// The next event; `None` after the end. Safe to cancel.
    pub(crate) async fn next(&mut self) -> Option<Event> {
        while !self.ended {
            let chunk = tokio::select! {
                biased;
                () = over(&mut self.ending) => return Some(self.stopping()),
                chunk = self.chunks.next() => chunk,
            };
            let event = match chunk {
                Some((part, chunk)) => self.take(part, chunk),
                None => Some(self.fail(Error::new(Reason::Internal, "no request was started"), StateTimes::default(), None)),
            };
            if event.is_some() {
                return event;
            }
        }
        None
    }

    fn take(&mut self, part: usize, chunk: Option<Chunk>) -> Option<Event> {
        match chunk {
            Some(Chunk::Started(started)) => {
                let slot = self.parts.get_mut(part)?;
                slot.started = Some(started.clone());
                Some(Event::Started(started))
            }
            Some(Chunk::Tokens(_) | Chunk::Finished(_)) if self.parts.get(part).is_some_and(|part| part.finished.is_some()) => {
                Some(self.fail(Error::new(Reason::Internal, "output arrived after the end"), StateTimes::default(), None))
            }
            Some(Chunk::Tokens(tokens)) => Some(self.output(part, tokens)),
            Some(Chunk::Finished(finished)) => self.finish(part, finished),
            Some(Chunk::Failed { error, usage, states }) => Some(self.fail(error, states, Some(usage))),
            // The stream of a finished request is drained; any other just stopped.
            None if self.parts.get(part).is_some_and(|part| part.finished.is_some()) => None,
            None => {
                let error = Error::new(Reason::WorkerLost, "the answer stopped before its end; send the request again");
                Some(self.fail(error, StateTimes::default(), None))
            }
        }
    }

    fn stopping(&mut self) -> Event {
        let error = Error::new(Reason::Draining, "the server stops and its grace period is over; send the request again")
            .with_retry_after(STOPPING_RETRY_AFTER);
        let mut usage = Usage { completion_tokens: self.delivered, ..Usage::default() };
        for started in self.parts.iter().filter_map(|part| part.started.as_ref()) {
            let cached: u32 = started.hits.iter().map(|hit| hit.tokens).sum();
            usage.cached_tokens += cached;
            usage.prompt_tokens += cached + started.computed;
        }
        self.fail(error, StateTimes::default(), Some(usage))
    }

    fn output(&mut self, part: usize, mut tokens: Tokens) -> Event {
        if tokens.choice >= self.choices_per_part {
            let message = format!("output for choice {} of {} arrived", tokens.choice, self.choices_per_part);
            return self.fail(Error::new(Reason::Internal, message), StateTimes::default(), None);
        }
        tokens.choice += part as u32 * self.choices_per_part;
        self.delivered += tokens.ids.len() as u32;
        let now = Instant::now();
        self.call.output();
        if let Some(last) = self.last_output.get_mut(tokens.choice as usize)
            && let Some(last) = last.replace(now)
        {
            self.call.gap(now.duration_since(last));
        }
        Event::Output(tokens)
    }

    fn finish(&mut self, part: usize, finished: Box<Finished>) -> Option<Event> {
        if finished.reasons.len() != self.choices_per_part as usize {
            let message = format!("{} of {} choices ended", finished.reasons.len(), self.choices_per_part);
            return Some(self.fail(Error::new(Reason::Internal, message), finished.states, Some(finished.usage)));
        }
        self.parts.get_mut(part)?.finished = Some(finished);
        if !self.parts.iter().all(|part| part.finished.is_some()) {
            return None;
        }
        self.ended = true;
        let end = self.end();
        self.call.succeed(end.usage, hits(&self.parts), self.states());
        // The streams go now: their owners may be waiting for that.
        self.chunks.clear();
        Some(Event::Finished(Box::new(end)))
    }

    fn end(&self) -> End {
        let mut usage = Usage::default();
        let mut counters = Counters::default();
        let mut reasons = Vec::new();
        for finished in self.parts.iter().filter_map(|part| part.finished.as_deref()) {
            reasons.extend_from_slice(&finished.reasons);
            usage.prompt_tokens += finished.usage.prompt_tokens;
            usage.cached_tokens += finished.usage.cached_tokens;
            usage.completion_tokens += finished.usage.completion_tokens;
            usage.recomputed_tokens += finished.usage.recomputed_tokens;
            counters.proposed += finished.counters.proposed;
            counters.accepted += finished.counters.accepted;
        }
        let report = self.report.then(|| Report {
            hits: hits(&self.parts),
            computed: self.parts.iter().filter_map(|part| part.started.as_ref()).map(|started| started.computed).sum(),
            miss_reason: self.parts.iter().find_map(|part| part.started.as_ref()?.miss_reason),
            contract: self.parts.iter().find_map(|part| part.finished.as_deref()).map(|end| end.contract).unwrap_or_default(),
            seed: self.seed,
            counters,
            states: self.states(),
            receipt: self.parts.iter().find_map(|part| part.receipt.get().cloned()),
        });
        End { reasons, usage, report }
    }

    /// Times of the request that took longest; of one request in the usual case.
    fn states(&self) -> StateTimes {
        self.parts
            .iter()
            .filter_map(|part| part.finished.as_deref())
            .map(|end| end.states)
            .max_by_key(StateTimes::total)
            .unwrap_or_default()
    }

    fn fail(&mut self, error: Error, states: StateTimes, usage: Option<Usage>) -> Event {
        self.ended = true;
        let mut states = states;
        if states.total().is_zero() {
            // Nothing came back: at least what the door itself spent is known.
            states = self.parts.first().map(|part| part.prepared).unwrap_or_default();
        }
        let error = renamed(error, self.grammar_name);
        self.call.fail(&error, usage.unwrap_or_default(), states);
        self.chunks.clear();
        Event::Failed(error)
    }
}

/// Names the member that the client wrote where a worker says `response_format`.
fn renamed(error: Error, grammar_name: &str) -> Error {
    if error.field.as_deref() != Some(GRAMMAR_FIELD) || grammar_name == GRAMMAR_FIELD {
        return error;
    }
    let message = error.message.replace(GRAMMAR_FIELD, grammar_name);
    Error { message, ..error }.with_field(grammar_name)
}

async fn over(ending: &mut Option<Ending>) {
    match ending {
        Some(ending) => ending.over().await,
        None => std::future::pending().await,
    }
}

fn hits(parts: &[Part]) -> Vec<TierHit> {
    let of = |tier: Tier| -> u32 {
        let started = parts.iter().filter_map(|part| part.started.as_ref());
        started.flat_map(|started| &started.hits).filter(|hit| hit.tier == tier).map(|hit| hit.tokens).sum()
    };
    Tier::ALL.into_iter().map(|tier| TierHit { tier, tokens: of(tier) }).filter(|hit| hit.tokens > 0).collect()
}

/// One request as a stream that always says when it is over.
fn run(serve: Arc<dyn Serve>, index: usize, prepared: Prepared) -> BoxStream<'static, (usize, Option<Chunk>)> {
    let states = prepared.states;
    let begin = async move {
        match serve.serve(prepared).await {
            Ok(chunks) => chunks.map(Some).boxed(),
            Err(error) => stream::iter([Some(Chunk::Failed { error, usage: Usage::default(), states })]).boxed(),
        }
    };
    let ended = stream::iter([None]);
    stream::once(begin).flatten().chain(ended).map(move |chunk| (index, chunk)).boxed()
}
