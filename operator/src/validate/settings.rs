//! Settings: what the operator's own flags say of pools.

use crate::api::PullPolicy;
use std::collections::BTreeMap;

/// What a pool gets where its spec says nothing, and what this cluster can do.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Settings {
    /// Image with `kvasir-worker`.
    pub worker_image: String,
    /// Image with `kvasir-router`.
    pub router_image: String,
    /// When images are pulled.
    pub pull_policy: PullPolicy,
    /// Names of Secrets with registry credentials, in each pool's namespace.
    pub pull_secrets: Vec<String>,
    /// Namespace of the operator's pods, for NetworkPolicies.
    pub operator_namespace: String,
    /// Labels of the operator's pods, for NetworkPolicies.
    pub operator_labels: BTreeMap<String, String>,
    /// Whether the cluster knows ServiceMonitors.
    pub service_monitors: bool,
    /// Whether the cluster mounts OCI images as volumes.
    pub image_volumes: bool,
}
