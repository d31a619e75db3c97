//! `ServingPool`, `kvasir.dev/v1alpha1`: what users write and what they read back.
//!
//! Owns the types, their schema with defaults and rules, and the CRD that follows from them. Refuses to know what a pool turns into: `validate` reads a
//! spec once into types that cannot hold what Kubernetes would refuse. Called by everything in this crate and by the generator of `crds/`.
//!
//! Invariants
//! 1. Whatever the schema admits without reading other objects, a rule in the schema refuses with words that say what to do; `validate` repeats none of
//!    it in other words, but refuses the same when an object passed an older schema.
//! 2. Every field has a description, every text and list a limit, every number a signed format; a test walks the schema.
//! 3. The file in `crds/` is what [`crd_yaml`] writes; a test compares them.

pub mod condition;
pub mod model;
pub mod operations;
mod schema;
pub mod serving;
pub mod status;
pub mod text;

pub use condition::{Condition, ConditionReason, ConditionStatus, ConditionType};
pub use model::*;
pub use operations::*;
pub use schema::{crd, crd_yaml};
pub use serving::*;
pub use status::*;
pub use text::{CpuText, DurationText, PercentText, SizeText, TextError};

use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

/// What a pool shall be.
#[derive(CustomResource, KubeSchema, Clone, PartialEq, Debug, Serialize, Deserialize)]
#[kube(
    group = "kvasir.dev",
    version = "v1alpha1",
    kind = "ServingPool",
    plural = "servingpools",
    singular = "servingpool",
    shortname = "spool",
    category = "all",
    namespaced,
    status = "ServingPoolStatus",
    derive = "PartialEq",
    doc = "A model served by a pool of workers behind routers.",
    scale(
        spec_replicas_path = ".spec.replicas",
        status_replicas_path = ".status.replicas",
        label_selector_path = ".status.selector"
    ),
    printcolumn(name = "Model", type_ = "string", json_path = ".status.model.name", description = "Name that clients use"),
    printcolumn(name = "Revision", type_ = "string", json_path = ".spec.model.revision", description = "Revision of the model"),
    printcolumn(name = "Ready", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].status", description = "Whether requests are answered"),
    printcolumn(name = "Routable", type_ = "integer", json_path = ".status.routableReplicas", description = "Workers that every Ready router can reach"),
    printcolumn(name = "Desired", type_ = "integer", json_path = ".status.desiredReplicas", description = "Workers that the pool wants"),
    printcolumn(name = "Reason", type_ = "string", json_path = ".status.reason", description = "Why the pool is as it is"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp", description = "Since when it exists"),
    validation = Rule::new("self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')")
        .message("a pool's name also names its Services: begin with a letter and use only a-z, 0-9 and -, up to 253 characters")
)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("self.parallelism.tensor * self.parallelism.pipeline == (has(self.accelerator) ? self.accelerator.count : 1)")
        .message("parallelism.tensor x parallelism.pipeline has to equal the devices of one worker: accelerator.count, or 1 without accelerator"),
    validation = Rule::new("self.engine.backend != 'Cuda' || has(self.accelerator)")
        .message("engine.backend Cuda computes on devices: set accelerator, or set backend to Cpu"),
    validation = Rule::new("self.engine.backend != 'Cpu' || !has(self.accelerator)")
        .message("engine.backend Cpu leaves devices unused: remove accelerator, or set backend to Cuda"),
    validation = Rule::new("self.engine.numerics != 'Fast' || has(self.accelerator)")
        .message("engine.numerics Fast exists on CUDA only: set accelerator, or set numerics to Invariant"),
    validation = Rule::new("self.scaling.owner != 'Operator' || !has(self.scaling.min) || !has(self.scaling.max) || (self.replicas >= self.scaling.min && self.replicas <= self.scaling.max)")
        .message("with scaling.owner Operator, replicas is where scaling starts: keep it from scaling.min to scaling.max, or set owner to External to scale by hand"),
    validation = Rule::new("!has(self.speculation.draft) || self.speculation.draft.placement != 'OtherDevice' || has(self.accelerator)")
        .message("speculation.draft.placement OtherDevice needs a second device: set accelerator, or choose SameDevice or SeparatePod"),
    validation = Rule::new("!has(self.speculation.draft) || !has(self.speculation.draft.interconnect) || (has(self.accelerator) && has(self.accelerator.deviceClassName))")
        .message("interconnect ties devices by dynamic resource allocation: set accelerator.deviceClassName instead of resourceName, or remove interconnect"),
    validation = Rule::new("!has(self.speculation.draft) || !has(self.speculation.draft.devices) || has(self.accelerator)")
        .message("speculation.draft.devices counts devices of the kind that accelerator names: set accelerator, or remove devices"),
    validation = Rule::new("!(self.rollout.mode == 'InPlace' && has(self.prefixCache.hostTier) && !self.prefixCache.hostTier.survivesRestart)")
        .message("rollout.mode InPlace restarts the container and loses this host tier: set prefixCache.hostTier.survivesRestart to true, or choose mode Auto"),
)]
pub struct ServingPoolSpec {
    /// The model that clients get.
    pub model: ModelSpec,
    /// Where fetched models are kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model_cache: Option<ModelCacheSpec>,
    /// Size and limits of each worker's engine.
    #[serde(default)]
    pub engine: EngineSpec,
    /// Devices of one worker; none means CPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accelerator: Option<AcceleratorSpec>,
    /// How one model is spread over the devices of one worker; the product must be accelerator.count.
    #[serde(default)]
    pub parallelism: ParallelismSpec,
    /// Reuse of computed prefixes.
    #[serde(default)]
    pub prefix_cache: PrefixCacheSpec,
    /// Provisional tokens that the model must accept.
    #[serde(default)]
    pub speculation: SpeculationSpec,
    /// Workers, each with a whole copy of the model. Written by people and autoscalers, never by the operator.
    #[serde(default = "replicas")]
    #[schemars(range(min = 0, max = 10_000))]
    pub replicas: i32,
    /// Who decides the number of workers.
    #[serde(default)]
    pub scaling: ScalingSpec,
    /// The front door of the pool.
    #[serde(default)]
    pub router: RouterSpec,
    /// Who may call, with which share; without tenants everyone who reaches the routers is the tenant `default`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 1024))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["name".into()]))]
    pub tenants: Vec<TenantSpec>,
    /// Secret from which reuse domains are derived, at least 16 bytes; made by the operator if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool_secret_ref: Option<SecretKeyRef>,
    /// What counts as good service.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slo: Option<SloSpec>,
    /// How changes reach workers.
    #[serde(default)]
    pub rollout: RolloutSpec,
    /// Repair what exists, but roll nothing out.
    #[serde(default)]
    pub paused: bool,
    /// What evictions may take.
    #[serde(default)]
    pub disruption: DisruptionSpec,
    /// Longest stream: how long a leaving worker or router waits for its requests.
    #[serde(default = "max_stream_duration")]
    pub max_stream_duration: DurationText,
    /// Traces, logs and metrics.
    #[serde(default)]
    pub observability: ObservabilitySpec,
    /// Managed: the operator makes NetworkPolicies. Off: somebody else does.
    #[serde(default)]
    pub network_policy: NetworkPolicyMode,
    /// Images, where they differ from the operator's settings.
    #[serde(default)]
    pub images: ImagesSpec,
    /// Fields of a PodTemplateSpec laid over the worker pods: node selectors, tolerations, volumes, sidecars. Lists merge by their keys; the worker's
    /// container is named `worker`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::free_object")]
    pub pod_template_patch: Option<serde_json::Value>,
}

// === impl ServingPool ===

impl ServingPool {
    /// What the operator has said of the pool; `None` before it looked, when the API server fills in that nobody has.
    pub fn told(&self) -> Option<&ServingPoolStatus> {
        self.status.as_ref().filter(|status| status.observed_generation.is_some())
    }
}

/// A key of a Secret in the pool's namespace.
#[derive(KubeSchema, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SecretKeyRef {
    /// Name of the Secret.
    #[schemars(length(min = 1, max = 253), regex(pattern = r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$"))]
    pub name: String,
    /// Key in it.
    #[serde(default = "secret_key")]
    #[schemars(length(min = 1, max = 253), regex(pattern = r"^[A-Za-z0-9._-]+$"))]
    pub key: String,
}

/// A Secret in the pool's namespace.
#[derive(KubeSchema, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SecretRef {
    /// Name of the Secret.
    #[schemars(length(min = 1, max = 253), regex(pattern = r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$"))]
    pub name: String,
}

/// A key of a ConfigMap in the pool's namespace.
#[derive(KubeSchema, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ConfigRef {
    /// Name of the ConfigMap.
    #[schemars(length(min = 1, max = 253), regex(pattern = r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$"))]
    pub name: String,
    /// Key in it.
    #[schemars(length(min = 1, max = 253), regex(pattern = r"^[A-Za-z0-9._-]+$"))]
    pub key: String,
}

// === impl Default ===

fn replicas() -> i32 {
    1
}

fn max_stream_duration() -> DurationText {
    "10m".into()
}

fn secret_key() -> String {
    "value".to_owned()
}

// === impl ServingPoolSpec ===

impl ServingPoolSpec {
    /// A spec with the defaults of the schema around one model.
    pub fn new(model: ModelSpec) -> Self {
        Self {
            model,
            model_cache: None,
            engine: EngineSpec::default(),
            accelerator: None,
            parallelism: ParallelismSpec::default(),
            prefix_cache: PrefixCacheSpec::default(),
            speculation: SpeculationSpec::default(),
            replicas: replicas(),
            scaling: ScalingSpec::default(),
            router: RouterSpec::default(),
            tenants: Vec::new(),
            pool_secret_ref: None,
            slo: None,
            rollout: RolloutSpec::default(),
            paused: false,
            disruption: DisruptionSpec::default(),
            max_stream_duration: max_stream_duration(),
            observability: ObservabilitySpec::default(),
            network_policy: NetworkPolicyMode::default(),
            images: ImagesSpec::default(),
            pod_template_patch: None,
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
