//! Scrape: what is read over plain HTTP: the metrics text of a router, and what a worker that starts says of itself.
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
pub(super) async fn metrics(address: &str) -> Result<String, AdminError> {
    match read(address, "/metrics").await? {
        (status, text) if status.is_success() => Ok(text),
        (status, _) => Err(failed(address, "/metrics", "refused", status.to_string())),
    }
}

/// Reads `/readyz` at an address: a worker that is not ready says how much of its model it has fetched.
pub(super) async fn fetched(address: &str) -> Result<Option<u32>, AdminError> {
    let (_, text) = read(address, "/readyz").await?;
    let body: serde_json::Value =
        serde_json::from_str(&text).map_err(|error| failed(address, "/readyz", "unreadable", error.to_string()))?;
    Ok(body["fetched_percent"].as_u64().map(|percent| percent.min(100) as u32))
}

fn failed(address: &str, method: &'static str, code: &str, message: String) -> AdminError {
    AdminError::Call { address: address.to_owned(), method, code: code.to_owned(), message }
}

async fn read(address: &str, path: &'static str) -> Result<(http::StatusCode, String), AdminError> {
    let failed = |code: &str, message: String| failed(address, path, code, message);
    let uri = format!("http://{address}{path}")
        .parse::<http::Uri>()
        .map_err(|error| AdminError::Address { address: address.to_owned(), message: error.to_string() })?;
    let client: Client<_, Empty<Bytes>> = Client::builder(TokioExecutor::new()).build_http();
    let read = async {
        let response = client.get(uri).await.map_err(|error| failed("unreachable", error.to_string()))?;
        let status = response.status();
        let body = Limited::new(response.into_body(), BYTES_MAX).collect().await;
        let body = body.map_err(|error| failed("unreadable", error.to_string()))?.to_bytes();
        Ok((status, String::from_utf8_lossy(&body).into_owned()))
    };
    timeout(SCRAPE_MAX, read).await.unwrap_or_else(|_late| Err(failed("late", "no answer within 2 s".to_owned())))
}
