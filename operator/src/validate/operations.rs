//! How a pool is run: routers, rollouts, images, telemetry.

use super::Settings;
use super::engine::{self, Size};
use super::findings::Findings;
use crate::api::{
    ImagesSpec, Monitor, ObservabilitySpec, PullPolicy, RolloutMode, RouterSpec, ScalingOwner, ServiceType, ServingPoolSpec,
    SloSpec,
};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kvasir_telemetry::Slo;
use std::collections::BTreeMap;
use std::time::Duration;

/// The routers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Router {
    /// How many.
    pub replicas: u32,
    /// How their Service is reached.
    pub service: ServiceType,
    /// Its port.
    pub port: u16,
    /// Its annotations.
    pub annotations: BTreeMap<String, String>,
    /// Size of one pod.
    pub size: Size,
    /// Requests that run at once through one.
    pub running: u32,
    /// Requests that may wait in one.
    pub queue: u32,
}

/// How workers are replaced.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Rollout {
    /// Workers that the spec asks for.
    pub replicas: u32,
    /// How.
    pub mode: RolloutMode,
    /// How many may be unroutable; at least 1 unless 0 was written.
    pub max_unavailable: u32,
    /// How many there may be beyond.
    pub max_surge: u32,
    /// Time without a move after which a rollout counts as failed.
    pub progress_deadline: Duration,
    /// Whether nothing is to be rolled.
    pub paused: bool,
}

/// Logs, traces, scraping.
#[derive(Clone, PartialEq, Debug)]
pub struct Telemetry {
    /// OTLP endpoint.
    pub otlp: Option<String>,
    /// Share of traces that are kept, 0 to 1.
    pub sampling: f64,
    /// What to log.
    pub log: String,
    /// Whether a ServiceMonitor is made where that kind exists.
    pub monitor: bool,
}

/// Images and how they are pulled.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Images {
    /// Of workers.
    pub worker: String,
    /// Of routers.
    pub router: String,
    /// When.
    pub pull_policy: PullPolicy,
    /// Names of Secrets with registry credentials.
    pub pull_secrets: Vec<String>,
}

/// Most workers, and most router pods.
const WORKERS_MAX: u32 = 10_000;
const ROUTERS_MAX: u32 = 256;
/// Cores and memory of a router that names none.
const ROUTER_SIZE: Size = Size { millicores: 100, memory: 512 << 20 };
/// Longest name in an annotation's key, behind the slash if there is one.
const KEY_BYTES_MAX: usize = 63;

/// Reads what makes a request good.
pub(super) fn slo(spec: &SloSpec, findings: &mut Findings) -> Slo {
    Slo {
        ttft: findings.duration("spec.slo.ttft", &spec.ttft),
        tpot: findings.duration("spec.slo.tpot", &spec.tpot),
        fraction: findings.percent("spec.slo.fraction", &spec.fraction),
    }
}

/// Reads the routers.
pub(super) fn router(spec: &RouterSpec, findings: &mut Findings) -> Router {
    let at = |name: &str| format!("spec.router.{name}");
    if let Some(tls) = &spec.tls {
        let fix = "routers cannot serve certificates yet, and serving without would send keys in the clear: remove it and end TLS in front of \
                   the Service";
        findings.refuse(&at("tls"), &tls.secret_ref.name, fix);
    }
    for key in spec.service.annotations.keys().filter(|key| !is_qualified(key)) {
        findings.refuse(
            &at("service.annotations"),
            key,
            "an annotation's key is a name of at most 63 characters, with an optional DNS prefix",
        );
    }
    Router {
        replicas: findings.number(&at("replicas"), spec.replicas, 1, ROUTERS_MAX),
        service: spec.service.service_type,
        port: findings.number(&at("service.port"), spec.service.port, 1, u32::from(u16::MAX)) as u16,
        annotations: spec.service.annotations.clone(),
        size: engine::size(&at("resources"), &spec.resources, ROUTER_SIZE, findings),
        running: findings.number(&at("maxRunning"), spec.max_running, 1, 1_000_000),
        queue: findings.number(&at("maxQueued"), spec.max_queued, 0, 1_000_000),
    }
}

/// Reads how workers are replaced.
pub(super) fn rollout(spec: &ServingPoolSpec, findings: &mut Findings) -> Rollout {
    let replicas = findings.number("spec.replicas", spec.replicas, 0, WORKERS_MAX);
    scaling(spec, findings);
    let rollout = &spec.rollout;
    findings.budget("spec.rollout.maxUnavailable", &rollout.max_unavailable);
    findings.budget("spec.rollout.maxSurge", &rollout.max_surge);
    let is_zero = |budget: &IntOrString| matches!(budget, IntOrString::Int(0)) || *budget == IntOrString::String("0%".to_owned());
    let (none_away, none_more) = (is_zero(&rollout.max_unavailable.0), is_zero(&rollout.max_surge.0));
    if none_away && none_more {
        findings.refuse("spec.rollout.maxUnavailable", "0 and maxSurge is 0", "nothing could ever move: raise one of them");
    } else if none_away && matches!(rollout.mode, RolloutMode::InPlace | RolloutMode::SurgeFree) {
        let fix = format!("mode {:?} takes workers away first: raise it, or choose mode Surge", rollout.mode);
        findings.refuse("spec.rollout.maxUnavailable", "0", fix);
    } else if none_more && rollout.mode == RolloutMode::Surge {
        findings.refuse("spec.rollout.maxSurge", "0", "mode Surge adds workers first: raise it, or choose another mode");
    }
    let tier_lost = spec.prefix_cache.host_tier.as_ref().is_some_and(|tier| !tier.survives_restart);
    if rollout.mode == RolloutMode::InPlace && tier_lost {
        let fix =
            "it restarts the container and loses this host tier: set prefixCache.hostTier.survivesRestart, or choose mode Auto";
        findings.refuse("spec.rollout.mode", "InPlace", fix);
    }
    let away = rollout.max_unavailable.of_rounded_down(replicas).unwrap_or(0);
    Rollout {
        replicas,
        mode: rollout.mode,
        max_unavailable: if none_away { 0 } else { away.max(1) },
        max_surge: rollout.max_surge.of_rounded_up(replicas).unwrap_or(0),
        progress_deadline: findings.duration("spec.rollout.progressDeadline", &rollout.progress_deadline),
        paused: spec.paused,
    }
}

fn scaling(spec: &ServingPoolSpec, findings: &mut Findings) {
    let scaling = &spec.scaling;
    findings.duration("spec.scaling.windows.up", &scaling.windows.up);
    findings.duration("spec.scaling.windows.down", &scaling.windows.down);
    if let Some(targets) = &scaling.targets {
        if let Some(share) = &targets.goodput {
            findings.percent("spec.scaling.targets.goodput", share);
        }
        if let Some(limit) = &targets.ttft {
            findings.duration("spec.scaling.targets.ttft", limit);
        }
    }
    let bounds = scaling.min.zip(scaling.max);
    let complete = bounds.is_some_and(|(min, max)| 0 <= min && min <= max && max >= 1) && scaling.targets.is_some();
    let operator = scaling.owner == ScalingOwner::Operator;
    let empty = scaling.targets.as_ref().is_some_and(|it| it.goodput.is_none() && it.ttft.is_none() && it.queue.is_none());
    if operator && (!complete || empty) {
        let fix = "it needs min, max with min not above max, and targets with at least one of goodput, ttft and queue";
        findings.refuse("spec.scaling.owner", "Operator", fix);
    } else if operator && bounds.is_some_and(|(min, max)| !(min..=max).contains(&spec.replicas)) {
        let fix = "with scaling.owner Operator it is where scaling starts: keep it from scaling.min to scaling.max";
        findings.refuse("spec.replicas", spec.replicas, fix);
    } else if !operator && (scaling.min.is_some() || scaling.max.is_some() || scaling.targets.is_some()) {
        let fix = "min, max and targets are read with owner Operator only: remove them, or set owner to Operator";
        findings.refuse("spec.scaling.owner", "External", fix);
    }
}

/// Reads what is logged, traced and scraped.
pub(super) fn telemetry(spec: &ObservabilitySpec, findings: &mut Findings) -> Telemetry {
    Telemetry {
        otlp: spec.otlp_endpoint.clone(),
        sampling: findings.percent("spec.observability.sampling", &spec.sampling),
        log: spec.log.clone(),
        monitor: spec.service_monitor == Monitor::Auto,
    }
}

/// Reads images, with the operator's own where the pool names none.
pub(super) fn images(spec: &ImagesSpec, settings: &Settings, findings: &mut Findings) -> Images {
    let mut image = |field: &str, own: &Option<String>, default: &str| {
        let image = own.as_deref().unwrap_or(default);
        if image.is_empty() || image.contains(char::is_whitespace) {
            findings.refuse(&format!("spec.images.{field}"), image, "write the reference of an image, without blanks");
        }
        image.to_owned()
    };
    let own = || spec.pull_secrets.iter().map(|secret| secret.name.clone());
    let pull_secrets = if spec.pull_secrets.is_empty() { settings.pull_secrets.clone() } else { own().collect() };
    Images {
        worker: image("worker", &spec.worker, &settings.worker_image),
        router: image("router", &spec.router, &settings.router_image),
        pull_policy: spec.pull_policy.unwrap_or(settings.pull_policy),
        pull_secrets,
    }
}

/// Whether a text can be the key of a label or an annotation.
pub(super) fn is_qualified(key: &str) -> bool {
    let (prefix, name) = key.split_once('/').map_or((None, key), |(prefix, name)| (Some(prefix), name));
    let label = |text: &str| {
        let plain = text.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-');
        plain && !text.is_empty() && !text.starts_with('-') && !text.ends_with('-')
    };
    let prefix_fits = prefix.is_none_or(|prefix| prefix.len() <= 253 && prefix.split('.').all(label));
    prefix_fits && !name.is_empty() && is_label_value(name)
}

/// Whether a text can be the value of a label.
pub(super) fn is_label_value(value: &str) -> bool {
    let plain = value.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte));
    let ends = |byte: Option<&u8>| byte.is_none_or(u8::is_ascii_alphanumeric);
    value.len() <= KEY_BYTES_MAX && plain && ends(value.as_bytes().first()) && ends(value.as_bytes().last())
}

/// Whether a pool of this name can name Services.
pub(super) fn is_pool_name(name: &str) -> bool {
    let plain = name.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-');
    plain && name.len() <= 253 && name.starts_with(|letter: char| letter.is_ascii_lowercase()) && !name.ends_with('-')
}
