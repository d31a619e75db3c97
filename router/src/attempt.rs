//! One try of one request on one worker.
//!
//! Owns the lease, the breaker's trial and the upstream stream of the try, and what is learned from it. Refuses to choose a worker and to decide
//! about retries. Made by [`crate::serve`]; dropping it cancels the work upstream and gives the lease back.
//!
//! Guarantees: the breaker hears exactly one signal per attempt; the lease's prefill is given back at the first output.

use crate::breaker::Signal;
use crate::cost::Work;
use crate::fleet::random_unit;
use crate::lease::Lease;
use crate::pick::Pick;
use crate::worker_client::{CallError, GenerateStream};
use kvasir_core::{Chunk, Error, Reason, Request, Started, TraceContext};
use kvasir_telemetry::names::span;
use kvasir_telemetry::{RequestSpan, RouterMetrics, SpanContext, Tracer};
use std::time::Duration;
use tokio::time::Instant;

/// A try under way.
pub(crate) struct Attempt {
    stream: Option<GenerateStream>,
    pick: Pick,
    work: Work,
    lease: Lease,
    times: Times,
    signalled: bool,
    outcome: &'static str,
    metrics: RouterMetrics,
    span: RequestSpan,
}

struct Times {
    sent: Instant,
    first_output: Option<Instant>,
    outputs: u64,
}

/// Output tokens per choice from which on an answer tells its worker's pace.
const PACE_TOKENS_MIN: f64 = 8.0;

// === impl Attempt ===

impl Attempt {
    /// Sends the request; returns when the worker has taken it.
    pub(crate) async fn open(
        pick: Pick,
        work: Work,
        request: &Request,
        tracer: &Tracer,
        metrics: &RouterMetrics,
    ) -> Result<Self, CallError> {
        let live = &pick.worker.live;
        let span = span_of(tracer, &pick, request.trace.as_ref());
        let mut attempt = Self {
            stream: None,
            lease: live.gauge.lease(pick.claim(&work)),
            times: Times { sent: Instant::now(), first_output: None, outputs: 0 },
            signalled: !live.breaker.enter(Instant::now()),
            outcome: Reason::Cancelled.code(),
            metrics: metrics.clone(),
            pick,
            work,
            span,
        };
        if attempt.signalled {
            // Another request took the gate's one trial between the decision and now.
            let message = format!("worker {} cannot be reached; its next trial is under way", attempt.pick.worker.uid);
            return Err(attempt.failed(CallError { error: Error::new(Reason::NoWorker, message), answered: true }));
        }
        let Some(client) = attempt.pick.worker.client.clone() else {
            let message = format!("worker {} has no connection", attempt.pick.worker.uid);
            return Err(attempt.failed(CallError { error: Error::new(Reason::WorkerLost, message), answered: false }));
        };
        let trace = attempt
            .span
            .context()
            .map(|context| TraceContext { traceparent: context.traceparent, tracestate: context.tracestate });
        let request = Request { trace, ..request.clone() };
        match client.generate(&request).await {
            Ok(stream) => {
                attempt.stream = Some(stream);
                Ok(attempt)
            }
            Err(failed) => Err(attempt.failed(failed)),
        }
    }

    /// The next chunk. After an error the attempt is over.
    pub(crate) async fn next(&mut self) -> Result<Chunk, CallError> {
        let Some(stream) = &mut self.stream else {
            return Err(CallError { error: Error::new(Reason::Internal, "an attempt was read after its end"), answered: true });
        };
        let chunk = match stream.next().await {
            Ok(chunk) => chunk,
            Err(failed) => return Err(self.failed(failed)),
        };
        self.signal(Signal::Answered);
        match &chunk {
            Chunk::Started(started) => self.started(started),
            Chunk::Tokens(tokens) => {
                self.times.outputs += tokens.ids.len() as u64;
                self.first_output();
            }
            Chunk::Finished(_) => {
                self.first_output();
                self.learn_pace();
                self.outcome = "ok";
            }
            Chunk::Failed { error, .. } => {
                self.outcome = error.reason.code();
                self.span.fail(error.reason.code());
            }
        }
        Ok(chunk)
    }

    /// Why this worker.
    pub(crate) fn pick(&self) -> &Pick {
        &self.pick
    }

    /// Time since the request was sent.
    pub(crate) fn elapsed(&self) -> Duration {
        self.times.sent.elapsed()
    }

    fn started(&mut self, started: &Started) {
        self.metrics.predicted(self.pick.predicted_cached_tokens, started.cached());
        self.span.set("kvasir.cached_tokens", started.cached());
        self.span.set("kvasir.predicted_cached_tokens", self.pick.predicted_cached_tokens);
    }

    fn first_output(&mut self) {
        if self.times.first_output.is_some() {
            return;
        }
        let now = Instant::now();
        self.times.first_output = Some(now);
        self.lease.first_output();
        let observed = now.duration_since(self.times.sent).as_secs_f64();
        let Pick { terms, factors, .. } = &self.pick;
        let predicted = (terms.wait_s + terms.prefill_s) / factors.ttft + terms.restore_s;
        self.pick.worker.live.learn(|learned| learned.observe_ttft(predicted, observed, now));
    }

    fn learn_pace(&mut self) {
        let per_choice = self.times.outputs as f64 / f64::from(self.work.choices.max(1));
        let Some(first) = self.times.first_output.filter(|_| per_choice >= PACE_TOKENS_MIN) else { return };
        let observed = first.elapsed().as_secs_f64() / (per_choice - 1.0);
        let predicted = self.pick.terms.decode_s / self.pick.factors.itl / self.work.output_tokens;
        self.pick.worker.live.learn(|learned| learned.observe_itl(predicted, observed, Instant::now()));
    }

    fn failed(&mut self, failed: CallError) -> CallError {
        self.signal(if failed.answered { Signal::Answered } else { Signal::TransportFailed });
        self.outcome = failed.error.reason.code();
        self.span.fail(failed.error.reason.code());
        self.stream = None;
        failed
    }

    fn signal(&mut self, signal: Signal) {
        if !std::mem::replace(&mut self.signalled, true) {
            self.pick.worker.live.breaker.record(signal, Instant::now(), random_unit());
        }
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        self.signal(Signal::Nothing);
        self.metrics.attempted(self.outcome);
    }
}

fn span_of(tracer: &Tracer, pick: &Pick, parent: Option<&TraceContext>) -> RequestSpan {
    let parent = parent.map(|trace| SpanContext { traceparent: trace.traceparent.clone(), tracestate: trace.tracestate.clone() });
    let span = tracer.start(span::ATTEMPT, parent.as_ref());
    span.set("kvasir.worker", pick.worker.uid.to_string());
    span.set("kvasir.branch", pick.branch.name());
    span.set("kvasir.score_s", pick.terms.score_s());
    span
}
