//! What all objects of a pool share: names, labels, owner, and the words of Kubernetes that stand in several of them.

use super::WORKER_PORT;
use crate::api::ConditionReason;
use crate::api::ServingPool;
use crate::names::{Component, Names};
use crate::status::Fault;
use crate::validate::Pool;
use k8s_openapi::api::core::v1::{ServiceAccount, ServicePort};
use k8s_openapi::api::policy::v1::{PodDisruptionBudget, PodDisruptionBudgetSpec};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta, OwnerReference};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::Resource as _;

/// A pool while it is being built.
pub(super) struct Frame<'a> {
    pub(super) pool: &'a Pool,
    pub(super) names: &'a Names,
    /// Tells bearers apart without telling them.
    pub(super) bearer_digest: String,
}

// === impl Frame ===

impl Frame<'_> {
    /// Metadata of an object that is the whole pool's, or one component's.
    pub(super) fn metadata(&self, name: String, component: Option<Component>) -> ObjectMeta {
        ObjectMeta {
            name: Some(name),
            namespace: Some(self.pool.namespace.clone()),
            labels: Some(component.map_or_else(|| self.names.labels(), |it| self.names.component_labels(it))),
            owner_references: Some(vec![self.owner()]),
            ..ObjectMeta::default()
        }
    }

    /// The pool, as owner.
    pub(super) fn owner(&self) -> OwnerReference {
        OwnerReference {
            api_version: ServingPool::api_version(&()).into_owned(),
            kind: ServingPool::kind(&()).into_owned(),
            name: self.pool.name.clone(),
            uid: self.pool.uid.clone(),
            controller: Some(true),
            block_owner_deletion: Some(true),
        }
    }

    /// Selects a component's pods.
    pub(super) fn selector(&self, component: Component) -> LabelSelector {
        LabelSelector { match_labels: Some(self.names.selector(component)), ..LabelSelector::default() }
    }

    /// Account of a component. Its token is mounted only where a pod asks for it.
    pub(super) fn account(&self, component: Component) -> ServiceAccount {
        ServiceAccount {
            metadata: self.metadata(self.names.component(component), Some(component)),
            automount_service_account_token: Some(false),
            ..ServiceAccount::default()
        }
    }

    /// What evictions may take of a component. Pods that do not work protect nobody.
    pub(super) fn budget(&self, component: Component, max_unavailable: IntOrString) -> PodDisruptionBudget {
        PodDisruptionBudget {
            metadata: self.metadata(self.names.component(component), Some(component)),
            spec: Some(PodDisruptionBudgetSpec {
                max_unavailable: Some(max_unavailable),
                selector: Some(self.selector(component)),
                unhealthy_pod_eviction_policy: Some("AlwaysAllow".to_owned()),
                ..PodDisruptionBudgetSpec::default()
            }),
            status: None,
        }
    }
}

/// A port of a Service that leads to the pods' port of the same name.
pub(super) fn service_port(name: &str, port: u16) -> ServicePort {
    ServicePort {
        name: Some(name.to_owned()),
        port: i32::from(port),
        protocol: Some("TCP".to_owned()),
        target_port: Some(IntOrString::String(name.to_owned())),
        ..ServicePort::default()
    }
}

/// The gRPC port of workers and drafts, named as routers look for it.
pub(super) fn grpc_port() -> ServicePort {
    ServicePort { app_protocol: Some("kubernetes.io/h2c".to_owned()), ..service_port("grpc", WORKER_PORT) }
}

/// An amount of bytes in the largest binary unit that it is a multiple of.
pub(super) fn bytes(amount: u64) -> Quantity {
    let unit = [("Ti", 40), ("Gi", 30), ("Mi", 20), ("Ki", 10)]
        .into_iter()
        .find(|(_, shift)| amount > 0 && amount.is_multiple_of(1 << shift));
    Quantity(unit.map_or_else(|| amount.to_string(), |(name, shift)| format!("{}{name}", amount >> shift)))
}

/// Cores.
pub(super) fn cores(millicores: u64) -> Quantity {
    Quantity(if millicores.is_multiple_of(1_000) { (millicores / 1_000).to_string() } else { format!("{millicores}m") })
}

/// A pool that cannot be written down; no value of a typed object leads here.
pub(super) fn unserialisable(error: &serde_json::Error) -> Fault {
    Fault::new(
        ConditionReason::InvalidSpec,
        format!("an object of the pool cannot be written as JSON: {error}; this is a fault of the operator"),
    )
}
