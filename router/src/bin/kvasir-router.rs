//! `kvasir-router`: the front door of a pool, until SIGTERM, then drains; a second signal exits at once.

use clap::Parser as _;
use kvasir_router::RouterRuntime;
use kvasir_router::args::Args;
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
    let mut router = RouterRuntime::start(args.settings(&text(&args.trust.secret_file)?, tracer.clone())?).await?;
    tracing::info!(http = %router.http, grpc = %router.grpc, admin = ?router.admin, "serving");
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

fn text(path: &Path) -> Result<String, Failure> {
    std::fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()).into())
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
