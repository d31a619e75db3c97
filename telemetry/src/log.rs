//! Log output: one subscriber per process.

use std::io::IsTerminal as _;
use tracing_subscriber::EnvFilter;

/// How log lines look.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

/// Why logging could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// The filter does not parse.
    #[error("log filter `{filter}` is invalid: {source}; write for example `info,kvasir=debug`")]
    Filter {
        /// As given.
        filter: String,
        /// Why.
        source: tracing_subscriber::filter::ParseError,
    },
}

/// Installs the process-wide subscriber on standard error; a second call keeps the first one.
pub fn init_log(filter: &str, format: LogFormat) -> Result<(), LogError> {
    let parsed = EnvFilter::try_new(filter).map_err(|source| LogError::Filter { filter: filter.to_owned(), source })?;
    let builder =
        tracing_subscriber::fmt().with_env_filter(parsed).with_ansi(std::io::stderr().is_terminal()).with_writer(std::io::stderr);
    // An error means that a subscriber is installed already (tests, several components in one process): the first one stays.
    let _kept = match format {
        LogFormat::Text => builder.with_target(false).try_init(),
        LogFormat::Json => builder.json().try_init(),
    };
    Ok(())
}
