//! `kvasir-operator`: looks after ServingPools until SIGTERM, then gives the lease up; a second signal exits at once.

use clap::Parser as _;
use kvasir_operator::args::Args;
use kvasir_operator::start::Operator;
use kvasir_telemetry::{Tracer, init_log};
use std::error::Error;
use std::process::ExitCode;
use tokio::signal::unix::{Signal, SignalKind, signal};

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
        .and_then(|()| Ok(tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?))
        .and_then(|runtime| runtime.block_on(run(&args)));
    match ended {
        Ok(code) => code,
        Err(error) => {
            tracing::error!(%error, "the operator cannot go on");
            ExitCode::FAILURE
        }
    }
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
