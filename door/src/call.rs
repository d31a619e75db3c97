//! One call through a door, from receipt to its end: what is counted and traced of it.
//!
//! Owns the in-flight gauge, the outcome counter and the `request` span of a call. A call that is dropped before it was settled was cancelled:
//! the client went away. Labels are bounded: a model that is not served is `other`, a route that does not exist is `other`.

use http::HeaderMap;
use kvasir_core::{Error, Reason, State, StateTimes, TierHit, Usage};
use kvasir_telemetry::names::span;
use kvasir_telemetry::{DoorMetrics, FinishedRequest, RequestSpan, SpanContext, Tracer};
use std::time::{Duration, SystemTime};
use tokio::time::Instant;

/// Label of everything that is not configured.
pub(crate) const OTHER: &str = "other";
/// Outcome of a call that went well.
const OK: &str = "ok";
/// Longest `tracestate` that is passed on, in bytes (W3C asks for at least 512).
const TRACESTATE_BYTES_MAX: usize = 512;

/// Which door and route a call came through.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Route {
    pub(crate) door: &'static str,
    pub(crate) name: &'static str,
    /// Whether it gives output, by which the service is judged.
    pub(crate) generates: bool,
}

/// An open call.
pub(crate) struct Call {
    route: Route,
    model: Option<String>,
    received: Instant,
    first_output: Option<Instant>,
    metrics: DoorMetrics,
    span: RequestSpan,
    settled: Settled,
}

/// What is known of the end.
#[derive(Default)]
struct Settled {
    outcome: Option<&'static str>,
    usage: Usage,
    hits: Vec<TierHit>,
    states: StateTimes,
    ended: Option<SystemTime>,
}

/// Reads the W3C trace context of a request; a malformed one is none.
pub(crate) fn trace_context(headers: &HeaderMap) -> Option<SpanContext> {
    let mut parents = headers.get_all("traceparent").iter();
    let traceparent = parents.next()?.to_str().ok()?.trim();
    if parents.next().is_some() || !is_traceparent(traceparent) {
        return None;
    }
    let states: Option<Vec<&str>> = headers.get_all("tracestate").iter().map(|value| value.to_str().ok()).collect();
    let tracestate =
        states.map(|states| states.join(",")).filter(|state| !state.is_empty() && state.len() <= TRACESTATE_BYTES_MAX);
    Some(SpanContext { traceparent: traceparent.to_owned(), tracestate })
}

fn is_traceparent(text: &str) -> bool {
    let hex = |part: &str, len: usize| part.len() == len && part.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    let zero = |part: &str| part.bytes().all(|byte| byte == b'0');
    let mut parts = text.split('-');
    let (Some(version), Some(trace), Some(parent), Some(flags)) = (parts.next(), parts.next(), parts.next(), parts.next()) else {
        return false;
    };
    let more = parts.next().is_some();
    let shape = hex(version, 2) && hex(trace, 32) && hex(parent, 16) && hex(flags, 2);
    shape && version != "ff" && !zero(trace) && !zero(parent) && (version != "00" || !more)
}

// === impl Call ===

impl Call {
    /// A call came in.
    pub(crate) fn open(route: Route, headers: &HeaderMap, metrics: &DoorMetrics, tracer: &Tracer) -> Self {
        metrics.opened(route.door);
        let span = tracer.start(span::REQUEST, trace_context(headers).as_ref());
        span.set("kvasir.door", route.door);
        span.set("kvasir.route", route.name);
        Self {
            route,
            model: None,
            received: Instant::now(),
            first_output: None,
            metrics: metrics.clone(),
            span,
            settled: Settled::default(),
        }
    }

    /// The clock starts now: the body has arrived.
    pub(crate) fn restart(&mut self) {
        self.received = Instant::now();
    }

    /// When the call came in, with its body.
    pub(crate) fn received(&self) -> Instant {
        self.received
    }

    /// The span of the call.
    pub(crate) fn span(&self) -> &RequestSpan {
        &self.span
    }

    /// The model turned out to be served.
    pub(crate) fn model(&mut self, name: &str) {
        self.span.set("gen_ai.request.model", name);
        self.model = Some(name.to_owned());
    }

    /// Output was produced.
    pub(crate) fn output(&mut self) {
        self.first_output.get_or_insert_with(Instant::now);
    }

    /// A gap between two outputs of one choice.
    pub(crate) fn gap(&self, gap: Duration) {
        self.metrics.gap(gap);
    }

    /// The call ends well.
    pub(crate) fn succeed(&mut self, usage: Usage, hits: Vec<TierHit>, states: StateTimes) {
        self.settled = Settled { outcome: Some(OK), usage, hits, states, ended: Some(SystemTime::now()) };
    }

    /// The call ends in a refusal or failure.
    pub(crate) fn fail(&mut self, error: &Error, usage: Usage, states: StateTimes) {
        self.settled =
            Settled { outcome: Some(error.reason.code()), usage, hits: Vec::new(), states, ended: Some(SystemTime::now()) };
    }

    fn trace_end(&self, outcome: &'static str) {
        let Settled { usage, states, .. } = &self.settled;
        let stages = [
            (span::PREPARE, states.get(State::Prepare)),
            (span::ADMIT, states.get(State::AdmitWait)),
            (span::ROUTE, states.get(State::Route)),
        ];
        self.span.stages(self.span.started(), &stages);
        if let Some(ended) = self.settled.ended {
            let emit = SystemTime::now().duration_since(ended).unwrap_or_default();
            self.span.stage(span::EMIT, ended, emit, &[]);
        }
        self.span.set("gen_ai.usage.input_tokens", usage.prompt_tokens);
        self.span.set("gen_ai.usage.output_tokens", usage.completion_tokens);
        self.span.set("kvasir.cached_tokens", usage.cached_tokens);
        if outcome != OK {
            self.span.fail(outcome);
        }
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        let outcome = self.settled.outcome.unwrap_or(Reason::Cancelled.code());
        self.trace_end(outcome);
        let Settled { usage, hits, states, .. } = &self.settled;
        let deepest = hits.iter().filter(|hit| hit.tokens > 0).map(|hit| hit.tier).max();
        let finished = FinishedRequest {
            door: self.route.door,
            route: self.route.name,
            model: self.model.as_deref().unwrap_or(OTHER),
            outcome,
            ttft: self.first_output.map(|at| at.duration_since(self.received)),
            total: self.received.elapsed(),
            output_tokens: usage.completion_tokens,
            prompt_tokens: usage.prompt_tokens,
            cached_tokens: usage.cached_tokens,
            tier: deepest.map_or("none", kvasir_core::Tier::name),
            judged: self.route.generates && (outcome == OK || Reason::from_code(outcome).is_some_and(Reason::blames_service)),
        };
        self.metrics.finished(&finished, states.iter().map(|(state, time)| (state.name(), time)));
        self.metrics.closed(self.route.door);
    }
}

#[cfg(test)]
mod tests;
