//! Tracing and metrics: every span and metric name once, one way to export them.
//!
//! Owns names, labels, buckets and exporters. Refuses to know what a request or a worker is: callers pass words and durations. Costs: a
//! counter is one atomic add; a request's spans are built when it ends, from durations that were measured anyway.
//!
//! Invariants
//! 1. Labels are bounded: each label value comes from a closed vocabulary or from a configured list.
//! 2. No domain id, key, prompt or salt is ever given to this crate.

mod log;
mod metrics;
pub mod names;
mod trace;

pub use log::{LogError, LogFormat, init_log};
pub use metrics::{
    AdmittedPrompt, DoorMetrics, FinishedRequest, OperatorMetrics, Outcome, Registry, RouterMetrics, Slo, WorkerLevels,
    WorkerMetrics, WorkerTotals,
};
pub use trace::{RequestSpan, SpanContext, TraceConfig, TraceError, Tracer, Value};
