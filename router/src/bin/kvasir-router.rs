//! `kvasir-router`: the front door of a pool, until SIGTERM, then drains; a second signal exits at once.

use clap::Parser as _;
use kvasir_process::{EXIT_SIGNALLED, Failure, Signals};
use kvasir_router::RouterRuntime;
use kvasir_router::args::Args;
use kvasir_telemetry::Tracer;
use std::path::Path;
use std::process::ExitCode;

// Requests allocate much and small; the system's allocator takes a fifth of a router's time.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let args = Args::parse();
    kvasir_process::run("router", &args.telemetry, None, run(&args))
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
