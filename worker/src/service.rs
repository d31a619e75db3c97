//! The worker service: an engine offered over gRPC, to a door in the same process, and to whoever runs it.
//!
//! Owns what is served under which name, the requests in flight, the drain, and what is told of all that. Refuses to know how tokens come
//! to be (engine) and where they go (router, door). [`WorkerService`] is cheap to clone and serves both ways in: [`grpc`] and [`EngineServe`].
//!
//! Flow of a request: read strictly → narrow by the worker's flags → engine mailbox → wait for `Started` (until then: a status) → chunks,
//! each passing [`observe::Record`] → the end, or the reader's absence, is counted once.
//!
//! Guarantees
//! 1. Dropping a stream anywhere cancels the request in the engine.
//! 2. Nothing is served without the bearer secret but health and reflection ([`guard`]: default deny).
//! 3. Each request in flight is one [`flight::Flight`]; when none is left, the gauge is 0.
//!
//! Costs: per chunk one conversion and no copy of tokens; a load report at most every 100 ms per subscriber.

mod admin;
mod draft;
mod events;
mod flight;
mod generate;
mod guard;
mod health;
mod http;
mod listen;
mod load;
mod observe;
mod rpc;
mod serve;
mod served;

pub use flight::InFlightRequest;
pub use generate::Output;
pub use http::{Readiness, http_router};
pub use listen::{GrpcServer, ListenError};
pub use serve::EngineServe;
pub use served::{ArtifactBlob, Served, ServedError, ServedParts};

use crate::drain::{self, Drain};
use crate::engine::EngineHandle;
use flight::Flights;
use kvasir_core::{CacheMode, Error, Incarnation, Reason, WorkerUid};
use kvasir_telemetry::{Registry, Tracer, WorkerMetrics};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

/// Limits of the service with their defaults.
#[derive(Clone, Copy, Debug)]
pub struct ServiceLimits {
    /// Largest request message, in bytes: 16 MiB, room for a prompt of three million tokens; routers read it from `Describe`.
    pub request_bytes_max: usize,
    /// Open `KvEvents` and `Load` streams: 256, one of each for 128 routers.
    pub subscribers_max: usize,
    /// Open streams per connection: 4096, above the engine's own queue, so that its refusal is the one that is seen.
    pub streams_per_connection_max: u32,
    /// Time that a drain may take unless the caller says another: 30 s, as Kubernetes' default grace.
    pub drain_deadline: Duration,
}

/// Where a worker records what it does.
#[derive(Clone)]
pub struct Telemetry {
    /// Metrics of this worker.
    pub registry: Registry,
    /// Spans.
    pub tracer: Tracer,
}

/// One worker; cheap to clone.
#[derive(Clone)]
pub struct WorkerService(Arc<Inner>);

struct Inner {
    engine: EngineHandle,
    served: Served,
    drain: Drain,
    flights: Flights,
    flags: Flags,
    limits: ServiceLimits,
    telemetry: Telemetry,
    metrics: WorkerMetrics,
    subscribers: Arc<Semaphore>,
    closing: CancellationToken,
    started: Instant,
}

/// What can be changed while the worker runs.
struct Flags {
    /// Encoded by [`encode_mode`].
    cache: AtomicU8,
    drain_deadline: Mutex<Duration>,
}

// === impl ServiceLimits ===

impl Default for ServiceLimits {
    fn default() -> Self {
        Self {
            request_bytes_max: 16 << 20,
            subscribers_max: 256,
            streams_per_connection_max: 4096,
            drain_deadline: Duration::from_secs(30),
        }
    }
}

// === impl Telemetry ===

impl Default for Telemetry {
    /// Metrics of their own and no spans.
    fn default() -> Self {
        Self { registry: Registry::default(), tracer: Tracer::disabled() }
    }
}

// === impl WorkerService ===

impl WorkerService {
    /// Offers an engine that runs already.
    pub fn new(engine: EngineHandle, served: Served, limits: ServiceLimits, telemetry: Telemetry) -> Self {
        let metrics = WorkerMetrics::new(&telemetry.registry);
        let flags = Flags {
            cache: AtomicU8::new(encode_mode(engine.settings().cache)),
            drain_deadline: Mutex::new(limits.drain_deadline),
        };
        Self(Arc::new(Inner {
            engine,
            served,
            drain: Drain::default(),
            flights: Flights::default(),
            flags,
            subscribers: Arc::new(Semaphore::new(limits.subscribers_max)),
            limits,
            telemetry,
            metrics,
            closing: CancellationToken::new(),
            started: Instant::now(),
        }))
    }

    /// The engine.
    pub fn engine(&self) -> &EngineHandle {
        &self.0.engine
    }

    /// What is served.
    pub fn served(&self) -> &Served {
        &self.0.served
    }

    /// Whether the worker is leaving.
    pub fn drain(&self) -> &Drain {
        &self.0.drain
    }

    /// The worker's name.
    pub fn uid(&self) -> &WorkerUid {
        &self.0.served.description().uid
    }

    /// This life of the worker.
    pub fn incarnation(&self) -> Incarnation {
        self.0.served.description().incarnation
    }

    /// Requests that the worker holds, from receipt until the last chunk was handed over.
    pub fn in_flight(&self) -> u32 {
        self.0.flights.count()
    }

    /// Waits until no request is held.
    pub async fn idle(&self) {
        self.0.flights.idle().await;
    }

    /// Whether new work is taken; the error says why not.
    pub fn ready(&self) -> Result<(), Error> {
        if self.0.drain.is_draining() {
            return Err(drain::refusal());
        }
        self.0.engine.refusal().map_or(Ok(()), Err)
    }

    /// Begins to drain within the worker's own deadline.
    pub fn begin_drain(&self, within: Option<Duration>) -> Duration {
        let left = self.0.drain.begin(within.unwrap_or(self.drain_deadline()));
        self.0.engine.start_drain();
        left
    }

    /// All metrics of this worker in the text format, with the engine's levels of this moment.
    pub fn render_metrics(&self) -> String {
        observe::refresh(&self.0.metrics, &self.0.engine);
        self.0.telemetry.registry.render()
    }

    /// Ends endless streams (events, load), so that connections can close.
    pub fn close_subscriptions(&self) {
        self.0.closing.cancel();
    }

    fn drain_deadline(&self) -> Duration {
        *self.0.flags.deadline()
    }

    fn cache_mode(&self) -> CacheMode {
        decode_mode(self.0.flags.cache.load(Ordering::Relaxed))
    }

    fn set_cache_mode(&self, mode: CacheMode) -> Result<(), Error> {
        if self.0.engine.settings().cache == CacheMode::Off && mode != CacheMode::Off {
            let message = "prefix_cache is off by the worker's own setting; restart it with another one";
            return Err(Error::new(Reason::UnsupportedCombination, message).with_field("flags.prefix_cache"));
        }
        self.0.flags.cache.store(encode_mode(mode), Ordering::Relaxed);
        Ok(())
    }
}

// === impl Flags ===

impl Flags {
    fn deadline(&self) -> MutexGuard<'_, Duration> {
        self.drain_deadline.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn encode_mode(mode: CacheMode) -> u8 {
    match mode {
        CacheMode::Auto => 0,
        CacheMode::On => 1,
        CacheMode::Off => 2,
    }
}

fn decode_mode(code: u8) -> CacheMode {
    match code {
        0 => CacheMode::Auto,
        1 => CacheMode::On,
        _ => CacheMode::Off,
    }
}
