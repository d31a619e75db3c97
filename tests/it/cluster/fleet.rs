//! A pool made by hand, without the operator: routers that find SmolLM2's worker by EndpointSlices and tenants by one Secret.
//!
//! Proves on a real kubelet what routers and workers do, so that what fails with the operator is the operator's.

use super::serving::{Pool, restricted};
use super::support::{MODEL, PATIENCE, ROUTER, WORKER, apply, claim, load_images, model_volume, on_nodes, step};
use crate::e2e::jaeger::Jaeger;
use crate::e2e::support::program;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use std::time::Instant;

const KEY: &str = "sk-of-the-harbour-0123456789";

fn named(api: &str, kind: &str, name: &str, rest: &Value) -> Value {
    let mut object = json!({"apiVersion": api, "kind": kind, "metadata": {"name": name}});
    for (key, value) in rest.as_object().unwrap() {
        object[key] = value.clone();
    }
    object
}

/// Secrets, rights and Services.
fn around(namespace: &str) -> Vec<Value> {
    let tenants = format!("[[tenant]]\nname = \"harbour\"\nkey_sha256 = \"{}\"\n", hex::encode(Sha256::digest(KEY)));
    let core = "v1";
    let rbac = "rbac.authorization.k8s.io/v1";
    vec![
        named(core, "Secret", "bearer", &json!({"stringData": {"bearer": "a-bearer-secret-of-this-test-0123"}})),
        named(
            core,
            "Secret",
            "keys",
            &json!({"stringData": {"tenants.toml": tenants, "pool-secret": "a-pool-secret-of-this-test-012345"}}),
        ),
        named(core, "Secret", "harbour", &json!({"stringData": {"value": KEY}})),
        named(core, "ServiceAccount", "router", &json!({})),
        named(
            rbac,
            "Role",
            "router",
            &json!({"rules": [
                {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
                {"apiGroups": [""], "resources": ["secrets"], "resourceNames": ["keys"], "verbs": ["get", "watch"]},
            ]}),
        ),
        named(
            rbac,
            "RoleBinding",
            "router",
            &json!({
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "router"},
                "subjects": [{"kind": "ServiceAccount", "name": "router", "namespace": namespace}],
            }),
        ),
        named(
            core,
            "Service",
            "workers",
            &json!({"spec": {
                "clusterIP": "None", "publishNotReadyAddresses": true, "selector": {"app": "worker"},
                "ports": [{"name": "grpc", "port": 7401, "targetPort": 7401}],
            }}),
        ),
        named(
            core,
            "Service",
            "routers",
            &json!({"spec": {
                "selector": {"app": "router"}, "ports": [{"port": 80, "targetPort": 7300}],
            }}),
        ),
    ]
}

fn container(name: &str, image: &str, args: &Value, probes: u16) -> Value {
    json!({
        "name": name, "image": image, "imagePullPolicy": "Never", "args": args, "securityContext": restricted(),
        "readinessProbe": {"httpGet": {"path": "/readyz", "port": probes}, "periodSeconds": 1},
        "volumeMounts": [
            {"name": "bearer", "mountPath": "/secrets", "readOnly": true},
            {"name": "scratch", "mountPath": "/tmp"},
        ],
    })
}

fn volumes() -> Value {
    json!([
        {"name": "bearer", "secret": {"secretName": "bearer", "defaultMode": 0o440}},
        {"name": "scratch", "emptyDir": {}},
    ])
}

fn worker(path: &str, otlp: Option<&str>) -> Value {
    let mut args = json!([
        format!("--model=/models/{path}"),
        format!("--served-name={MODEL}"),
        "--kv-bytes=256MiB",
        "--threads=2",
        "--cache=/tmp/cache",
        "--secret-file=/secrets/bearer",
        "--listen=0.0.0.0:7401",
        "--metrics=0.0.0.0:7402",
    ]);
    args.as_array_mut().unwrap().extend(otlp.map(|url| json!(format!("--otlp={url}"))));
    let mut container = container("worker", WORKER, &args, 7402);
    container["volumeMounts"].as_array_mut().unwrap().push(json!({"name": "models", "mountPath": "/models", "readOnly": true}));
    let mut volumes = volumes();
    volumes
        .as_array_mut()
        .unwrap()
        .push(json!({"name": "models", "persistentVolumeClaim": {"claimName": "models", "readOnly": true}}));
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "worker-0", "labels": {"app": "worker"}},
        "spec": {
            "automountServiceAccountToken": false, "securityContext": {"fsGroup": 65532, "fsGroupChangePolicy": "OnRootMismatch"},
            "containers": [container], "volumes": volumes,
        },
    })
}

fn routers(namespace: &str, otlp: Option<&str>) -> Value {
    let mut args = json!([
        format!("--workers-service={namespace}/workers"),
        format!("--tenants-secret={namespace}/keys"),
        "--secret-file=/secrets/bearer",
        "--http=0.0.0.0:7300",
        "--metrics=0.0.0.0:7302",
    ]);
    args.as_array_mut().unwrap().extend(otlp.map(|url| json!(format!("--otlp={url}"))));
    let labels = json!({"app": "router"});
    named(
        "apps/v1",
        "Deployment",
        "routers",
        &json!({"spec": {
            "replicas": 2,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": {
                "serviceAccountName": "router", "securityContext": {"fsGroup": 65532},
                "containers": [container("router", ROUTER, &args, 7302)], "volumes": volumes(),
            }},
        }}),
    )
}

#[test]
fn routers_serve_a_worker_that_they_find_in_the_cluster() {
    let Some(binary) = program("KVASIR_TEST_JAEGER", "a real Jaeger") else { return };
    on_nodes(1, async |cluster| {
        let began = Instant::now();
        load_images(cluster, &[WORKER, ROUTER]).await;
        let path = model_volume(cluster).await;
        step("images and model", began);
        let jaeger = Jaeger::start(&binary, cluster.folder(), cluster.host());
        let otlp = jaeger.otlp();
        let namespace = cluster.namespace("fleet", &[("pod-security.kubernetes.io/enforce", "restricted")]).await.unwrap();
        let began = Instant::now();
        let own = [claim(&namespace), worker(&path, Some(&otlp)), routers(&namespace, Some(&otlp))];
        for mut object in around(&namespace).into_iter().chain(own) {
            object["metadata"]["namespace"] = json!(namespace);
            apply(cluster, &object);
        }
        let pool = Pool { cluster, namespace: &namespace, service: "routers", model: MODEL, key_secret: "harbour", key: KEY };
        pool.first_answer(PATIENCE).await;
        step("first answer", began);
        let began = Instant::now();
        pool.check().await;
        step("requests", began);
        let began = Instant::now();
        pool.check_trace(&jaeger).await;
        step("trace", began);
    });
}
