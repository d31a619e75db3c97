//! `kvasir-router`: the front door of a pool, until SIGTERM, then drains; a second signal exits at once.

use clap::Parser as _;
use kvasir_core::PoolSecret;
use kvasir_router::args::{Args, Files};
use kvasir_router::{RouterRuntime, StartError};
use kvasir_telemetry::{Tracer, init_log};
use std::error::Error;
use std::path::Path;
use std::process::ExitCode;
use tokio::signal::unix::{Signal, SignalKind, signal};

// Requests allocate much and small; the system's allocator takes a fifth of a router's time.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

type Failure = Box<dyn Error + Send + Sync>;

/// Exit code of a process that SIGTERM ended.
const EXIT_SIGNALLED: u8 = 143;

/// SIGTERM and Ctrl-C, which mean the same.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let ended = init_log(&args.telemetry.log, args.telemetry.log_format.into())
        .map_err(Failure::from)
        .and_then(|()| Ok(tokio::runtime::Builder::new_multi_thread().enable_all().build()?))
        .and_then(|runtime| runtime.block_on(run(&args)));
    match ended {
        Ok(code) => code,
        Err(error) => {
            tracing::error!(%error, "the router cannot go on");
            ExitCode::FAILURE
        }
    }
}

async fn run(args: &Args) -> Result<ExitCode, Failure> {
    let mut signals = Signals::new()?;
    let tracer = Tracer::new(&args.trace_config())?;
    let started = RouterRuntime::start(args.settings(files(args)?, tracer.clone())?).await;
    let mut router = started.map_err(|error| match (&error, &args.trust.tenants) {
        (StartError::Tenants(_), Some(path)) => format!("{}: {error}", path.display()).into(),
        _ => Failure::from(error),
    })?;
    tracing::info!(http = %router.http, grpc = %router.grpc, admin = ?router.admin, workers = args.workers.len(), "serving");
    tokio::select! {
        () = signals.next() => {}
        error = router.failed() => return Err(error.into()),
    }
    tracing::info!(in_flight = router.serve().fleet().total().attempts(), "draining; a second signal exits at once");
    tokio::select! {
        () = router.shutdown() => {}
        () = signals.next() => return Ok(ExitCode::from(EXIT_SIGNALLED)),
    }
    tracer.shutdown();
    Ok(ExitCode::SUCCESS)
}

fn files(args: &Args) -> Result<Files, Failure> {
    let pool_secret = |path: &std::path::PathBuf| -> Result<PoolSecret, Failure> {
        let bytes = read(path)?;
        // A file that was written by an editor ends in a newline that is no part of the secret.
        PoolSecret::new(bytes.trim_ascii_end())
            .ok_or_else(|| format!("{}: a pool secret has at least 16 bytes", path.display()).into())
    };
    Ok(Files {
        secret: String::from_utf8_lossy(&read(&args.trust.secret_file)?).into_owned(),
        pool_secrets: args.trust.pool_secret_files.iter().map(pool_secret).collect::<Result<_, _>>()?,
        tenants: args.trust.tenants.as_deref().map(text).transpose()?,
    })
}

fn text(path: &Path) -> Result<String, Failure> {
    String::from_utf8(read(path)?).map_err(|error| format!("{}: {error}", path.display()).into())
}

fn read(path: &Path) -> Result<Vec<u8>, Failure> {
    std::fs::read(path).map_err(|error| format!("{}: {error}", path.display()).into())
}

// === impl Signals ===

impl Signals {
    fn new() -> std::io::Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}
