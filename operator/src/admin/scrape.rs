//! Scrape: the metrics text of a router, over plain HTTP.
//!
//! Owns the bounds: two seconds and four mebibytes.

use super::AdminError;
use bytes::Bytes;
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use std::time::Duration;
use tokio::time::timeout;

/// Longest wait for the whole text.
const SCRAPE_MAX: Duration = Duration::from_secs(2);
/// Longest text.
const BYTES_MAX: usize = 4 << 20;

/// Reads `/metrics` at an address.
pub(super) async fn scrape(address: &str) -> Result<String, AdminError> {
    let failed = |code: &str, message: String| AdminError::Call {
        address: address.to_owned(),
        method: "/metrics",
        code: code.to_owned(),
        message,
    };
    let uri = format!("http://{address}/metrics")
        .parse::<http::Uri>()
        .map_err(|error| AdminError::Address { address: address.to_owned(), message: error.to_string() })?;
    let client: Client<_, Empty<Bytes>> = Client::builder(TokioExecutor::new()).build_http();
    let read = async {
        let response = client.get(uri).await.map_err(|error| failed("unreachable", error.to_string()))?;
        if !response.status().is_success() {
            return Err(failed("refused", response.status().to_string()));
        }
        let body = Limited::new(response.into_body(), BYTES_MAX).collect().await;
        let body = body.map_err(|error| failed("unreadable", error.to_string()))?.to_bytes();
        Ok(String::from_utf8_lossy(&body).into_owned())
    };
    timeout(SCRAPE_MAX, read).await.unwrap_or_else(|_late| Err(failed("late", "no answer within 2 s".to_owned())))
}
