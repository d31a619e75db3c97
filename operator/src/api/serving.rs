//! What a pool reuses, drafts and promises: prefix cache, speculation, tenants, objectives.

use super::SecretKeyRef;
use super::model::{ModelSpec, ResourcesSpec, SharedPrefixSpec};
use super::text::{DurationText, PercentText, SizeText};
use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Whether something is used.
#[derive(JsonSchema, Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum CacheMode {
    /// The engine decides from measured cost.
    #[default]
    Auto,
    /// Always.
    On,
    /// Never; wins over every request's wish.
    Off,
}

/// Who may reuse whose cached state.
#[derive(JsonSchema, Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum Isolation {
    /// Each tenant its own; registered shared prefixes are shared and re-rooted per tenant behind them.
    #[default]
    PerTenant,
    /// All tenants of the pool share one domain: they can learn by timing what others asked.
    Pool,
}

/// When a block is copied to the host tier.
#[derive(JsonSchema, Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum HostTierPolicy {
    /// When the device evicts it.
    #[default]
    OnEviction,
    /// When it is used for the second time.
    OnSecondUse,
    /// As soon as it is complete.
    WriteThrough,
}

/// Reuse of computed prefixes.
#[derive(KubeSchema, Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.mode != 'Off' || (!has(self.hostTier) && !has(self.diskTier) && !(has(self.sharedPrefixes) && self.sharedPrefixes.size() > 0))")
    .message("with prefixCache.mode Off nothing is cached: remove hostTier, diskTier and sharedPrefixes, or set mode to Auto or On"))]
pub struct PrefixCacheSpec {
    /// Auto: the engine decides from measured cost. On: always. Off: never.
    #[serde(default)]
    pub mode: CacheMode,
    /// Part of the KV pool that unreferenced blocks may hold; all of it if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_share: Option<PercentText>,
    /// Tier in the host's memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_tier: Option<HostTierSpec>,
    /// Tier on a disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_tier: Option<DiskTierSpec>,
    /// PerTenant: each tenant reuses its own state only. Pool: all tenants share one domain and can learn by timing what others asked.
    #[serde(default)]
    pub isolation: Isolation,
    /// Prefixes that all tenants share, such as a system prompt.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["name".into()]))]
    pub shared_prefixes: Vec<SharedPrefixSpec>,
}

/// Tier in the host's memory; charged to the pod's memory request.
#[derive(KubeSchema, Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HostTierSpec {
    /// Memory per worker.
    pub size: SizeText,
    /// When a block is copied to it: OnEviction, OnSecondUse or WriteThrough.
    #[serde(default)]
    pub policy: HostTierPolicy,
    /// Keep it on a memory volume, so that it outlives a restart of the container (an image changed in place, a crash), though not the pod.
    #[serde(default)]
    pub survives_restart: bool,
}

/// Tier on a disk.
#[derive(KubeSchema, Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DiskTierSpec {
    /// Disk per worker, on the node's ephemeral storage.
    pub size: SizeText,
}

/// Who chooses how deep to draft.
#[derive(JsonSchema, Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum SpeculationMode {
    /// Nobody: no drafts.
    #[default]
    Off,
    /// Always maxDraftTokens.
    Fixed,
    /// The worker's controller, from measured cost and acceptance.
    Auto,
}

/// Who proposes tokens.
#[derive(JsonSchema, Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum Drafter {
    /// The prompt and earlier text.
    #[default]
    Ngram,
    /// A smaller model; see draft.
    Model,
    /// Heads inside the target model.
    Mtp,
}

/// Which promise speculation keeps.
#[derive(JsonSchema, Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum Contract {
    /// The same tokens and bits with speculation on, off or changing depth.
    #[default]
    Coupled,
    /// The target's distribution is preserved.
    Rejection,
}

/// Provisional tokens that the model must accept.
#[derive(KubeSchema, Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.draft) || self.drafter == 'Model'")
        .message("speculation.draft describes a draft model: set drafter to Model, or remove draft"),
    validation = Rule::new("self.drafter != 'Model' || has(self.draft)")
        .message("drafter Model needs speculation.draft with the model that drafts"),
)]
pub struct SpeculationSpec {
    /// Off: no drafts. Fixed: always maxDraftTokens. Auto: the worker decides from measured cost and acceptance.
    #[serde(default)]
    pub mode: SpeculationMode,
    /// Who proposes tokens: Ngram, Model or Mtp.
    #[serde(default)]
    pub drafter: Drafter,
    /// Coupled: same tokens as without speculation. Rejection: same distribution.
    #[serde(default)]
    pub contract: Contract,
    /// Most tokens proposed per step.
    #[serde(default = "max_draft_tokens")]
    #[schemars(range(min = 1, max = 32))]
    pub max_draft_tokens: i32,
    /// The model that drafts, and where it runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draft: Option<DraftSpec>,
}

/// Where a draft model runs.
#[derive(JsonSchema, Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum Placement {
    /// On the target's device.
    #[default]
    SameDevice,
    /// On another device of the same pod.
    OtherDevice,
    /// In pods of its own.
    SeparatePod,
}

/// What happens when the draft cannot be placed at start.
#[derive(JsonSchema, Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum DraftFailure {
    /// Serve without it and say so.
    #[default]
    ServeWithoutDraft,
    /// Wait for it.
    Fail,
}

/// A draft model and where it runs.
#[derive(KubeSchema, Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.interconnect) || self.placement == 'OtherDevice'")
        .message("interconnect ties two devices of one pod: set placement to OtherDevice, or remove interconnect"),
    validation = Rule::new("!has(self.replicas) || self.placement == 'SeparatePod'")
        .message("draft.replicas counts draft pods: set placement to SeparatePod, or remove replicas"),
    validation = Rule::new("!has(self.devices) || self.placement != 'SameDevice'")
        .message("a draft on the target's device asks for no devices: remove draft.devices, or set placement to OtherDevice or SeparatePod"),
)]
pub struct DraftSpec {
    /// The model that drafts. Its tokeniser must be the target's.
    pub model: ModelSpec,
    /// SameDevice, OtherDevice (one pod, another device) or SeparatePod.
    #[serde(default)]
    pub placement: Placement,
    /// Draft pods; SeparatePod only, 1 if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1024))]
    pub replicas: Option<i32>,
    /// Devices for the draft, of the kind that `accelerator` names; OtherDevice and SeparatePod only. 1 if absent and the pool has an accelerator.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 64))]
    pub devices: Option<i32>,
    /// CPU and memory for the draft: its own pod's with SeparatePod, added to the worker's otherwise.
    #[serde(default)]
    pub resources: ResourcesSpec,
    /// Link between the target's and the draft's device; OtherDevice with deviceClassName only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interconnect: Option<InterconnectSpec>,
    /// ServeWithoutDraft or Fail, when the draft cannot be placed at start.
    #[serde(default)]
    pub on_failure: DraftFailure,
}

/// Link between the target's and the draft's device.
#[derive(KubeSchema, Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct InterconnectSpec {
    /// Device attribute that both devices must have with one value, such as `gpu.nvidia.com/nvlinkDomain`.
    #[schemars(length(max = 253), regex(pattern = r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[A-Za-z_][A-Za-z0-9_]{0,31}$"))]
    pub match_attribute: String,
}

/// One tenant of the pool.
#[derive(KubeSchema, Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.cacheFloor) || !has(self.cacheCeiling) || double(self.cacheFloor.replace('%', '')) <= double(self.cacheCeiling.replace('%', ''))")
        .message("cacheFloor must not be above cacheCeiling"),
    validation = Rule::new("self.priority <= self.priorityMax")
        .message("priority must not be above priorityMax, the highest that one of the tenant's requests may have"),
)]
pub struct TenantSpec {
    /// Name of the tenant; a metric label.
    #[schemars(length(min = 1, max = 63), regex(pattern = r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$"))]
    pub name: String,
    /// Secret with the tenant's API key; several keys stand one per line.
    pub key_secret_ref: SecretKeyRef,
    /// Share of the pool under load, relative to other tenants.
    #[serde(default = "weight")]
    #[schemars(range(min = 1, max = 1000))]
    pub weight: i32,
    /// Added to the priority of each of its requests.
    #[serde(default)]
    #[schemars(range(min = -100, max = 100))]
    pub priority: i32,
    /// Highest priority that one of its requests may ask for.
    #[serde(default)]
    #[schemars(range(min = 0, max = 100))]
    pub priority_max: i32,
    /// Limits of use; none if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quota: Option<QuotaSpec>,
    /// Part of the cache that others cannot take.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_floor: Option<PercentText>,
    /// Part of the cache that it cannot exceed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_ceiling: Option<PercentText>,
    /// Raise it to make everything that is cached for the tenant unreachable.
    #[serde(default)]
    #[schemars(range(min = 0, max = 9_007_199_254_740_991i64))]
    pub cache_epoch: i64,
}

/// Limits of use of one tenant.
#[derive(KubeSchema, Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("has(self.requestsPerMinute) || has(self.tokensPerMinute) || has(self.maxRunning)")
    .message("an empty quota limits nothing: set requestsPerMinute, tokensPerMinute or maxRunning, or remove quota"))]
pub struct QuotaSpec {
    /// Requests in a minute.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_000_000_000))]
    pub requests_per_minute: Option<i32>,
    /// Prompt and output tokens in a minute.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 9_007_199_254_740_991i64))]
    pub tokens_per_minute: Option<i64>,
    /// Requests at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_000_000))]
    pub max_running: Option<i32>,
}

/// What counts as good service.
#[derive(KubeSchema, Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SloSpec {
    /// Longest time to the first token.
    pub ttft: DurationText,
    /// Longest time per output token.
    pub tpot: DurationText,
    /// Share of requests that must keep both.
    #[serde(default = "fraction")]
    pub fraction: PercentText,
}

// === impl Default ===

fn max_draft_tokens() -> i32 {
    4
}

fn weight() -> i32 {
    1
}

fn fraction() -> PercentText {
    "95%".into()
}

impl Default for SpeculationSpec {
    fn default() -> Self {
        Self {
            mode: SpeculationMode::Off,
            drafter: Drafter::Ngram,
            contract: Contract::Coupled,
            max_draft_tokens: max_draft_tokens(),
            draft: None,
        }
    }
}
