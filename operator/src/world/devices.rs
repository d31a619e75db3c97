//! Free devices: how many more pods of a template the cluster could place now.
//!
//! Owns the arithmetic over nodes and the pods on them: what is allocatable minus what is asked for, in every resource that the pod requests,
//! extended ones included. Refuses to imitate the whole scheduler: affinities and spread are not looked at, so the count is an upper bound of
//! what fits; a pod that does not fit after all waits as Pending and the plan waits with it.

mod class;

pub use class::free_of_class;

use crate::rollout::Free;
use k8s_openapi::api::core::v1::{Node, Pod, PodSpec, Taint, Toleration};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use std::collections::BTreeMap;

/// Amounts by resource, in millionths.
type Amounts = BTreeMap<String, i128>;

/// How many more pods like `wanted` fit onto `nodes` beside `pods`.
pub fn free(wanted: &PodSpec, nodes: &[Node], pods: &[Pod]) -> Free {
    let need = requests(wanted);
    let fits = nodes.iter().filter(|node| is_usable(node, wanted)).map(|node| slots(&need, node, pods)).sum::<u32>();
    // What waits for a node takes a place as soon as there is one.
    let waits = |pod: &&Pod| pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_none() && shares(&need, &requests(spec)));
    let waiting = pods.iter().filter(|pod| !is_over(pod) && pod.metadata.deletion_timestamp.is_none()).filter(waits).count();
    Free::Slots(fits.saturating_sub(waiting as u32))
}

fn slots(need: &Amounts, node: &Node, pods: &[Pod]) -> u32 {
    let status = node.status.clone().unwrap_or_default();
    let mut left = amounts(status.allocatable.unwrap_or_default().iter());
    let name = node.metadata.name.as_deref();
    let here =
        pods.iter().filter(|pod| !is_over(pod)).filter_map(|pod| pod.spec.as_ref()).filter(|it| it.node_name.as_deref() == name);
    let mut count = 0;
    for spec in here {
        count += 1;
        for (resource, amount) in requests(spec) {
            *left.entry(resource).or_default() -= amount;
        }
    }
    *left.entry("pods".to_owned()).or_default() -= count * 1_000_000;
    let fits = |resource: &str, amount: i128| {
        u32::try_from(left.get(resource).copied().unwrap_or_default().max(0) / amount).unwrap_or(u32::MAX)
    };
    let whole = need.iter().filter(|(_, amount)| **amount > 0).map(|(resource, amount)| fits(resource, *amount));
    whole.min().unwrap_or(u32::MAX).min(fits("pods", 1_000_000))
}

/// Whether what waits competes for what is scarce: an extended resource if the pod asks for one, else anything.
fn shares(need: &Amounts, other: &Amounts) -> bool {
    let extended: Vec<&String> = need.keys().filter(|resource| resource.contains('/')).collect();
    extended.is_empty() || extended.into_iter().any(|resource| other.contains_key(resource))
}

fn is_usable(node: &Node, wanted: &PodSpec) -> bool {
    let spec = node.spec.clone().unwrap_or_default();
    let ready =
        node.status.as_ref().and_then(|status| status.conditions.as_ref()).is_some_and(|conditions| {
            conditions.iter().any(|condition| condition.type_ == "Ready" && condition.status == "True")
        });
    let labels = node.metadata.labels.clone().unwrap_or_default();
    let chosen = wanted.node_selector.iter().flatten().all(|(name, value)| labels.get(name) == Some(value));
    let tolerations = wanted.tolerations.clone().unwrap_or_default();
    let welcome = spec.taints.iter().flatten().filter(|it| it.effect != "PreferNoSchedule").all(|it| tolerated(it, &tolerations));
    ready && chosen && welcome && spec.unschedulable != Some(true)
}

fn tolerated(taint: &Taint, tolerations: &[Toleration]) -> bool {
    tolerations.iter().any(|it| {
        let key = it.key.as_deref().is_none_or(|key| key.is_empty() || key == taint.key);
        let effect = it.effect.as_deref().is_none_or(|effect| effect.is_empty() || effect == taint.effect);
        let exists = it.operator.as_deref() == Some("Exists");
        key && effect && (exists || it.value.as_deref().unwrap_or_default() == taint.value.as_deref().unwrap_or_default())
    })
}

fn is_over(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed"))
}

fn requests(spec: &PodSpec) -> Amounts {
    let mut sum = Amounts::new();
    for container in &spec.containers {
        let resources = container.resources.clone().unwrap_or_default();
        let mut asked = amounts(resources.limits.unwrap_or_default().iter());
        asked.extend(amounts(resources.requests.unwrap_or_default().iter()));
        for (resource, amount) in asked {
            *sum.entry(resource).or_default() += amount;
        }
    }
    sum
}

fn amounts<'a>(quantities: impl Iterator<Item = (&'a String, &'a Quantity)>) -> Amounts {
    quantities.filter_map(|(resource, amount)| Some((resource.clone(), crate::apply::quantity(&amount.0)?))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn node(name: &str, spec: &Value) -> Node {
        serde_json::from_value(json!({"metadata": {"name": name, "labels": {"kind": "gpu"}}, "spec": spec, "status": {
            "allocatable": {"cpu": "8", "memory": "32Gi", "nvidia.com/gpu": "4", "pods": "110"},
            "conditions": [{"type": "Ready", "status": "True"}]}}))
        .unwrap()
    }

    fn pod(node: Option<&str>, gpus: u32, phase: &str) -> Pod {
        serde_json::from_value(json!({"metadata": {"name": "p"}, "spec": {"nodeName": node, "containers": [{"name": "w",
            "resources": {"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": {"nvidia.com/gpu": gpus.to_string()}}}]},
            "status": {"phase": phase}}))
        .unwrap()
    }

    fn count(nodes: &[Node], pods: &[Pod]) -> Free {
        free(pod(None, 2, "").spec.as_ref().unwrap(), nodes, pods)
    }

    #[test]
    fn what_is_allocatable_minus_what_is_asked_for_is_free() {
        let nodes = [node("a", &json!({})), node("b", &json!({}))];
        assert_eq!(count(&nodes, &[]), Free::Slots(4));
        assert_eq!(count(&nodes, &[pod(Some("a"), 3, "Running")]), Free::Slots(2), "one device left over is no place for two");
        assert_eq!(count(&nodes, &[pod(Some("a"), 4, "Succeeded")]), Free::Slots(4));
        assert_eq!(count(&nodes, &[pod(None, 2, "Pending")]), Free::Slots(3), "who waits comes first");
        let many: Vec<Pod> = (0..16).map(|_| pod(Some("a"), 0, "Running")).collect();
        assert_eq!(count(&nodes, &many), Free::Slots(2), "cpu can be what is scarce");
    }

    #[test]
    fn nodes_that_take_no_such_pod_do_not_count() {
        let closed = node("a", &json!({"unschedulable": true}));
        let tainted = node("b", &json!({"taints": [{"key": "t", "value": "v", "effect": "NoSchedule"}]}));
        assert_eq!(count(&[closed, tainted.clone()], &[]), Free::Slots(0));
        let mut wanted = pod(None, 2, "").spec.unwrap();
        wanted.tolerations = Some(vec![Toleration { operator: Some("Exists".to_owned()), ..Toleration::default() }]);
        assert_eq!(free(&wanted, std::slice::from_ref(&tainted), &[]), Free::Slots(2));
        wanted.node_selector = Some([("kind".to_owned(), "cpu".to_owned())].into());
        assert_eq!(free(&wanted, &[tainted], &[]), Free::Slots(0));
    }
}
