//! The verbs against an API server that answers from a list and counts what it is asked.

use super::*;
use http::{Request, Response, StatusCode};
use http_body_util::BodyExt as _;
use kube::client::Body;
use serde_json::{Value, json};
use std::sync::{Arc, Mutex};

type Asked = Arc<Mutex<Vec<String>>>;

/// Answers GETs by path and takes evictions.
fn server(objects: Vec<(&'static str, Value)>) -> (Client, Asked) {
    let asked: Asked = Arc::default();
    let seen = Arc::clone(&asked);
    let objects = Arc::new(objects);
    let service = tower::service_fn(move |request: Request<Body>| {
        let (seen, objects) = (Arc::clone(&seen), Arc::clone(&objects));
        async move {
            let path = request.uri().path().to_owned();
            let line = format!("{} {path}?{}", request.method(), request.uri().query().unwrap_or_default());
            let _ = request.into_body().collect().await;
            seen.lock().unwrap().push(line);
            let found = objects.iter().find(|(at, _)| *at == path);
            let (status, value) = found.map_or_else(
                || (StatusCode::NOT_FOUND, json!({ "kind": "Status", "status": "Failure", "message": "not found", "reason": "NotFound", "code": 404 })),
                |(_, value)| (StatusCode::OK, value.clone()),
            );
            let answer = Response::builder().status(status).header("content-type", "application/json");
            Ok::<_, tower::BoxError>(answer.body(Body::from(value.to_string().into_bytes())).unwrap())
        }
    });
    (Client::new(service, "team-a"), asked)
}

const POOL: &str = "/apis/kvasir.dev/v1alpha1/namespaces/team-a/servingpools/first";
const PODS: &str = "/api/v1/namespaces/team-a/pods";
const EVENTS: &str = "/api/v1/namespaces/team-a/events";
const EVICTION: &str = "/api/v1/namespaces/team-a/pods/first-worker-0/eviction";

fn condition(kind: &str, status: &str, reason: &str, message: &str) -> Value {
    json!({ "type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": "2026-01-01T00:00:00Z" })
}

/// A pool whose rollout waits for a device.
fn pool() -> Value {
    json!({
        "apiVersion": "kvasir.dev/v1alpha1", "kind": "ServingPool", "metadata": { "name": "first", "namespace": "team-a", "generation": 3 },
        "spec": { "model": { "source": { "file": { "path": "/m.gguf" } } }, "prefixCache": { "hostTier": { "size": "1Gi" } } },
        "status": {
            "observedGeneration": 3, "replicas": 2, "readyReplicas": 1, "routableReplicas": 1, "updatedReplicas": 1, "desiredReplicas": 2,
            "reason": "InsufficientAccelerators", "routers": { "desired": 2, "ready": 2 }, "model": { "name": "smollm2", "digest": "ab" },
            "rollout": { "to": "t2", "mode": "SurgeFree", "modeMessage": "no device is free for a surge pod",
                "startedAt": "2026-01-01T00:00:00Z", "progressedAt": "2026-01-01T00:00:00Z",
                "hold": { "reason": "InsufficientAccelerators", "message": "0 devices are free", "since": "2026-01-01T00:01:00Z" } },
            "conditions": [
                condition("Ready", "True", "ServingWithFewer", "1 of 2 workers are routable"),
                condition("Progressing", "True", "InsufficientAccelerators", "0 devices are free"),
                condition("Degraded", "True", "NotYetSupported", "served without: prefixCache.hostTier"),
                condition("ModelResolved", "True", "Resolved", "workers serve ab"),
                condition("RoutersInSync", "True", "InSync", "every Ready router knows every ready worker"),
            ],
        },
    })
}

fn pods() -> Value {
    let pod = |name: &str, conditions: Value| json!({ "metadata": { "name": name, "labels": { "app.kubernetes.io/component": "worker" } }, "status": { "conditions": conditions } });
    json!({ "kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": [
        pod("first-worker-1", json!([{ "type": "PodScheduled", "status": "False", "message": "0/1 nodes are available: 1 Insufficient nvidia.com/gpu." }])),
        pod("first-worker-0", json!([{ "type": "Ready", "status": "True" }])),
    ] })
}

fn events() -> Value {
    let event = |time: &str, kind: &str, reason: &str| {
        json!({ "metadata": { "name": reason, "namespace": "team-a" }, "involvedObject": {}, "type": kind, "reason": reason,
            "message": "what happened", "eventTime": time })
    };
    json!({ "kind": "EventList", "apiVersion": "v1", "metadata": {}, "items": [
        event("2026-01-01T00:02:00.000000Z", "Warning", "InsufficientAccelerators"),
        event("2026-01-01T00:01:00.000000Z", "Normal", "RolloutStarted"),
    ] })
}

async fn ask(line: &[&str]) -> (Result<String, PluginError>, Vec<String>) {
    let objects =
        vec![(POOL, pool()), (PODS, pods()), (EVENTS, events()), (EVICTION, json!({ "kind": "Status", "status": "Success" }))];
    let (client, asked) = server(objects);
    let plugin = Plugin::try_parse_from(["kubectl-servingpool"].iter().chain(line)).unwrap();
    let mut out = Vec::new();
    let result = run(&plugin, client, &mut out).await;
    let asked = asked.lock().unwrap().clone();
    (result.map(|()| String::from_utf8(out).unwrap()), asked)
}

#[tokio::test]
async fn status_is_one_get() {
    let (text, asked) = ask(&["status", "first"]).await;
    assert_eq!(asked.len(), 1, "{asked:?}");
    insta::assert_snapshot!(text.unwrap());
    let (text, _) = ask(&["status", "first", "-o", "json"]).await;
    let status: Value = serde_json::from_str(&text.unwrap()).unwrap();
    assert_eq!(status["rollout"]["hold"]["reason"], "InsufficientAccelerators");
}

#[tokio::test]
async fn why_answers_everything_with_three_gets() {
    let (text, asked) = ask(&["why", "first"]).await;
    assert_eq!(asked.len(), 3, "{asked:?}");
    assert!(asked.iter().all(|line| line.starts_with("GET ")), "{asked:?}");
    insta::assert_snapshot!(text.unwrap());
    let (text, _) = ask(&["why", "first", "-o", "json"]).await;
    let answers: Value = serde_json::from_str(&text.unwrap()).unwrap();
    assert_eq!((&answers[2]["topic"], &answers[2]["state"]), (&json!("Placement"), &json!("Bad")));
}

#[tokio::test]
async fn events_are_one_get_and_in_order() {
    let (text, asked) = ask(&["events", "first"]).await;
    assert_eq!(asked.len(), 1, "{asked:?}");
    assert!(asked[0].contains("involvedObject.name%3Dfirst"), "{asked:?}");
    insta::assert_snapshot!(text.unwrap());
}

#[tokio::test]
async fn drain_evicts_a_worker_of_the_pool_and_nothing_else() {
    let (text, asked) = ask(&["drain", "first", "first-worker-0"]).await;
    assert!(text.unwrap().contains("10m at most"));
    assert!(asked.len() == 3 && asked[2].starts_with(&format!("POST {EVICTION}")), "{asked:?}");
    let (result, asked) = ask(&["drain", "first", "someone-elses"]).await;
    let message = result.unwrap_err().to_string();
    assert!(message.contains("first-worker-0, first-worker-1"), "{message}");
    assert!(asked.iter().all(|line| line.starts_with("GET ")), "{asked:?}");
}

#[tokio::test]
async fn a_pool_that_is_not_there_is_named_with_its_namespace() {
    let (result, _) = ask(&["why", "second"]).await;
    let message = result.unwrap_err().to_string();
    assert!(message.contains("second") && message.contains("team-a"), "{message}");
}

#[test]
fn what_keeps_a_pod_back_is_told_first_things_first() {
    let pool: ServingPool = serde_json::from_value(pool()).unwrap();
    let told = |status: Value| {
        let pod: Pod = serde_json::from_value(json!({ "metadata": { "name": "p" }, "status": status })).unwrap();
        explain(&pool, &[pod], &[]).into_iter().find(|it| it.topic == "Placement").unwrap().lines[1].clone()
    };
    let crash =
        told(json!({ "containerStatuses": [{ "name": "worker", "image": "i", "imageID": "", "ready": false, "restartCount": 4,
        "state": { "waiting": { "reason": "CrashLoopBackOff", "message": "back-off" } } }] }));
    assert!(crash.contains("after 4 restarts: CrashLoopBackOff back-off"), "{crash}");
    let gate = told(
        json!({ "conditions": [{ "type": "kvasir.dev/routable", "status": "False", "message": "router r does not know it" }] }),
    );
    assert!(gate.contains("not routable: router r does not know it"), "{gate}");
    let loads = told(json!({ "conditions": [{ "type": "ContainersReady", "status": "False", "message": "unready" }] }));
    assert!(loads.contains("loads its model"), "{loads}");
}
