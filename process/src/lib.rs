//! What every server process shares: flags of logs and traces, signals, and the way from `main` to an exit code.
//!
//! Owns the order log → runtime → work → exit. Refuses to know what is served. Called by the binaries of worker, router and operator.
//!
//! Cost: nothing after the start.

mod args;
mod signals;

pub use args::{Format, TelemetryArgs, parse_share};
pub use signals::{EXIT_SIGNALLED, Signals};

use kvasir_telemetry::init_log;
use std::error::Error;
use std::fmt;
use std::process::ExitCode;
use tokio::runtime::Builder;

/// Why a process cannot go on.
pub type Failure = Box<dyn Error + Send + Sync>;

/// A failure whose log line says what it is about, for whoever reads why a process ended and has to tell one cause from another.
#[derive(Debug)]
pub struct About {
    what: &'static str,
    source: Failure,
}

// === impl About ===

impl About {
    /// A failure about `what`, one lower-case word.
    pub fn new(what: &'static str, source: impl Into<Failure>) -> Self {
        Self { what, source: source.into() }
    }
}

impl fmt::Display for About {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.source.fmt(f)
    }
}

impl Error for About {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.source.source()
    }
}

/// Runs `work` to its end on a runtime of `threads` threads (one a core if absent). A failure is logged as that of `what`.
///
/// What still blocks a thread at the end, such as a model that is being loaded, does not hold up the exit.
pub fn run<W>(what: &'static str, telemetry: &TelemetryArgs, threads: Option<usize>, work: W) -> ExitCode
where
    W: Future<Output = Result<ExitCode, Failure>>,
{
    let start = || -> Result<ExitCode, Failure> {
        init_log(&telemetry.log, telemetry.log_format.into())?;
        let mut builder = Builder::new_multi_thread();
        if let Some(threads) = threads {
            builder.worker_threads(threads);
        }
        let runtime = builder.enable_all().build()?;
        let ended = runtime.block_on(work);
        runtime.shutdown_background();
        ended
    };
    start().unwrap_or_else(|error| {
        let about = error.downcast_ref::<About>().map(|about| about.what);
        tracing::error!(about, %error, "the {what} cannot go on");
        ExitCode::FAILURE
    })
}
