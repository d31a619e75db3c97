//! How a pool is run: images, scaling, routers, rollouts, disruptions, telemetry.

use super::SecretRef;
use super::model::ResourcesSpec;
use super::text::{DurationText, PercentText};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::KubeSchema;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::collections::BTreeMap;

/// A number of workers such as `1`, or a share of the wished ones such as `25%`.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct CountOrPercent(pub IntOrString);

/// The second form; minimum and maximum bound the first.
const COUNT_OR_PERCENT_PATTERN: &str = "^(100|[0-9]{1,2})%$";

/// When the kubelet pulls images.
#[derive(JsonSchema, Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum PullPolicy {
    /// If the node lacks the image.
    #[default]
    IfNotPresent,
    /// Before each start.
    Always,
    /// Never: the node must have it.
    Never,
}

/// Images of the pool, where they differ from the operator's settings.
#[derive(KubeSchema, Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ImagesSpec {
    /// Image with `kvasir-worker`; a change of it alone can be made in place.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 512), regex(pattern = r"^[^\s]+$"))]
    pub worker: Option<String>,
    /// Image with `kvasir-router`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 512), regex(pattern = r"^[^\s]+$"))]
    pub router: Option<String>,
    /// IfNotPresent, Always or Never; the operator's setting if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pull_policy: Option<PullPolicy>,
    /// Names of Secrets with registry credentials.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 8))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["name".into()]))]
    pub pull_secrets: Vec<SecretRef>,
}

/// Who decides the number of workers.
#[derive(JsonSchema, Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum ScalingOwner {
    /// Whoever writes `spec.replicas`: a person, `kubectl scale`, a HorizontalPodAutoscaler.
    #[default]
    External,
    /// The operator, within min and max.
    Operator,
}

/// Who decides the number of workers, and by what.
#[derive(KubeSchema, Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("self.owner != 'Operator' || (has(self.min) && has(self.max) && has(self.targets))")
        .message("scaling.owner Operator needs min, max and targets"),
    validation = Rule::new("self.owner != 'External' || !(has(self.min) || has(self.max) || has(self.targets))")
        .message("scaling.min, max and targets are read with owner Operator only: remove them, or set owner to Operator"),
    validation = Rule::new("!has(self.min) || !has(self.max) || self.min <= self.max")
        .message("scaling.min must not be above scaling.max"),
)]
pub struct ScalingSpec {
    /// External: whoever writes spec.replicas (a person, kubectl scale, a HorizontalPodAutoscaler). Operator: the operator, in status.desiredReplicas.
    #[serde(default)]
    pub owner: ScalingOwner,
    /// Fewest workers; owner Operator only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 10_000))]
    pub min: Option<i32>,
    /// Most workers; owner Operator only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 10_000))]
    pub max: Option<i32>,
    /// What to keep; owner Operator only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub targets: Option<ScalingTargets>,
    /// How long a wish must hold before it is followed.
    #[serde(default)]
    pub windows: ScalingWindows,
}

/// What the operator's scaler keeps; the one that asks for most workers decides.
#[derive(KubeSchema, Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("has(self.goodput) || has(self.ttft) || has(self.queue)")
    .message("scaling.targets needs at least one of goodput, ttft and queue"))]
pub struct ScalingTargets {
    /// Smallest share of requests within the pool's slo.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub goodput: Option<PercentText>,
    /// Longest time to the first token at the 95th percentile.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttft: Option<DurationText>,
    /// Most requests that wait per worker.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1_000_000))]
    pub queue: Option<i32>,
}

/// How long a wish must hold before it is followed.
#[derive(KubeSchema, Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ScalingWindows {
    /// Before workers are added.
    #[serde(default = "window_up")]
    pub up: DurationText,
    /// Before workers are removed. Removing one loses its warm prefixes.
    #[serde(default = "window_down")]
    pub down: DurationText,
}

/// How a Service is reached.
#[derive(JsonSchema, Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum ServiceType {
    /// Inside the cluster.
    #[default]
    ClusterIP,
    /// On a port of every node.
    NodePort,
    /// Through a load balancer.
    LoadBalancer,
}

/// The Service in front of the routers.
#[derive(KubeSchema, Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ServiceSpec {
    /// ClusterIP, NodePort or LoadBalancer.
    #[serde(default, rename = "type")]
    pub service_type: ServiceType,
    /// Port for OpenAI HTTP and gRPC.
    #[serde(default = "service_port")]
    #[schemars(range(min = 1, max = 65_535))]
    pub port: i32,
    /// Annotations, for load balancers.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "annotations_schema")]
    pub annotations: BTreeMap<String, String>,
}

/// Serving certificates of the routers.
#[derive(KubeSchema, Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TlsSpec {
    /// Secret of type kubernetes.io/tls in the pool's namespace.
    pub secret_ref: SecretRef,
}

/// The front door of the pool.
#[derive(KubeSchema, Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RouterSpec {
    /// Router pods.
    #[serde(default = "router_replicas")]
    #[schemars(range(min = 1, max = 256))]
    pub replicas: i32,
    /// The Service in front of them.
    #[serde(default)]
    pub service: ServiceSpec,
    /// Serving certificates; plain text if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls: Option<TlsSpec>,
    /// CPU and memory of one router pod; 100m and 512Mi if absent.
    #[serde(default)]
    pub resources: ResourcesSpec,
    /// Requests that run at once through one router.
    #[serde(default = "router_running")]
    #[schemars(range(min = 1, max = 1_000_000))]
    pub max_running: i32,
    /// Requests that may wait in one router; more are refused as overloaded.
    #[serde(default = "router_queue")]
    #[schemars(range(min = 0, max = 1_000_000))]
    pub max_queued: i32,
}

/// How changes reach workers.
#[derive(JsonSchema, Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum RolloutMode {
    /// In place where only the image changes; else without surge where devices are scarce; else with surge.
    #[default]
    Auto,
    /// The image is changed in the running pod: volumes survive, weights and device KV do not.
    InPlace,
    /// An old worker leaves before a new one comes.
    SurgeFree,
    /// A new worker comes before an old one leaves.
    Surge,
}

/// How changes reach workers.
#[derive(KubeSchema, Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("self.mode != 'Surge' || !(self.maxSurge == 0 || self.maxSurge == '0%')")
        .message("rollout.mode Surge adds workers before it removes old ones: set maxSurge above 0, or choose another mode"),
    validation = Rule::new("!(self.mode in ['InPlace', 'SurgeFree']) || !(self.maxUnavailable == 0 || self.maxUnavailable == '0%')")
        .message("rollout.mode InPlace or SurgeFree takes workers away first: set maxUnavailable above 0, or choose mode Surge"),
    validation = Rule::new("!(self.maxUnavailable == 0 || self.maxUnavailable == '0%') || !(self.maxSurge == 0 || self.maxSurge == '0%')")
        .message("with rollout.maxUnavailable and maxSurge both 0 nothing could ever move: raise one of them"),
)]
pub struct RolloutSpec {
    /// Auto, InPlace, SurgeFree or Surge.
    #[serde(default)]
    pub mode: RolloutMode,
    /// Workers that may be missing from the routable ones during a rollout: a number or a percentage of the wished ones, rounded down but at least 1.
    #[serde(default = "one_worker")]
    pub max_unavailable: CountOrPercent,
    /// Workers beyond the wished number during a rollout: a number or a percentage, rounded up.
    #[serde(default = "one_worker")]
    pub max_surge: CountOrPercent,
    /// Time without progress after which the rollout counts as failed. It is not undone.
    #[serde(default = "progress_deadline")]
    pub progress_deadline: DurationText,
}

/// What evictions may take.
#[derive(KubeSchema, Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DisruptionSpec {
    /// Workers that evictions may take at once: a number or a percentage.
    #[serde(default = "one_worker")]
    pub max_unavailable: CountOrPercent,
}

/// Whether something is made when the cluster has the API for it.
#[derive(JsonSchema, Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum Monitor {
    /// A ServiceMonitor, if the cluster knows that kind.
    #[default]
    Auto,
    /// None.
    Off,
}

/// Who makes NetworkPolicies.
#[derive(JsonSchema, Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum NetworkPolicyMode {
    /// The operator: workers are reached by routers, draft users and the operator only.
    #[default]
    Managed,
    /// Somebody else.
    Off,
}

/// Traces, logs and metrics.
#[derive(KubeSchema, Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ObservabilitySpec {
    /// OTLP/gRPC endpoint for traces, such as `http://collector.observability:4317`; no traces if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 512), regex(pattern = r"^https?://[^\s/@]+(/[^\s@]*)?$"))]
    pub otlp_endpoint: Option<String>,
    /// Share of traces that begin here and are kept; a caller's decision is followed.
    #[serde(default = "sampling")]
    pub sampling: PercentText,
    /// What workers and routers log, such as `info,kvasir=debug`.
    #[serde(default = "log_filter")]
    #[schemars(length(min = 1, max = 256), regex(pattern = r"^[A-Za-z0-9_:=,.\[\]-]+$"))]
    pub log: String,
    /// Auto: a ServiceMonitor if the cluster knows that kind. Off: none.
    #[serde(default)]
    pub service_monitor: Monitor,
}

// === impl CountOrPercent ===

impl CountOrPercent {
    /// A number of workers.
    pub fn count(count: i32) -> Self {
        Self(IntOrString::Int(count))
    }

    /// How many of `wished` it stands for; a percentage is rounded down. `None` if it is neither a number nor a percentage.
    pub fn of_rounded_down(&self, wished: u32) -> Option<u32> {
        self.of(wished, |part| part / 100)
    }

    /// How many of `wished` it stands for; a percentage is rounded up. `None` if it is neither a number nor a percentage.
    pub fn of_rounded_up(&self, wished: u32) -> Option<u32> {
        self.of(wished, |part| part.div_ceil(100))
    }

    fn of(&self, wished: u32, hundredth: fn(u64) -> u64) -> Option<u32> {
        match &self.0 {
            IntOrString::Int(count) => u32::try_from(*count).ok(),
            IntOrString::String(text) => {
                let percent: u64 = text.strip_suffix('%')?.parse().ok().filter(|percent| *percent <= 100)?;
                u32::try_from(hundredth(u64::from(wished) * percent)).ok()
            }
        }
    }
}

impl JsonSchema for CountOrPercent {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "CountOrPercent".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "x-kubernetes-int-or-string": true,
            "description": "A number of workers such as 1, or a percentage such as 25%.",
            "minimum": 0,
            "maximum": 10_000,
            "maxLength": 4,
            "pattern": COUNT_OR_PERCENT_PATTERN,
        })
    }
}

fn annotations_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "maxProperties": 32,
        "additionalProperties": { "type": "string", "maxLength": 4096, "description": "Value of the annotation." },
    })
}

// === impl Default ===

fn window_up() -> DurationText {
    "30s".into()
}

fn window_down() -> DurationText {
    "10m".into()
}

fn service_port() -> i32 {
    80
}

fn router_replicas() -> i32 {
    2
}

fn router_running() -> i32 {
    4_096
}

fn router_queue() -> i32 {
    1_024
}

fn one_worker() -> CountOrPercent {
    CountOrPercent::count(1)
}

fn progress_deadline() -> DurationText {
    "15m".into()
}

fn sampling() -> PercentText {
    "1%".into()
}

fn log_filter() -> String {
    "info".to_owned()
}

impl Default for ScalingWindows {
    fn default() -> Self {
        Self { up: window_up(), down: window_down() }
    }
}

impl Default for ServiceSpec {
    fn default() -> Self {
        Self { service_type: ServiceType::ClusterIP, port: service_port(), annotations: BTreeMap::new() }
    }
}

impl Default for RouterSpec {
    fn default() -> Self {
        Self {
            replicas: router_replicas(),
            service: ServiceSpec::default(),
            tls: None,
            resources: ResourcesSpec::default(),
            max_running: router_running(),
            max_queued: router_queue(),
        }
    }
}

impl Default for RolloutSpec {
    fn default() -> Self {
        Self {
            mode: RolloutMode::Auto,
            max_unavailable: one_worker(),
            max_surge: one_worker(),
            progress_deadline: progress_deadline(),
        }
    }
}

impl Default for DisruptionSpec {
    fn default() -> Self {
        Self { max_unavailable: one_worker() }
    }
}

impl Default for ObservabilitySpec {
    fn default() -> Self {
        Self { otlp_endpoint: None, sampling: sampling(), log: log_filter(), service_monitor: Monitor::Auto }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_are_numbers_or_percentages_of_the_wished_workers() {
        let percent = |text: &str| CountOrPercent(IntOrString::String(text.to_owned()));
        assert_eq!(CountOrPercent::count(3).of_rounded_down(1), Some(3));
        assert_eq!((percent("25%").of_rounded_down(10), percent("25%").of_rounded_up(10)), (Some(2), Some(3)));
        assert_eq!(percent("100%").of_rounded_up(7), Some(7));
        for wrong in ["", "%", "101%", "5", "-1%", "a%"] {
            assert_eq!(percent(wrong).of_rounded_up(10), None, "{wrong}");
        }
        assert_eq!(CountOrPercent::count(-1).of_rounded_up(10), None);
    }
}
