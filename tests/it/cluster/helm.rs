//! The whole road: `helm install`, `kubectl apply` of a pool, a tenant's request answered; then what users rely on, and `helm test`.

use super::serving::Pool;
use super::support::{
    MODEL, MODELS, PATIENCE, ROUTER, WORKER, apply, claim, get, kubectl, load_images, model_volume, on_nodes, step,
};
use crate::e2e::jaeger::Jaeger;
use crate::e2e::support::program;
use crate::root;
use kvasir_cluster::{Cluster, until};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// From `kubectl apply` to the first answer, images and model present.
const FIRST_ANSWER_MAX: Duration = Duration::from_secs(90);
pub const OPERATOR: &str = "kvasir.test/kvasir-operator:1";
pub const SYSTEM: &str = "kvasir-system";
pub const KEY: &str = "sk-of-the-harbour-0123456789";

/// Values for images that lie on the node and nowhere else.
pub fn install(cluster: &Cluster, otlp: &str, tenant_namespace: &str) {
    let values = json!({
        "images": {
            "registry": "kvasir.test", "pullPolicy": "Never",
            "operator": {"tag": "1"}, "router": {"tag": "1"}, "worker": {"tag": "1"}, "cli": {"tag": "1"},
        },
        "telemetry": {"otlp": {"endpoint": otlp}},
        "test": {"pool": {"name": "harbour", "namespace": tenant_namespace, "model": MODEL, "keySecret": {"name": "harbour", "key": "value"}}},
    });
    let file = cluster.folder().join("values.json");
    std::fs::write(&file, values.to_string()).unwrap();
    let mut helm = cluster.helm().unwrap();
    helm.arg("install").arg("kvasir").arg(root().join("charts/kvasir"));
    helm.args(["--namespace", SYSTEM, "--create-namespace", "--wait", "--timeout", "60s", "--values"]).arg(file);
    Cluster::output(&mut helm).unwrap_or_else(|error| panic!("{error}"));
}

pub fn secret(namespace: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "harbour", "namespace": namespace}, "stringData": {"value": KEY}})
}

fn pool(namespace: &str, path: &str, otlp: &str) -> Value {
    json!({
        "apiVersion": "kvasir.dev/v1alpha1", "kind": "ServingPool",
        "metadata": {"name": "harbour", "namespace": namespace},
        "spec": {
            "model": {"name": MODEL, "source": {"pvc": {"claimName": MODELS, "path": path}}},
            "engine": {"kvMemory": "256Mi", "resources": {"cpu": "1", "memory": "1Gi"}},
            "tenants": [{"name": "harbour", "keySecretRef": {"name": "harbour", "key": "value"}}],
            "router": {"replicas": 2},
            "observability": {"otlpEndpoint": otlp},
        },
    })
}

#[test]
fn a_pool_that_is_applied_after_helm_install_serves_its_tenant() {
    let Some(binary) = program("KVASIR_TEST_JAEGER", "a real Jaeger") else { return };
    on_nodes(1, async |cluster| {
        let began = Instant::now();
        load_images(cluster, &[OPERATOR, WORKER, ROUTER]).await;
        let path = model_volume(cluster).await;
        step("images and model", began);
        let jaeger = Jaeger::start(&binary, cluster.folder(), cluster.host());
        let otlp = jaeger.otlp();
        let namespace = cluster.namespace("tenants", &[("pod-security.kubernetes.io/enforce", "restricted")]).await.unwrap();
        apply(cluster, &claim(&namespace));
        apply(cluster, &secret(&namespace));

        let began = Instant::now();
        install(cluster, &otlp, &namespace);
        step("helm install", began);
        let began = Instant::now();
        apply(cluster, &pool(&namespace, &path, &otlp));
        let served =
            Pool { cluster, namespace: &namespace, service: "harbour-router", model: MODEL, key_secret: "harbour", key: KEY };
        until("the routers' Service is made", FIRST_ANSWER_MAX, || {
            let found = super::support::try_kubectl(cluster, &["-n", &namespace, "get", "service", "harbour-router"]);
            std::future::ready(found.map(drop))
        })
        .await
        .unwrap_or_else(|error| panic!("{error}"));
        served.first_answer(FIRST_ANSWER_MAX.saturating_sub(began.elapsed())).await;
        step("first answer after kubectl apply", began);
        kubectl(cluster, &["-n", &namespace, "wait", "--for=condition=Ready", "--timeout=60s", "spool/harbour"]);
        let began = Instant::now();
        served.check().await;
        step("requests", began);
        let began = Instant::now();
        served.check_trace(&jaeger).await;
        step("trace", began);

        apply(cluster, &secret(SYSTEM));
        let began = Instant::now();
        let mut helm = cluster.helm().unwrap();
        helm.args(["test", "kvasir", "--namespace", SYSTEM, "--timeout", "60s"]);
        Cluster::output(&mut helm).unwrap_or_else(|error| panic!("{error}"));
        step("helm test", began);
        deleted_with_everything(cluster, &namespace).await;
    });
}

/// What a deleted pool leaves: nothing but what its user made. The garbage collector looks for kinds that are new to it every 30 s, so that the
/// first deletion in a cluster waits for it.
async fn deleted_with_everything(cluster: &Cluster, namespace: &str) {
    let began = Instant::now();
    kubectl(cluster, &["-n", namespace, "delete", "spool", "harbour", "--wait=false"]);
    let kinds =
        "pods,services,deployments,configmaps,secrets,serviceaccounts,roles,rolebindings,poddisruptionbudgets,networkpolicies";
    let ours = ["harbour", "models", "default", "kube-root-ca.crt"];
    until("everything of the pool is collected", PATIENCE, || {
        let items = get(cluster, &["-n", namespace, kinds])["items"].as_array().cloned().unwrap_or_default();
        let name = |item: &Value| item["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        // The pods that asked from inside are the test's own.
        let owned = |item: &&Value| !ours.contains(&name(item).as_str()) && !["grpc", "openai"].contains(&name(item).as_str());
        let left: Vec<String> = items.iter().filter(owned).map(|item| format!("{}/{}", item["kind"], name(item))).collect();
        std::future::ready(if left.is_empty() { Ok(()) } else { Err(left.join(", ")) })
    })
    .await
    .unwrap_or_else(|error| panic!("{error}"));
    step("deletion", began);
}
