//! Free devices of a class: what drivers announce minus what claims hold.
//!
//! Owns the one form of class that can be counted without evaluating expressions: all devices of a driver. Any other class is said to be
//! uncountable rather than guessed at.

use crate::rollout::Free;
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};
use std::collections::{BTreeMap, BTreeSet};

/// How many more claims of `per_pod` devices of a class could be met. Devices of one claim have to be on one node.
pub fn free_of_class(class: &DeviceClass, per_pod: u32, slices: &[ResourceSlice], claims: &[ResourceClaim]) -> Free {
    let name = class.metadata.name.as_deref().unwrap_or_default();
    let Some(driver) = driver(class) else {
        return Free::Unknown(format!(
            "DeviceClass {name} selects devices by more than `device.driver == \"…\"`, so they cannot be counted"
        ));
    };
    let results =
        claims.iter().filter_map(|claim| claim.status.as_ref()?.allocation.as_ref()?.devices.as_ref()?.results.as_ref());
    let taken: BTreeSet<(&str, &str)> =
        results.flatten().filter(|it| it.driver == driver).map(|it| (&*it.pool, &*it.device)).collect();
    // Of a pool only the newest generation counts.
    let mut newest: BTreeMap<&str, i64> = BTreeMap::new();
    let of_driver = || slices.iter().map(|slice| &slice.spec).filter(|spec| spec.driver == driver);
    for spec in of_driver() {
        let generation = newest.entry(&spec.pool.name).or_insert(spec.pool.generation);
        *generation = (*generation).max(spec.pool.generation);
    }
    let mut by_node: BTreeMap<Option<&str>, u32> = BTreeMap::new();
    for spec in of_driver().filter(|spec| newest.get(&*spec.pool.name) == Some(&spec.pool.generation)) {
        let devices = spec.devices.iter().flatten();
        let free = devices.filter(|device| {
            let tainted = device.taints.iter().flatten().any(|taint| taint.effect != "None");
            !tainted && !taken.contains(&(&*spec.pool.name, &*device.name))
        });
        *by_node.entry(spec.node_name.as_deref()).or_default() += free.count() as u32;
    }
    let slots: u32 = by_node.values().map(|devices| devices / per_pod.max(1)).sum();
    let waiting = claims.iter().filter(|claim| waits_for(claim, name)).count() as u32;
    Free::Slots(slots.saturating_sub(waiting))
}

/// The driver all of whose devices a class is.
fn driver(class: &DeviceClass) -> Option<&str> {
    let [selector] = class.spec.selectors.as_deref()? else { return None };
    let expression = selector.cel.as_ref()?.expression.trim();
    let (left, right) = expression.split_once("==")?;
    let quoted = |text: &'static str| (left.trim() == text).then_some(right.trim());
    let value = quoted("device.driver")?;
    let inner = value.strip_prefix(['"', '\''])?.strip_suffix(['"', '\''])?;
    inner.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-')).then_some(inner)
}

/// Whether a claim without devices asks for some of the class.
fn waits_for(claim: &ResourceClaim, class: &str) -> bool {
    let open =
        claim.status.as_ref().is_none_or(|status| status.allocation.is_none()) && claim.metadata.deletion_timestamp.is_none();
    let requests = claim.spec.devices.as_ref().and_then(|devices| devices.requests.as_ref());
    open && requests.into_iter().flatten().any(|request| request.exactly.as_ref().is_some_and(|it| it.device_class_name == class))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn class(expression: &str) -> DeviceClass {
        let spec = json!({"selectors": [{"cel": {"expression": expression}}]});
        serde_json::from_value(json!({"metadata": {"name": "gpu"}, "spec": spec})).unwrap()
    }

    fn slice(node: &str, generation: i64, devices: &[&str]) -> ResourceSlice {
        let devices: Vec<Value> = devices.iter().map(|name| json!({"name": name})).collect();
        let pool = json!({"name": node, "generation": generation, "resourceSliceCount": 1});
        serde_json::from_value(json!({"metadata": {"name": node},
            "spec": {"driver": "gpu.example.com", "nodeName": node, "pool": pool, "devices": devices}}))
        .unwrap()
    }

    fn claim(allocated: &[(&str, &str)]) -> ResourceClaim {
        let results: Vec<Value> = allocated
            .iter()
            .map(|(pool, device)| json!({"driver": "gpu.example.com", "pool": pool, "device": device, "request": "r"}))
            .collect();
        let status = if results.is_empty() { json!({}) } else { json!({"allocation": {"devices": {"results": results}}}) };
        serde_json::from_value(json!({"metadata": {"name": "c"}, "status": status, "spec": {"devices": {"requests": [
            {"name": "r", "exactly": {"deviceClassName": "gpu", "allocationMode": "ExactCount", "count": 2}}]}}}))
        .unwrap()
    }

    const ALL: &str = "device.driver == \"gpu.example.com\"";

    #[test]
    fn devices_of_one_claim_have_to_be_on_one_node() {
        let slices = [slice("a", 1, &["0", "1", "2"]), slice("b", 1, &["0"])];
        let free = |per_pod, claims: &[ResourceClaim]| free_of_class(&class(ALL), per_pod, &slices, claims);
        assert_eq!(free(1, &[]), Free::Slots(4));
        assert_eq!(free(2, &[]), Free::Slots(1), "one is left over on each node");
        assert_eq!(free(2, &[claim(&[("a", "0"), ("a", "1")])]), Free::Slots(0));
        assert_eq!(free(1, &[claim(&[])]), Free::Slots(3), "who waits comes first");
    }

    #[test]
    fn an_old_generation_of_a_pool_is_not_counted_twice() {
        let slices = [slice("a", 1, &["0", "1"]), slice("a", 2, &["0"])];
        assert_eq!(free_of_class(&class(ALL), 1, &slices, &[]), Free::Slots(1));
    }

    #[test]
    fn a_class_that_needs_an_expression_is_not_guessed_at() {
        for expression in ["device.driver == 'x' && device.attributes['x'].model == 'y'", "true", "device.driver != 'x'"] {
            assert!(
                matches!(free_of_class(&class(expression), 1, &[], &[]), Free::Unknown(why) if why.contains("gpu")),
                "{expression}"
            );
        }
    }
}
