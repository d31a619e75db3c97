//! Flags and environment of `kvasir-operator`: parsed once, here, into settings. Nothing else reads either.

use crate::api::PullPolicy;
use crate::lead::LeadSettings;
use crate::validate::Settings;
use clap::{Parser, ValueEnum};
use kvasir_process::TelemetryArgs;
use kvasir_telemetry::TraceConfig;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

/// Look after ServingPools: turn them into workers, routers and what these need, and say what is true of them.
#[derive(Parser, Clone, Debug)]
#[command(
    name = "kvasir-operator",
    version,
    after_help = "Every flag can also be set by its environment variable.",
    mut_arg("otlp", |arg| arg.help("OTLP/gRPC endpoint for traces of passes, such as `http://localhost:4317`; no traces if absent")),
    mut_arg("trace_sampling", |arg| arg.help("Share of traces that are kept, 0 to 1")),
    mut_arg("log", |arg| arg.help("What to log, for example `info,kvasir_operator=debug`"))
)]
pub struct Args {
    /// Unique name of this process in the lease, in events and in traces: the pod's. Made up if absent.
    #[arg(long, env = "POD_NAME", value_name = "NAME", hide_env_values = true)]
    pub name: Option<String>,

    /// Address of /metrics, /readyz and /healthz.
    #[arg(long, env = "KVASIR_HTTP", default_value = "127.0.0.1:8080", value_name = "ADDR")]
    pub http: SocketAddr,

    /// The one namespace whose pools are looked after; all namespaces if absent. In one namespace nodes cannot be seen, so rollouts never surge.
    #[arg(long, env = "KVASIR_NAMESPACE", value_name = "NAMESPACE")]
    pub namespace: Option<String>,

    /// Passes over pools that run at once.
    #[arg(long, env = "KVASIR_CONCURRENCY", default_value_t = 8, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub concurrency: u16,

    /// Seconds between two looks at a pool at rest: within this time is seen what routers alone know.
    #[arg(long, env = "KVASIR_REST_SECONDS", default_value_t = 5, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=3_600))]
    pub rest_seconds: u64,

    /// What pools get where they say nothing.
    #[command(flatten)]
    pub pools: PoolArgs,

    /// Who leads.
    #[command(flatten)]
    pub lead: LeadArgs,

    /// Telemetry.
    #[command(flatten)]
    pub telemetry: TelemetryArgs,
}

/// What pools get where they say nothing.
#[derive(clap::Args, Clone, Debug)]
#[command(next_help_heading = "Pools")]
pub struct PoolArgs {
    /// Image with kvasir-worker.
    #[arg(long, env = "KVASIR_DEFAULT_WORKER_IMAGE", value_name = "IMAGE")]
    pub default_worker_image: String,

    /// Image with kvasir-router.
    #[arg(long, env = "KVASIR_DEFAULT_ROUTER_IMAGE", value_name = "IMAGE")]
    pub default_router_image: String,

    /// When images are pulled.
    #[arg(long, env = "KVASIR_IMAGE_PULL_POLICY", default_value = "IfNotPresent", value_name = "POLICY")]
    pub image_pull_policy: Pull,

    /// Secret with registry credentials in each pool's namespace; may be given several times.
    #[arg(long = "image-pull-secret", env = "KVASIR_IMAGE_PULL_SECRETS", value_name = "NAME", value_delimiter = ',')]
    pub image_pull_secrets: Vec<String>,

    /// Whether the cluster mounts OCI images as volumes: what its version says, or as told.
    #[arg(long, env = "KVASIR_IMAGE_VOLUMES", default_value = "auto", value_name = "WHETHER")]
    pub image_volumes: Whether,

    /// Label of the operator's own pods, by which NetworkPolicies let it in; may be given several times.
    #[arg(
        long = "operator-label",
        env = "KVASIR_OPERATOR_LABELS",
        default_value = "app.kubernetes.io/name=kvasir,app.kubernetes.io/component=operator",
        value_name = "NAME=VALUE",
        value_delimiter = ',',
        value_parser = parse_label
    )]
    pub operator_labels: Vec<(String, String)>,
}

/// Who leads.
#[derive(clap::Args, Clone, Debug)]
#[command(next_help_heading = "Lead")]
pub struct LeadArgs {
    /// Namespace of the lease and of the operator's own pods.
    #[arg(long, env = "POD_NAMESPACE", default_value = "kvasir-system", value_name = "NAMESPACE")]
    pub lease_namespace: String,

    /// Name of the lease.
    #[arg(long, env = "KVASIR_LEASE_NAME", default_value = "kvasir-operator", value_name = "NAME")]
    pub lease_name: String,

    /// Seconds without renewal after which another process may take the lease.
    #[arg(long, env = "KVASIR_LEASE_SECONDS", default_value_t = 15, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(3..=600))]
    pub lease_seconds: u64,

    /// Seconds without renewal after which this process writes nothing more; shorter than --lease-seconds by at least 2, so that a write on its way has
    /// arrived.
    #[arg(long, env = "KVASIR_RENEW_SECONDS", default_value_t = 10, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=598))]
    pub renew_seconds: u64,

    /// Seconds between two attempts to take or renew the lease; shorter than --renew-seconds.
    #[arg(long, env = "KVASIR_RETRY_SECONDS", default_value_t = 2, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=300))]
    pub retry_seconds: u64,
}

/// When images are pulled.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
#[value(rename_all = "PascalCase")]
pub enum Pull {
    /// If the node lacks the image.
    IfNotPresent,
    /// Before each start.
    Always,
    /// Never: the node must have it.
    Never,
}

/// Whether something is so.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum Whether {
    /// As is found out.
    Auto,
    /// It is.
    On,
    /// It is not.
    Off,
}

/// Why flags cannot be used together.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ArgsError {
    /// A write on its way could meet the next leader's.
    #[error("--renew-seconds {renew} must be shorter than --lease-seconds {lease} by at least 2")]
    Renew {
        /// As given.
        renew: u64,
        /// As given.
        lease: u64,
    },
    /// A lease would run out between two attempts.
    #[error("--retry-seconds {retry} must be shorter than --renew-seconds {renew}")]
    Retry {
        /// As given.
        retry: u64,
        /// As given.
        renew: u64,
    },
}

/// What was found out about the cluster.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Abilities {
    /// It knows ServiceMonitors.
    pub service_monitors: bool,
    /// Its version mounts OCI images as volumes without being told to.
    pub image_volumes: bool,
}

// === impl Args ===

impl Args {
    /// Settings of pools.
    pub fn settings(&self, abilities: Abilities) -> Settings {
        let pools = &self.pools;
        Settings {
            worker_image: pools.default_worker_image.clone(),
            router_image: pools.default_router_image.clone(),
            pull_policy: match pools.image_pull_policy {
                Pull::IfNotPresent => PullPolicy::IfNotPresent,
                Pull::Always => PullPolicy::Always,
                Pull::Never => PullPolicy::Never,
            },
            pull_secrets: pools.image_pull_secrets.clone(),
            operator_namespace: self.lead.lease_namespace.clone(),
            operator_labels: pools.operator_labels.iter().cloned().collect::<BTreeMap<_, _>>(),
            service_monitors: abilities.service_monitors,
            image_volumes: match pools.image_volumes {
                Whether::Auto => abilities.image_volumes,
                Whether::On => true,
                Whether::Off => false,
            },
        }
    }

    /// How to campaign under a name.
    pub fn lead(&self, identity: &str) -> Result<LeadSettings, ArgsError> {
        let LeadArgs { lease_seconds: lease, renew_seconds: renew, retry_seconds: retry, .. } = self.lead;
        if renew + 2 > lease {
            return Err(ArgsError::Renew { renew, lease });
        }
        if retry >= renew {
            return Err(ArgsError::Retry { retry, renew });
        }
        Ok(LeadSettings {
            lease_duration: Duration::from_secs(lease),
            renew_deadline: Duration::from_secs(renew),
            retry_period: Duration::from_secs(retry),
            ..LeadSettings::new(&self.lead.lease_namespace, &self.lead.lease_name, identity)
        })
    }

    /// Where spans go.
    pub fn trace_config(&self, instance: &str) -> TraceConfig {
        self.telemetry.trace_config("kvasir-operator", instance)
    }
}

fn parse_label(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err(format!("`{text}` is no label; write NAME=VALUE")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    const IMAGES: [&str; 3] = ["kvasir-operator", "--default-worker-image=w", "--default-router-image=r"];

    fn args(more: &[&str]) -> Args {
        Args::try_parse_from(IMAGES.iter().chain(more)).unwrap()
    }

    #[test]
    fn flags_become_settings_and_the_command_is_consistent() {
        Args::command().debug_assert();
        let args = args(&["--image-pull-policy=Never", "--image-pull-secret=a", "--image-pull-secret=b", "--lease-namespace=n"]);
        let none = Abilities { service_monitors: true, image_volumes: false };
        let settings = args.settings(none);
        assert_eq!((settings.pull_policy, settings.pull_secrets.len(), settings.service_monitors), (PullPolicy::Never, 2, true));
        assert_eq!((settings.operator_namespace.as_str(), settings.operator_labels.len()), ("n", 2));
        let lead = args.lead("me").unwrap();
        assert_eq!((lead.lease_duration, lead.renew_deadline), (Duration::from_secs(15), Duration::from_secs(10)));
    }

    #[test]
    fn image_volumes_are_as_told_or_as_found() {
        let found = |image_volumes| Abilities { service_monitors: false, image_volumes };
        for (told, with, without) in [("auto", true, false), ("on", true, true), ("off", false, false)] {
            let args = args(&[&format!("--image-volumes={told}")]);
            assert_eq!(
                (args.settings(found(true)).image_volumes, args.settings(found(false)).image_volumes),
                (with, without),
                "{told}"
            );
        }
    }

    #[test]
    fn what_cannot_be_used_is_refused_by_name() {
        for (more, wanted) in [
            (&["--renew-seconds=14"][..], "--renew-seconds 14"),
            (&["--renew-seconds=5", "--retry-seconds=5"], "--retry-seconds 5"),
        ] {
            let message = args(more).lead("me").unwrap_err().to_string();
            assert!(message.contains(wanted), "{message}");
        }
        for (more, wanted) in [
            ("--operator-label=x", "NAME=VALUE"),
            ("--trace-sampling=2", "0 to 1"),
            ("--image-pull-policy=Sometimes", "IfNotPresent"),
            ("--rest-seconds=0", "1..=3600"),
        ] {
            let message = Args::try_parse_from(IMAGES.iter().chain([&more])).unwrap_err().to_string();
            assert!(message.contains(wanted), "{more}: {message}");
        }
        assert!(Args::try_parse_from(["kvasir-operator"]).unwrap_err().to_string().contains("--default-worker-image"));
    }

    #[test]
    fn the_help_lists_every_flag_with_its_variable() {
        let help = Args::command().mut_args(|arg| arg.hide_env_values(true)).term_width(120).render_long_help();
        insta::assert_snapshot!(help.to_string());
    }
}
