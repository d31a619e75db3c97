//! Request traces over OTLP.
//!
//! Owns the exporter and the shape of a request's spans. A request's stages are measured as exclusive durations; their spans are laid end
//! to end when the stage or the request ends, so tracing adds no clock reads to the hot path. Refuses to know which stages exist.
//!
//! Guarantees: W3C context in and out; the caller's sampled flag is kept; a malformed header starts a new trace and is no error; nothing
//! here can fail a request (an unreachable collector drops spans).

use opentelemetry::trace::{
    SpanContext as OtelContext, SpanId, SpanKind, Status, TraceContextExt as _, TraceFlags, TraceId, TraceState, Tracer as _,
    TracerProvider as _,
};
use opentelemetry::{Context, KeyValue};
use opentelemetry_otlp::WithExportConfig as _;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{Sampler, SdkTracer, SdkTracerProvider, SpanExporter};
use std::str::FromStr as _;
use std::time::{Duration, SystemTime};

/// How a component exports its spans.
#[derive(Clone, Debug)]
pub struct TraceConfig {
    /// `service.name` of the component.
    pub service: &'static str,
    /// `service.instance.id`: pod name or uid.
    pub instance: String,
    /// OTLP/gRPC endpoint (`http://host:4317`); `None` disables tracing.
    pub otlp: Option<String>,
    /// Share of traces that start here and are kept, 0 to 1; a caller's decision is followed.
    pub sampling: f64,
}

/// Why tracing could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The exporter refused its settings.
    #[error("otlp endpoint `{endpoint}` is invalid: {message}; write for example `http://localhost:4317`")]
    Endpoint {
        /// As given.
        endpoint: String,
        /// Why.
        message: String,
    },
}

/// W3C trace context on its way between processes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SpanContext {
    /// The `traceparent` header.
    pub traceparent: String,
    /// The `tracestate` header, if any.
    pub tracestate: Option<String>,
}

/// Starts request spans; cheap to clone. A disabled tracer passes the caller's context through.
#[derive(Clone)]
pub struct Tracer(Option<Inner>);

#[derive(Clone)]
struct Inner {
    tracer: SdkTracer,
    provider: SdkTracerProvider,
}

/// One open span of a request.
pub struct RequestSpan {
    tracer: Option<Inner>,
    context: Context,
    passed_on: Option<SpanContext>,
    started: SystemTime,
}

// === impl Tracer ===

impl Tracer {
    /// A tracer that records nothing.
    pub const fn disabled() -> Self {
        Self(None)
    }

    /// Connects lazily to the collector. Must be called inside a tokio runtime when an endpoint is given.
    pub fn new(config: &TraceConfig) -> Result<Self, TraceError> {
        let Some(endpoint) = &config.otlp else { return Ok(Self::disabled()) };
        let exporter = opentelemetry_otlp::SpanExporter::builder()
            .with_tonic()
            .with_endpoint(endpoint.clone())
            .with_timeout(Duration::from_secs(5))
            .build()
            .map_err(|error| TraceError::Endpoint { endpoint: endpoint.clone(), message: error.to_string() })?;
        Ok(Self::with_exporter(config, exporter))
    }

    /// A tracer over any exporter (tests read spans back from memory).
    pub fn with_exporter(config: &TraceConfig, exporter: impl SpanExporter + 'static) -> Self {
        let resource = Resource::builder()
            .with_service_name(config.service)
            .with_attribute(KeyValue::new("service.instance.id", config.instance.clone()))
            .build();
        let provider = SdkTracerProvider::builder()
            .with_sampler(Sampler::ParentBased(Box::new(Sampler::TraceIdRatioBased(config.sampling))))
            .with_resource(resource)
            .with_batch_exporter(exporter)
            .build();
        Self(Some(Inner { tracer: provider.tracer("kvasir"), provider }))
    }

    /// Opens a span under a caller's context, or as a new root.
    pub fn start(&self, name: &'static str, parent: Option<&SpanContext>) -> RequestSpan {
        let started = SystemTime::now();
        let Some(inner) = &self.0 else {
            return RequestSpan { tracer: None, context: Context::new(), passed_on: parent.cloned(), started };
        };
        let parent_context =
            parent.and_then(parse).map_or_else(Context::new, |context| Context::new().with_remote_span_context(context));
        RequestSpan::open(inner, name, SpanKind::Server, &parent_context, started)
    }

    /// Opens a new root that began at `started`: for work that is worth a trace only once its outcome is known.
    pub fn start_at(&self, name: &'static str, started: SystemTime) -> RequestSpan {
        match &self.0 {
            None => RequestSpan { tracer: None, context: Context::new(), passed_on: None, started },
            Some(inner) => RequestSpan::open(inner, name, SpanKind::Internal, &Context::new(), started),
        }
    }

    /// Sends what is buffered and stops; spans after it are dropped.
    pub fn shutdown(&self) {
        if let Some(inner) = &self.0 {
            // A collector that is gone must not hold up the exit; the loss is only of spans.
            let _lost = inner.provider.shutdown_with_timeout(Duration::from_secs(2));
        }
    }

    /// Sends what is buffered.
    pub fn flush(&self) {
        if let Some(inner) = &self.0 {
            let _lost = inner.provider.force_flush();
        }
    }
}

// === impl RequestSpan ===

impl RequestSpan {
    fn open(inner: &Inner, name: &'static str, kind: SpanKind, parent: &Context, started: SystemTime) -> Self {
        let span =
            inner.tracer.span_builder(name).with_kind(kind).with_start_time(started).start_with_context(&inner.tracer, parent);
        Self { tracer: Some(inner.clone()), context: Context::new().with_span(span), passed_on: None, started }
    }

    /// Opens a child that ends by itself (an attempt on a worker).
    pub fn child(&self, name: &'static str) -> Self {
        match &self.tracer {
            None => Self { tracer: None, context: Context::new(), passed_on: self.passed_on.clone(), started: SystemTime::now() },
            Some(inner) => Self::open(inner, name, SpanKind::Client, &self.context, SystemTime::now()),
        }
    }

    /// Adds finished children laid end to end from `from` on: (name, duration), zero durations left out. Returns the end.
    pub fn stages(&self, from: SystemTime, stages: &[(&'static str, Duration)]) -> SystemTime {
        let mut at = from;
        for (name, duration) in stages.iter().filter(|(_, duration)| !duration.is_zero()) {
            self.stage(name, at, *duration, &[]);
            at += *duration;
        }
        at
    }

    /// Adds one finished child with attributes.
    pub fn stage(&self, name: &'static str, start: SystemTime, duration: Duration, attributes: &[(&'static str, Value)]) {
        let Some(inner) = &self.tracer else { return };
        let builder = inner.tracer.span_builder(name).with_kind(SpanKind::Internal).with_start_time(start);
        let builder =
            builder.with_attributes(attributes.iter().map(|(key, value)| KeyValue::new(*key, value.clone().into_otel())));
        let mut span = builder.start_with_context(&inner.tracer, &self.context);
        opentelemetry::trace::Span::end_with_timestamp(&mut span, start + duration);
    }

    /// When the span was opened.
    pub fn started(&self) -> SystemTime {
        self.started
    }

    /// Sets an attribute.
    pub fn set(&self, key: &'static str, value: impl Into<Value>) {
        self.context.span().set_attribute(KeyValue::new(key, value.into().into_otel()));
    }

    /// Adds an event.
    pub fn event(&self, name: &'static str, attributes: &[(&'static str, Value)]) {
        let attributes = attributes.iter().map(|(key, value)| KeyValue::new(*key, value.clone().into_otel())).collect();
        self.context.span().add_event(name, attributes);
    }

    /// Marks the span as failed with a reason code.
    pub fn fail(&self, reason: &'static str) {
        self.set("error.type", reason);
        self.context.span().set_status(Status::error(reason));
    }

    /// The context to hand to the next process.
    pub fn context(&self) -> Option<SpanContext> {
        if self.tracer.is_none() {
            return self.passed_on.clone();
        }
        let span = self.context.span();
        let context = span.span_context();
        context.is_valid().then(|| SpanContext {
            traceparent: format!(
                "00-{}-{}-{:02x}",
                context.trace_id(),
                context.span_id(),
                context.trace_flags() & TraceFlags::SAMPLED
            ),
            tracestate: Some(context.trace_state().header()).filter(|state| !state.is_empty()),
        })
    }

    /// Trace id in hexadecimal, for a reply header.
    pub fn trace_id(&self) -> Option<String> {
        let span = self.context.span();
        let context = span.span_context();
        context.is_valid().then(|| context.trace_id().to_string())
    }
}

impl Drop for RequestSpan {
    fn drop(&mut self) {
        self.context.span().end();
    }
}

// === attribute values ===

/// Value of a span attribute.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Text.
    Text(String),
    /// Integer.
    Int(i64),
    /// Float.
    Float(f64),
    /// Flag.
    Bool(bool),
}

impl Value {
    fn into_otel(self) -> opentelemetry::Value {
        match self {
            Self::Text(text) => text.into(),
            Self::Int(value) => value.into(),
            Self::Float(value) => value.into(),
            Self::Bool(value) => value.into(),
        }
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<String> for Value {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

impl From<u32> for Value {
    fn from(value: u32) -> Self {
        Self::Int(value.into())
    }
}

impl From<u64> for Value {
    fn from(value: u64) -> Self {
        Self::Int(i64::try_from(value).unwrap_or(i64::MAX))
    }
}

impl From<f64> for Value {
    fn from(value: f64) -> Self {
        Self::Float(value)
    }
}

impl From<bool> for Value {
    fn from(value: bool) -> Self {
        Self::Bool(value)
    }
}

/// Reads a `traceparent` of version 00 (or a later one by its first four fields); `None` when malformed.
fn parse(context: &SpanContext) -> Option<OtelContext> {
    let mut fields = context.traceparent.trim().split('-');
    let (version, trace, span, flags) = (fields.next()?, fields.next()?, fields.next()?, fields.next()?);
    let hex = |text: &str, len: usize| text.len() == len && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    if !(hex(version, 2) && hex(trace, 32) && hex(span, 16) && hex(flags, 2)) || version == "ff" {
        return None;
    }
    if version == "00" && fields.next().is_some() {
        return None;
    }
    let flags = TraceFlags::new(u8::from_str_radix(flags, 16).ok()?) & TraceFlags::SAMPLED;
    let state = context.tracestate.as_deref().and_then(|state| TraceState::from_str(state).ok()).unwrap_or_default();
    let context = OtelContext::new(TraceId::from_hex(trace).ok()?, SpanId::from_hex(span).ok()?, flags, true, state);
    context.is_valid().then_some(context)
}

#[cfg(test)]
mod tests;
