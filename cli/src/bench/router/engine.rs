//! A stand-in for an inference server that speaks OpenAI over HTTP: it reads a request and streams 16 chunks, without any work.
//!
//! Peers route to it. Each engine has one thread, and each chunk is written on its own, as an engine that makes a token per step does.

use super::RouterBenchError;
use super::prompts::{CHUNKS, MODEL};
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, post};
use axum::serve::ListenerExt as _;
use axum::{Json, Router};
use futures::stream;
use serde_json::json;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::net::TcpListener;
use tokio::runtime::{Builder, Runtime};

/// A running engine; dropping it stops it.
pub struct Engine {
    /// Where it listens.
    pub address: SocketAddr,
    answered: Arc<AtomicU64>,
    runtime: Option<Runtime>,
}

#[derive(Clone)]
struct Shared {
    frames: Arc<[Bytes]>,
    answered: Arc<AtomicU64>,
}

// === impl Engine ===

impl Engine {
    /// Starts one on a free loopback port.
    pub fn start() -> Result<Self, RouterBenchError> {
        let failed = RouterBenchError::Engine;
        let runtime =
            Builder::new_multi_thread().worker_threads(1).thread_name("mock-http").enable_all().build().map_err(failed)?;
        let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let listener = {
            // A tokio listener belongs to the runtime that it is made in.
            let _inside = runtime.enter();
            TcpListener::from_std(listener).map_err(failed)?
        };
        let listener = listener.tap_io(|stream| {
            if let Err(error) = stream.set_nodelay(true) {
                tracing::warn!(%error, "a mock engine cannot switch off Nagle's algorithm");
            }
        });
        let answered = Arc::new(AtomicU64::new(0));
        let shared = Shared { frames: frames(), answered: Arc::clone(&answered) };
        runtime.spawn(async move {
            if let Err(error) = axum::serve(listener, routes(shared)).await {
                tracing::warn!(%error, "a mock engine stopped");
            }
        });
        Ok(Self { address, answered, runtime: Some(runtime) })
    }

    /// Requests that it was sent.
    pub fn answered(&self) -> u64 {
        self.answered.load(Ordering::Relaxed)
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// What routers ask an engine: models, health and figures, and work. What it does not know is a 404, as with an engine that lacks it.
fn routes(shared: Shared) -> Router {
    let models = json!({"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": MODEL, "max_model_len": 32768}]});
    Router::new()
        .route("/v1/chat/completions", post(generate))
        .route("/v1/models", get(move || async { Json(models) }))
        .route("/health", get(|| async { StatusCode::OK }))
        .with_state(shared)
}

async fn generate(State(shared): State<Shared>, _prompt: Bytes) -> Response {
    shared.answered.fetch_add(1, Ordering::Relaxed);
    let chunks = stream::unfold((shared.frames, 0), |(frames, at)| async move {
        // Between two chunks others have their turn, so each is flushed alone.
        tokio::task::yield_now().await;
        let frame = frames.get(at)?.clone();
        Some((Ok::<_, Infallible>(frame), (frames, at + 1)))
    });
    ([(header::CONTENT_TYPE, "text/event-stream")], Body::from_stream(chunks)).into_response()
}

fn frames() -> Arc<[Bytes]> {
    let chunk = |delta: serde_json::Value, finish: Option<&str>| {
        let choice = json!({"index": 0, "delta": delta, "logprobs": null, "finish_reason": finish});
        let event = json!({
            "id": "chatcmpl-0123456789abcdef0123456789abcdef", "object": "chat.completion.chunk", "created": 1_700_000_000, "model": MODEL,
            "choices": [choice],
        });
        format!("data: {event}\n\n")
    };
    let mut frames: Vec<Bytes> = (0..CHUNKS).map(|_| chunk(json!({"content": "w"}), None).into()).collect();
    frames[0] = chunk(json!({"role": "assistant", "content": "w"}), None).into();
    frames.push((chunk(json!({}), Some("length")) + "data: [DONE]\n\n").into());
    frames.into()
}
