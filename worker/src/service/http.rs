//! The plain HTTP port: metrics and probes, open before the model is loaded.

use super::WorkerService;
use axum::Router;
use axum::extract;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use http::{StatusCode, header};
use kvasir_core::{Error, Reason};
use kvasir_telemetry::Registry;
use serde_json::json;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

/// Whether there is a worker yet, and how far its model is; clones share it.
#[derive(Clone, Default)]
pub struct Readiness(Arc<State>);

#[derive(Default)]
struct State {
    service: OnceLock<WorkerService>,
    /// Percent of the model's bytes that have been fetched, plus one; 0 while nothing is.
    fetched: AtomicU32,
}

// === impl Readiness ===

impl Readiness {
    /// The worker runs.
    pub fn set(&self, service: WorkerService) {
        // A second worker under one port is a defect of the caller; the first one stays.
        let _first_stays = self.0.service.set(service);
    }

    /// So much of the model has been fetched, in percent; absent when nothing is being fetched.
    pub fn fetched(&self, percent: Option<u32>) {
        self.0.fetched.store(percent.map_or(0, |percent| percent.min(100) + 1), Ordering::Relaxed);
    }

    fn fetched_percent(&self) -> Option<u32> {
        self.0.fetched.load(Ordering::Relaxed).checked_sub(1)
    }

    /// Whether requests are served; the error says what is missing.
    pub fn check(&self) -> Result<&WorkerService, Error> {
        let service = self.0.service.get().ok_or_else(|| {
            let doing = self.fetched_percent().map_or_else(|| "loaded".to_owned(), |percent| format!("fetched: {percent} %"));
            Error::new(Reason::NotReady, format!("the model is being {doing}"))
        })?;
        service.ready().map(|()| service)
    }
}

/// `/metrics`, `/readyz` and `/healthz`.
pub fn http_router(readiness: Readiness) -> Router {
    Router::new()
        .route("/metrics", get(metrics))
        .route("/readyz", get(readyz))
        .route("/healthz", get(async || "ok\n"))
        .with_state(readiness)
}

async fn metrics(extract::State(readiness): extract::State<Readiness>) -> Response {
    // Before the worker runs there is nothing to show; an empty exposition is valid.
    let text = readiness.0.service.get().map_or_else(|| Registry::default().render(), WorkerService::render_metrics);
    ([(header::CONTENT_TYPE, Registry::CONTENT_TYPE)], text).into_response()
}

async fn readyz(extract::State(readiness): extract::State<Readiness>) -> Response {
    match readiness.check() {
        Ok(service) => {
            let body = json!({"ready": true, "in_flight": service.in_flight()});
            (StatusCode::OK, axum::Json(body)).into_response()
        }
        Err(error) => {
            let fetched = readiness.fetched_percent();
            let body =
                json!({"ready": false, "reason": error.reason.code(), "message": error.message, "fetched_percent": fetched});
            let status = StatusCode::from_u16(error.reason.http_status()).unwrap_or(StatusCode::SERVICE_UNAVAILABLE);
            (status, axum::Json(body)).into_response()
        }
    }
}
