//! Workers on a real node: an image of the built binary, a model on a volume, a Service, probes, SIGTERM.

use super::serving::{asker, assert_ends_well, restricted};
use super::support::{MODELS, WORKER, apply, claim, eventually, get, kubectl, load_images, on_nodes};
use crate::e2e::support::{metric, model_file};
use kvasir_cli::client::Client;
use kvasir_cluster::Cluster;
use serde_json::{Value, json};

const DOOR: u16 = 7300;
const PROBES: u16 = 7402;

fn worker(name: &str) -> Value {
    let args = [
        "--model=/models/tiny.gguf",
        "--served-name=tiny",
        "--kv-bytes=8MiB",
        "--threads=1",
        "--secret-file=/secrets/bearer",
        "--pool-secret-file=/secrets/pool",
        "--cache=/tmp/cache",
        "--listen=0.0.0.0:7401",
    ];
    let ports = [format!("--door=0.0.0.0:{DOOR}"), format!("--metrics=0.0.0.0:{PROBES}")];
    let args: Vec<&str> = args.into_iter().chain(ports.iter().map(String::as_str)).collect();
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": "worker"}},
        "spec": {
            "terminationGracePeriodSeconds": 60,
            "automountServiceAccountToken": false,
            "securityContext": {"fsGroup": 65532},
            "containers": [{
                "name": "worker", "image": WORKER, "imagePullPolicy": "Never", "args": args,
                "securityContext": restricted(),
                "readinessProbe": {"httpGet": {"path": "/readyz", "port": PROBES}, "periodSeconds": 1},
                "livenessProbe": {"httpGet": {"path": "/healthz", "port": PROBES}},
                "volumeMounts": [
                    {"name": "models", "mountPath": "/models", "readOnly": true},
                    {"name": "secrets", "mountPath": "/secrets", "readOnly": true},
                    {"name": "scratch", "mountPath": "/tmp"},
                ],
            }],
            "volumes": [
                {"name": "models", "persistentVolumeClaim": {"claimName": "models", "readOnly": true}},
                {"name": "secrets", "secret": {"secretName": "secrets", "defaultMode": 0o440}},
                {"name": "scratch", "emptyDir": {}},
            ],
        },
    })
}

fn around(namespace: &str) -> [Value; 3] {
    let meta = |name: &str| json!({"name": name, "namespace": namespace});
    [
        claim(namespace),
        json!({
            "apiVersion": "v1", "kind": "Secret", "metadata": meta("secrets"),
            "stringData": {"bearer": "a-bearer-secret-of-this-test-0123", "pool": "a-pool-secret-of-this-test-012345"},
        }),
        json!({
            "apiVersion": "v1", "kind": "Service", "metadata": meta("tiny"),
            "spec": {"selector": {"app": "worker"}, "ports": [{"port": 80, "targetPort": DOOR}]},
        }),
    ]
}

/// A namespace that enforces `restricted`, with two workers behind a Service; gives its name.
async fn two_workers(cluster: &Cluster) -> String {
    load_images(cluster, &[WORKER]).await;
    let models = cluster.folder().join("models");
    cluster.local_volume(MODELS, 0, MODELS, "1Gi", &models).await.unwrap();
    model_file(4096, &models);
    let namespace = cluster.namespace("workers", &[("pod-security.kubernetes.io/enforce", "restricted")]).await.unwrap();
    for object in around(&namespace) {
        apply(cluster, &object);
    }
    for name in ["w-0", "w-1"] {
        let mut pod = worker(name);
        pod["metadata"]["namespace"] = json!(namespace);
        apply(cluster, &pod);
    }
    eventually("both workers are ready", || {
        let pods = get(cluster, &["-n", &namespace, "pods"]);
        let ready = pods["items"].as_array().unwrap().iter().filter(|pod| is_ready(pod)).count();
        (ready == 2).then_some(()).ok_or_else(|| pods["items"].to_string())
    })
    .await;
    namespace
}

fn is_ready(pod: &Value) -> bool {
    let conditions = pod["status"]["conditions"].as_array().cloned().unwrap_or_default();
    conditions.iter().any(|it| it["type"] == "Ready" && it["status"] == "True")
}

fn body(max_tokens: u32) -> Value {
    let tokens: Vec<u32> = (0..100).collect();
    json!({"model": "tiny", "prompt": tokens, "max_tokens": max_tokens, "seed": 3, "ignore_eos": true, "kvasir": {"report": true}})
}

#[test]
fn two_pods_behind_a_service_answer_from_outside_and_from_inside() {
    on_nodes(1, async |cluster| {
        let namespace = two_workers(cluster).await;
        let service = get(cluster, &["-n", &namespace, "service", "tiny"]);
        let outside = format!("http://{}", service["spec"]["clusterIP"].as_str().unwrap());
        // Each new connection goes to one of the two by chance.
        for _ in 0..64 {
            Client::new(&outside, None).unwrap().complete(body(2), |_| ()).await.unwrap();
        }
        for name in ["w-0", "w-1"] {
            let metrics = client_of(cluster, &namespace, name).get_text("/metrics").await.unwrap().1;
            let answered = metric(&metrics, "kvasir_door_requests_total", &["outcome=\"ok\""]);
            assert!(answered > 0.0, "{name} answered: {metrics}");
        }

        let url = format!("--url=http://tiny.{namespace}.svc");
        let args = json!(["generate", url, "--model=tiny", "--max-tokens=4", "--min-tokens=1", "Name a river."]);
        apply(cluster, &asker(&namespace, "asker", &args));
        assert_ends_well(cluster, &namespace, "asker").await;
    });
}

/// A client of one pod's own door.
fn client_of(cluster: &Cluster, namespace: &str, pod: &str) -> Client {
    let pod = get(cluster, &["-n", namespace, "pod", pod]);
    Client::new(&format!("http://{}:{DOOR}", pod["status"]["podIP"].as_str().unwrap()), None).unwrap()
}

#[test]
fn a_deleted_pod_ends_its_stream_in_full_before_it_goes() {
    on_nodes(1, async |cluster| {
        let namespace = two_workers(cluster).await;
        let client = client_of(cluster, &namespace, "w-0");
        let mut pieces = 0;
        let answer = client.complete(body(3500), |_| {
            pieces += 1;
            if pieces == 20 {
                kubectl(cluster, &["-n", &namespace, "delete", "pod", "w-0", "--wait=false"]);
            }
        });
        let answer = answer.await.unwrap();
        assert_eq!(answer.usage["completion_tokens"], 3500, "the stream was not cut");
        eventually("the drained pod goes", || {
            let left = kubectl(cluster, &["-n", &namespace, "get", "pods", "-o", "name"]);
            (left.trim() == "pod/w-1").then_some(()).ok_or(left)
        })
        .await;
    });
}
