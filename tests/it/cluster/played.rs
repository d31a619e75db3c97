//! Played nodes under the real scheduler and the real controllers: devices by count and by claim, silence, readiness gates.

use super::support::{apply, eventually, feed, get, kubectl, on_cluster, unschedulable};
use kvasir_cluster::{Cluster, Component, DeviceSpec, Layers, NodeSpec, Play};
use serde_json::{Value, json};

const DRIVER: &str = "gpu.example.com";

fn pod(namespace: &str, name: &str, container: &Value) -> Value {
    let mut whole = json!({"name": "main", "image": "kvasir.test/none:1", "resources": {}});
    for (key, value) in container.as_object().unwrap() {
        whole[key] = value.clone();
    }
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"containers": [whole]},
    })
}

fn gpus(count: u32) -> Value {
    json!({"resources": {"limits": {"nvidia.com/gpu": count.to_string()}}})
}

/// Node of a pod that runs.
async fn runs_on(cluster: &Cluster, namespace: &str, name: &str) -> String {
    eventually(&format!("pod `{name}` runs"), || {
        let pod = get(cluster, &["-n", namespace, "pod", name]);
        let running = pod["status"]["phase"] == "Running";
        running.then(|| pod["spec"]["nodeName"].as_str().unwrap().to_owned()).ok_or_else(|| pod["status"].to_string())
    })
    .await
}

#[test]
fn a_fleet_of_eight_gpus_takes_what_fits_and_the_rest_waits_for_devices() {
    on_cluster(Layers::controllers(), async |cluster| {
        let nodes = cluster.play_nodes(&[NodeSpec::new("gpu-0").gpus(4), NodeSpec::new("gpu-1").gpus(4)]).await.unwrap();
        let namespace = cluster.namespace("fleet", &[]).await.unwrap();
        let mut places = Vec::new();
        for number in 0..4 {
            let name = format!("w-{number}");
            apply(cluster, &pod(&namespace, &name, &gpus(2)));
            places.push(runs_on(cluster, &namespace, &name).await);
        }
        places.sort();
        assert_eq!(places, ["gpu-0", "gpu-0", "gpu-1", "gpu-1"]);
        apply(cluster, &pod(&namespace, "w-4", &gpus(2)));
        let why = unschedulable(cluster, &namespace, "w-4").await;
        assert!(why.contains("2 Insufficient nvidia.com/gpu"), "{why}");

        nodes.set_capacity("gpu-1", "nvidia.com/gpu", "6").await.unwrap();
        assert_eq!(runs_on(cluster, &namespace, "w-4").await, "gpu-1", "more devices let it in");
        nodes.stop().await;
    });
}

/// A claim for a target device and a draft device; with `link`, both have to hang on one link.
fn claim(namespace: &str, name: &str, link: bool) -> Value {
    let request = |name: &str| json!({"name": name, "exactly": {"deviceClassName": "gpu", "count": 1}});
    let mut devices = json!({"requests": [request("target"), request("draft")]});
    if link {
        devices["constraints"] = json!([{"requests": ["target", "draft"], "matchAttribute": format!("{DRIVER}/link")}]);
    }
    json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"devices": devices},
    })
}

fn claiming(namespace: &str, name: &str) -> Value {
    let mut pod = pod(namespace, name, &json!({"resources": {"claims": [{"name": "devices"}]}}));
    pod["spec"]["resourceClaims"] = json!([{"name": "devices", "resourceClaimName": name}]);
    pod
}

/// Devices that the scheduler allocated to a claim, by request.
fn allocated(cluster: &Cluster, namespace: &str, claim: &str) -> Vec<(String, String)> {
    let claim = get(cluster, &["-n", namespace, "resourceclaim", claim]);
    let results = claim["status"]["allocation"]["devices"]["results"].as_array().cloned().unwrap_or_default();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    results.iter().map(|it| (text(&it["request"]), text(&it["device"]))).collect()
}

fn devices(links: &[&str]) -> Vec<DeviceSpec> {
    links.iter().enumerate().map(|(number, link)| DeviceSpec::new(&format!("gpu-{number}")).attribute("link", link)).collect()
}

#[test]
fn the_scheduler_picks_the_linked_pair_by_match_attribute_and_otherwise_the_pod_waits() {
    on_cluster(Layers::controllers(), async |cluster| {
        let specs = ["split", "linked"].map(NodeSpec::new);
        let nodes = cluster.play_nodes(&specs).await.unwrap();
        cluster.device_class("gpu", &format!("device.driver == \"{DRIVER}\"")).await.unwrap();
        // No two devices of the first node share a link; on the second the first one is alone and the other two are a pair.
        cluster.offer_devices("split", DRIVER, &devices(&["a", "b", "c"])).await.unwrap();
        cluster.offer_devices("linked", DRIVER, &devices(&["d", "e", "e"])).await.unwrap();
        let namespace = cluster.namespace("draft", &[]).await.unwrap();

        for name in ["first", "second"] {
            apply(cluster, &claim(&namespace, name, true));
            apply(cluster, &claiming(&namespace, name));
        }
        let mut waiting = "second";
        let winner = eventually("one of the two runs", || {
            let found = ["first", "second"]
                .into_iter()
                .find(|name| get(cluster, &["-n", &namespace, "pod", name])["status"]["phase"] == "Running");
            found.ok_or_else(|| kubectl(cluster, &["-n", &namespace, "get", "pods"]))
        })
        .await;
        if winner == waiting {
            waiting = "first";
        }
        assert_eq!(runs_on(cluster, &namespace, winner).await, "linked");
        let mut pair: Vec<String> = allocated(cluster, &namespace, winner).into_iter().map(|(_, device)| device).collect();
        pair.sort();
        assert_eq!(pair, ["gpu-1", "gpu-2"], "the two on one link");
        let why = unschedulable(cluster, &namespace, waiting).await;
        assert!(why.contains("cannot allocate all claims"), "{why}");

        // Whoever does not ask for a link gets two devices of the other node.
        apply(cluster, &claim(&namespace, "loose", false));
        apply(cluster, &claiming(&namespace, "loose"));
        assert_eq!(runs_on(cluster, &namespace, "loose").await, "split");
        let requests: Vec<String> = allocated(cluster, &namespace, "loose").into_iter().map(|(request, _)| request).collect();
        assert_eq!(requests, ["target", "draft"], "each request has its own device");

        // The pair is free again when its pod and claim go, and the one that waits gets it.
        kubectl(cluster, &["-n", &namespace, "delete", "pod,resourceclaim", winner]);
        assert_eq!(runs_on(cluster, &namespace, waiting).await, "linked");
        nodes.stop().await;
    });
}

#[test]
fn a_claim_with_a_constraint_on_a_request_that_is_not_there_is_refused() {
    on_cluster(Layers::api(), async |cluster| {
        let namespace = cluster.namespace("draft", &[]).await.unwrap();
        let mut wrong = claim(&namespace, "wrong", true);
        wrong["spec"]["devices"]["constraints"][0]["requests"] = json!(["target", "drafft"]);
        let said = feed(cluster, &["apply"], &wrong).unwrap_err();
        assert!(said.contains("drafft"), "{said}");
    });
}

fn deployment(namespace: &str) -> Value {
    let labels = json!({"app": "gated"});
    json!({
        "apiVersion": "apps/v1", "kind": "Deployment",
        "metadata": {"name": "gated", "namespace": namespace},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": {
                "readinessGates": [{"conditionType": "example.com/routable"}],
                "containers": [{"name": "main", "image": "kvasir.test/none:1"}],
            }},
        },
    })
}

#[test]
fn a_gate_holds_a_rollout_and_a_silent_node_loses_its_pods() {
    let layers = Layers::controllers()
        .flag(Component::ControllerManager, "--node-monitor-grace-period=12s")
        .flag(Component::ControllerManager, "--node-monitor-period=1s");
    on_cluster(layers, async |cluster| {
        let nodes = cluster.play_nodes(&["a", "b"].map(NodeSpec::new)).await.unwrap();
        let namespace = cluster.namespace("gate", &[]).await.unwrap();
        apply(cluster, &deployment(&namespace));
        let ready = || get(cluster, &["-n", &namespace, "deployment", "gated"])["status"]["readyReplicas"].as_u64().unwrap_or(0);
        let the_pod = |whose: &str| {
            let pods = get(cluster, &["-n", &namespace, "pods", "-l", "app=gated"]);
            let pods: Vec<Value> = pods["items"].as_array().unwrap().clone();
            pods.into_iter().find(|pod| pod["status"]["phase"] == "Running" && pod["spec"]["nodeName"] != whose)
        };
        let pod = eventually("the pod runs", || the_pod("none").ok_or_else(|| "no pod runs".to_owned())).await;
        assert_eq!(ready(), 0, "the gate is shut");
        let name = pod["metadata"]["name"].as_str().unwrap();
        let gate = json!({"status": {"conditions": [{"type": "example.com/routable", "status": "True"}]}}).to_string();
        kubectl(cluster, &["-n", &namespace, "patch", "pod", name, "--subresource=status", "--type=strategic", "-p", &gate]);
        eventually("the deployment is ready", || (ready() == 1).then_some(()).ok_or_else(|| "not ready".to_owned())).await;

        let node = pod["spec"]["nodeName"].as_str().unwrap();
        nodes.silence(node);
        eventually("the silent node is tainted", || {
            let taints = get(cluster, &["node", node])["spec"]["taints"].clone();
            taints.to_string().contains("unreachable").then_some(()).ok_or_else(|| taints.to_string())
        })
        .await;
        eventually("a pod that was ready is not any more", || {
            (ready() == 0).then_some(()).ok_or_else(|| "still ready".to_owned())
        })
        .await;
        kubectl(cluster, &["-n", &namespace, "delete", "pod", name, "--force"]);
        eventually("another pod runs on the other node", || the_pod(node).map(drop).ok_or_else(|| "no pod runs".to_owned()))
            .await;
        nodes.stop().await;
    });
}

#[test]
fn a_pod_does_what_the_script_says() {
    on_cluster(Layers::controllers(), async |cluster| {
        let nodes = cluster.play_nodes(&[NodeSpec::new("a")]).await.unwrap();
        let namespace = cluster.namespace("script", &[]).await.unwrap();
        nodes.script(|_| Play::Crash);
        apply(cluster, &pod(&namespace, "w", &json!({})));
        let state = || get(cluster, &["-n", &namespace, "pod", "w"])["status"]["containerStatuses"][0]["state"].clone();
        let waits_for = |reason: &str| (state()["waiting"]["reason"] == reason).then_some(()).ok_or_else(|| state().to_string());
        eventually("the pod crashes", || waits_for("CrashLoopBackOff")).await;
        nodes.script(|_| Play::Linger);
        eventually("the pod recovers", || state()["running"].is_object().then_some(()).ok_or_else(|| state().to_string())).await;
        kubectl(cluster, &["-n", &namespace, "delete", "pod", "w", "--wait=false"]);
        assert!(get(cluster, &["-n", &namespace, "pod", "w"])["metadata"]["deletionTimestamp"].is_string(), "it drains");
        nodes.script(|_| Play::Run);
        eventually("the drained pod goes", || {
            let left = kubectl(cluster, &["-n", &namespace, "get", "pods", "-o", "name"]);
            left.is_empty().then_some(()).ok_or(left)
        })
        .await;
        nodes.stop().await;
    });
}
