//! Errors as the OpenAI API shows them.

use axum::body::Body;
use axum::response::Response;
use http::{HeaderValue, StatusCode, header};
use kvasir_core::{Error, Reason};
use serde::Serialize;
use std::time::Duration;

/// When a client may come back if nobody knows better.
const RETRY_AFTER_DEFAULT: Duration = Duration::from_secs(1);

/// `{"error": …}`.
#[derive(Serialize)]
pub(crate) struct ErrorBody<'a> {
    error: ErrorObject<'a>,
}

#[derive(Serialize)]
struct ErrorObject<'a> {
    message: &'a str,
    r#type: &'static str,
    param: Option<&'a str>,
    code: &'static str,
}

impl<'a> ErrorBody<'a> {
    /// Shows an error.
    pub(crate) fn new(error: &'a Error) -> Self {
        Self {
            error: ErrorObject {
                message: &error.message,
                r#type: error.reason.openai_type(),
                param: error.field.as_deref(),
                code: error.reason.code(),
            },
        }
    }

    /// As JSON text.
    pub(crate) fn json(&self) -> String {
        // Strings alone cannot fail to serialise.
        serde_json::to_string(self).unwrap_or_default()
    }
}

/// An error as a whole response, with the headers that tell a client whether and when to try again.
pub(crate) fn error_response(error: &Error) -> Response {
    let mut response = Response::new(Body::from(ErrorBody::new(error).json()));
    *response.status_mut() = StatusCode::from_u16(error.reason.http_status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    if error.reason == Reason::Unauthenticated {
        headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    if error.retryable() {
        let after = error.retry_after.unwrap_or(RETRY_AFTER_DEFAULT);
        headers.insert(header::RETRY_AFTER, HeaderValue::from(after.as_millis().div_ceil(1000).max(1) as u64));
    } else {
        // OpenAI's SDKs retry any 5xx otherwise.
        headers.insert("x-should-retry", HeaderValue::from_static("false"));
    }
    response
}
