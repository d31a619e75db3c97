//! A played node as an object.

use crate::Error;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// The resource under which NVIDIA's device plugin offers whole GPUs.
const GPU: &str = "nvidia.com/gpu";

/// What a played node offers.
#[derive(Clone, Debug)]
pub struct NodeSpec {
    name: String,
    labels: BTreeMap<String, String>,
    capacity: BTreeMap<String, String>,
    taints: Vec<Value>,
}

// === impl NodeSpec ===

impl NodeSpec {
    /// 64 cores, 512 GiB, 110 pods, no GPU.
    pub fn new(name: &str) -> Self {
        let capacity = [("cpu", "64"), ("memory", "512Gi"), ("pods", "110"), ("ephemeral-storage", "1Ti")];
        let labels = [("kubernetes.io/hostname", name), ("kubernetes.io/os", "linux"), ("kubernetes.io/arch", "amd64")];
        Self { name: name.to_owned(), labels: owned(labels), capacity: owned(capacity), taints: Vec::new() }
    }

    /// `nvidia.com/gpu`, as the device plugin would report it.
    pub fn gpus(self, count: u32) -> Self {
        self.capacity(GPU, &count.to_string())
    }

    /// Any resource, extended ones included.
    pub fn capacity(mut self, resource: &str, quantity: &str) -> Self {
        self.capacity.insert(resource.to_owned(), quantity.to_owned());
        self
    }

    /// A label, such as a zone.
    pub fn label(mut self, key: &str, value: &str) -> Self {
        self.labels.insert(key.to_owned(), value.to_owned());
        self
    }

    /// A taint that keeps pods without a toleration away.
    pub fn taint(mut self, key: &str, value: &str, effect: &str) -> Self {
        self.taints.push(json!({"key": key, "value": value, "effect": effect}));
        self
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn object(&self) -> Result<Node, Error> {
        let now = Timestamp::now();
        let condition = |kind: &str, status: &str| {
            json!({
                "type": kind, "status": status, "reason": "Played", "message": "played by the test harness",
                "lastHeartbeatTime": now, "lastTransitionTime": now,
            })
        };
        serde_json::from_value(json!({
            "metadata": {"name": self.name, "labels": self.labels},
            "spec": {"taints": self.taints},
            "status": {
                "capacity": self.capacity,
                "allocatable": self.capacity,
                "conditions": [
                    condition("Ready", "True"),
                    condition("MemoryPressure", "False"),
                    condition("DiskPressure", "False"),
                    condition("PIDPressure", "False"),
                ],
                "nodeInfo": {
                    "architecture": "amd64", "operatingSystem": "linux", "osImage": "played", "kernelVersion": "played",
                    "kubeletVersion": crate::KUBERNETES_VERSION, "kubeProxyVersion": crate::KUBERNETES_VERSION,
                    "containerRuntimeVersion": "played://1", "machineID": self.name, "systemUUID": self.name, "bootID": self.name,
                },
            },
        }))
        .map_err(|error| Error::Settings(format!("node `{}`: {error}", self.name)))
    }
}

fn owned<const N: usize>(pairs: [(&str, &str); N]) -> BTreeMap<String, String> {
    pairs.into_iter().map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_offers_its_gpus_and_is_ready() {
        let node = NodeSpec::new("gpu-0").gpus(8).label("zone", "a").object().unwrap();
        let status = node.status.unwrap();
        assert_eq!(status.allocatable.unwrap()[GPU].0, "8");
        assert!(status.conditions.unwrap().iter().any(|condition| condition.type_ == "Ready" && condition.status == "True"));
        assert_eq!(node.metadata.labels.unwrap()["kubernetes.io/hostname"], "gpu-0");
    }
}
