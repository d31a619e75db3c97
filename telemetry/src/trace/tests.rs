use super::*;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::SpanData;
use std::sync::{Arc, Mutex};

#[derive(Clone, Default, Debug)]
struct Memory(Arc<Mutex<Vec<SpanData>>>);

impl SpanExporter for Memory {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        self.0.lock().expect("not poisoned").extend(batch);
        Ok(())
    }
}

fn tracer(memory: &Memory, sampling: f64) -> Tracer {
    let config = TraceConfig { service: "test", instance: "t".into(), otlp: None, sampling };
    Tracer::with_exporter(&config, memory.clone())
}

fn parent(traceparent: &str) -> SpanContext {
    SpanContext { traceparent: traceparent.into(), tracestate: None }
}

const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

#[test]
fn children_join_the_callers_trace_and_stages_lie_end_to_end() {
    let memory = Memory::default();
    let tracer = tracer(&memory, 0.0);
    let span = tracer.start("request", Some(&parent(PARENT)));
    let from = span.started();
    let end = span
        .stages(from, &[("queue", Duration::from_millis(2)), ("skipped", Duration::ZERO), ("prefill", Duration::from_millis(3))]);
    assert_eq!(end, from + Duration::from_millis(5));
    assert_eq!(span.context().expect("sampled").traceparent[3..35], PARENT[3..35]);
    drop(span);
    tracer.flush();
    let spans = memory.0.lock().expect("not poisoned").clone();
    assert_eq!(spans.len(), 3, "{spans:?}");
    let root = spans.iter().find(|span| span.name == "request").expect("root");
    assert_eq!(root.parent_span_id.to_string(), "b7ad6b7169203331");
    for name in ["queue", "prefill"] {
        let stage = spans.iter().find(|span| span.name == name).expect("stage");
        assert_eq!(stage.parent_span_id, root.span_context.span_id());
    }
}

#[test]
fn an_unsampled_caller_stays_unsampled_on_the_way_out() {
    let memory = Memory::default();
    let tracer = tracer(&memory, 1.0);
    let span = tracer.start("request", Some(&parent("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00")));
    let out = span.context().expect("passed on").traceparent;
    assert!(out.starts_with("00-0af7651916cd43dd8448eb211c80319c-") && out.ends_with("-00"), "{out}");
    drop(span);
    tracer.flush();
    assert!(memory.0.lock().expect("not poisoned").is_empty());
}

#[test]
fn a_malformed_header_starts_a_new_trace() {
    let memory = Memory::default();
    let tracer = tracer(&memory, 1.0);
    for bad in [
        "",
        "00",
        "00-xyz-b7ad6b7169203331-01",
        "00-00000000000000000000000000000000-b7ad6b7169203331-01",
        "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-extra",
        "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
    ] {
        let out = tracer.start("request", Some(&parent(bad))).context().expect("a new trace").traceparent;
        assert!(!out.contains("0af7651916cd43dd8448eb211c80319c"), "{bad}");
    }
}

#[test]
fn a_disabled_tracer_passes_the_callers_context_on() {
    let span = Tracer::disabled().start("request", Some(&parent(PARENT)));
    assert_eq!(span.child("attempt").context(), Some(parent(PARENT)));
}
