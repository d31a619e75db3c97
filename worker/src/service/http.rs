//! The plain HTTP port: metrics and probes, open before the model is loaded.

use super::WorkerService;
use axum::Router;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use http::{StatusCode, header};
use kvasir_core::{Error, Reason};
use kvasir_telemetry::Registry;
use serde_json::json;
use std::sync::{Arc, OnceLock};

/// Whether there is a worker yet; clones share it.
#[derive(Clone, Default)]
pub struct Readiness(Arc<OnceLock<WorkerService>>);

// === impl Readiness ===

impl Readiness {
    /// The worker runs.
    pub fn set(&self, service: WorkerService) {
        // A second worker under one port is a defect of the caller; the first one stays.
        let _first_stays = self.0.set(service);
    }

    /// Whether requests are served; the error says what is missing.
    pub fn check(&self) -> Result<&WorkerService, Error> {
        let service = self.0.get().ok_or_else(|| Error::new(Reason::NotReady, "the model is being loaded"))?;
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

async fn metrics(State(readiness): State<Readiness>) -> Response {
    // Before the worker runs there is nothing to show; an empty exposition is valid.
    let text = readiness.0.get().map_or_else(|| Registry::default().render(), WorkerService::render_metrics);
    ([(header::CONTENT_TYPE, Registry::CONTENT_TYPE)], text).into_response()
}

async fn readyz(State(readiness): State<Readiness>) -> Response {
    match readiness.check() {
        Ok(service) => {
            let body = json!({"ready": true, "in_flight": service.in_flight()});
            (StatusCode::OK, axum::Json(body)).into_response()
        }
        Err(error) => {
            let body = json!({"ready": false, "reason": error.reason.code(), "message": error.message});
            let status = StatusCode::from_u16(error.reason.http_status()).unwrap_or(StatusCode::SERVICE_UNAVAILABLE);
            (status, axum::Json(body)).into_response()
        }
    }
}
