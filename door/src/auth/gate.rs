//! The gate in front of both doors: default deny.
//!
//! Owns the list of what is open. It looks at the exact path and method as sent, before any routing, so that another spelling of a path is
//! never more open than the path itself. What passes carries its [`Tenant`] as a request extension; handlers have no other way to get one.

use super::Tenant;
use crate::call::{OTHER, Route};
use crate::door::Door;
use crate::grpc::status_response;
use crate::openai::error_response;
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use http::{HeaderMap, Method, header};
use kvasir_core::{StateTimes, Usage};
use std::sync::Arc;

/// Open to everyone, by GET and HEAD.
const OPEN_HTTP: [&str; 3] = ["/healthz", "/readyz", "/metrics"];

/// Open to everyone, by gRPC.
const OPEN_GRPC: [&str; 4] = [
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
];

/// Headers by which other systems let a caller name a tenant; they mean nothing here and go no further.
const TENANT_HEADERS: [&str; 5] = ["x-tenant", "x-tenant-id", "x-kvasir-tenant", "x-kvasir-domain", "x-kvasir-priority"];

/// Lets a request pass with its tenant, or refuses it in the caller's language.
pub(crate) async fn gate(State(door): State<Door>, mut request: Request, next: Next) -> Response {
    request.extensions_mut().remove::<Arc<Tenant>>();
    for name in TENANT_HEADERS {
        request.headers_mut().remove(name);
    }
    if is_open(request.method(), request.uri().path(), request.headers()) {
        return next.run(request).await;
    }
    let mut keys = request.headers().get_all(header::AUTHORIZATION).iter();
    let first = keys.next().map(http::HeaderValue::as_bytes);
    // Two keys would let two readers see two callers.
    let presented = if keys.next().is_some() { Some(&b""[..]) } else { first };
    match door.tenants().current().authenticate(presented) {
        Ok(tenant) => {
            request.headers_mut().remove(header::AUTHORIZATION);
            request.extensions_mut().insert(tenant);
            next.run(request).await
        }
        Err(error) => {
            let grpc = is_grpc(request.headers());
            let route = Route { door: if grpc { "grpc" } else { "http" }, name: OTHER, generates: false };
            door.open(route, request.headers()).fail(&error, Usage::default(), StateTimes::default());
            if grpc { status_response(&error) } else { error_response(&error) }
        }
    }
}

/// Whether a request speaks gRPC.
pub(crate) fn is_grpc(headers: &HeaderMap) -> bool {
    headers.get(header::CONTENT_TYPE).is_some_and(|value| value.as_bytes().starts_with(b"application/grpc"))
}

fn is_open(method: &Method, path: &str, headers: &HeaderMap) -> bool {
    if is_grpc(headers) {
        return OPEN_GRPC.contains(&path);
    }
    (method == Method::GET || method == Method::HEAD) && OPEN_HTTP.contains(&path)
}
