//! Lives of pools: random edits, reverts, deaths and changes of devices on played nodes, under the real operator, scheduler and controllers.
//!
//! At every moment: the operator takes no routable worker away below `replicas - maxUnavailable`, cuts no stream, makes no pod beyond
//! `replicas + maxSurge`, and none beyond `replicas` that finds no device. At every rest: status says what an oracle says. A life follows from
//! its seed, which is printed; `KVASIR_LIVES_SEED` plays one again, `KVASIR_LIVES` and `KVASIR_LIFE_STEPS` say how many and how long.

pub mod answers;
mod oracle;
pub mod steps;

use super::api_server::install;
use super::operator::Operator;
use super::support::{PATIENCE, apply, from_environment, get, on_cluster};
use answers::{Seen, Shared, Truth};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams};
use kube::{Api, Client, ResourceExt as _};
use kvasir_cluster::{Cluster, Layers, NodeSpec, Play, PlayedNodes, until};
use kvasir_operator::api::ServingPool;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Instant;
use steps::{DEVICES, Happens, NODES, Step, Then, Wish, life};

const LIVES: u64 = 1;
const STEPS: u64 = 12;
/// A short life in which much happens: a bad image and its revert, a surge, too few devices, no replicas, a killed operator.
const SEED: u64 = 2149;
const POOL: &str = "p";

#[test]
fn a_pool_keeps_its_promises_and_tells_the_truth_whatever_happens_to_it() {
    on_cluster(Layers::controllers(), async |cluster| {
        install(cluster, &[]).await;
        let nodes = cluster.play_nodes(&NODES.map(|name| NodeSpec::new(name).gpus(DEVICES))).await.unwrap();
        nodes.serve_pods();
        let (first, lives) = (from_environment("KVASIR_LIVES_SEED", SEED), from_environment("KVASIR_LIVES", LIVES));
        for seed in first..first + lives {
            let began = Instant::now();
            let mut stage = Stage::open(cluster, &nodes, cluster.admin().kubeconfig()).await;
            stage.play(&life(seed, from_environment("KVASIR_LIFE_STEPS", STEPS) as usize), seed).await;
            stage.close().await;
            eprintln!("{:>7.1} s  life of seed {seed}", began.elapsed().as_secs_f64());
        }
        nodes.stop().await;
    });
}

/// A pool with everything around it.
pub struct Stage<'a> {
    cluster: &'a Cluster,
    nodes: &'a PlayedNodes,
    client: Client,
    namespace: String,
    operator: Operator,
    truth: Shared,
    answers: answers::Answers,
    wish: Wish,
    /// What pods do that do not just run, by uid.
    plays: Arc<Mutex<BTreeMap<String, Play>>>,
}

fn pool(namespace: &str, wish: &Wish) -> Value {
    let mut spec = wish.spec();
    spec["model"] = json!({"source": {"file": {"path": "/models/a.gguf"}}});
    spec["accelerator"] = json!({"count": 1, "resourceName": "nvidia.com/gpu"});
    spec["router"] = json!({"replicas": 2});
    json!({
        "apiVersion": "kvasir.dev/v1alpha1", "kind": "ServingPool",
        "metadata": {"name": POOL, "namespace": namespace}, "spec": spec,
    })
}

// === impl Stage ===

impl<'a> Stage<'a> {
    /// A pool at rest, and an operator that reaches the API server this way.
    pub async fn open(cluster: &'a Cluster, nodes: &'a PlayedNodes, kubeconfig: &Path) -> Self {
        let client = cluster.client().await.unwrap();
        let namespace = cluster.namespace("life", &[]).await.unwrap();
        let plays: Arc<Mutex<BTreeMap<String, Play>>> = Arc::default();
        let script = plays.clone();
        nodes.script(move |pod| {
            let image = pod.spec.as_ref().and_then(|spec| spec.containers[0].image.clone()).unwrap_or_default();
            let otherwise = if image.ends_with(":bad") { Play::Crash } else { Play::Run };
            script.lock().unwrap().get(&pod.uid().unwrap_or_default()).copied().unwrap_or(otherwise)
        });
        let (truth, wish) = (Shared::default(), Wish::first());
        truth.lock().wishes.insert(1, wish.clone());
        let answers = truth.answer(&client, &namespace);
        apply(cluster, &pool(&namespace, &wish));
        let operator = Operator::start(cluster, kubeconfig, "1", &[&format!("--lease-namespace={namespace}")]);
        let mut stage = Self { cluster, nodes, client, namespace, operator, truth, answers, wish, plays };
        stage.rest("the beginning").await;
        stage
    }

    async fn play(&mut self, steps: &[Step], seed: u64) {
        for (number, step) in steps.iter().enumerate() {
            let what = format!("seed {seed}, step {number}: {step}");
            eprintln!("         {what}");
            let moves = self.truth.lock().moves;
            self.happen(&step.happens).await;
            match step.then {
                Then::Rest => self.rest(&what).await,
                Then::Moves(count) => self.moved(&what, moves + count).await,
            }
            self.agree(&what);
        }
        self.rest(&format!("seed {seed}, the end")).await;
        self.agree(&format!("seed {seed}, the end"));
    }

    /// Nothing wrong was seen so far.
    pub fn agree(&self, what: &str) {
        let wrong = self.truth.lock().wrong.clone();
        assert!(wrong.is_empty(), "{what}: {wrong:#?}\n{}", self.operator.log());
    }

    pub fn cluster(&self) -> &'a Cluster {
        self.cluster
    }

    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    async fn happen(&mut self, happens: &Happens) {
        match happens {
            Happens::Edit(wish) => self.edit(wish).await,
            Happens::Ends(place) => {
                if let Some((uid, _)) = self.lose(*place) {
                    self.force(&uid, Play::Finish(1));
                }
            }
            Happens::Evicted(place) => {
                if let Some((_, name)) = self.lose(*place) {
                    self.delete(&name).await;
                }
            }
            Happens::Crashes(place) => {
                if let Some((uid, _)) = self.lose(*place) {
                    self.force(&uid, Play::Crash);
                    let crashed = |truth: &Truth| truth.pods.get(&uid).is_none_or(|seen| !seen.ready);
                    self.until("a worker crashes", crashed).await;
                    self.plays.lock().unwrap().remove(&uid);
                    self.nodes.again();
                }
            }
            Happens::RouterDeleted(place) => {
                let name = self.nth(*place, |seen| seen.router && seen.lives()).map(|(_, name)| name);
                if let Some(name) = name {
                    self.delete(&name).await;
                }
            }
            Happens::Devices(node, count) => {
                self.truth.lock().calm = false;
                self.nodes.set_capacity(NODES[*node], "nvidia.com/gpu", &count.to_string()).await.unwrap();
            }
            Happens::OperatorKilled => {
                self.operator.kill();
                self.operator = Operator::beside(self.cluster, &self.namespace);
            }
        }
    }

    pub async fn edit(&mut self, wish: &Wish) {
        if *wish == self.wish {
            return;
        }
        {
            // Noted first: the operator may act on it before the answer is here.
            let mut truth = self.truth.lock();
            let generation = truth.wishes.keys().max().unwrap() + 1;
            truth.wishes.insert(generation, wish.clone());
        }
        let pools = Api::<ServingPool>::namespaced(self.client.clone(), &self.namespace);
        let patch = Patch::Merge(json!({"spec": wish.spec()}));
        let edited = pools.patch(POOL, &PatchParams::default(), &patch).await.unwrap();
        assert_eq!(edited.metadata.generation, self.truth.lock().wishes.keys().max().copied());
        self.wish = wish.clone();
    }

    fn nth(&self, place: usize, keep: impl Fn(&Seen) -> bool) -> Option<(String, String)> {
        let truth = self.truth.lock();
        let mut found: Vec<_> = truth.pods.iter().filter(|(_, seen)| keep(seen)).collect();
        found.sort_by(|left, right| left.1.name.cmp(&right.1.name));
        (!found.is_empty()).then(|| found[place % found.len()]).map(|(uid, seen)| (uid.clone(), seen.name.clone()))
    }

    /// A ready worker is taken away by something that is not the operator.
    fn lose(&self, place: usize) -> Option<(String, String)> {
        let found = self.nth(place, |seen| !seen.router && seen.lives() && seen.ready)?;
        self.truth.lock().lose(&found.0);
        Some(found)
    }

    fn force(&self, uid: &str, play: Play) {
        self.plays.lock().unwrap().insert(uid.to_owned(), play);
        self.nodes.again();
    }

    async fn delete(&self, name: &str) {
        let pods = Api::<Pod>::namespaced(self.client.clone(), &self.namespace);
        // The operator may have been faster.
        match pods.delete(name, &DeleteParams::default()).await {
            Err(kube::Error::Api(error)) if error.code == 404 => {}
            done => drop(done.unwrap()),
        }
    }

    async fn until(&self, what: &str, is: impl Fn(&Truth) -> bool) {
        let ask = || std::future::ready(if is(&self.truth.lock()) { Ok(()) } else { Err("not yet".to_owned()) });
        until(what, PATIENCE, ask).await.unwrap_or_else(|error| panic!("{error}\n{}", self.operator.log()));
    }

    async fn at_rest(&self) -> Result<(), String> {
        let nodes = Api::<Node>::all(self.client.clone()).list(&ListParams::default()).await.unwrap().items;
        let pool = get(self.cluster, &["-n", &self.namespace, "spool", POOL]);
        let truth = self.truth.lock();
        oracle::World { wish: &self.wish, truth: &truth, nodes: &nodes, pool: &pool }.check()
    }

    /// Waits until all is at rest and status says so.
    pub async fn rest(&mut self, what: &str) {
        let rested = until("a rest that status tells as it is", PATIENCE, || self.at_rest()).await;
        rested.unwrap_or_else(|error| panic!("{what}: {error}\n{}", self.operator.log()));
        self.truth.lock().calm = true;
    }

    /// Waits until so much has moved, or all is at rest.
    pub async fn moved(&self, what: &str, moves: u64) {
        let moved =
            until(
                "a move or a rest",
                PATIENCE,
                async || {
                    if self.truth.lock().moves >= moves { Ok(()) } else { self.at_rest().await }
                },
            );
        moved.await.unwrap_or_else(|error| panic!("{what}: {error}\n{}", self.operator.log()));
    }

    /// The pool goes with everything that was made for it.
    pub async fn close(mut self) {
        drop(self.answers);
        self.operator.kill();
        super::support::kubectl(self.cluster, &["delete", "namespace", &self.namespace, "--wait=false"]);
        for node in NODES {
            self.nodes.set_capacity(node, "nvidia.com/gpu", &DEVICES.to_string()).await.unwrap();
        }
    }
}
