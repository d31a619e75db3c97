//! Validate: reads a spec once into types that cannot hold what Kubernetes would refuse.
//!
//! Owns what a field means beyond its schema: units, sums, what workers and routers cannot do yet. Refuses to know which objects follow; `build` makes
//! them and cannot fail. Pure: what needs other objects is found by `build` and becomes a note.
//!
//! Invariants
//! 1. A spec that passes the schema is refused only for what the schema cannot see: a sum that overflows, a patch that breaks what the operator
//!    relies on, a feature that this cluster lacks. A spec that passed an older schema is refused with the same sense.
//! 2. A fault names field, value and what to do. All faults of a spec are found at once.
//! 3. What workers cannot do yet is accepted, noted, and served without; devices and memory that were asked for are reserved all the same, so that
//!    nothing moves when it becomes possible. Where serving without would be unsafe (TLS), the spec is refused instead.

mod draft;
mod engine;
mod findings;
mod model;
mod operations;
mod patch;
mod settings;
mod tenants;
#[cfg(test)]
pub(crate) mod tests;

pub use draft::Draft;
pub use engine::{DeviceAsk, Devices, Engine, HostTier, Size};
pub use model::{Model, Source};
pub use operations::{Images, Rollout, Router, Telemetry};
pub use patch::RESERVED as RESERVED_NAMES;
pub use settings::Settings;
pub use tenants::Tenant;

use crate::api::{CacheMode, ConditionReason, ConfigRef, Isolation, NetworkPolicyMode, Placement, SecretKeyRef, ServingPool};
use crate::status::{Fault, Note};
use findings::Findings;
use k8s_openapi::api::core::v1::PodTemplateSpec;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kvasir_telemetry::Slo;
use std::time::Duration;

/// What a worker gets after its longest stream to hand back what is left, and a router to close.
pub const DRAIN_MARGIN: Duration = Duration::from_secs(30);

/// A pool that can be built.
#[derive(Clone, PartialEq, Debug)]
pub struct Pool {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its uid.
    pub uid: String,
    /// Name of the model for clients.
    pub served_name: String,
    /// The model.
    pub model: Model,
    /// Claim on which fetched models are kept; none means a scratch volume per pod.
    pub cache_claim: Option<String>,
    /// Sizes and limits of a worker.
    pub engine: Engine,
    /// Mode of the prefix cache.
    pub prefix_cache: CacheMode,
    /// Tier in memory.
    pub host_tier: Option<HostTier>,
    /// Bytes of the tier on disk.
    pub disk_tier: Option<u64>,
    /// Texts of shared prefixes.
    pub shared_prefixes: Vec<ConfigRef>,
    /// Who may reuse whose state.
    pub isolation: Isolation,
    /// Devices of a worker, its draft's included.
    pub devices: Devices,
    /// The draft, if drafting with a model is asked for.
    pub draft: Option<Draft>,
    /// The routers.
    pub router: Router,
    /// Who may call; empty means everyone.
    pub tenants: Vec<Tenant>,
    /// Secret from which reuse domains are derived, if not the operator's own.
    pub pool_secret: Option<SecretKeyRef>,
    /// How workers are replaced.
    pub rollout: Rollout,
    /// What evictions may take.
    pub disruption: IntOrString,
    /// Longest stream.
    pub stream_max: Duration,
    /// What makes a request good, if the pool says so.
    pub slo: Option<Slo>,
    /// Logs, traces, scraping.
    pub telemetry: Telemetry,
    /// Whether NetworkPolicies are made.
    pub network_policies: bool,
    /// Images.
    pub images: Images,
    /// What is laid over the worker pods.
    pub patch: Option<PodTemplateSpec>,
    /// What is served otherwise than asked for.
    pub notes: Vec<Note>,
}

/// Reads a pool's spec.
pub fn read(object: &ServingPool, settings: &Settings) -> Result<Pool, Vec<Fault>> {
    let mut findings = Findings::default();
    let spec = &object.spec;
    let identity = |value: &Option<String>| value.clone().unwrap_or_default();
    let (namespace, name, uid) =
        (identity(&object.metadata.namespace), identity(&object.metadata.name), identity(&object.metadata.uid));
    for (field, value) in [("namespace", &namespace), ("name", &name), ("uid", &uid)] {
        if value.is_empty() {
            findings.refuse(&format!("metadata.{field}"), "empty", "read the pool from the API server");
        }
    }
    if !name.is_empty() && !operations::is_pool_name(&name) {
        findings.refuse("metadata.name", &name, "begin with a letter and use only a-z, 0-9 and -, up to 253 characters");
    }
    let draft = draft::read(spec, settings, &mut findings);
    let devices = engine::devices(spec, draft.as_ref(), &mut findings);
    let (host_tier, disk_tier) = engine::tiers(&spec.prefix_cache, &mut findings);
    let engine = engine::read(spec, host_tier.as_ref(), disk_tier, draft.as_ref(), &mut findings);
    let stream_max = findings.duration("spec.maxStreamDuration", &spec.max_stream_duration);
    let pool = Pool {
        served_name: spec.model.name.clone().unwrap_or_else(|| name.clone()),
        model: model::read("spec.model", &spec.model, settings, &mut findings),
        cache_claim: spec.model_cache.as_ref().map(|cache| cache.claim_name.clone()),
        prefix_cache: spec.prefix_cache.mode,
        shared_prefixes: spec.prefix_cache.shared_prefixes.iter().map(|prefix| prefix.config_map_ref.clone()).collect(),
        isolation: spec.prefix_cache.isolation,
        router: operations::router(&spec.router, &mut findings),
        tenants: tenants::read(&spec.tenants, &mut findings),
        pool_secret: spec.pool_secret_ref.clone(),
        rollout: operations::rollout(spec, &mut findings),
        disruption: findings.budget("spec.disruption.maxUnavailable", &spec.disruption.max_unavailable),
        telemetry: operations::telemetry(&spec.observability, &mut findings),
        network_policies: spec.network_policy == NetworkPolicyMode::Managed,
        images: operations::images(&spec.images, settings, &mut findings),
        patch: patch::read(spec, &devices, stream_max + DRAIN_MARGIN, &mut findings),
        notes: Vec::new(),
        namespace,
        name,
        uid,
        engine,
        host_tier,
        disk_tier,
        devices,
        draft,
        stream_max,
        slo: spec.slo.as_ref().map(|slo| operations::slo(slo, &mut findings)),
    };
    unsupported(object, &mut findings);
    findings.finish(pool)
}

// === impl Pool ===

impl Pool {
    /// Whether the draft has pods of its own.
    pub fn draft_pods(&self) -> bool {
        self.draft.as_ref().is_some_and(|draft| draft.placement == Placement::SeparatePod)
    }
}

/// What neither workers nor routers can do yet, beside what the parts have found.
fn unsupported(object: &ServingPool, findings: &mut Findings) {
    let spec = &object.spec;
    if let Some(share) = spec.prefix_cache.device_share.as_ref() {
        let share_read = findings.percent("spec.prefixCache.deviceShare", share);
        if share_read < 1.0 {
            findings.unsupported(format!("prefixCache.deviceShare {share} (unreferenced blocks may fill the whole KV pool)"));
        }
    }
    if !spec.prefix_cache.shared_prefixes.is_empty() {
        findings.unsupported("prefixCache.sharedPrefixes (each tenant computes them once for itself)");
    }
}

/// The note for what is served without.
fn unsupported_note(fields: &[String]) -> Note {
    let message = format!("workers and routers cannot do this yet and serve without it: {}", fields.join("; "));
    Note { reason: ConditionReason::NotYetSupported, message }
}
