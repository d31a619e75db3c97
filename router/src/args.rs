//! Flags and environment of `kvasir-router`: parsed once, here, into settings. Nothing else reads either.

use crate::discover::{Endpoint, EndpointError, PortChoice, PortChoiceError};
use crate::kubernetes::{ObjectName, ObjectNameError};
use crate::secrets::SecretFiles;
use crate::settings::RouterSettings;
use crate::start::{SecretSource, StartSettings, WorkerSource};
use clap::{ArgGroup, Parser};
use kvasir_door::{DoorSettings, Isolation, ServerSettings};
use kvasir_process::{TelemetryArgs, parse_share};
use kvasir_proto::auth::{Access, BearerSecret, Credentials, SecretError};
use kvasir_telemetry::{Slo, TraceConfig, Tracer};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// Place requests on workers by their prefix: the OpenAI and gRPC front door of a pool.
#[derive(Parser, Clone, Debug)]
#[command(name = "kvasir-router", version, after_help = "Every flag can also be set by its environment variable.")]
pub struct Args {
    /// Name of this router in traces; the host's name if absent.
    #[arg(long, env = "HOSTNAME", default_value = "router", hide_env = true, value_name = "NAME")]
    pub name: String,

    /// Workers.
    #[command(flatten)]
    pub workers: WorkerArgs,

    /// Ports.
    #[command(flatten)]
    pub ports: PortArgs,

    /// Secrets and tenants.
    #[command(flatten)]
    pub trust: TrustArgs,

    /// Placement and admission.
    #[command(flatten)]
    pub limits: LimitArgs,

    /// The objective.
    #[command(flatten)]
    pub slo: SloArgs,

    /// Telemetry.
    #[command(flatten)]
    pub telemetry: TelemetryArgs,
}

/// Where workers are found.
#[derive(clap::Args, Clone, Debug)]
#[command(next_help_heading = "Workers")]
pub struct WorkerArgs {
    /// Addresses of the workers' gRPC services, such as `10.0.0.1:7401`; may be given several times or with commas.
    #[arg(
        long = "worker",
        env = "KVASIR_WORKERS",
        value_name = "ADDR",
        value_delimiter = ',',
        value_parser = parse_endpoint,
        conflicts_with = "workers_service"
    )]
    pub list: Vec<Endpoint>,

    /// Headless Service whose EndpointSlices name the workers, ready or not: the router probes each itself. Needs list and watch on endpointslices in
    /// its namespace.
    #[arg(
        id = "workers_service",
        long = "workers-service",
        env = "KVASIR_WORKERS_SERVICE",
        value_name = "NAMESPACE/NAME",
        value_parser = parse_service
    )]
    pub service: Option<ObjectName>,

    /// Port of the workers' gRPC services: its name in that Service, or a number.
    #[arg(
        long = "workers-port",
        env = "KVASIR_WORKERS_PORT",
        default_value = "grpc",
        value_name = "NAME|NUMBER",
        value_parser = parse_port
    )]
    pub port: PortChoice,
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
#[command(next_help_heading = "Trust", group = ArgGroup::new("keys").args(["tenants", "tenants_secret"]))]
pub struct TrustArgs {
    /// File with the bearer secret that workers ask for and that callers of the admin service must show, at least 16 visible characters.
    #[arg(long, env = "KVASIR_SECRET_FILE", value_name = "FILE")]
    pub secret_file: PathBuf,

    /// Files with pool secrets, at least 16 bytes each: the first derives reuse domains, others are loaded for a rotation. Changes are taken over while
    /// the router runs.
    #[arg(
        long = "pool-secret-file",
        env = "KVASIR_POOL_SECRET_FILE",
        value_name = "FILE",
        value_delimiter = ',',
        required_unless_present = "tenants_secret",
        conflicts_with = "tenants_secret"
    )]
    pub pool_secret_files: Vec<PathBuf>,

    /// Tenants (TOML); without it everyone is the tenant `default`. Changes are taken over while the router runs, within two seconds.
    #[arg(long, env = "KVASIR_TENANTS", value_name = "FILE")]
    pub tenants: Option<PathBuf>,

    /// Kubernetes Secret with the keys `tenants.toml`, `pool-secret` and, during a rotation, `pool-secret-next`, instead of files. Changes are taken
    /// over while the router runs, at once and never later than four seconds. Needs get and watch on this one Secret.
    #[arg(long, env = "KVASIR_TENANTS_SECRET", value_name = "NAMESPACE/NAME", value_parser = parse_object)]
    pub tenants_secret: Option<ObjectName>,

    /// Let all tenants of the pool with this uid reuse each other's cached prefixes.
    #[arg(long, env = "KVASIR_SHARED_POOL_UID", value_name = "UID", requires = "keys")]
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

    /// Ready workers of the list without which the router is not ready itself. Not with --workers-service: there workers become ready by being probed
    /// by ready routers.
    #[arg(long, env = "KVASIR_READY_WORKERS", default_value_t = 0, value_name = "N", conflicts_with = "workers_service")]
    pub ready_workers: u32,
}

/// What makes a request good; the two times are given together.
#[derive(clap::Args, Clone, Debug)]
#[command(next_help_heading = "Objective")]
pub struct SloArgs {
    /// Longest time to the first output, in milliseconds; with it, requests are counted by whether they kept the objective (goodput).
    #[arg(long = "slo-ttft-ms", env = "KVASIR_SLO_TTFT_MS", value_name = "MS", requires = "tpot_ms", value_parser = clap::value_parser!(u64).range(1..))]
    pub ttft_ms: Option<u64>,

    /// Longest mean time per output token after the first, in milliseconds.
    #[arg(long = "slo-tpot-ms", env = "KVASIR_SLO_TPOT_MS", value_name = "MS", requires = "ttft_ms", value_parser = clap::value_parser!(u64).range(1..))]
    pub tpot_ms: Option<u64>,

    /// Share of requests that should keep both; shown beside the counts, for alerts.
    #[arg(long = "slo-fraction", env = "KVASIR_SLO_FRACTION", default_value_t = 0.95, value_name = "SHARE", value_parser = parse_share)]
    pub fraction: f64,
}

/// Why flags cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ArgsError {
    /// The bearer secret.
    #[error("--secret-file: {0}")]
    Secret(#[from] SecretError),
}

// === impl Args ===

impl Args {
    /// Settings of the router, with what `--secret-file` holds.
    pub fn settings(&self, secret: &str, tracer: Tracer) -> Result<StartSettings, ArgsError> {
        let bearer = BearerSecret::new(secret)?;
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
            door: DoorSettings { slo: self.slo.slo(), ..DoorSettings::default() },
            server: ServerSettings { grace: Duration::from_secs(self.ports.grace_seconds), ..ServerSettings::default() },
            workers: self.workers.source(),
            http: self.ports.http,
            grpc: self.ports.grpc,
            admin: self.ports.admin.map(|address| (address, Access::Bearer(bearer))),
            metrics: self.ports.metrics,
            secrets: self.trust.source(),
            tracer,
            registries: Vec::new(),
            settle: Duration::from_secs(self.ports.settle_seconds),
        })
    }

    /// Where spans go.
    pub fn trace_config(&self) -> TraceConfig {
        self.telemetry.trace_config("kvasir-router", &self.name)
    }
}

impl WorkerArgs {
    fn source(&self) -> WorkerSource {
        match &self.service {
            Some(service) => WorkerSource::Service(service.clone(), self.port.clone()),
            None => WorkerSource::Listed(self.list.clone()),
        }
    }
}

impl SloArgs {
    fn slo(&self) -> Option<Slo> {
        let (ttft, tpot) = (Duration::from_millis(self.ttft_ms?), Duration::from_millis(self.tpot_ms?));
        Some(Slo { ttft, tpot, fraction: self.fraction })
    }
}

impl TrustArgs {
    fn source(&self) -> SecretSource {
        let isolation = self.shared_pool_uid.clone().map_or(Isolation::PerTenant, Isolation::Pool);
        match &self.tenants_secret {
            Some(name) => SecretSource::Object(name.clone(), isolation),
            None => SecretSource::Files(SecretFiles {
                pool_secrets: self.pool_secret_files.clone(),
                tenants: self.tenants.clone(),
                isolation,
            }),
        }
    }
}

fn parse_endpoint(text: &str) -> Result<Endpoint, EndpointError> {
    Endpoint::parse(text)
}

fn parse_service(text: &str) -> Result<ObjectName, ObjectNameError> {
    ObjectName::parse_service(text)
}

fn parse_object(text: &str) -> Result<ObjectName, ObjectNameError> {
    ObjectName::parse(text)
}

fn parse_port(text: &str) -> Result<PortChoice, PortChoiceError> {
    PortChoice::parse(text)
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
        let settings = args.settings("0123456789abcdef", Tracer::disabled()).unwrap();
        let WorkerSource::Listed(list) = &settings.workers else { panic!("{:?}", settings.workers) };
        let uris: Vec<&str> = list.iter().map(Endpoint::uri).collect();
        assert_eq!(uris, ["http://a:1", "http://b:2", "http://c:3"]);
        assert_eq!((settings.router.admit.running_max, settings.router.index_bytes), (7, 2 << 20));
        assert!(settings.admin.is_some() && settings.router.credentials.is_some());
        let SecretSource::Files(files) = &settings.secrets else { panic!("{:?}", settings.secrets) };
        assert_eq!((files.pool_secrets.len(), &files.tenants), (2, &None));
        let wrong = refused(&["--worker", "nowhere"]);
        assert!(wrong.contains("host:port"), "{wrong}");
    }

    fn refused(more: &[&str]) -> String {
        let line = ["kvasir-router", "--secret-file", "s", "--pool-secret-file", "p"];
        Args::try_parse_from(line.iter().chain(more)).unwrap_err().to_string()
    }

    #[test]
    fn in_a_cluster_a_service_names_the_workers_and_a_secret_holds_the_keys() {
        let line = ["kvasir-router", "--secret-file", "s", "--workers-service", "n/workers", "--tenants-secret", "n/pool.keys"];
        let args = Args::try_parse_from(line.iter().chain(&["--shared-pool-uid", "u"])).unwrap();
        let settings = args.settings("0123456789abcdef", Tracer::disabled()).unwrap();
        let named = |text: &str| ObjectName::parse(text).unwrap();
        assert_eq!(settings.workers, WorkerSource::Service(named("n/workers"), PortChoice::Name("grpc".to_owned())));
        assert!(
            matches!(settings.secrets, SecretSource::Object(name, Isolation::Pool(uid)) if name == named("n/pool.keys") && uid == "u")
        );
        let args = Args::try_parse_from(line.iter().chain(&["--workers-port", "7401"])).unwrap();
        assert_eq!(args.workers.source(), WorkerSource::Service(named("n/workers"), PortChoice::Number(7401)));
    }

    #[test]
    fn flags_that_contradict_each_other_are_refused_by_name() {
        for (more, wanted) in [
            (&["--worker", "a:1", "--workers-service", "n/w"][..], "--workers-service"),
            (&["--workers-service", "w"], "NAMESPACE/NAME"),
            (&["--workers-service", "n/w.x"], "NAMESPACE/NAME"),
            (&["--workers-service", "n/w", "--workers-port", "0"], "1 to 65535"),
            (&["--workers-service", "n/w", "--ready-workers", "1"], "--ready-workers"),
            (&["--tenants-secret", "n/s"], "--tenants-secret"),
            (&["--shared-pool-uid", "u"], "--tenants-secret"),
        ] {
            let message = refused(more);
            assert!(message.contains(wanted), "{more:?}: {message}");
        }
        let both = ["kvasir-router", "--secret-file", "s", "--tenants", "f", "--tenants-secret", "n/s"];
        assert!(Args::try_parse_from(both).is_err());
        let neither = Args::try_parse_from(["kvasir-router", "--secret-file", "s"]).unwrap_err().to_string();
        assert!(neither.contains("--pool-secret-file"), "{neither}");
    }

    #[test]
    fn the_help_lists_every_flag_with_its_variable() {
        let help = Args::command().mut_args(|arg| arg.hide_env_values(true)).term_width(120).render_long_help();
        insta::assert_snapshot!(help.to_string());
    }
}
