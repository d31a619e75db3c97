//! Who may reach the pods of a pool, where the network plugin enforces policies.
//!
//! Ingress only: routers must reach the API server, whose address no portable selector names. What keeps strangers off is the bearer; policies make
//! trying harder.

use super::frame::Frame;
use super::{ROUTER_ADMIN_PORT, ROUTER_METRICS_PORT, ROUTER_PORT, WORKER_METRICS_PORT, WORKER_PORT};
use crate::names::Component;
use crate::validate::Settings;
use k8s_openapi::api::networking::v1::{
    NetworkPolicy, NetworkPolicyIngressRule, NetworkPolicyPeer, NetworkPolicyPort, NetworkPolicySpec,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use std::collections::BTreeMap;

/// The policies of all components; none where somebody else makes them.
pub(super) fn policies(frame: &Frame<'_>, settings: &Settings) -> Vec<NetworkPolicy> {
    if !frame.pool.network_policies {
        return Vec::new();
    }
    let operator = operator(settings);
    let scraped = |port: u16| rule(port, vec![operator.clone(), prometheus()]);
    let mut policies = vec![
        policy(
            frame,
            Component::Worker,
            vec![rule(WORKER_PORT, vec![pods(frame, Component::Router), operator.clone()]), scraped(WORKER_METRICS_PORT)],
        ),
        policy(
            frame,
            Component::Router,
            vec![rule(ROUTER_PORT, Vec::new()), rule(ROUTER_ADMIN_PORT, vec![operator.clone()]), scraped(ROUTER_METRICS_PORT)],
        ),
    ];
    if frame.pool.draft_pods() {
        let callers = vec![pods(frame, Component::Worker), operator.clone()];
        policies.push(policy(frame, Component::Draft, vec![rule(WORKER_PORT, callers), scraped(WORKER_METRICS_PORT)]));
    }
    policies
}

fn policy(frame: &Frame<'_>, component: Component, ingress: Vec<NetworkPolicyIngressRule>) -> NetworkPolicy {
    NetworkPolicy {
        metadata: frame.metadata(frame.names.component(component), Some(component)),
        spec: Some(NetworkPolicySpec {
            pod_selector: Some(frame.selector(component)),
            policy_types: Some(vec!["Ingress".to_owned()]),
            ingress: Some(ingress),
            egress: None,
        }),
    }
}

/// Lets `from` in to `port`; nobody named means everybody.
fn rule(port: u16, from: Vec<NetworkPolicyPeer>) -> NetworkPolicyIngressRule {
    NetworkPolicyIngressRule {
        ports: Some(vec![NetworkPolicyPort {
            port: Some(IntOrString::Int(i32::from(port))),
            protocol: Some("TCP".to_owned()),
            end_port: None,
        }]),
        from: (!from.is_empty()).then_some(from),
    }
}

fn pods(frame: &Frame<'_>, component: Component) -> NetworkPolicyPeer {
    NetworkPolicyPeer { pod_selector: Some(frame.selector(component)), ..NetworkPolicyPeer::default() }
}

fn operator(settings: &Settings) -> NetworkPolicyPeer {
    let namespace = [("kubernetes.io/metadata.name".to_owned(), settings.operator_namespace.clone())];
    NetworkPolicyPeer {
        namespace_selector: Some(labelled(namespace.into())),
        pod_selector: Some(labelled(settings.operator_labels.clone())),
        ip_block: None,
    }
}

/// Prometheus wherever it runs, by the label that its operator and its chart give it.
fn prometheus() -> NetworkPolicyPeer {
    NetworkPolicyPeer {
        namespace_selector: Some(LabelSelector::default()),
        pod_selector: Some(labelled([("app.kubernetes.io/name".to_owned(), "prometheus".to_owned())].into())),
        ip_block: None,
    }
}

fn labelled(labels: BTreeMap<String, String>) -> LabelSelector {
    LabelSelector { match_labels: Some(labels), ..LabelSelector::default() }
}
