//! Tracing and OTLP set-up, the metric registry, every metric and span name once.
