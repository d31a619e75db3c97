//! `kvasir local`: a router and workers in one process, on loopback.
//!
//! Owns the wiring and the order of start and end. The parts are the same as in separate processes and speak the same protocol over loopback;
//! the workers share one weight mapping and one compute pool (a step takes the whole pool). Refuses to decide anything that they decide.
//!
//! Order of an end: doors stop accepting and finish what they have begun → workers drain → spans are sent.

use crate::args::LocalArgs;
use crate::model::{ModelError, obtain};
use kvasir_core::{Error, PoolSecret};
use kvasir_door::{DoorSettings, Isolation, Serve as _, ServerSettings};
use kvasir_kernels::Pool;
use kvasir_model::DigestCache;
use kvasir_process::Signals;
use kvasir_proto::auth::{Access, BearerSecret, Credentials, SecretError};
use kvasir_router::discover::{Endpoint, EndpointError};
use kvasir_router::view::Readiness;
use kvasir_router::{
    RouterRuntime, RouterServe, RouterSettings, SecretFiles, SecretSource, StartError, StartSettings, View, WorkerSource,
};
use kvasir_telemetry::{Registry, TraceConfig, TraceError, Tracer};
use kvasir_worker::service::Telemetry;
use kvasir_worker::start::{self as worker, KvSize, LoadedModel, WorkerRuntime, WorkerSettings};
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use std::{fs, io};

/// Longest wait for the router to know all workers.
const READY_MAX: Duration = Duration::from_mins(1);
/// Time that running streams get at the end.
const GRACE: Duration = Duration::from_secs(10);
/// Bytes of a pool secret that is made here.
const SECRET_BYTES: usize = 32;

/// Why a local fleet cannot start.
#[derive(Debug, thiserror::Error)]
pub enum LocalError {
    /// The model could not be had or read.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A worker did not start.
    #[error(transparent)]
    Worker(#[from] worker::StartError),
    /// The router did not start (its tenants file is wrong, a port is taken), or a port of it closed.
    #[error(transparent)]
    Router(#[from] StartError),
    /// A worker's address is unusable.
    #[error(transparent)]
    Endpoint(#[from] EndpointError),
    /// A secret is unusable.
    #[error(transparent)]
    Secret(#[from] SecretError),
    /// A file cannot be read or written.
    #[error("{path}: {source}")]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The stored pool secret is too short to be one.
    #[error("{0} holds no pool secret of at least 16 bytes; delete it to make a new one (cached prefixes are lost)")]
    ShortSecret(PathBuf),
    /// Signals cannot be listened for.
    #[error("signals cannot be received: {0}")]
    Signals(io::Error),
    /// Tracing is misconfigured.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// No random bytes.
    #[error("the system gives no random bytes: {0}")]
    Random(getrandom::Error),
    /// The router did not become ready.
    #[error("the fleet is not ready after {0:?}: {1}")]
    NotReady(Duration, Error),
}

/// A running fleet.
pub struct Fleet {
    model: String,
    threads: usize,
    workers: Vec<WorkerRuntime>,
    router: RouterRuntime,
    tracers: Vec<Tracer>,
}

/// Runs a fleet in the foreground until Ctrl-C.
pub async fn run(args: &LocalArgs, cache: &Path, state: &Path) -> Result<(), LocalError> {
    // Until here a signal ends the process at once, which is right: nothing has begun that could be finished.
    let mut fleet = Fleet::start(args, cache, state).await?;
    let mut signals = Signals::new().map_err(LocalError::Signals)?;
    let http = fleet.http();
    println!("kvasir serves `{}` with {} worker(s), {} threads", fleet.model(), args.workers, fleet.threads());
    println!("  OpenAI HTTP  http://{http}/v1    (ready: http://{http}/readyz, metrics: http://{http}/metrics)");
    println!("  gRPC         {}    (reflection is on)", fleet.grpc());
    println!("\ntry it:\n  curl -s http://{http}/v1/chat/completions -H 'content-type: application/json' \\");
    println!(
        "    -d '{{\"model\": \"{}\", \"messages\": [{{\"role\": \"user\", \"content\": \"Name three rivers.\"}}], \"max_tokens\": 32}}'",
        fleet.model()
    );
    println!("  kvasir chat --url http://{http}\n\nCtrl-C ends it.");
    tokio::select! {
        () = signals.next() => {}
        error = fleet.router.failed() => return Err(error.into()),
    }
    println!("\nfinishing what has begun (at most {} s; Ctrl-C again ends at once) ...", GRACE.as_secs());
    tokio::select! {
        () = fleet.stop() => {}
        () = signals.next() => {}
    }
    Ok(())
}

// === impl LocalArgs ===

impl LocalArgs {
    /// A fleet for measurements: free loopback ports, everything else by default, no traces.
    pub fn for_measurement(model: &str, workers: u32, state: &Path) -> Self {
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        Self {
            model: model.to_owned(),
            served_name: None,
            workers,
            http: any,
            grpc: any,
            tenants: None,
            otlp: None,
            threads: None,
            kv_mib: 1024,
            block_size: 16,
            state: Some(state.to_owned()),
        }
    }

    fn name(&self) -> String {
        self.served_name.clone().unwrap_or_else(|| kvasir_model::default_name(&self.model))
    }

    fn tracer(&self, service: &'static str, instance: &str) -> Result<Tracer, TraceError> {
        Tracer::new(&TraceConfig { service, instance: instance.to_owned(), otlp: self.otlp.clone(), sampling: 1.0 })
    }
}

// === impl Fleet ===

impl Fleet {
    /// Loads the model, starts workers and router, waits until requests can be served. `state` holds the pool secret unless the arguments name
    /// another folder.
    pub async fn start(args: &LocalArgs, cache: &Path, state: &Path) -> Result<Self, LocalError> {
        let secret = pool_secret(args.state.as_deref().unwrap_or(state))?;
        let secrets = SecretFiles { pool_secrets: vec![secret], tenants: args.tenants.clone(), isolation: Isolation::PerTenant };
        // A wrong tenants file is told of before a model is fetched and loaded.
        secrets.read().map_err(StartError::from)?;
        let model = load(args, cache).await?;
        let threads = model.1;
        let access = BearerSecret::new(&random_hex()?)?;
        let mut registries = Vec::new();
        let mut tracers = Vec::new();
        let mut workers = Vec::new();
        for number in 0..args.workers {
            let uid = format!("worker-{number}");
            let registry = Registry::with_component(&uid);
            let tracer = args.tracer("kvasir-worker", &uid)?;
            let telemetry = Telemetry { registry: registry.clone(), tracer: tracer.clone() };
            let settings = WorkerSettings {
                kv: KvSize::Bytes(args.kv_mib << 20),
                ..WorkerSettings::new(&uid, Access::Bearer(access.clone()))
            };
            workers.push(WorkerRuntime::start(settings, model.0.parts(args.block_size, None, telemetry)?).await?);
            registries.push(registry);
            tracers.push(tracer);
        }
        let tracer = args.tracer("kvasir-router", "router")?;
        tracers.push(tracer.clone());
        let router = RouterRuntime::start(router_settings(args, &workers, &access, secrets, registries, tracer)?).await?;
        let fleet = Self { model: args.name(), threads, workers, router, tracers };
        fleet.wait_until_ready().await?;
        Ok(fleet)
    }

    /// Where the OpenAI door listens.
    pub fn http(&self) -> SocketAddr {
        self.router.http
    }

    /// Where the gRPC door listens.
    pub fn grpc(&self) -> SocketAddr {
        self.router.grpc
    }

    /// Name of the served model.
    pub fn model(&self) -> &str {
        &self.model
    }

    /// Compute threads.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// The workers.
    pub fn workers(&self) -> &[WorkerRuntime] {
        &self.workers
    }

    /// The router.
    pub fn router(&self) -> &RouterServe {
        self.router.serve()
    }

    /// Sends all buffered spans.
    pub fn flush_traces(&self) {
        self.tracers.iter().for_each(Tracer::flush);
    }

    /// Ends the fleet; running streams get a grace period.
    pub async fn stop(self) {
        self.router.shutdown().await;
        for worker in self.workers {
            if let Err(error) = worker.shutdown(Some(GRACE)).await {
                tracing::warn!(%error, "a worker ended badly");
            }
        }
        for tracer in self.tracers {
            // Sending blocks, and a collector may be slow.
            let sent = tokio::task::spawn_blocking(move || tracer.shutdown()).await;
            if let Err(error) = sent {
                tracing::warn!(%error, "spans were lost");
            }
        }
    }

    async fn wait_until_ready(&self) -> Result<(), LocalError> {
        let wanted = self.workers.len();
        let ready = self.router().fleet().until(|view| ready_workers(view) >= wanted);
        if tokio::time::timeout(READY_MAX, ready).await.is_err() {
            let missing = self.router().ready().err().unwrap_or_else(|| {
                let message = format!("{} of {wanted} workers are ready", ready_workers(&self.router().fleet().view()));
                Error::new(kvasir_core::Reason::NotReady, message)
            });
            return Err(LocalError::NotReady(READY_MAX, missing));
        }
        Ok(())
    }
}

/// Workers that get requests.
fn ready_workers(view: &View) -> usize {
    view.workers().iter().filter(|worker| worker.readiness == Readiness::Ready).count()
}

/// The router of these workers: they are listed, and the tenants file is followed.
fn router_settings(
    args: &LocalArgs,
    workers: &[WorkerRuntime],
    access: &BearerSecret,
    secrets: SecretFiles,
    registries: Vec<Registry>,
    tracer: Tracer,
) -> Result<StartSettings, LocalError> {
    let endpoints = workers.iter().map(|worker| Endpoint::parse(&worker.address().to_string())).collect::<Result<Vec<_>, _>>()?;
    Ok(StartSettings {
        router: RouterSettings {
            credentials: Some(Credentials::new(access)?),
            ready_workers_min: 1,
            ..RouterSettings::default()
        },
        door: DoorSettings::default(),
        server: ServerSettings { grace: GRACE, ..ServerSettings::default() },
        workers: WorkerSource::Listed(endpoints),
        http: args.http,
        grpc: Some(args.grpc),
        admin: None,
        metrics: None,
        secrets: SecretSource::Files(secrets),
        tracer,
        registries,
        settle: Duration::ZERO,
    })
}

async fn load(args: &LocalArgs, cache: &Path) -> Result<(LoadedModel, usize), LocalError> {
    let (args, cache) = (args.clone(), cache.to_owned());
    let loaded = tokio::task::spawn_blocking(move || -> Result<_, LocalError> {
        let path = obtain(&args.model, &cache).map_err(ModelError::from)?;
        let cores = || std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let pool = Arc::new(Pool::new(args.threads.map_or_else(cores, usize::from)));
        let threads = pool.threads();
        Ok((LoadedModel::open(&args.name(), &path, Some(DigestCache::new(cache)), pool)?, threads))
    });
    match loaded.await {
        Ok(loaded) => loaded,
        Err(error) => Err(LocalError::NotReady(READY_MAX, Error::new(kvasir_core::Reason::Internal, error.to_string()))),
    }
}

/// The file of the state folder with the pool secret, made on first use with mode 0600.
fn pool_secret(state: &Path) -> Result<PathBuf, LocalError> {
    let path = state.join("pool-secret");
    let explain = |source| LocalError::File { path: path.clone(), source };
    fs::create_dir_all(state).map_err(explain)?;
    let bytes = match fs::read(&path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let mut bytes = vec![0; SECRET_BYTES];
            getrandom::fill(&mut bytes).map_err(LocalError::Random)?;
            let written = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path);
            match written.and_then(|mut file| io::Write::write_all(&mut file, &bytes)) {
                Ok(()) => bytes,
                // Another process made one in the same moment: its secret is the one.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => fs::read(&path).map_err(explain)?,
                Err(error) => return Err(explain(error)),
            }
        }
        Err(error) => return Err(explain(error)),
    };
    if PoolSecret::new(bytes.trim_ascii_end()).is_none() {
        return Err(LocalError::ShortSecret(path));
    }
    Ok(path)
}

fn random_hex() -> Result<String, LocalError> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).map_err(LocalError::Random)?;
    Ok(hex::encode(bytes))
}
