//! Admin: what routers and workers are asked and told.
//!
//! Owns the trait that the controller calls and its gRPC client, with one lazy connection per address. Refuses to know pods and pools: callers
//! name addresses and show the pool's secret. Every call is short and bounded; a failure is an answer too.

mod grpc;
mod scrape;

pub use grpc::GrpcAdmin;

use kvasir_proto::auth::BearerSecret;
use std::time::Duration;

/// What routers and workers can be asked. Tests put a scripted one in its place.
#[tonic::async_trait]
pub trait Admin: Send + Sync {
    /// Every worker that a router knows.
    async fn workers(&self, router: &str, secret: &BearerSecret) -> Result<Registered, AdminError>;

    /// Tells a router to place nothing new on one life of a worker for a while; can be repeated. Answers how many requests it has open there.
    async fn cordon(&self, router: &str, secret: &BearerSecret, cordon: &Cordon<'_>) -> Result<u32, AdminError>;

    /// A router's metrics, in the text that scrapers read.
    async fn metrics(&self, router: &str) -> Result<String, AdminError>;

    /// Tells a worker to take no new work and to hand back what is left after `deadline`; can be repeated.
    async fn drain(&self, worker: &str, secret: &BearerSecret, deadline: Duration) -> Result<Drained, AdminError>;

    /// How much of its model a worker that starts has fetched, in percent; `None` if it is not fetching.
    async fn fetched(&self, worker: &str) -> Result<Option<u32>, AdminError>;

    /// What a worker serves.
    async fn describe(&self, worker: &str, secret: &BearerSecret) -> Result<Described, AdminError>;
}

/// Whom a router should leave alone, and for how long.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Cordon<'a> {
    /// The worker's stable name.
    pub worker: &'a str,
    /// Which life of it.
    pub incarnation: &'a [u8],
    /// For how long.
    pub time: Duration,
}

/// What a router knows.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Registered {
    /// Whether its list is complete and each worker was probed once.
    pub complete: bool,
    /// Its workers.
    pub workers: Vec<RegisteredWorker>,
    /// Requests that wait for admission.
    pub waiting: u32,
    /// Version of the Kubernetes Secret with keys that is in force; empty where keys come from elsewhere.
    pub keys_version: String,
    /// Why its list of workers, its keys or its secrets may be behind.
    pub stale: Option<String>,
}

/// One worker as a router sees it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RegisteredWorker {
    /// Its stable name: the pod's.
    pub uid: String,
    /// Which life.
    pub incarnation: Vec<u8>,
    /// Address of its service.
    pub address: String,
    /// Why it gets no requests; absent when it does.
    pub refusal: Option<String>,
    /// Requests that this router has open there.
    pub in_flight: u32,
}

/// What a draining worker answers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Drained {
    /// Requests that it still holds; it takes no new ones.
    pub in_flight: u32,
}

/// What a worker serves.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Described {
    /// Name of the model.
    pub model: String,
    /// Digest of its weights, in hexadecimal.
    pub weights: String,
    /// Digest of its tokeniser, in hexadecimal.
    pub tokenizer: String,
}

/// Why a call came to nothing.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum AdminError {
    /// The address cannot be called.
    #[error("address {address} cannot be called: {message}")]
    Address {
        /// As given.
        address: String,
        /// Why.
        message: String,
    },
    /// It did not answer or refused.
    #[error("{address} {method}: {code}: {message}")]
    Call {
        /// Whom.
        address: String,
        /// What.
        method: &'static str,
        /// gRPC code in words.
        code: String,
        /// Its words.
        message: String,
    },
}

#[cfg(test)]
mod tests;
