//! What a pool is: the status that the operator computes and users read.
//!
//! Owns the shape. Refuses to know how a figure is found; it is computed from the observed world each time and never carried over, but for the times at
//! which a condition or a rollout last moved.

use super::condition::Condition;
use super::operations::RolloutMode;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::KubeSchema;
use serde::{Deserialize, Serialize};

/// What a pool is.
#[derive(KubeSchema, Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ServingPoolStatus {
    /// Generation of the spec that this status was computed from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub observed_generation: Option<i64>,
    /// What is true of the pool; one entry per type.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
    /// Worker pods that exist and are not leaving; draft pods are not among them.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub replicas: i32,
    /// Worker pods that say they can serve.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub ready_replicas: i32,
    /// Worker pods that every Ready router can reach, of which there is at least one.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub routable_replicas: i32,
    /// Worker pods of the newest template.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub updated_replicas: i32,
    /// Worker pods that the pool wants: spec.replicas, or with scaling.owner Operator what its scaler decided.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub desired_replicas: Option<i32>,
    /// Label selector of the worker pods, for /scale.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 512))]
    pub selector: Option<String>,
    /// Hash of the newest worker template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 63))]
    pub template_hash: Option<String>,
    /// The model, as workers report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<ModelStatus>,
    /// The draft model, as workers report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draft: Option<DraftStatus>,
    /// The routers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub routers: Option<RoutersStatus>,
    /// The rollout that is running, and why it has not moved; absent when there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rollout: Option<RolloutStatus>,
    /// What the pool's own scaler last decided, and from what; owner Operator only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scaling: Option<ScalingStatus>,
    /// The Ready condition's reason, or what keeps the pool from settling, for the Reason column.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 128))]
    pub reason: Option<String>,
}

/// A model, as workers report it.
#[derive(KubeSchema, Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ModelStatus {
    /// Name that clients use.
    #[schemars(length(max = 253))]
    pub name: String,
    /// Weights digest, 64 hexadecimal digits; absent until a worker reports it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub digest: Option<String>,
    /// Revision that was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 128))]
    pub revision: Option<String>,
    /// Share of the bytes that the slowest worker has fetched, in percent, in steps of 5; absent when nothing is being fetched.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 100))]
    pub fetched_percent: Option<i32>,
}

/// The draft, as workers report it.
#[derive(KubeSchema, Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DraftStatus {
    /// Weights digest, 64 hexadecimal digits; absent until a worker reports it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub digest: Option<String>,
    /// Draft pods that exist and are not leaving; SeparatePod only.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub replicas: i32,
    /// Draft pods that say they can serve; SeparatePod only.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub ready_replicas: i32,
}

/// The routers.
#[derive(KubeSchema, Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RoutersStatus {
    /// Router pods that the pool wants.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub desired: i32,
    /// Router pods that are Ready.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub ready: i32,
}

/// A rollout that is running.
#[derive(KubeSchema, Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RolloutStatus {
    /// Hash of the template that it leads to.
    #[schemars(length(max = 63))]
    pub to: String,
    /// How workers are replaced: what Auto chose, or what was asked for.
    pub mode: RolloutMode,
    /// Why this mode.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 512))]
    pub mode_message: Option<String>,
    /// When it began.
    pub started_at: Time,
    /// When a worker last moved on.
    pub progressed_at: Time,
    /// Why it has not moved; absent while it moves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hold: Option<HoldStatus>,
}

/// Why a rollout has not moved.
#[derive(KubeSchema, Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HoldStatus {
    /// One of the documented reasons.
    #[schemars(length(max = 128))]
    pub reason: String,
    /// What is in the way, with numbers and names.
    #[schemars(length(max = 1024))]
    pub message: String,
    /// Since when.
    pub since: Time,
}

/// What the pool's own scaler last decided.
#[derive(KubeSchema, Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ScalingStatus {
    /// When the number of wished workers last changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub changed_at: Option<Time>,
    /// From what it was decided, with figures.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub message: Option<String>,
}
