//! Probes and metrics over plain HTTP.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test may stop at the first surprise")]

use super::rig::{prompt, rig};
use axum::Router;
use axum::body::{Body, to_bytes};
use http::{Request, StatusCode};
use kvasir_worker::service::{Readiness, http_router};
use serde_json::Value;
use std::time::Duration;
use tower::ServiceExt as _;

async fn get(router: &Router, path: &str) -> (StatusCode, String) {
    let answer = router.clone().oneshot(Request::get(path).body(Body::empty()).unwrap()).await.unwrap();
    let status = answer.status();
    (status, String::from_utf8(to_bytes(answer.into_body(), 1 << 20).await.unwrap().to_vec()).unwrap())
}

async fn readyz(router: &Router) -> (StatusCode, Value) {
    let (status, body) = get(router, "/readyz").await;
    (status, serde_json::from_str(&body).unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn readiness_says_why_from_loading_to_leaving() {
    let readiness = Readiness::default();
    let router = http_router(readiness.clone());
    let (status, body) = readyz(&router).await;
    assert_eq!((status, body["reason"].as_str()), (StatusCode::SERVICE_UNAVAILABLE, Some("not_ready")));
    assert_eq!(get(&router, "/healthz").await.0, StatusCode::OK);
    assert!(get(&router, "/metrics").await.1.ends_with("# EOF\n"));

    let rig = rig().await;
    rig.runtime().announce(&readiness);
    let (status, body) = readyz(&router).await;
    assert_eq!((status, &body["ready"], &body["in_flight"]), (StatusCode::OK, &Value::Bool(true), &Value::from(0)));

    rig.runtime().service().begin_drain(Some(Duration::from_secs(9)));
    let (status, body) = readyz(&router).await;
    assert_eq!((status, body["reason"].as_str()), (StatusCode::SERVICE_UNAVAILABLE, Some("draining")));
    assert_eq!(get(&router, "/healthz").await.0, StatusCode::OK, "a draining worker is alive");
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_add_up_to_what_was_served() {
    let rig = rig().await;
    let readiness = Readiness::default();
    rig.runtime().announce(&readiness);
    let request = rig.request("a", &prompt(1, 21), 9);
    rig.run(&request).await;
    rig.run(&request).await;
    rig.at_rest().await;
    let (_, text) = get(&http_router(readiness), "/metrics").await;
    let value = |name: &str| -> f64 {
        let line = text.lines().find(|line| line.starts_with(name) && line[name.len()..].starts_with(' '));
        line.unwrap_or_else(|| panic!("{name} is missing from\n{text}")).rsplit(' ').next().unwrap().parse().unwrap()
    };
    assert_eq!(value(r#"kvasir_engine_requests_total{outcome="ok"}"#), 2.0);
    assert_eq!(value(r#"kvasir_prompt_tokens_total{source="device"}"#), 20.0);
    assert_eq!(value(r#"kvasir_prompt_tokens_total{source="computed"}"#), 22.0);
    assert_eq!(value(r#"kvasir_prefix_misses_total{reason="cold"}"#), 1.0);
    assert_eq!(value("kvasir_prefix_requests_total"), 2.0);
    assert_eq!(value("kvasir_reconcile_violations_total"), 0.0);
    let blocks = ["free", "cached", "held"].map(|state| value(&format!(r#"kvasir_blocks{{tier="device",state="{state}"}}"#)));
    assert_eq!(blocks.iter().sum::<f64>(), 512.0);
    assert_eq!(blocks[2], 0.0);
}
