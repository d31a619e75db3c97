//! Reads a request body within its limits.

use crate::door::DoorSettings;
use axum::extract::Request;
use http::{HeaderMap, header};
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use kvasir_core::{Error, Reason};
use serde_json::Value;

/// Reads JSON. Stops reading at the limit; a body is never cut and then parsed.
pub(crate) async fn json(settings: &DoorSettings, request: Request) -> Result<Value, Error> {
    let limit = settings.body_bytes_max;
    refuse_encoding(request.headers())?;
    let length = request.headers().get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    if length.is_some_and(|length| length > limit as u64) {
        return Err(too_large(limit));
    }
    let late = |_| {
        let seconds = settings.body_wait.as_secs();
        Error::new(Reason::DeadlineExceeded, format!("the body did not arrive within {seconds} s; send it faster, or split it"))
    };
    let reading = Limited::new(request.into_body(), limit).collect();
    let bytes = match tokio::time::timeout(settings.body_wait, reading).await.map_err(late)? {
        Ok(collected) => collected.to_bytes(),
        Err(error) if is_limit(&*error) => return Err(too_large(limit)),
        Err(error) => return Err(Error::invalid("body", format!("the body could not be read: {error}; send it whole"))),
    };
    if bytes.is_empty() {
        return Err(Error::invalid("body", "the body is empty; give one JSON object"));
    }
    serde_json::from_slice(&bytes).map_err(|error| Error::invalid("body", format!("the body is not valid JSON: {error}")))
}

/// Whether an error says that a body was over its limit.
fn is_limit(error: &(dyn std::error::Error + 'static)) -> bool {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if error.is::<LengthLimitError>() {
            return true;
        }
        cause = error.source();
    }
    false
}

fn too_large(limit: usize) -> Error {
    let message =
        format!("the body is larger than the limit of {limit} bytes; shorten it, or ask the operator to raise the limit");
    Error::new(Reason::PayloadTooLarge, message).with_field("body")
}

/// A packed body could grow without bound after it passed the limit.
fn refuse_encoding(headers: &HeaderMap) -> Result<(), Error> {
    let packed =
        headers.get_all(header::CONTENT_ENCODING).iter().find(|value| !value.as_bytes().eq_ignore_ascii_case(b"identity"));
    match packed {
        None => Ok(()),
        Some(_) => Err(Error::invalid(
            "Content-Encoding",
            "compressed bodies are not accepted; send the body without `Content-Encoding`",
        )),
    }
}
