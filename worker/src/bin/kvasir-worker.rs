//! `kvasir-worker`: loads a model and serves it until SIGTERM, then drains; a second signal exits at once.

use clap::Parser as _;
use kvasir_core::PoolSecret;
use kvasir_door::{Door, DoorSettings, Isolation, ServerSettings, TenantTable, Tenants};
use kvasir_kernels::Pool;
use kvasir_model::{DigestCache, Progress, Wanted};
use kvasir_process::{About, EXIT_SIGNALLED, Failure, Signals};
use kvasir_telemetry::{DoorMetrics, Registry, Tracer};
use kvasir_worker::args::{Args, ModelArgs};
use kvasir_worker::service::{EngineServe, Readiness, Telemetry, WorkerService, http_router};
use kvasir_worker::start::{LoadedModel, WorkerRuntime};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

// The door and the service allocate much and small.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let args = Args::parse();
    kvasir_process::run("worker", &args.telemetry, None, run(&args))
}

async fn run(args: &Args) -> Result<ExitCode, Failure> {
    let mut signals = Signals::new()?;
    let tracer = Tracer::new(&args.trace_config())?;
    let telemetry = Telemetry { registry: Registry::default(), tracer: tracer.clone() };
    let secret = read(&args.ports.secret_file)?;
    let explain = |error| format!("--secret-file {}: {error}", args.ports.secret_file.display());
    let settings = args.settings(&String::from_utf8_lossy(&secret)).map_err(explain)?;
    let readiness = Readiness::default();
    let closing = CancellationToken::new();
    let probes = listen(args.ports.metrics, http_router(readiness.clone()), closing.clone()).await?;
    let model = tokio::select! {
        model = load(args.clone(), readiness.clone()) => model?,
        () = signals.next() => return Ok(ExitCode::SUCCESS),
    };
    let parts = model.parts(args.engine.block_size, args.engine.context, telemetry.clone())?;
    let mut worker = WorkerRuntime::start(settings, parts).await?;
    let door = match args.ports.door {
        Some(address) => Some(listen(address, door(args, worker.service(), telemetry)?, closing.clone()).await?),
        None => None,
    };
    worker.announce(&readiness);
    tracing::info!(address = %worker.address(), model = args.served_name(), "serving");
    tokio::select! {
        () = signals.next() => {}
        error = worker.failed() => return Err(error.into()),
    }
    tracing::info!(in_flight = worker.service().in_flight(), "draining; a second signal exits at once");
    tokio::select! {
        ended = leave(worker, closing, door, probes) => ended?,
        () = signals.next() => return Ok(ExitCode::from(EXIT_SIGNALLED)),
    }
    tracer.shutdown();
    Ok(ExitCode::SUCCESS)
}

/// Drains, then closes the other ports; probes last, so that they can say why the worker is not ready.
async fn leave(
    worker: WorkerRuntime,
    closing: CancellationToken,
    door: Option<JoinHandle<std::io::Result<()>>>,
    probes: JoinHandle<std::io::Result<()>>,
) -> Result<(), Failure> {
    worker.shutdown(None).await?;
    closing.cancel();
    if let Some(door) = door {
        door.await??;
    }
    probes.await??;
    Ok(())
}

async fn load(args: Args, readiness: Readiness) -> Result<LoadedModel, Failure> {
    let task = tokio::task::spawn_blocking(move || -> Result<LoadedModel, Failure> {
        let cache = args.cache_dir();
        let path = obtain(&args.source, &cache, &readiness)?;
        readiness.fetched(None);
        let cores = || std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let pool = Arc::new(Pool::new(args.engine.threads.map_or_else(cores, usize::from)));
        tracing::info!(path = %path.display(), threads = pool.threads(), "loading");
        let model = LoadedModel::open(&args.served_name(), &path, Some(DigestCache::new(cache.join("digests"))), pool)?;
        let found = hex::encode(model.served().weights.as_bytes());
        match &args.source.model_digest {
            Some(wanted) if !wanted.eq_ignore_ascii_case(&found) => {
                Err(format!("--model-digest {wanted}: the weights have the digest {found}; correct the digest or the model")
                    .into())
            }
            _ => Ok(model),
        }
    });
    task.await?.map_err(|error| About::new("model", error).into())
}

/// The model's file or folder, fetched into the cache if it lies elsewhere.
fn obtain(source: &ModelArgs, cache: &Path, readiness: &Readiness) -> Result<PathBuf, Failure> {
    let token = source.model_token_file.as_deref().map(read).transpose()?;
    let token = token.as_deref().map(String::from_utf8_lossy);
    let wanted = Wanted {
        model: &source.model,
        sha256: source.model_sha256.as_deref(),
        token: token.as_deref().map(str::trim),
        hub: &source.hub,
    };
    let mut told = 0;
    let path = kvasir_model::fetch_wanted(&wanted, cache, &mut |progress| match progress {
        Progress::Fetching { bytes, total: Some(total) } if total > 0 => {
            readiness.fetched(u32::try_from(bytes * 100 / total).ok());
            let tenths = bytes * 10 / total;
            if tenths != told {
                told = tenths;
                tracing::info!(percent = tenths * 10, total, "fetching the model");
            }
        }
        progress => tracing::debug!(?progress, "fetching the model"),
    })?;
    Ok(path)
}

/// The worker's own door.
fn door(args: &Args, service: &WorkerService, telemetry: Telemetry) -> Result<axum::Router, Failure> {
    let path = args.ports.pool_secret_file.as_deref().ok_or("--door needs --pool-secret-file")?;
    let secret =
        PoolSecret::new(&read(path)?).ok_or_else(|| format!("{}: a pool secret has at least 16 bytes", path.display()))?;
    let table = match &args.ports.tenants {
        Some(file) => TenantTable::parse(&String::from_utf8(read(file)?)?, &secret, &Isolation::PerTenant)?,
        None => TenantTable::open(secret),
    };
    let metrics = DoorMetrics::new(&telemetry.registry);
    let serve = Arc::new(EngineServe::new(service.clone()));
    let registries = vec![telemetry.registry];
    Ok(Door::new(serve, Tenants::new(table), DoorSettings::default(), metrics, registries, telemetry.tracer).router())
}

async fn listen(
    address: SocketAddr,
    router: axum::Router,
    closing: CancellationToken,
) -> Result<JoinHandle<std::io::Result<()>>, Failure> {
    let listener = TcpListener::bind(address).await.map_err(|error| format!("cannot listen on {address}: {error}"))?;
    let settings = ServerSettings { grace: std::time::Duration::from_secs(1), ..ServerSettings::default() };
    Ok(tokio::spawn(kvasir_door::serve(listener, router, settings, async move { closing.cancelled().await })))
}

fn read(path: &Path) -> Result<Vec<u8>, Failure> {
    std::fs::read(path).map_err(|error| format!("cannot read {}: {error}", path.display()).into())
}
