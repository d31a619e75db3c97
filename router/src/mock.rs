//! A worker without weights: an engine simulator that speaks `worker.proto`, for tests and benchmarks of the router.
//!
//! Owns a true block cache with events, a serial prefill of set speed, decoding of set pace, and faults on demand. Refuses to be a model: its output
//! is a function of prompt and position. Runs in a thread of its own, so that it can be killed like a process: every connection breaks at once.
//!
//! What it does not simulate: batching effects on step time, preemption, tiers below the device, speculation.

mod engine;
mod service;
mod text;

pub use engine::{Fault, MockLevels, MockSettings};
pub use text::{END_TOKEN, artifacts};

use engine::Engine;
use kvasir_core::{CacheEvent, Error, IdentityParts, Incarnation, ModelIdentity, Reason};
use kvasir_model::Artifacts;
use kvasir_proto::auth::{Access, BearerSecret, Guard};
use kvasir_proto::worker::worker_server::WorkerServer;
use service::Service;
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tonic::transport::server::TcpIncoming;

/// A running mock worker; dropping it kills it.
pub struct MockWorker {
    engine: Arc<Engine>,
    address: SocketAddr,
    runtime: Option<Runtime>,
}

/// Why a mock worker could not start.
#[derive(Debug, thiserror::Error)]
pub enum MockError {
    /// Its thread or its port.
    #[error("mock worker at {address}: {source}")]
    Io {
        /// Where.
        address: SocketAddr,
        /// Why.
        source: std::io::Error,
    },
    /// Its text.
    #[error("mock worker text: {0}")]
    Text(#[from] kvasir_model::TextError),
}

// === impl MockError ===

impl MockError {
    /// The public word for this failure.
    pub const fn reason(&self) -> Reason {
        match self {
            Self::Io { .. } => Reason::Internal,
            Self::Text(error) => error.reason(),
        }
    }
}

// === impl MockWorker ===

impl MockWorker {
    /// Starts a mock worker whose tokens are bytes; port 0 takes a free one.
    pub fn start(settings: MockSettings, address: SocketAddr, secret: Option<BearerSecret>) -> Result<Self, MockError> {
        let text = artifacts(settings.context);
        Self::start_with(settings, text, address, secret)
    }

    /// Starts a mock worker with the tokenizer and template of a real model.
    pub fn start_with(
        settings: MockSettings,
        text: Artifacts,
        address: SocketAddr,
        secret: Option<BearerSecret>,
    ) -> Result<Self, MockError> {
        let io = |source| MockError::Io { address, source };
        // The port first: a runtime may not be dropped inside another one, as it would be if the port were taken.
        let listener = std::net::TcpListener::bind(address).map_err(io)?;
        listener.set_nonblocking(true).map_err(io)?;
        let address = listener.local_addr().map_err(io)?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("mock-worker")
            .enable_all()
            .build()
            .map_err(io)?;
        let listener = {
            // A tokio listener belongs to the runtime that it is made in.
            let _inside = runtime.enter();
            TcpListener::from_std(listener).map_err(io)?
        };
        let engine = Arc::new(Engine::new(settings, text)?);
        let guard = Guard::new(secret.map_or(Access::Verified, Access::Bearer));
        let service = WorkerServer::new(Service::new(Arc::clone(&engine)));
        let service = tonic::service::interceptor::InterceptedService::new(service, guard);
        // As a real worker: a token that waits for the acknowledgement of the one before is late.
        let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
        runtime.spawn(async move {
            let served = tonic::transport::Server::builder().add_service(service).serve_with_incoming(incoming).await;
            if let Err(error) = served {
                tracing::warn!(%error, "mock worker stopped");
            }
        });
        Ok(Self { engine, address, runtime: Some(runtime) })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The identity that it serves.
    pub fn identity(&self) -> ModelIdentity {
        self.engine.identity()
    }

    /// What the identity is made of.
    pub fn parts(&self) -> &IdentityParts {
        self.engine.parts()
    }

    /// Which life this is.
    pub fn incarnation(&self) -> Incarnation {
        self.engine.incarnation()
    }

    /// Its counters now.
    pub fn levels(&self) -> MockLevels {
        self.engine.levels()
    }

    /// Makes every request from now on end like this.
    pub fn set_fault(&self, fault: Fault) {
        self.engine.set_fault(fault);
    }

    /// Answers probes with this refusal, or with readiness.
    pub fn set_refusal(&self, refusal: Option<Error>) {
        self.engine.set_refusal(refusal);
    }

    /// Drops its whole cache and says so, or keeps silent as if the event was lost.
    pub fn clear_cache(&self, announce: bool) {
        self.engine.clear(announce.then_some(CacheEvent::Cleared { tenant: None }));
    }

    /// Breaks every connection at once, as `kill -9` does.
    pub fn kill(mut self) {
        self.stop();
    }

    fn stop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Drop for MockWorker {
    fn drop(&mut self) {
        self.stop();
    }
}
