//! Assembling a worker: engine, service and ports, from settings and parts. Used by the binary and by fleets in one process.
//!
//! Owns the order of start and end. Refuses to read flags and files' names from anywhere but its arguments. Workers of one process share one
//! [`LoadedModel`]: one weight mapping, one compute pool (a step takes the whole pool), one text, one grammar cache.
//!
//! Order of an end: refuse new work → waiting requests are handed back → running ones finish, or are handed back at the deadline → endless
//! streams end → the port closes → the engine thread ends.

use crate::backend::cpu::{CpuBackend, CpuError, CpuModel, CpuOptions};
use crate::backend::{Backend, TokenBytes};
use crate::engine::{
    Clock, ConstraintFactory, Engine, EngineParts, EngineSettings, EngineThread, MonotonicClock, QueueLimits, StepLimits,
};
use crate::grammar::{GrammarError, GrammarFactory};
use crate::service::{
    GrpcServer, ListenError, Readiness, Served, ServedError, ServedParts, ServiceLimits, Telemetry, WorkerService,
};
use kvasir_core::{CacheMode, Error, Incarnation, Reason, TokenId, WorkerUid};
use kvasir_kernels::Pool;
use kvasir_model::{DigestCache, ModelFile, Text};
use kvasir_proto::Role;
use kvasir_proto::auth::Access;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinHandle;

/// Longest wait for readers to take their last chunk once the engine has ended.
const DELIVERY_MAX: Duration = Duration::from_secs(1);

/// Settings of one worker.
#[derive(Clone, Debug)]
pub struct WorkerSettings {
    /// Stable name of the worker.
    pub uid: WorkerUid,
    /// What the worker is for; routers take no other than [`Role::Target`].
    pub role: Role,
    /// Address of the gRPC port; port 0 takes a free one.
    pub listen: SocketAddr,
    /// Who may call.
    pub access: Access,
    /// Size of the KV pool.
    pub kv: KvSize,
    /// Prefix cache; `Off` wins over a request's wish.
    pub cache: CacheMode,
    /// Limits of a step.
    pub step: StepLimits,
    /// Limits of the engine's queues.
    pub queue: QueueLimits,
    /// Limits of the service.
    pub service: ServiceLimits,
    /// Poison freed blocks and recount every law after each step (tests).
    pub check: bool,
}

/// Size of the KV pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KvSize {
    /// Number of blocks.
    Blocks(u32),
    /// Bytes, rounded down to whole blocks.
    Bytes(u64),
}

/// What a worker is made of.
pub struct WorkerParts {
    /// What computes.
    pub backend: Box<dyn Backend>,
    /// The model's names, text and files.
    pub model: ServedParts,
    /// Token to bytes.
    pub bytes: Arc<dyn TokenBytes>,
    /// Structured output, if it is served.
    pub constraints: Option<Arc<dyn ConstraintFactory>>,
    /// Time of the engine.
    pub clock: Arc<dyn Clock>,
    /// Where it records what it does.
    pub telemetry: Telemetry,
}

/// A model on this machine's CPU, loaded once for all workers of the process; cheap to clone.
#[derive(Clone)]
pub struct LoadedModel {
    served: ServedParts,
    weights: Arc<CpuModel>,
    pool: Arc<Pool>,
    bytes: Arc<dyn TokenBytes>,
    constraints: Arc<GrammarFactory>,
}

/// A running worker.
pub struct WorkerRuntime {
    service: WorkerService,
    server: GrpcServer,
    engine: EngineThread,
    drain: JoinHandle<()>,
}

/// Why a worker cannot start or end.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The model cannot be served.
    #[error(transparent)]
    Model(#[from] ServedError),
    /// The model cannot be computed on this CPU.
    #[error(transparent)]
    Cpu(#[from] CpuError),
    /// The vocabulary cannot be used for structured output.
    #[error(transparent)]
    Grammar(#[from] GrammarError),
    /// The pool has no room for a block.
    #[error("the KV pool of {bytes} bytes holds no block of {block_bytes} bytes; give it more")]
    KvTooSmall {
        /// As given.
        bytes: u64,
        /// What one block takes.
        block_bytes: u64,
    },
    /// No random number for the incarnation.
    #[error("the system gives no random bytes: {0}")]
    Random(getrandom::Error),
    /// The engine refused its parts, or its thread died.
    #[error(transparent)]
    Engine(Error),
    /// The port cannot be served.
    #[error(transparent)]
    Listen(#[from] ListenError),
}

/// Bytes of a text's tokens as they appear in the output.
struct TextBytes(Arc<Text>);

// === impl StartError ===

impl StartError {
    /// The public word for this failure.
    pub fn reason(&self) -> Reason {
        match self {
            Self::Model(error) => error.reason(),
            Self::Cpu(error) => error.reason(),
            Self::Grammar(_) => Reason::ModelFile,
            Self::KvTooSmall { .. } => Reason::InvalidArgument,
            Self::Random(_) => Reason::Internal,
            Self::Engine(error) => error.reason,
            Self::Listen(error) => error.reason(),
        }
    }
}

// === impl WorkerSettings ===

impl WorkerSettings {
    /// Defaults for a worker `uid` on a free loopback port.
    pub fn new(uid: &str, access: Access) -> Self {
        Self {
            uid: WorkerUid(uid.into()),
            role: Role::Target,
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            access,
            kv: KvSize::Bytes(1 << 30),
            cache: CacheMode::Auto,
            step: StepLimits::default(),
            queue: QueueLimits::default(),
            service: ServiceLimits::default(),
            check: false,
        }
    }
}

// === impl LoadedModel ===

impl LoadedModel {
    /// Opens a model file or folder and loads it; blocks for about a second per GB. Digests of weight files are remembered in `digests`.
    pub fn open(name: &str, path: &Path, digests: Option<DigestCache>, pool: Arc<Pool>) -> Result<Self, StartError> {
        let file = ModelFile::open_with(path, digests).map_err(ServedError::from)?;
        Self::load(name, &file, pool)
    }

    /// Loads an opened model.
    pub fn load(name: &str, file: &ModelFile, pool: Arc<Pool>) -> Result<Self, StartError> {
        let served = ServedParts::from_file(name, file)?;
        let weights = Arc::new(CpuModel::load(file, &pool)?);
        let bytes: Arc<dyn TokenBytes> = Arc::new(TextBytes(Arc::clone(&served.text)));
        let vocab = weights.config().vocab;
        let constraints = Arc::new(GrammarFactory::new(vocab, served.text.stop_ids(), served.text.masked_ids(), &*bytes)?);
        Ok(Self { served, weights, pool, bytes, constraints })
    }

    /// Names, text and files.
    pub fn served(&self) -> &ServedParts {
        &self.served
    }

    /// The parts of one more worker over the same weights. `context` cuts the model's own, in tokens.
    pub fn parts(&self, block_size: u32, context: Option<u32>, telemetry: Telemetry) -> Result<WorkerParts, StartError> {
        let options = CpuOptions { block_size, context, ..CpuOptions::new(Arc::clone(&self.pool)) };
        let constraints: Arc<dyn ConstraintFactory> = self.constraints.clone();
        Ok(WorkerParts {
            backend: Box::new(CpuBackend::new(Arc::clone(&self.weights), options)?),
            model: self.served.clone(),
            bytes: Arc::clone(&self.bytes),
            constraints: Some(constraints),
            clock: Arc::new(MonotonicClock::default()),
            telemetry,
        })
    }
}

// === impl TextBytes ===

impl TokenBytes for TextBytes {
    fn bytes(&self, id: TokenId) -> &[u8] {
        self.0.tokenizer().decode_bytes(id)
    }
}

// === impl KvSize ===

impl KvSize {
    fn blocks(self, block_bytes: u64) -> Result<u32, StartError> {
        let blocks = match self {
            Self::Blocks(blocks) => blocks,
            Self::Bytes(bytes) => u32::try_from(bytes / block_bytes.max(1)).unwrap_or(u32::MAX),
        };
        if blocks == 0 {
            let bytes = if let Self::Bytes(bytes) = self { bytes } else { 0 };
            return Err(StartError::KvTooSmall { bytes, block_bytes });
        }
        Ok(blocks)
    }
}

// === impl WorkerRuntime ===

impl WorkerRuntime {
    /// Starts engine, service and port. Must be called inside a tokio runtime.
    pub async fn start(settings: WorkerSettings, parts: WorkerParts) -> Result<Self, StartError> {
        let spec = parts.backend.spec().clone();
        let blocks = settings.kv.blocks(spec.block_bytes)?;
        let mut incarnation = [0; 8];
        getrandom::fill(&mut incarnation).map_err(StartError::Random)?;
        let incarnation = Incarnation(incarnation);
        let text = &parts.model.text;
        let engine_settings = EngineSettings {
            end_tokens: text.stop_ids().to_vec(),
            never: text.masked_ids().into(),
            cache: settings.cache,
            step: settings.step,
            queue: settings.queue,
            poison: settings.check,
            check_laws: settings.check,
            ..EngineSettings::new(incarnation, parts.model.identity_parts(&spec).id(), blocks)
        };
        let served = Served::new(settings.uid, incarnation, &parts.model, &spec, blocks, settings.service.request_bytes_max)
            .with_role(settings.role);
        let engine_parts =
            EngineParts { backend: parts.backend, bytes: parts.bytes, constraints: parts.constraints, clock: parts.clock };
        let (engine, handle) = Engine::new(engine_settings, engine_parts).map_err(StartError::Engine)?;
        let engine = engine.spawn().map_err(StartError::Engine)?;
        let service = WorkerService::new(handle.clone(), served, settings.service, parts.telemetry);
        let server = match GrpcServer::start(&service, settings.listen, settings.access).await {
            Ok(server) => server,
            Err(error) => {
                handle.stop();
                return Err(error.into());
            }
        };
        let drain = tokio::spawn({
            let drain = service.drain().clone();
            async move { drain.carry_out(&handle).await }
        });
        Ok(Self { service, server, engine, drain })
    }

    /// The worker.
    pub fn service(&self) -> &WorkerService {
        &self.service
    }

    /// Where its gRPC port listens.
    pub fn address(&self) -> SocketAddr {
        self.server.address()
    }

    /// Tells `readiness` that the worker runs.
    pub fn announce(&self, readiness: &Readiness) {
        readiness.set(self.service.clone());
    }

    /// Waits until the port fails, which it never does by itself.
    pub async fn failed(&mut self) -> StartError {
        self.server.failed().await.into()
    }

    /// Drains within `within` (absent: the worker's own setting), closes the port and ends the engine.
    pub async fn shutdown(self, within: Option<Duration>) -> Result<(), StartError> {
        self.service.begin_drain(within);
        if let Err(error) = self.drain.await {
            tracing::error!(%error, "the drain died; running requests are handed back now");
        }
        // Also when nothing was left: requests that were taken in the same moment are handed back and not forgotten.
        self.service.engine().stop();
        if tokio::time::timeout(DELIVERY_MAX, self.service.idle()).await.is_err() {
            tracing::warn!(in_flight = self.service.in_flight(), "readers did not take the end of their streams in time");
        }
        self.server.close(&self.service).await?;
        let engine = self.engine;
        match tokio::task::spawn_blocking(move || engine.join()).await {
            Ok(ended) => ended.map_err(StartError::Engine),
            Err(error) => Err(StartError::Engine(Error::new(Reason::Internal, error.to_string()))),
        }
    }
}
