//! One request in flight: its attempts, its clock, its chunks.

use super::{Inner, named};
use crate::admit::Permit;
use crate::attempt::Attempt;
use crate::cost::Work;
use crate::worker_client::CallError;
use kvasir_core::{BlockKey, Chunk, Error, Finished, Reason, Request, Started, State, StateTimes, Usage, WorkerUid};
use kvasir_door::{Prepared, Receipt, ReceiptSlot};
use std::collections::VecDeque;
use std::sync::Arc;
use tokio::time::{Instant, timeout_at};

/// One request in flight.
pub(super) struct Run {
    inner: Arc<Inner>,
    request: Request,
    plan: Plan,
    attempt: Option<Attempt>,
    tried: Vec<WorkerUid>,
    attempts: u32,
    states: StateTimes,
    /// Since when no attempt is under way.
    routing_since: Instant,
    phase: Phase,
    usage: Usage,
    ready: VecDeque<Chunk>,
    _permit: Permit,
}

/// What is made once and kept over retries.
struct Plan {
    work: Work,
    keys: Vec<BlockKey>,
    receipt: ReceiptSlot,
    deadline: Option<Instant>,
}

/// What a worker said at a bad end.
type Told = Box<(Usage, StateTimes)>;

enum Phase {
    /// Nothing was handed on: another worker may still take over.
    Held(Option<Started>),
    /// Output flows; this worker is the request's only one.
    Flowing,
    Ended,
}

// === impl Run ===

impl Run {
    /// Admits, places and sends. An error means that nothing runs anywhere.
    pub(super) async fn begin(inner: Arc<Inner>, prepared: Prepared) -> Result<Self, Error> {
        let Prepared { request, mut states, receipt } = prepared;
        let began = Instant::now();
        let deadline = request.deadline.map(|left| began + left);
        inner.budget.request(began);
        let ticket = Inner::ticket(&request);
        let entering = inner.admission.enter(&ticket, deadline);
        inner.gauges();
        let permit = entering.await;
        inner.gauges();
        let permit = permit?;
        let routing_since = Instant::now();
        states.add(State::AdmitWait, routing_since - began);
        let work = inner.work(&request);
        let keys = Inner::keys(&request, &work);
        let mut run = Self {
            inner,
            request,
            plan: Plan { work, keys, receipt, deadline },
            attempt: None,
            tried: Vec::new(),
            attempts: 0,
            states,
            routing_since,
            phase: Phase::Held(None),
            usage: Usage::default(),
            ready: VecDeque::new(),
            _permit: permit,
        };
        run.route().await?;
        Ok(run)
    }

    /// The next chunk, for `unfold`.
    pub(super) async fn step(mut self) -> Option<(Chunk, Self)> {
        loop {
            if let Some(chunk) = self.ready.pop_front() {
                return Some((chunk, self));
            }
            if matches!(self.phase, Phase::Ended) {
                return None;
            }
            self.advance().await;
        }
    }

    /// Places and sends until a worker has taken the request.
    async fn route(&mut self) -> Result<(), Error> {
        let mut last: Option<Error> = None;
        loop {
            let now = Instant::now();
            if self.plan.deadline.is_some_and(|deadline| deadline <= now) {
                return Err(Error::new(Reason::DeadlineExceeded, "the deadline passed before a worker took the request"));
            }
            let picked = self.inner.pick(&self.request, self.plan.work, &self.plan.keys, &self.tried);
            // When nobody is left, what the last worker said tells more than that nobody is left.
            let picked = picked.map_err(|nobody| last.take().unwrap_or(nobody))?;
            self.attempts += 1;
            let worker = Arc::clone(&picked.worker);
            self.request.deadline = self.plan.deadline.map(|deadline| deadline - now);
            let opening = self.inner.attempt(picked, self.plan.work, &self.request);
            let opened = match self.plan.deadline {
                None => opening.await,
                Some(deadline) => match timeout_at(deadline + self.inner.settings.deadline_grace, opening).await {
                    Ok(opened) => opened,
                    Err(_elapsed) => {
                        return Err(Error::new(Reason::DeadlineExceeded, "the deadline passed before a worker took the request"));
                    }
                },
            };
            match opened {
                Ok(attempt) => {
                    // What follows the sending is the attempt's own time.
                    self.states.add(State::Route, self.routing_since.elapsed().saturating_sub(attempt.elapsed()));
                    self.attempt = Some(attempt);
                    return Ok(());
                }
                Err(CallError { error, .. }) => {
                    let error = named(&worker, error);
                    self.tried.push(worker.uid.clone());
                    if !self.inner.may_retry(&error, self.attempts) {
                        return Err(error);
                    }
                    self.inner.metrics.retried(error.reason.code());
                    last = Some(error);
                }
            }
        }
    }

    /// Reads one chunk of the attempt and decides what becomes of it.
    async fn advance(&mut self) {
        let Some(attempt) = &mut self.attempt else {
            return self.end_failed(Error::new(Reason::Internal, "a request had no attempt"), None);
        };
        let next = match self.plan.deadline {
            None => attempt.next().await,
            Some(deadline) => match timeout_at(deadline + self.inner.settings.deadline_grace, attempt.next()).await {
                Ok(next) => next,
                Err(_elapsed) => {
                    return self.end_failed(
                        Error::new(Reason::DeadlineExceeded, "the deadline passed before the answer was complete"),
                        None,
                    );
                }
            },
        };
        match next {
            Ok(Chunk::Started(started)) => self.started(started),
            Ok(Chunk::Tokens(tokens)) => {
                self.commit();
                self.usage.completion_tokens += tokens.ids.len() as u32;
                self.ready.push_back(Chunk::Tokens(tokens));
            }
            Ok(Chunk::Finished(finished)) => {
                self.commit();
                self.end_finished(finished);
            }
            Ok(Chunk::Failed { error, usage, states }) => self.failed(error, Some(Box::new((usage, states)))).await,
            Err(CallError { error, .. }) => self.failed(error, None).await,
        }
    }

    fn started(&mut self, started: Started) {
        match &mut self.phase {
            Phase::Held(held) if held.is_none() => {
                self.usage.prompt_tokens = started.cached() + started.computed;
                self.usage.cached_tokens = started.cached();
                *held = Some(started);
            }
            _ => self.end_failed(Error::new(Reason::Internal, "the worker started a request twice"), None),
        }
    }

    /// Output is about to be handed on: from here on there is no other worker.
    fn commit(&mut self) {
        let Phase::Held(started) = &mut self.phase else { return };
        let started = started.take().unwrap_or_default();
        self.phase = Phase::Flowing;
        if let Some(attempt) = &self.attempt {
            // Set once: this is the only place, reached once per request.
            let _first = self.plan.receipt.set(receipt(attempt, self.attempts));
        }
        self.ready.push_back(Chunk::Started(started));
    }

    fn end_finished(&mut self, mut finished: Box<Finished>) {
        self.attempt_over(&finished.states);
        finished.states.merge(&self.states);
        let choices = finished.reasons.len().max(1) as f64;
        self.inner.outputs.observe(f64::from(finished.usage.completion_tokens) / choices);
        self.ready.push_back(Chunk::Finished(finished));
        self.end();
    }

    /// The attempt failed: another worker if nothing was handed on, or the end.
    async fn failed(&mut self, error: Error, told: Option<Told>) {
        let Some(attempt) = &self.attempt else { return self.end_failed(error, told) };
        let worker = Arc::clone(&attempt.pick().worker);
        let error = named(&worker, error);
        if !matches!(self.phase, Phase::Held(_)) || !self.inner.may_retry(&error, self.attempts) {
            return self.end_failed(error, told);
        }
        self.inner.metrics.retried(error.reason.code());
        self.states.add(State::Route, attempt.elapsed());
        self.attempt = None;
        self.inner.gauges();
        self.routing_since = Instant::now();
        self.tried.push(worker.uid.clone());
        self.phase = Phase::Held(None);
        if let Err(nobody) = self.route().await {
            self.states.add(State::Route, self.routing_since.elapsed());
            // "Nobody is left" says less than why the last one failed.
            self.end_failed(if nobody.reason == Reason::NoWorker { error } else { nobody }, None);
        }
    }

    fn end_failed(&mut self, error: Error, told: Option<Told>) {
        let (usage, mut states) = told.map_or_else(|| (self.usage, StateTimes::default()), |told| *told);
        self.attempt_over(&states);
        states.merge(&self.states);
        self.ready.push_back(Chunk::Failed { error, usage, states });
        self.end();
    }

    /// Books the attempt's time beyond what the worker accounts for.
    fn attempt_over(&mut self, workers: &StateTimes) {
        if let Some(attempt) = &self.attempt {
            self.states.add(State::Transfer, attempt.elapsed().saturating_sub(workers.total()));
        }
    }

    /// Nothing runs any more: lease and upstream stream go before the last chunk is read.
    fn end(&mut self) {
        self.phase = Phase::Ended;
        self.attempt = None;
        self.inner.gauges();
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        self.attempt = None;
        self.inner.gauges();
    }
}

fn receipt(attempt: &Attempt, attempts: u32) -> Receipt {
    let pick = attempt.pick();
    Receipt {
        worker_uid: pick.worker.uid.to_string(),
        candidates: pick.candidates as u32,
        score_s: pick.terms.score_s(),
        terms: pick.terms.named().into_iter().map(|(name, seconds)| (name.to_owned(), seconds)).collect(),
        attempts,
        predicted_cached_tokens: pick.predicted_cached_tokens,
    }
}
