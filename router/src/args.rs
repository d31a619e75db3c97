//! Flags and environment of `kvasir-router`: parsed once, here, into settings. Nothing else reads either.

use crate::discover::{Endpoint, EndpointError};
use crate::secrets::TenantSource;
use crate::settings::RouterSettings;
use crate::start::StartSettings;
use clap::{Parser, ValueEnum};
use kvasir_core::PoolSecret;
use kvasir_door::{DoorSettings, Isolation, ServerSettings};
use kvasir_proto::auth::{Access, BearerSecret, Credentials, SecretError};
use kvasir_telemetry::{LogFormat, TraceConfig, Tracer};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// Place requests on workers by their prefix: the OpenAI and gRPC front door of a pool.
#[derive(Parser, Clone, Debug)]
#[command(name = "kvasir-router", version, about, after_help = "Every flag can also be set by its environment variable.")]
pub struct Args {
    /// Addresses of the workers' gRPC services, such as `10.0.0.1:7401`; may be given several times or with commas.
    #[arg(long = "worker", env = "KVASIR_WORKERS", value_name = "ADDR", value_delimiter = ',', value_parser = parse_endpoint)]
    pub workers: Vec<Endpoint>,

    /// Name of this router in traces; the host's name if absent.
    #[arg(long, env = "HOSTNAME", default_value = "router", hide_env = true, value_name = "NAME")]
    pub name: String,

    /// Ports.
    #[command(flatten)]
    pub ports: PortArgs,

    /// Secrets and tenants.
    #[command(flatten)]
    pub trust: TrustArgs,

    /// Placement and admission.
    #[command(flatten)]
    pub limits: LimitArgs,

    /// Telemetry.
    #[command(flatten)]
    pub telemetry: TelemetryArgs,
}

/// Where the router listens.
#[derive(clap::Args, Clone, Debug)]
#[command(next_help_heading = "Ports")]
pub struct PortArgs {
    /// Address of the OpenAI door; of the gRPC door too if --grpc is absent.
    #[arg(long, env = "KVASIR_HTTP", default_value = "127.0.0.1:7300", value_name = "ADDR")]
    pub http: SocketAddr,

    /// Address of the gRPC door.
    #[arg(long, env = "KVASIR_GRPC", value_name = "ADDR")]
    pub grpc: Option<SocketAddr>,

    /// Address of the admin service; absent means none.
    #[arg(long, env = "KVASIR_ADMIN", value_name = "ADDR")]
    pub admin: Option<SocketAddr>,

    /// Address of /metrics, /readyz and /healthz apart from the door.
    #[arg(long, env = "KVASIR_METRICS", value_name = "ADDR")]
    pub metrics: Option<SocketAddr>,

    /// Seconds between "not ready" and the end of service after SIGTERM, so that load balancers notice.
    #[arg(long, env = "KVASIR_SETTLE_SECONDS", default_value_t = 5, value_name = "SECONDS")]
    pub settle_seconds: u64,

    /// Seconds that running requests get at the end.
    #[arg(long, env = "KVASIR_GRACE_SECONDS", default_value_t = 600, value_name = "SECONDS")]
    pub grace_seconds: u64,
}

/// Secrets and tenants.
#[derive(clap::Args, Clone, Debug)]
#[command(next_help_heading = "Trust")]
pub struct TrustArgs {
    /// File with the bearer secret that workers ask for and that callers of the admin service must show, at least 16 visible characters.
    #[arg(long, env = "KVASIR_SECRET_FILE", value_name = "FILE")]
    pub secret_file: PathBuf,

    /// Files with pool secrets, at least 16 bytes each: the first derives reuse domains, others are loaded for a rotation.
    #[arg(
        long = "pool-secret-file",
        env = "KVASIR_POOL_SECRET_FILE",
        value_name = "FILE",
        value_delimiter = ',',
        required = true
    )]
    pub pool_secret_files: Vec<PathBuf>,

    /// Tenants (TOML); without it everyone is the tenant `default`.
    #[arg(long, env = "KVASIR_TENANTS", value_name = "FILE")]
    pub tenants: Option<PathBuf>,

    /// Let all tenants of the pool with this uid reuse each other's cached prefixes.
    #[arg(long, env = "KVASIR_SHARED_POOL_UID", value_name = "UID", requires = "tenants")]
    pub shared_pool_uid: Option<String>,
}

/// Placement and admission.
#[derive(clap::Args, Clone, Debug)]
#[command(next_help_heading = "Limits")]
pub struct LimitArgs {
    /// Prompt tokens that decide which workers are tried first.
    #[arg(long, env = "KVASIR_AFFINITY_TOKENS", default_value_t = 1_024, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    pub affinity_tokens: u32,

    /// Workers compared by affinity, beside those that hold the longest prefix.
    #[arg(long, env = "KVASIR_CANDIDATES", default_value_t = 4, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub candidates: u32,

    /// Attempts per request, the first included.
    #[arg(long, env = "KVASIR_ATTEMPTS", default_value_t = 3, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=16))]
    pub attempts: u32,

    /// Requests that run at once.
    #[arg(long, env = "KVASIR_RUNNING", default_value_t = 4_096, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub running: u32,

    /// Requests that may wait; more are refused as overloaded.
    #[arg(long, env = "KVASIR_QUEUE", default_value_t = 1_024, value_name = "N")]
    pub queue: u32,

    /// Longest wait for admission, in seconds.
    #[arg(long, env = "KVASIR_QUEUE_SECONDS", default_value_t = 30, value_name = "SECONDS")]
    pub queue_seconds: u64,

    /// Memory of the prefix index, in MiB.
    #[arg(long, env = "KVASIR_INDEX_MIB", default_value_t = 256, value_name = "MIB", value_parser = clap::value_parser!(u32).range(1..))]
    pub index_mib: u32,

    /// Ready workers without which the router is not ready itself.
    #[arg(long, env = "KVASIR_READY_WORKERS", default_value_t = 0, value_name = "N")]
    pub ready_workers: u32,
}

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

/// What the files that are named by flags hold.
#[derive(Clone, Debug)]
pub struct Files {
    /// Of `--secret-file`.
    pub secret: String,
    /// Of `--pool-secret-file`, at least one.
    pub pool_secrets: Vec<PoolSecret>,
    /// Of `--tenants`.
    pub tenants: Option<String>,
}

/// Why flags cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ArgsError {
    /// The bearer secret.
    #[error("--secret-file: {0}")]
    Secret(#[from] SecretError),
    /// No pool secret at all.
    #[error("--pool-secret-file names no secret; name one file at least")]
    NoPoolSecret,
}

// === impl Args ===

impl Args {
    /// Settings of the router, with what its files hold.
    pub fn settings(&self, files: Files, tracer: Tracer) -> Result<StartSettings, ArgsError> {
        let bearer = BearerSecret::new(&files.secret)?;
        let mut pool_secrets = files.pool_secrets.into_iter();
        let first = pool_secrets.next().ok_or(ArgsError::NoPoolSecret)?;
        let isolation = self.trust.shared_pool_uid.clone().map_or(Isolation::PerTenant, Isolation::Pool);
        let mut router = RouterSettings { credentials: Some(Credentials::new(&bearer)?), ..RouterSettings::default() };
        let limits = &self.limits;
        router.pick.affinity_tokens = limits.affinity_tokens;
        router.pick.candidates = limits.candidates as usize;
        router.attempts_max = limits.attempts;
        router.admit.running_max = limits.running as usize;
        router.admit.queue_max = limits.queue as usize;
        router.admit.wait_max = Duration::from_secs(limits.queue_seconds);
        router.index_bytes = (limits.index_mib as usize) << 20;
        router.ready_workers_min = limits.ready_workers as usize;
        Ok(StartSettings {
            router,
            door: DoorSettings::default(),
            server: ServerSettings { grace: Duration::from_secs(self.ports.grace_seconds), ..ServerSettings::default() },
            workers: self.workers.clone(),
            http: self.ports.http,
            grpc: self.ports.grpc,
            admin: self.ports.admin.map(|address| (address, Access::Bearer(bearer))),
            metrics: self.ports.metrics,
            pool_secrets: (first, pool_secrets.collect()),
            tenants: files.tenants.map_or(TenantSource::Open, |text| TenantSource::File { text, isolation }),
            tracer,
            registries: Vec::new(),
            settle: Duration::from_secs(self.ports.settle_seconds),
        })
    }

    /// Where spans go.
    pub fn trace_config(&self) -> TraceConfig {
        TraceConfig {
            service: "kvasir-router",
            instance: self.name.clone(),
            otlp: self.telemetry.otlp.clone(),
            sampling: self.telemetry.trace_sampling,
        }
    }
}

impl From<Format> for LogFormat {
    fn from(format: Format) -> Self {
        match format {
            Format::Text => Self::Text,
            Format::Json => Self::Json,
        }
    }
}

fn parse_endpoint(text: &str) -> Result<Endpoint, EndpointError> {
    Endpoint::parse(text)
}

fn parse_share(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(share) if (0.0..=1.0).contains(&share) => Ok(share),
        _ => Err("a share is a number from 0 to 1".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn flags_become_settings_and_the_command_is_consistent() {
        Args::command().debug_assert();
        let line = [
            "kvasir-router",
            "--worker",
            "a:1,b:2",
            "--worker",
            "http://c:3",
            "--secret-file",
            "s",
            "--pool-secret-file",
            "p,q",
            "--admin",
            "127.0.0.1:0",
            "--running",
            "7",
            "--index-mib",
            "2",
        ];
        let args = Args::try_parse_from(line).unwrap();
        let secret = |text: &str| PoolSecret::new(text.as_bytes()).unwrap();
        let files = Files {
            secret: "0123456789abcdef".to_owned(),
            pool_secrets: vec![secret("the first pool secret"), secret("the second pool secret")],
            tenants: None,
        };
        let settings = args.settings(files, Tracer::disabled()).unwrap();
        let uris: Vec<&str> = settings.workers.iter().map(Endpoint::uri).collect();
        assert_eq!(uris, ["http://a:1", "http://b:2", "http://c:3"]);
        assert_eq!((settings.router.admit.running_max, settings.router.index_bytes), (7, 2 << 20));
        assert!(settings.admin.is_some() && settings.router.credentials.is_some());
        assert_eq!(settings.pool_secrets.1.len(), 1);
        let wrong =
            Args::try_parse_from(["kvasir-router", "--secret-file", "s", "--pool-secret-file", "p", "--worker", "nowhere"]);
        assert!(wrong.unwrap_err().to_string().contains("host:port"));
    }
}
