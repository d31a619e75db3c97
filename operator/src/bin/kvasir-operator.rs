//! `kvasir-operator`: looks after ServingPools until SIGTERM, then gives the lease up; a second signal exits at once.

use clap::Parser as _;
use kvasir_operator::args::Args;
use kvasir_operator::start::Operator;
use kvasir_process::{EXIT_SIGNALLED, Failure, Signals};
use kvasir_telemetry::Tracer;
use std::process::ExitCode;

fn main() -> ExitCode {
    let args = Args::parse();
    kvasir_process::run("operator", &args.telemetry, Some(2), run(&args))
}

async fn run(args: &Args) -> Result<ExitCode, Failure> {
    let mut signals = Signals::new()?;
    let identity = match &args.name {
        Some(name) => name.clone(),
        None => format!("operator-{:08x}", getrandom::u32()?),
    };
    let tracer = Tracer::new(&args.trace_config(&identity))?;
    let mut operator = Operator::start(args, &identity, tracer.clone()).await?;
    tracing::info!(http = %operator.http, "looking after pools");
    tokio::select! {
        () = signals.next() => {}
        error = operator.failed() => return Err(error.into()),
    }
    tracing::info!("ending; a second signal exits at once");
    tokio::select! {
        () = operator.shutdown() => {}
        () = signals.next() => return Ok(ExitCode::from(EXIT_SIGNALLED)),
    }
    tracer.shutdown();
    Ok(ExitCode::SUCCESS)
}
