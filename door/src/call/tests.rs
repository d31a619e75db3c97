//! Trace headers as they come.
#![allow(clippy::unwrap_used, reason = "tests fail by panicking")]

use super::*;

const GOOD: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

fn headers(entries: &[(&'static str, &str)]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in entries {
        headers.append(*name, value.parse().unwrap());
    }
    headers
}

/// R70: a good header is passed on as it is, a malformed one starts a new trace and is no error.
#[test]
fn a_malformed_trace_header_is_none() {
    let context = trace_context(&headers(&[("traceparent", GOOD), ("tracestate", "a=1"), ("tracestate", "b=2")])).unwrap();
    assert_eq!((context.traceparent.as_str(), context.tracestate.as_deref()), (GOOD, Some("a=1,b=2")));
    assert!(trace_context(&headers(&[("traceparent", &format!("cc{}-more", &GOOD[2..]))])).is_some());
    let upper = GOOD.to_uppercase();
    let longer = format!("{GOOD}-more");
    let zero_trace = GOOD.replace("4bf92f3577b34da6a3ce929d0e0e4736", &"0".repeat(32));
    let zero_parent = GOOD.replace("00f067aa0ba902b7", &"0".repeat(16));
    let version_ff = format!("ff{}", &GOOD[2..]);
    for bad in ["", "x", &upper, &longer, &zero_trace, &zero_parent, &version_ff, &GOOD[..54]] {
        assert!(trace_context(&headers(&[("traceparent", bad)])).is_none(), "{bad}");
    }
    assert!(trace_context(&headers(&[("traceparent", GOOD), ("traceparent", GOOD)])).is_none());
    assert!(trace_context(&headers(&[("tracestate", "a=1")])).is_none());
    let long = format!("a={}", "x".repeat(600));
    assert_eq!(trace_context(&headers(&[("traceparent", GOOD), ("tracestate", &long)])).unwrap().tracestate, None);
}
