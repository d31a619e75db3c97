//! Flags and environment of logs and traces, the same for every server.

use clap::ValueEnum;
use kvasir_telemetry::{LogFormat, TraceConfig};

/// Logs and traces.
#[derive(clap::Args, Clone, Debug)]
#[command(next_help_heading = "Telemetry")]
pub struct TelemetryArgs {
    /// OTLP/gRPC endpoint for traces, such as `http://localhost:4317`; no traces if absent.
    #[arg(long, env = "KVASIR_OTLP", value_name = "URL")]
    pub otlp: Option<String>,

    /// Share of traces that begin here and are kept, 0 to 1; a caller's decision is followed.
    #[arg(long, env = "KVASIR_TRACE_SAMPLING", default_value_t = 1.0, value_name = "SHARE", value_parser = parse_share)]
    pub trace_sampling: f64,

    /// What to log, for example `info,kvasir=debug`.
    #[arg(long, env = "KVASIR_LOG", default_value = "info", value_name = "FILTER")]
    pub log: String,

    /// Form of log lines.
    #[arg(long, env = "KVASIR_LOG_FORMAT", default_value = "text")]
    pub log_format: Format,
}

/// Forms of log lines.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum Format {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

// === impl TelemetryArgs ===

impl TelemetryArgs {
    /// Where the spans of one process of `service` go.
    pub fn trace_config(&self, service: &'static str, instance: &str) -> TraceConfig {
        TraceConfig { service, instance: instance.to_owned(), otlp: self.otlp.clone(), sampling: self.trace_sampling }
    }
}

// === impl Format ===

impl From<Format> for LogFormat {
    fn from(format: Format) -> Self {
        match format {
            Format::Text => Self::Text,
            Format::Json => Self::Json,
        }
    }
}

/// A number from 0 to 1.
pub fn parse_share(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(share) if (0.0..=1.0).contains(&share) => Ok(share),
        _ => Err("a share is a number from 0 to 1".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_a_number_from_0_to_1() {
        for (text, wanted) in
            [("0", Some(0.0)), ("0.25", Some(0.25)), ("1", Some(1.0)), ("1.01", None), ("-0.1", None), ("NaN", None), ("", None)]
        {
            assert_eq!(parse_share(text).ok(), wanted, "{text}");
        }
    }
}
