//! Where a model's bytes come from and who says so: a hub that the test plays, fetched from once for a node, shown while they come and when they do
//! not; then a draft in a pod of its own, from the same cache.

use super::helm::{KEY, OPERATOR, install, secret};
use super::serving::Pool;
use super::support::{MODEL, ROUTER, WORKER, apply, eventually, get, kubectl, load_images, on_nodes, processes_of, step};
use crate::e2e::support::model_cache;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use axum::routing::get as route;
use futures::StreamExt as _;
use http::{HeaderMap, StatusCode, header};
use kvasir_cluster::Cluster;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::sync::watch;

const REPO: &str = "harbour/smollm2";
const FILE: &str = "model.gguf";
const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
/// Class and claim of the volume that keeps what was fetched.
const CACHE: &str = "cache";
/// Bytes of one piece of an answer.
const PIECE: usize = 1 << 20;

/// How much of a file the hub gives away.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Gate {
    Shut,
    Half,
    Open,
}

/// A hub with one file.
struct Hub {
    bytes: Bytes,
    sha256: String,
    gate: watch::Sender<Gate>,
    /// Bytes of the file that were sent.
    sent: AtomicU64,
}

// === impl Hub ===

impl Hub {
    async fn start(cluster: &Cluster) -> (Arc<Self>, String) {
        let file = kvasir_model::fetch(MODEL, &model_cache(), &mut |_| {}).unwrap();
        let bytes = Bytes::from(std::fs::read(file).unwrap());
        let sha256 = hex::encode(Sha256::digest(&bytes));
        let hub = Arc::new(Self { bytes, sha256, gate: watch::Sender::new(Gate::Shut), sent: AtomicU64::new(0) });
        let routes = axum::Router::new()
            .route(&format!("/api/models/{REPO}/tree/{COMMIT}"), route(Self::list))
            .route(&format!("/{REPO}/resolve/{COMMIT}/{FILE}"), route(Self::file))
            .with_state(Arc::clone(&hub));
        let listener = TcpListener::bind((cluster.host(), 0)).await.unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move { axum::serve(listener, routes).await });
        (hub, address)
    }

    #[expect(clippy::unused_async, reason = "a handler of axum is one")]
    async fn list(State(hub): State<Arc<Self>>) -> Response {
        let oid = format!("sha256:{}", hub.sha256);
        axum::Json(json!([{"type": "file", "path": FILE, "oid": "0", "lfs": {"oid": oid, "size": hub.bytes.len()}}]))
            .into_response()
    }

    #[expect(clippy::unused_async, reason = "a handler of axum is one")]
    async fn file(State(hub): State<Arc<Self>>, headers: HeaderMap) -> Response {
        if *hub.gate.borrow() == Gate::Shut {
            return (StatusCode::NOT_FOUND, "no such file").into_response();
        }
        let range = headers.get(header::RANGE).map(|value| value.to_str().unwrap().to_owned());
        let from = range.as_deref().map_or(0, |range| range.trim_start_matches("bytes=").trim_end_matches('-').parse().unwrap());
        let (len, rest) = (hub.bytes.len(), hub.bytes.len() - from);
        let status = if range.is_some() { StatusCode::PARTIAL_CONTENT } else { StatusCode::OK };
        let pieces = futures::stream::unfold((hub, from), |(hub, at)| async move {
            let end = (at + PIECE).min(hub.bytes.len());
            if at == end {
                return None;
            }
            if at >= hub.bytes.len() / 2 {
                hub.gate.subscribe().wait_for(|gate| *gate == Gate::Open).await.ok()?;
            }
            hub.sent.fetch_add((end - at) as u64, Ordering::Relaxed);
            Some((hub.bytes.slice(at..end), (hub, end)))
        });
        let body = Body::from_stream(pieces.map(Ok::<_, std::convert::Infallible>));
        let content =
            [(header::CONTENT_LENGTH, rest.to_string()), (header::CONTENT_RANGE, format!("bytes {from}-{}/{len}", len - 1))];
        (status, content, body).into_response()
    }

    fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }
}

fn source() -> Value {
    json!({"revision": COMMIT, "source": {"huggingFace": {"repo": REPO, "file": FILE}}})
}

fn pool(namespace: &str, hub: &str) -> Value {
    let mut model = source();
    model["name"] = json!(MODEL);
    json!({
        "apiVersion": "kvasir.dev/v1alpha1", "kind": "ServingPool",
        "metadata": {"name": "harbour", "namespace": namespace},
        "spec": {
            "model": model,
            "modelCache": {"claimName": CACHE},
            "engine": {"kvMemory": "128Mi", "resources": {"cpu": "300m", "memory": "1Gi"}},
            "tenants": [{"name": "harbour", "keySecretRef": {"name": "harbour", "key": "value"}}],
            "replicas": 2,
            "router": {"replicas": 1},
            "podTemplatePatch": {"spec": {"containers": [{"name": "worker", "env": [{"name": "KVASIR_HUB", "value": hub}]}]}},
        },
    })
}

#[test]
fn a_model_is_fetched_once_for_a_node_and_its_draft_stands_beside_it() {
    on_nodes(1, async |cluster| {
        let began = Instant::now();
        load_images(cluster, &[OPERATOR, WORKER, ROUTER]).await;
        cluster.local_volume(CACHE, 0, CACHE, "1Gi", &cluster.folder().join(CACHE)).await.unwrap();
        let (hub, address) = Hub::start(cluster).await;
        let namespace = cluster.namespace("tenants", &[("pod-security.kubernetes.io/enforce", "restricted")]).await.unwrap();
        for object in [cache(&namespace), secret(&namespace)] {
            apply(cluster, &object);
        }
        install(cluster, "", &namespace);
        apply(cluster, &pool(&namespace, &address));
        step("pool", began);
        let harbour = Harbour { cluster, namespace: &namespace, hub: &hub };
        harbour.says_what_it_fetches().await;
        harbour.fetches_nothing_again().await;
        harbour.has_a_draft().await;
    });
}

fn cache(namespace: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": CACHE, "namespace": namespace},
        "spec": {"storageClassName": CACHE, "accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Mi"}}},
    })
}

struct Harbour<'a> {
    cluster: &'a Cluster,
    namespace: &'a str,
    hub: &'a Hub,
}

// === impl Harbour ===

impl Harbour<'_> {
    /// First there is no file, then half of it comes, then all.
    async fn says_what_it_fetches(&self) {
        let began = Instant::now();
        let condition = self.says("ModelResolved", "False", "ModelUnavailable").await;
        let message = condition["message"].as_str().unwrap();
        assert!(message.contains(FILE) && message.contains("404"), "{message}");
        step("ModelUnavailable", began);
        let began = Instant::now();
        self.hub.gate.send_replace(Gate::Half);
        self.says("ModelResolved", "Unknown", "Fetching").await;
        let percent = eventually("the progress is told", || {
            let status = self.status();
            status["model"]["fetchedPercent"].as_u64().filter(|percent| *percent > 0).ok_or_else(|| status.to_string())
        })
        .await;
        assert!(percent <= 50, "{percent}");
        step("Fetching", began);
        let began = Instant::now();
        self.hub.gate.send_replace(Gate::Open);
        self.says("ModelResolved", "True", "Resolved").await;
        self.serves(2).await;
        assert_eq!(self.hub.sent(), self.hub.bytes.len() as u64, "two workers on a node fetch one copy");
        assert!(self.status()["model"]["fetchedPercent"].is_null());
        step("Resolved and served", began);
    }

    /// Pods that come anew and containers that start anew find what was fetched.
    async fn fetches_nothing_again(&self) {
        let began = Instant::now();
        let (pods, before) = (self.pods("worker"), self.lives());
        // Not waited for: the next pod has the same name, and kubectl may take one for the other.
        let victim = pods[0]["metadata"]["name"].as_str().unwrap();
        kubectl(self.cluster, &["-n", self.namespace, "delete", "pod", victim, "--wait=false"]);
        for pid in processes_of(pods[1]["metadata"]["uid"].as_str().unwrap(), "kvasir-worker") {
            Cluster::output(Command::new("kill").args(["-9", &pid])).unwrap();
        }
        eventually("another pod and another process are there", || {
            let now = self.lives();
            (now.len() == 2 && now.iter().all(|life| !before.contains(life))).then_some(()).ok_or_else(|| format!("{now:?}"))
        })
        .await;
        self.serves(2).await;
        assert_eq!(self.hub.sent(), self.hub.bytes.len() as u64, "nothing is fetched again");
        step("restarts", began);
    }

    /// A draft of its own pod is placed, found and reported; drafting itself is not there yet, and the pool says so and serves.
    async fn has_a_draft(&self) {
        let began = Instant::now();
        let draft = json!({"model": source(), "placement": "SeparatePod", "resources": {"cpu": "100m", "memory": "1Gi"}});
        let patch = json!({"spec": {"speculation": {"mode": "Auto", "drafter": "Model", "draft": draft}}});
        kubectl(self.cluster, &["-n", self.namespace, "patch", "spool", "harbour", "--type=merge", "-p", &patch.to_string()]);
        self.says("DraftPlaced", "True", "Placed").await;
        self.says("DraftCompatible", "True", "Compatible").await;
        let lacks = self.says("Degraded", "True", "NotYetSupported").await;
        assert!(lacks["message"].as_str().unwrap().contains("speculation"), "{lacks}");
        self.serves(2).await;
        let drafts = self.pods("draft");
        assert_eq!(drafts.len(), 1);
        assert_eq!(self.status()["draft"]["readyReplicas"], 1);
        assert_eq!(self.status()["draft"]["digest"], self.status()["model"]["digest"], "it is the same model");
        assert_eq!(self.hub.sent(), self.hub.bytes.len() as u64, "target and draft share what was fetched");
        step("draft", began);
    }

    async fn serves(&self, workers: usize) {
        eventually("all workers are routable", || {
            let status = self.status();
            (status["routableReplicas"] == workers && status["rollout"].is_null()).then_some(()).ok_or_else(|| status.to_string())
        })
        .await;
        let served = Pool {
            cluster: self.cluster,
            namespace: self.namespace,
            service: "harbour-router",
            model: MODEL,
            key_secret: "harbour",
            key: KEY,
        };
        served.first_answer(Duration::from_mins(1)).await;
    }

    /// Waits until a condition is so, and gives it.
    async fn says(&self, kind: &str, state: &str, reason: &str) -> Value {
        eventually(&format!("{kind} is {state} because of {reason}"), || {
            let status = self.status();
            let conditions = status["conditions"].as_array().cloned().unwrap_or_default();
            let found = conditions.into_iter().find(|it| it["type"] == kind && it["status"] == state && it["reason"] == reason);
            found.ok_or_else(|| status.to_string())
        })
        .await
    }

    /// Each worker's pod, and how often its container has started.
    fn lives(&self) -> Vec<(String, u64)> {
        let life = |pod: &Value| {
            let restarts = pod["status"]["containerStatuses"][0]["restartCount"].as_u64().unwrap_or(0);
            (pod["metadata"]["uid"].as_str().unwrap().to_owned(), restarts)
        };
        self.pods("worker").iter().map(life).collect()
    }

    fn status(&self) -> Value {
        get(self.cluster, &["-n", self.namespace, "spool", "harbour"])["status"].clone()
    }

    fn pods(&self, component: &str) -> Vec<Value> {
        let label = format!("app.kubernetes.io/component={component}");
        get(self.cluster, &["-n", self.namespace, "pods", "-l", &label])["items"].as_array().unwrap().clone()
    }
}
