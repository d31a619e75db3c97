//! What a request leaves behind: one span with its stages, and metrics. Built when the request ends, from durations that were measured
//! anyway.

use super::WorkerService;
use super::flight::Flight;
use crate::engine::EngineHandle;
use kvasir_core::{Chunk, Counters, Error, MissReason, RemovalCause, Request, Started, State, StateTimes, Tier, Usage};
use kvasir_telemetry::names::span;
use kvasir_telemetry::{AdmittedPrompt, RequestSpan, SpanContext, Value, WorkerLevels, WorkerMetrics, WorkerTotals};
use std::time::Duration;

/// Outcome label of a request that ended well.
const OK: &str = "ok";

/// Watches one request; counts its end exactly once, and its absence of an end as a cancellation.
pub(super) struct Record {
    service: WorkerService,
    span: RequestSpan,
    flight: Flight,
    prompt_tokens: u32,
    started: Option<(Started, Duration)>,
    ended: bool,
}

/// How a request ended.
struct End<'a> {
    outcome: &'static str,
    states: &'a StateTimes,
    usage: Usage,
    counters: Counters,
}

// === impl Record ===

impl Record {
    pub(super) fn open(service: &WorkerService, request: &Request) -> Self {
        let parent = request
            .trace
            .as_ref()
            .map(|trace| SpanContext { traceparent: trace.traceparent.clone(), tracestate: trace.tracestate.clone() });
        let span = service.0.telemetry.tracer.start(span::WORKER, parent.as_ref());
        span.set("kvasir.worker", &*service.uid().0);
        span.set("kvasir.request_id", request.id.to_string());
        span.set("kvasir.tenant", &*request.tenant.0);
        span.set("kvasir.contract", request.contract.name());
        let prompt_tokens = request.prompt.len() as u32;
        Self {
            service: service.clone(),
            span,
            flight: service.0.flights.enter(request),
            prompt_tokens,
            started: None,
            ended: false,
        }
    }

    /// The request was refused before it started.
    pub(super) fn refuse(&mut self, error: &Error) {
        self.fail(error, &StateTimes::default(), Usage::default());
    }

    /// A chunk on its way out.
    pub(super) fn see(&mut self, chunk: &Chunk) {
        match chunk {
            Chunk::Started(started) => {
                self.flight.start();
                self.started = Some((started.clone(), self.flight.age()));
            }
            Chunk::Tokens(tokens) => self.flight.add_output(tokens.ids.len() as u32),
            Chunk::Finished(finished) => {
                self.end(&End { outcome: OK, states: &finished.states, usage: finished.usage, counters: finished.counters });
            }
            Chunk::Failed { error, usage, states } => self.fail(error, states, *usage),
        }
    }

    fn fail(&mut self, error: &Error, states: &StateTimes, usage: Usage) {
        self.span.fail(error.reason.code());
        self.end(&End { outcome: error.reason.code(), states, usage, counters: Counters::default() });
    }

    fn end(&mut self, end: &End<'_>) {
        if std::mem::replace(&mut self.ended, true) {
            return;
        }
        self.count_prompt(end.states);
        self.service.0.metrics.finished(end.outcome);
        self.span.set("gen_ai.usage.input_tokens", end.usage.prompt_tokens);
        self.span.set("gen_ai.usage.output_tokens", end.usage.completion_tokens);
        self.span.set("kvasir.cached_tokens", end.usage.cached_tokens);
        if let Some(reason) = self.started.as_ref().and_then(|(started, _)| started.miss_reason) {
            self.span.set("kvasir.miss_reason", reason.name());
        }
        stages(&self.span, end);
    }

    /// Counted with the end, when the time of lookup and queue is known; a request whose reader left tells its wait only.
    fn count_prompt(&self, states: &StateTimes) {
        let Some((started, waited)) = &self.started else { return };
        let hits: Vec<_> = started.hits.iter().map(|hit| (hit.tier.name(), hit.tokens)).collect();
        let known = !states.total().is_zero();
        self.service.0.metrics.admitted(&AdmittedPrompt {
            prompt_tokens: self.prompt_tokens,
            hits: &hits,
            computed: started.computed,
            miss: started.miss_reason.map(MissReason::name),
            lookup: states.get(State::Lookup),
            queue: if known { states.get(State::EngineWait) } else { *waited },
        });
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        if !self.ended {
            let error = Error::new(kvasir_core::Reason::Cancelled, "the reader left");
            self.fail(&error, &StateTimes::default(), Usage::default());
        }
    }
}

/// Lays the worker's exclusive states end to end under the span.
fn stages(span: &RequestSpan, end: &End<'_>) {
    let of = |states: &[State]| states.iter().map(|state| end.states.get(*state)).sum::<Duration>();
    let before = [
        (span::QUEUE, of(&[State::EngineWait])),
        (span::LOOKUP, of(&[State::Lookup])),
        (span::RESTORE, of(&[State::RestoreWait])),
        (span::PREFILL, of(&[State::Prefill, State::FirstOutput])),
        (span::PREEMPTED, of(&[State::Preempted])),
    ];
    let decode_states = [State::Draft, State::Verify, State::DecodePlain, State::Correction, State::Scheduler];
    let decode = of(&decode_states);
    let at = span.stages(span.started(), &before);
    if !decode.is_zero() {
        let mut attributes: Vec<(&'static str, Value)> = vec![
            ("kvasir.steps", end.counters.steps.into()),
            ("kvasir.drafted", end.counters.proposed.into()),
            ("kvasir.accepted", end.counters.accepted.into()),
        ];
        attributes.extend(decode_states.map(|state| (seconds_key(state), Value::from(end.states.get(state).as_secs_f64()))));
        span.stage(span::DECODE, at, decode, &attributes);
    }
    span.stages(at + decode, &[(span::EMIT, of(&[State::EmitWait]))]);
}

/// Attribute that a state's total has on the decode span.
const fn seconds_key(state: State) -> &'static str {
    match state {
        State::Draft => "kvasir.draft_s",
        State::Verify => "kvasir.verify_s",
        State::Correction => "kvasir.correction_s",
        State::Scheduler => "kvasir.scheduler_s",
        _ => "kvasir.decode_plain_s",
    }
}

/// Brings gauges and engine totals up to date; called when metrics are read.
pub(super) fn refresh(metrics: &WorkerMetrics, engine: &EngineHandle) {
    let watched = engine.load();
    let measured = watched.borrow();
    let load = &measured.load;
    let device = load.tier(Tier::Device).copied();
    metrics.levels(&WorkerLevels {
        free: device.map_or(0, |tier| tier.free.into()),
        cached: device.map_or(0, |tier| tier.cached.into()),
        held: device.map_or(0, |tier| tier.held.into()),
        block_bytes: engine.spec().block_bytes,
        running: load.running.into(),
        waiting: load.waiting.into(),
    });
    drop(measured);
    let stats = engine.stats();
    let causes =
        [RemovalCause::Capacity, RemovalCause::Expired, RemovalCause::Flushed, RemovalCause::Rotated, RemovalCause::Corrupt];
    metrics.totals(&WorkerTotals {
        steps: stats.steps.steps,
        preemptions: stats.steps.preemptions,
        recomputed_tokens: stats.prompt.recomputed,
        admission_blocked_by_retention: 0,
        violations: stats.reconcile_violations,
        evictions: &causes.map(|cause| (cause.name(), stats.evicted(cause))),
        speculation_steps: 0,
        draft_tokens: &[],
    });
}
