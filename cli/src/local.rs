//! `kvasir local`: a router and workers in one process, on loopback.
//!
//! Owns the wiring and the order of start and end. The parts are the same as in separate processes and speak the same protocol over loopback;
//! the workers share one weight mapping and one compute pool (a step takes the whole pool). Refuses to decide anything that they decide.
//!
//! Order of an end: doors stop accepting and finish what they have begun → workers drain → spans are sent.

use crate::args::LocalArgs;
use crate::model::{ModelError, obtain};
use kvasir_core::{Error, PoolSecret};
use kvasir_door::{Door, DoorSettings, Isolation, Serve as _, ServerSettings, TenantFileError, TenantTable, Tenants};
use kvasir_kernels::Pool;
use kvasir_model::DigestCache;
use kvasir_proto::auth::{Access, BearerSecret, Credentials, SecretError};
use kvasir_router::discover::{Endpoint, EndpointError, Fixed};
use kvasir_router::fleet::{Fleet as RouterFleet, FleetTask};
use kvasir_router::view::Readiness;
use kvasir_router::{RouterServe, RouterSettings, View};
use kvasir_telemetry::{DoorMetrics, Registry, RouterMetrics, TraceConfig, TraceError, Tracer};
use kvasir_worker::service::Telemetry;
use kvasir_worker::start::{KvSize, LoadedModel, StartError, WorkerRuntime, WorkerSettings};
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use std::{fs, io};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

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
    Worker(#[from] StartError),
    /// A worker's address is unusable.
    #[error(transparent)]
    Endpoint(#[from] EndpointError),
    /// A secret is unusable.
    #[error(transparent)]
    Secret(#[from] SecretError),
    /// The tenants file is wrong.
    #[error("{path}: {source}")]
    Tenants {
        /// The file.
        path: PathBuf,
        /// Why.
        source: TenantFileError,
    },
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
    /// A port is taken.
    #[error("cannot listen on {address}: {source}; choose another with --http or --grpc")]
    Listen {
        /// Where.
        address: SocketAddr,
        /// Why.
        source: io::Error,
    },
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
    http: SocketAddr,
    grpc: SocketAddr,
    model: String,
    threads: usize,
    workers: Vec<WorkerRuntime>,
    router: RouterServe,
    router_task: FleetTask,
    doors: Vec<JoinHandle<io::Result<()>>>,
    closing: CancellationToken,
    tracers: Vec<Tracer>,
}

/// Runs a fleet in the foreground until Ctrl-C.
pub async fn run(args: &LocalArgs, cache: &Path, state: &Path) -> Result<(), LocalError> {
    let fleet = Fleet::start(args, cache, state).await?;
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
    interrupted().await;
    println!("\nfinishing what has begun (at most {} s; Ctrl-C again ends at once) ...", GRACE.as_secs());
    tokio::select! {
        () = fleet.stop() => {}
        () = interrupted() => {}
    }
    Ok(())
}

/// Ctrl-C or SIGTERM.
async fn interrupted() {
    let terminated = async {
        match tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate()) {
            Ok(mut signal) => {
                signal.recv().await;
            }
            Err(_) => std::future::pending().await,
        }
    };
    tokio::select! {
        _ = tokio::signal::ctrl_c() => {}
        () = terminated => {}
    }
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
        let tenants = tenants(args, secret)?;
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
        let router_registry = Registry::with_component("router");
        let tracer = args.tracer("kvasir-router", "router")?;
        let (router, router_task) = start_router(&workers, &access, &router_registry, &tracer)?;
        registries.insert(0, router_registry.clone());
        tracers.push(tracer.clone());
        let door = Door::new(
            Arc::new(router.clone()),
            tenants,
            DoorSettings::default(),
            DoorMetrics::new(&router_registry),
            registries,
            tracer,
        );
        let closing = CancellationToken::new();
        let (http, http_task) = listen(args.http, door.http_router(), closing.clone()).await?;
        let (grpc, grpc_task) = listen(args.grpc, door.grpc_router(), closing.clone()).await?;
        let doors = vec![http_task, grpc_task];
        let fleet = Self { http, grpc, model: args.name(), threads, workers, router, router_task, doors, closing, tracers };
        fleet.wait_until_ready().await?;
        Ok(fleet)
    }

    /// Where the OpenAI door listens.
    pub fn http(&self) -> SocketAddr {
        self.http
    }

    /// Where the gRPC door listens.
    pub fn grpc(&self) -> SocketAddr {
        self.grpc
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
        &self.router
    }

    /// Sends all buffered spans.
    pub fn flush_traces(&self) {
        self.tracers.iter().for_each(Tracer::flush);
    }

    /// Ends the fleet; running streams get a grace period.
    pub async fn stop(self) {
        self.closing.cancel();
        for door in self.doors {
            if let Ok(Err(error)) = door.await {
                tracing::warn!(%error, "a door ended badly");
            }
        }
        drop(self.router_task);
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
        let ready = self.router.fleet().until(|view| ready_workers(view) >= wanted);
        if tokio::time::timeout(READY_MAX, ready).await.is_err() {
            let missing = self.router.ready().err().unwrap_or_else(|| {
                let message = format!("{} of {wanted} workers are ready", ready_workers(&self.router.fleet().view()));
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

fn start_router(
    workers: &[WorkerRuntime],
    access: &BearerSecret,
    registry: &Registry,
    tracer: &Tracer,
) -> Result<(RouterServe, FleetTask), LocalError> {
    let endpoints = workers.iter().map(|worker| Endpoint::parse(&worker.address().to_string())).collect::<Result<Vec<_>, _>>()?;
    let credentials = Some(Credentials::new(access)?);
    let settings = RouterSettings { credentials: credentials.clone(), ready_workers_min: 1, ..RouterSettings::default() };
    let metrics = RouterMetrics::new(registry);
    let (fleet, task) = RouterFleet::start(Box::new(Fixed::new(endpoints)), settings.index_bytes, credentials, metrics.clone());
    Ok((RouterServe::new(fleet, settings, metrics, tracer.clone()), task))
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

fn tenants(args: &LocalArgs, secret: PoolSecret) -> Result<Tenants, LocalError> {
    let Some(path) = &args.tenants else { return Ok(Tenants::new(TenantTable::open(secret))) };
    let text = fs::read_to_string(path).map_err(|source| LocalError::File { path: path.clone(), source })?;
    let table = TenantTable::parse(&text, &secret, &Isolation::PerTenant)
        .map_err(|source| LocalError::Tenants { path: path.clone(), source })?;
    Ok(Tenants::new(table))
}

/// The secret of the state folder, made on first use with mode 0600.
fn pool_secret(state: &Path) -> Result<PoolSecret, LocalError> {
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
    PoolSecret::new(&bytes).ok_or(LocalError::ShortSecret(path))
}

fn random_hex() -> Result<String, LocalError> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).map_err(LocalError::Random)?;
    Ok(hex::encode(bytes))
}

async fn listen(
    address: SocketAddr,
    router: axum::Router,
    closing: CancellationToken,
) -> Result<(SocketAddr, JoinHandle<io::Result<()>>), LocalError> {
    let explain = |source| LocalError::Listen { address, source };
    let listener = TcpListener::bind(address).await.map_err(explain)?;
    let bound = listener.local_addr().map_err(explain)?;
    let settings = ServerSettings { grace: GRACE, ..ServerSettings::default() };
    Ok((bound, tokio::spawn(kvasir_door::serve(listener, router, settings, async move { closing.cancelled().await }))))
}
