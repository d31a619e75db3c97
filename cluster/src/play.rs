//! Nodes that the harness plays: real objects and leases, no machine behind them. The real scheduler places pods on them, and a played kubelet
//! says that they run. So an 8-GPU fleet fits on a laptop.
//!
//! Owns one watch of pods and one lease round for all of its nodes. Refuses to know what pods are for. What is played is a pure function
//! (`pod::step`); this file only acts on it. Cost: one status write per change of a pod, one lease write per node in [`LEASE_ROUND`].

mod node;
mod pod;

pub use node::NodeSpec;
pub use pod::Play;

use crate::cluster::Cluster;
use crate::plan::Plan;
use crate::{Error, probe};
use futures::{StreamExt as _, TryStreamExt as _};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::jiff::Timestamp;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Api, Client, ResourceExt as _};
use pod::Step;
use serde_json::json;
use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::task::JoinSet;

/// Between two renewals of the leases; kubelets do it every 10 s, and the node controller waits 50 s.
const LEASE_ROUND: Duration = Duration::from_secs(5);
const LEASES: &str = "kube-node-lease";
const REGISTERED_MAX: Duration = Duration::from_secs(30);

type Script = Box<dyn Fn(&Pod) -> Play + Send + Sync>;

/// A fleet of played nodes; they stop being played when it is dropped.
pub struct PlayedNodes {
    client: Client,
    state: Arc<State>,
    tasks: JoinSet<()>,
}

struct State {
    plan: Plan,
    inner: Mutex<Inner>,
    again: Notify,
}

struct Inner {
    /// Name → whether it answers.
    nodes: BTreeMap<String, bool>,
    /// Uid → last seen state of every pod on a played node.
    pods: BTreeMap<String, Pod>,
    /// Uid → address.
    addresses: BTreeMap<String, Ipv4Addr>,
    addresses_given: u32,
    /// Whether pods get addresses on which the test listens.
    served: bool,
    script: Script,
}

// === impl Cluster ===

impl Cluster {
    /// Registers played nodes and plays their kubelets on the current runtime.
    pub async fn play_nodes(&self, specs: &[NodeSpec]) -> Result<PlayedNodes, Error> {
        PlayedNodes::start(self.client().await?, self.plan(), specs).await
    }
}

// === impl PlayedNodes ===

impl PlayedNodes {
    async fn start(client: Client, plan: Plan, specs: &[NodeSpec]) -> Result<Self, Error> {
        let inner = Inner {
            nodes: specs.iter().map(|spec| (spec.name().to_owned(), true)).collect(),
            pods: BTreeMap::new(),
            addresses: BTreeMap::new(),
            addresses_given: 0,
            served: false,
            script: Box::new(|_| Play::Run),
        };
        let state = Arc::new(State { plan, inner: Mutex::new(inner), again: Notify::new() });
        let nodes = Api::<Node>::all(client.clone());
        for spec in specs {
            let name = spec.name();
            nodes.create(&PostParams::default(), &spec.object()?).await.map_err(Error::api(format!("create node `{name}`")))?;
        }
        let mut tasks = JoinSet::new();
        tasks.spawn(renew_leases(client.clone(), state.clone()));
        tasks.spawn(play_pods(client.clone(), state.clone()));
        let played = Self { client, state, tasks };
        for spec in specs {
            played.wait_leased(spec.name()).await?;
        }
        Ok(played)
    }

    async fn wait_leased(&self, node: &str) -> Result<(), Error> {
        let leases = Api::<Lease>::namespaced(self.client.clone(), LEASES);
        probe::until(&format!("node `{node}` has a lease"), REGISTERED_MAX, || async {
            leases.get(node).await.map(drop).map_err(|error| error.to_string())
        })
        .await
    }

    /// Decides what each pod does from now on; asked again for every pod at once.
    pub fn script(&self, script: impl Fn(&Pod) -> Play + Send + Sync + 'static) {
        self.state.lock().script = Box::new(script);
        self.state.again.notify_one();
    }

    /// Asks the script again, because what it knows has changed.
    pub fn again(&self) {
        self.state.again.notify_one();
    }

    /// From now on pods get loopback addresses, each its own, so that the test can answer in their place. EndpointSlices hold no such addresses.
    pub fn serve_pods(&self) {
        self.state.lock().served = true;
    }

    /// The node falls silent: no leases, no pod moves. The node controller finds out by itself.
    pub fn silence(&self, node: &str) {
        if let Some(answers) = self.state.lock().nodes.get_mut(node) {
            *answers = false;
        }
    }

    /// The node answers again, and catches up.
    pub fn wake(&self, node: &str) {
        if let Some(answers) = self.state.lock().nodes.get_mut(node) {
            *answers = true;
        }
        self.state.again.notify_one();
    }

    /// Changes how much of a resource a node has, such as `nvidia.com/gpu` to `4`.
    pub async fn set_capacity(&self, node: &str, resource: &str, quantity: &str) -> Result<(), Error> {
        let amount = json!({resource: quantity});
        let patch = Patch::Merge(json!({"status": {"capacity": amount, "allocatable": amount}}));
        let nodes = Api::<Node>::all(self.client.clone());
        let done = nodes.patch_status(node, &PatchParams::default(), &patch).await;
        done.map(drop).map_err(Error::api(format!("set `{resource}` of node `{node}`")))
    }

    /// Takes a node out of the cluster, as an autoscaler does. Its pods are for the garbage collector.
    pub async fn remove(&self, node: &str) -> Result<(), Error> {
        self.state.lock().nodes.remove(node);
        let nodes = Api::<Node>::all(self.client.clone());
        nodes.delete(node, &DeleteParams::default()).await.map(drop).map_err(Error::api(format!("delete node `{node}`")))
    }

    /// Ends the play; the objects stay.
    pub async fn stop(mut self) {
        self.tasks.shutdown().await;
    }
}

// === impl State ===

impl State {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        // The state is plain data and whole after each statement, so a panic elsewhere does not spoil it.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What to do about one pod.
    fn step(&self, pod: &Pod) -> Step {
        let mut inner = self.lock();
        let node = pod.spec.as_ref().and_then(|spec| spec.node_name.clone()).unwrap_or_default();
        if inner.nodes.get(&node) != Some(&true) {
            return Step::Nothing;
        }
        let uid = pod.uid().unwrap_or_default();
        let address = if let Some(address) = inner.addresses.get(&uid) {
            *address
        } else {
            let number = inner.addresses_given;
            let address = if inner.served { self.plan.served_pod(number) } else { self.plan.played_pod(number) };
            inner.addresses_given += 1;
            inner.addresses.insert(uid, address);
            address
        };
        let play = (inner.script)(pod);
        pod::step(pod, play, address, Timestamp::now())
    }

    fn see(&self, event: &watcher::Event<Pod>) {
        let mut inner = self.lock();
        match event {
            watcher::Event::Apply(pod) | watcher::Event::InitApply(pod) => {
                let played =
                    pod.spec.as_ref().and_then(|spec| spec.node_name.as_ref()).is_some_and(|node| inner.nodes.contains_key(node));
                if played {
                    inner.pods.insert(pod.uid().unwrap_or_default(), pod.clone());
                }
            }
            watcher::Event::Delete(pod) => {
                let uid = pod.uid().unwrap_or_default();
                inner.pods.remove(&uid);
                inner.addresses.remove(&uid);
            }
            watcher::Event::Init => inner.pods.clear(),
            watcher::Event::InitDone => {}
        }
    }
}

async fn renew_leases(client: Client, state: Arc<State>) {
    let leases = Api::<Lease>::namespaced(client, LEASES);
    let mut round = tokio::time::interval(LEASE_ROUND);
    loop {
        round.tick().await;
        let awake: Vec<String> =
            state.lock().nodes.iter().filter(|(_, answers)| **answers).map(|(name, _)| name.clone()).collect();
        for name in awake {
            let lease = json!({
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": {"name": name},
                "spec": {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": format!("{:.6}", Timestamp::now())},
            });
            let params = PatchParams::apply("played-kubelet").force();
            if let Err(error) = leases.patch(&name, &params, &Patch::Apply(&lease)).await {
                tracing::debug!(%error, node = name, "a lease was not renewed; the next round tries again");
            }
        }
    }
}

async fn play_pods(client: Client, state: Arc<State>) {
    let on_nodes = watcher::Config::default().fields("spec.nodeName!=");
    let mut events = watcher(Api::<Pod>::all(client.clone()), on_nodes).default_backoff().boxed();
    loop {
        let due: Vec<Pod> = tokio::select! {
            event = events.try_next() => match event {
                Ok(Some(event)) => {
                    state.see(&event);
                    match event {
                        watcher::Event::Apply(pod) | watcher::Event::InitApply(pod) => vec![pod],
                        watcher::Event::Delete(_) | watcher::Event::Init | watcher::Event::InitDone => Vec::new(),
                    }
                }
                Ok(None) => return,
                Err(error) => {
                    tracing::debug!(%error, "the watch of pods was cut and begins again");
                    Vec::new()
                }
            },
            () = state.again.notified() => state.lock().pods.values().cloned().collect(),
        };
        for pod in due {
            act(&client, &pod, state.step(&pod)).await;
        }
    }
}

async fn act(client: &Client, pod: &Pod, step: Step) {
    let pods = Api::<Pod>::namespaced(client.clone(), &pod.namespace().unwrap_or_default());
    let name = pod.name_any();
    let done = match step {
        Step::Nothing => return,
        Step::Status(status) => {
            let patch = Patch::Strategic(json!({"metadata": {"uid": pod.uid()}, "status": status}));
            pods.patch_status(&name, &PatchParams::default(), &patch).await.map(drop)
        }
        Step::Gone => {
            let preconditions = Some(Preconditions { uid: pod.uid(), resource_version: None });
            pods.delete(&name, &DeleteParams { preconditions, ..DeleteParams::default().grace_period(0) }).await.map(drop)
        }
    };
    // Pods come and go; the next event of this one, if there is one, tells what is left to do.
    if let Err(error) = done {
        tracing::debug!(%error, pod = name, "a played step was refused");
    }
}
