//! The gate of the gRPC port: nothing but health and reflection passes without the bearer secret.
//!
//! Works on paths before any service is chosen, so a service that is added later, or a path that no service has, is closed by itself. Also
//! turns the transport's own refusal of a large message into the protocol's.

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use http::header::AUTHORIZATION;
use kvasir_core::{Error, Reason};
use kvasir_proto::auth::Guard;
use kvasir_proto::convert::error_to_status;
use tonic::{Code, Status};

/// Path prefixes that anyone may call; they tell nothing of requests.
const OPEN: [&str; 2] = ["/grpc.health.v1.Health/", "/grpc.reflection."];

/// What the gate needs.
#[derive(Clone)]
pub(super) struct Gate {
    pub(super) guard: Guard,
    pub(super) request_bytes_max: usize,
}

pub(super) async fn gate(State(gate): State<Gate>, request: Request, next: Next) -> Response {
    let path = request.uri().path();
    let open = OPEN.iter().any(|prefix| path.starts_with(prefix));
    if !open {
        let header = request.headers().get(AUTHORIZATION).map(http::HeaderValue::as_bytes);
        if let Err(error) = gate.guard.check(header) {
            return refuse(&error);
        }
    }
    let response = next.run(request).await;
    let status = Status::from_header_map(response.headers());
    if status.is_some_and(|status| status.code() == Code::OutOfRange) {
        // No service of ours answers OUT_OF_RANGE: it is how the codec refuses a message above the limit.
        let message =
            format!("the request message is larger than {} bytes, the most that this worker takes", gate.request_bytes_max);
        return refuse(&Error::new(Reason::PayloadTooLarge, message));
    }
    response
}

fn refuse(error: &Error) -> Response {
    error_to_status(error).into_http::<axum::body::Body>().into_response()
}
