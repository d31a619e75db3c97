//! A sample of the fault sweep on a real API server: a proxy between the operator and the server lets the n-th write fail, be late, or be
//! carried out while its answer is lost; or it holds a leader's write back until another one has led for long. Each life of a pool has to end
//! with the objects of a life without faults, and with nothing left.
//!
//! `KVASIR_FAULTS_SEED` chooses which writes, `KVASIR_FAULTS` how often; the seed is printed.

use super::api_server::install;
use super::lives::Stage;
use super::lives::steps::{Dice, NODES, Wish};
use super::operator::Operator;
use super::support::{eventually, from_environment, get, kubectl, on_cluster, step};
use axum::body::Body;
use axum::extract::{Request, State as Shared};
use axum::http::{Method, StatusCode};
use axum::response::{IntoResponse as _, Response};
use kube::Client;
use kvasir_cluster::{Cluster, Layers, NodeSpec, PlayedNodes};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// What happens to a write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fault {
    /// It is refused and not carried out.
    Fails,
    /// It is carried out late.
    Late,
    /// It is carried out, and the answer is lost.
    Lost,
    /// It arrives when another one has led for long.
    Held,
}

const FAULTS: [Fault; 3] = [Fault::Fails, Fault::Late, Fault::Lost];
/// Longer than a pass, so that it looks again meanwhile.
const LATE: Duration = Duration::from_secs(2);
/// Writes of a life without faults, about; a larger number hits none.
const WRITES: usize = 45;
/// Writes of an edit, about, before the one that is held back.
const HELD_AFTER: usize = 6;
/// Passes after which what arrived late has been seen.
const PASSES: usize = 2;

struct Plan {
    client: Client,
    state: Mutex<State>,
    /// Whether writes of one who does not lead any more are held back.
    held: watch::Sender<bool>,
}

#[derive(Default)]
struct State {
    writes: usize,
    /// What happens to which write.
    faults: BTreeMap<usize, Fault>,
    /// What has happened.
    met: Vec<String>,
    /// This write and what comes after it is held back, and the lease is out of reach.
    last: Option<usize>,
}

/// A way to the API server on which things go wrong.
struct Proxy {
    plan: Arc<Plan>,
    kubeconfig: PathBuf,
    task: JoinHandle<()>,
}

// === impl Proxy ===

impl Proxy {
    async fn start(cluster: &Cluster, faults: BTreeMap<usize, Fault>) -> Self {
        let state = Mutex::new(State { faults, ..State::default() });
        let plan = Arc::new(Plan { client: cluster.client().await.unwrap(), state, held: watch::Sender::new(true) });
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let kubeconfig = cluster.folder().join(format!("faults-{}.kubeconfig", address.port()));
        let text = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "c", "users": [{"name": "u", "user": {}}],
            "clusters": [{"name": "s", "cluster": {"server": format!("http://{address}")}}],
            "contexts": [{"name": "c", "context": {"cluster": "s", "user": "u"}}],
        });
        std::fs::write(&kubeconfig, text.to_string()).unwrap();
        let routes = axum::Router::new().fallback(arrive).with_state(plan.clone());
        let task = tokio::spawn(async move { axum::serve(listener, routes).await.unwrap() });
        Self { plan, kubeconfig, task }
    }

    /// Writes that were met by a fault.
    fn met(&self) -> Vec<String> {
        self.plan.state.lock().unwrap().met.clone()
    }

    /// The write that comes after so many more does not arrive for now, and the lease cannot be renewed from then on.
    fn cut_off_after(&self, writes: usize) {
        let mut state = self.plan.state.lock().unwrap();
        state.last = Some(state.writes + 1 + writes);
    }

    /// What was held back arrives.
    fn let_go(&self) {
        self.plan.held.send_replace(false);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Plan {
    fn fault(&self, request: &Request) -> Option<Fault> {
        let (mut state, path) = (self.state.lock().unwrap(), request.uri().path());
        let is_cut_off = |state: &State| state.last.is_some_and(|last| state.writes >= last) && *self.held.borrow();
        if path.contains("/leases") {
            return is_cut_off(&state).then_some(Fault::Fails);
        }
        // What is told is not what a pool becomes.
        if path.contains("/events") || *request.method() == Method::GET {
            return None;
        }
        state.writes += 1;
        let number = state.writes;
        let fault = if is_cut_off(&state) { Some(Fault::Held) } else { state.faults.remove(&number) }?;
        state.met.push(format!("{number} {} {path}: {fault:?}", request.method()));
        Some(fault)
    }

    /// Carries a request out, and goes on with it when who sent it has given up.
    async fn carry_out(self: Arc<Self>, request: Request) -> Response {
        let (mut parts, body) = request.into_parts();
        parts.headers.remove("host");
        let bytes = axum::body::to_bytes(body, usize::MAX).await.unwrap();
        let request = http::Request::from_parts(parts, kube::client::Body::from(bytes.to_vec()));
        match self.client.send(request).await {
            Ok(answer) => answer.map(Body::new),
            Err(error) => (StatusCode::BAD_GATEWAY, error.to_string()).into_response(),
        }
    }
}

async fn forward(Shared(plan): Shared<Arc<Plan>>, request: Request) -> Response {
    let fault = plan.fault(&request);
    match fault {
        Some(Fault::Fails) => return (StatusCode::SERVICE_UNAVAILABLE, "{}").into_response(),
        Some(Fault::Late) => tokio::time::sleep(LATE).await,
        Some(Fault::Held) => drop(plan.held.subscribe().wait_for(|held| !held).await),
        Some(Fault::Lost) | None => {}
    }
    let answer = plan.carry_out(request).await;
    if fault == Some(Fault::Lost) { (StatusCode::GATEWAY_TIMEOUT, "{}").into_response() } else { answer }
}

/// What was sent arrives, whether who sent it still waits or not.
async fn arrive(Shared(plan): Shared<Arc<Plan>>, request: Request) -> Response {
    // Watches end with who watches.
    if *request.method() == Method::GET {
        return forward(Shared(plan), request).await;
    }
    tokio::spawn(forward(Shared(plan), request)).await.unwrap()
}

const KINDS: &str =
    "pods,services,deployments,configmaps,secrets,serviceaccounts,roles,rolebindings,poddisruptionbudgets,networkpolicies";

fn everything(cluster: &Cluster, namespace: &str) -> Vec<Value> {
    get(cluster, &["-n", namespace, KINDS])["items"].as_array().cloned().unwrap_or_default()
}

/// Objects of the pool by kind and name, without what the server or chance has put into them.
fn picture(cluster: &Cluster, namespace: &str) -> BTreeMap<String, Value> {
    let objects = everything(cluster, namespace).into_iter().filter(|it| it["metadata"]["labels"]["kvasir.dev/pool"] == "p");
    let keep = |object: Value| {
        let meta = &object["metadata"];
        let router_pod = object["kind"] == "Pod" && meta["labels"]["app.kubernetes.io/component"] == "router";
        let owner = &meta["ownerReferences"][0];
        let name = if router_pod { "router pod" } else { meta["name"].as_str().unwrap() };
        let container = |spec: &Value| json!([spec["containers"][0]["image"], spec["containers"][0]["args"]]);
        let content = match object["kind"].as_str().unwrap() {
            "Pod" => container(&object["spec"]),
            "Deployment" => json!([object["spec"]["replicas"], container(&object["spec"]["template"]["spec"])]),
            "Secret" => json!(object["data"].as_object().unwrap().keys().collect::<Vec<_>>()),
            "Service" => json!([object["spec"]["ports"], object["spec"]["selector"]]),
            "ConfigMap" => object["data"].clone(),
            "Role" => object["rules"].clone(),
            "RoleBinding" => object["roleRef"].clone(),
            "ServiceAccount" => Value::Null,
            _ => object["spec"].clone(),
        };
        let text = json!([meta["labels"]["app.kubernetes.io/component"], owner["kind"], content]).to_string();
        (format!("{}/{name}", object["kind"].as_str().unwrap()), json!(text.replace(namespace, "NAMESPACE")))
    };
    objects.map(keep).collect()
}

/// What is there of the pool, by kind and uid.
fn identities(cluster: &Cluster, namespace: &str) -> Vec<String> {
    let objects = everything(cluster, namespace);
    let ours = objects.iter().filter(|it| it["metadata"]["labels"]["kvasir.dev/pool"] == "p");
    ours.map(|it| format!("{} {}", it["kind"], it["metadata"]["uid"])).collect()
}

/// Edits, and reverts while that rolls.
async fn edits(stage: &mut Stage<'_>) {
    let first = Wish::first();
    stage.edit(&Wish { image: "2", tokens: 320, replicas: 3, ..first.clone() }).await;
    stage.moved("an edit", 3).await;
    stage.edit(&first).await;
    stage.rest("a revert").await;
    stage.agree("a revert");
}

/// The pool goes; gives what there was before.
async fn ends(stage: &Stage<'_>, cascade: &str) -> BTreeMap<String, Value> {
    let (cluster, namespace) = (stage.cluster(), stage.namespace().to_owned());
    let picture = picture(cluster, &namespace);
    let before = identities(cluster, &namespace);
    kubectl(cluster, &["-n", &namespace, "delete", "spool", "p", &format!("--cascade={cascade}"), "--timeout=60s"]);
    if cascade == "orphan" {
        let after = identities(cluster, &namespace);
        assert_eq!(before, after, "what is orphaned stays as it is, and nothing is made anew");
        return picture;
    }
    eventually("everything of the pool is collected, and nothing is made anew", || {
        let left = identities(cluster, &namespace);
        assert!(left.iter().all(|it| before.contains(it)), "made anew: {left:?}");
        if left.is_empty() { Ok(()) } else { Err(left.join(", ")) }
    })
    .await;
    picture
}

/// A life in which some writes are met by faults; the objects before its end, and what was met.
async fn disturbed(cluster: &Cluster, nodes: &PlayedNodes, cascade: &str, faults: BTreeMap<usize, Fault>) -> Objects {
    let proxy = Proxy::start(cluster, faults).await;
    let mut stage = Stage::open(cluster, nodes, &proxy.kubeconfig).await;
    edits(&mut stage).await;
    let picture = ends(&stage, cascade).await;
    stage.close().await;
    (picture, proxy.met())
}

/// A life in which the leader is cut off in the middle of its work, another one takes over and goes on, and only then what the first one had
/// sent arrives.
async fn usurped(cluster: &Cluster, nodes: &PlayedNodes, after: usize) -> Objects {
    let proxy = Proxy::start(cluster, BTreeMap::new()).await;
    let mut stage = Stage::open(cluster, nodes, &proxy.kubeconfig).await;
    let holder = |namespace: &str| {
        let leases = get(cluster, &["-n", namespace, "leases"]);
        leases["items"][0]["spec"]["holderIdentity"].as_str().unwrap_or_default().to_owned()
    };
    let (namespace, first) = (stage.namespace().to_owned(), holder(stage.namespace()));
    let standby = Operator::beside(cluster, &namespace);
    proxy.cut_off_after(after);
    stage.edit(&Wish { image: "2", tokens: 320, ..Wish::first() }).await;
    eventually("another one leads", || {
        let now = holder(&namespace);
        if now == first || now.is_empty() { Err(format!("{now} leads; {:?}", proxy.met())) } else { Ok(()) }
    })
    .await;
    stage.rest("what the first one began").await;
    stage.edit(&Wish::first()).await;
    stage.rest("a revert by the second one").await;
    assert!(!proxy.met().is_empty(), "the first one had sent something");
    proxy.let_go();
    // It may change something for a moment; what stays is what is asked for.
    standby.passed(PASSES).await;
    stage.rest("what the first one had sent").await;
    stage.agree("what the first one had sent");
    let picture = ends(&stage, "foreground").await;
    drop(standby);
    stage.close().await;
    (picture, proxy.met())
}

type Objects = (BTreeMap<String, Value>, Vec<String>);

#[test]
fn a_write_that_fails_is_late_or_loses_its_answer_or_its_lead_changes_nothing_in_the_end() {
    on_cluster(Layers::controllers(), async |cluster| {
        install(cluster, &[]).await;
        let nodes = cluster.play_nodes(&NODES.map(|name| NodeSpec::new(name).gpus(4))).await.unwrap();
        nodes.serve_pods();
        let began = Instant::now();
        let (golden, met) = disturbed(cluster, &nodes, "background", BTreeMap::new()).await;
        assert!(met.is_empty());
        step("a life without faults", began);
        let first = from_environment("KVASIR_FAULTS_SEED", 1);
        for seed in first..first + from_environment("KVASIR_FAULTS", 1) {
            let mut dice = Dice::new(seed);
            let cascade = ["foreground", "orphan", "background"][seed as usize % 3];
            // A third of all writes, each met in its own way.
            let chosen = (1..WRITES).filter(|_| dice.below(3) == 0).collect::<Vec<_>>();
            let faults = chosen.into_iter().map(|number| (number, FAULTS[dice.below(FAULTS.len())])).collect();
            let began = Instant::now();
            let (picture, met) = disturbed(cluster, &nodes, cascade, faults).await;
            step(&format!("seed {seed}: {} writes were met", met.len()), began);
            assert!(!met.is_empty());
            assert_eq!(golden, picture, "seed {seed}: {met:?}");
            let began = Instant::now();
            let (picture, met) = usurped(cluster, &nodes, dice.below(HELD_AFTER)).await;
            step(&format!("seed {seed}: held back: {}", met.join(", ")), began);
            assert_eq!(golden, picture, "seed {seed}: {met:?}");
        }
        nodes.stop().await;
    });
}
