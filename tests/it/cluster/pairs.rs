//! Pairs of devices through the operator: a draft beside its target, tied by an attribute, under the real scheduler.

use super::api_server::install;
use super::operator::Operator;
use super::support::{apply, eventually, feed, get, on_cluster};
use kvasir_cluster::{Cluster, DeviceSpec, Layers, NodeSpec};
use serde_json::{Value, json};

const DRIVER: &str = "gpu.example.com";
const LINK: &str = "gpu.example.com/link";

fn pool(namespace: &str, name: &str, accelerator: &Value, on_failure: &str) -> Value {
    let file = |path: &str| json!({"source": {"file": {"path": path}}});
    json!({
        "apiVersion": "kvasir.dev/v1alpha1", "kind": "ServingPool", "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "model": file("/models/a.gguf"), "accelerator": accelerator,
            "speculation": {"mode": "Auto", "drafter": "Model", "draft": {
                "model": file("/models/draft.gguf"), "placement": "OtherDevice", "onFailure": on_failure,
                "interconnect": {"matchAttribute": LINK},
            }},
        },
    })
}

fn devices(links: &[&str]) -> Vec<DeviceSpec> {
    links.iter().enumerate().map(|(number, link)| DeviceSpec::new(&format!("gpu-{number}")).attribute("link", link)).collect()
}

/// A condition once it has this reason.
async fn said(cluster: &Cluster, namespace: &str, name: &str, kind: &str, reason: &str) -> Value {
    eventually(&format!("{kind} of pool `{name}` is {reason}"), || {
        let conditions = get(cluster, &["-n", namespace, "spool", name])["status"]["conditions"].clone();
        let found = conditions.as_array().and_then(|all| all.iter().find(|it| it["type"] == kind && it["reason"] == reason));
        found.cloned().ok_or_else(|| conditions.to_string())
    })
    .await
}

/// Devices of the pool's worker by request, once it runs; one that could not be placed may have been replaced by then.
async fn allocated(cluster: &Cluster, namespace: &str, name: &str) -> Vec<(String, String, String)> {
    let worker = format!("{name}-worker-");
    eventually(&format!("a pod `{worker}` runs"), || {
        let pods = get(cluster, &["-n", namespace, "pods"]);
        let of_worker = |it: &&Value| it["metadata"]["name"].as_str().is_some_and(|pod| pod.starts_with(&worker));
        let workers: Vec<&Value> = pods["items"].as_array().unwrap().iter().filter(of_worker).collect();
        let Some(pod) = workers.iter().find(|it| it["status"]["phase"] == "Running") else {
            return Err(workers.iter().map(|it| it["status"].to_string()).collect());
        };
        let claim = pod["status"]["resourceClaimStatuses"][0]["resourceClaimName"].as_str().unwrap_or_default().to_owned();
        let claim = get(cluster, &["-n", namespace, "resourceclaim", &claim]);
        let results = claim["status"]["allocation"]["devices"]["results"].as_array().cloned().unwrap_or_default();
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        Ok(results.iter().map(|it| (text(&it["request"]), text(&it["pool"]), text(&it["device"]))).collect())
    })
    .await
}

#[test]
fn the_operator_gets_a_linked_pair_or_says_that_there_is_none_or_serves_without_a_draft() {
    on_cluster(Layers::controllers(), async |cluster| {
        install(cluster, &[]).await;
        let nodes = cluster.play_nodes(&["split", "linked"].map(NodeSpec::new)).await.unwrap();
        nodes.serve_pods();
        cluster.device_class("gpu", &format!("device.driver == \"{DRIVER}\"")).await.unwrap();
        // No two devices of the first node share a link; on the second the first one is alone and the other two are a pair.
        cluster.offer_devices("split", DRIVER, &devices(&["a", "b", "c"])).await.unwrap();
        cluster.offer_devices("linked", DRIVER, &devices(&["d", "e", "e"])).await.unwrap();
        let namespace = cluster.namespace("pairs", &[]).await.unwrap();
        let operator = Operator::beside(cluster, &namespace);
        let class = json!({"count": 1, "deviceClassName": "gpu"});

        apply(cluster, &pool(&namespace, "first", &class, "Fail"));
        let mut pair = allocated(cluster, &namespace, "first").await;
        pair.sort();
        let of = |request: &str, device: &str| (request.to_owned(), "linked".to_owned(), device.to_owned());
        let either = [vec![of("draft", "gpu-1"), of("target", "gpu-2")], vec![of("draft", "gpu-2"), of("target", "gpu-1")]];
        assert!(either.contains(&pair), "{pair:?}");

        // Five devices are left, and no two of them are linked.
        apply(cluster, &pool(&namespace, "second", &class, "Fail"));
        for kind in ["DraftPlaced", "Degraded", "Progressing"] {
            let condition = said(cluster, &namespace, "second", kind, "NoLinkedDevices").await;
            let message = condition["message"].as_str().unwrap();
            assert!(message.contains(LINK) && message.contains("cannot allocate all claims"), "{message}");
        }
        assert_eq!(said(cluster, &namespace, "second", "Ready", "NoRoutableWorkers").await["status"], "False");

        apply(cluster, &pool(&namespace, "third", &class, "ServeWithoutDraft"));
        said(cluster, &namespace, "third", "DraftPlaced", "ServingWithoutDraft").await;
        let alone = allocated(cluster, &namespace, "third").await;
        assert!(alone.len() == 1 && alone[0].0 == "target", "{alone:?}");

        // Whole devices by count cannot be tied.
        let counted = json!({"count": 1, "resourceName": "nvidia.com/gpu"});
        let refused = feed(cluster, &["apply"], &pool(&namespace, "fourth", &counted, "Fail")).unwrap_err();
        assert!(refused.contains("set accelerator.deviceClassName instead of resourceName"), "{refused}");
        drop(operator);
        nodes.stop().await;
    });
}
