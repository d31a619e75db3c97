//! Streams through everything that happens to a pool: another image, another copy of the model, other numbers of workers, routers that start anew, a
//! node that is emptied, an operator that is killed. Nobody who streams may notice.
//!
//! The gate runs four changes; `KVASIR_ROLLOUTS` adds changes by chance (`cargo xtask soak`), `KVASIR_SEED` repeats a run.

use super::helm::{KEY, OPERATOR, SYSTEM, install, secret};
use super::serving::Pool;
use super::support::{
    MODEL, MODELS, ROUTER, WORKER, apply, claim, eventually, from_environment, get, kubectl, load_images, load_program, on_nodes,
    processes_of, shared_models, step, try_kubectl,
};
use super::traffic::{Asked, OPEN_MIN, Traffic};
use kvasir_cluster::{Cluster, until};
use serde_json::{Value, json};
use std::process::Command;
use std::time::{Duration, Instant};

/// Changes of the gate, and questions that have to be answered while they are made.
const GATE: u64 = 4;
const STREAMS_MIN: usize = 500;
/// A change is made within this time, the longest stream included.
const CHANGE_MAX: Duration = Duration::from_mins(5);
/// Questions after a change in which prefixes may be computed anew, and those after them in which they have to be found.
const REFILL: usize = 64;
const WINDOW: usize = 64;
/// Share of the cached tokens before a change that has to be there after it.
const HITS_MIN: f64 = 0.9;
const WORKERS: usize = 2;
/// The same program under another name.
const WORKER_2: &str = "kvasir.test/kvasir-worker:2";
/// The same model under two names.
const COPIES: [&str; 2] = ["first.gguf", "second.gguf"];

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Change {
    Image,
    Flag,
    Revision,
    Scale,
    RestartRouters,
    KillRouter,
    Drain,
    KillOperator,
}

/// A pool on two nodes, and what it is at the moment.
struct Fleet<'a> {
    cluster: &'a Cluster,
    namespace: &'a str,
    made: usize,
    chance: u64,
}

fn pool(namespace: &str) -> Value {
    json!({
        "apiVersion": "kvasir.dev/v1alpha1", "kind": "ServingPool",
        "metadata": {"name": "harbour", "namespace": namespace},
        "spec": {
            "model": {"name": MODEL, "source": {"pvc": {"claimName": MODELS, "path": COPIES[0]}}},
            "engine": {"kvMemory": "256Mi", "resources": {"cpu": "300m", "memory": "1Gi"}},
            "tenants": [{"name": "harbour", "keySecretRef": {"name": "harbour", "key": "value"}}],
            "replicas": WORKERS,
            "router": {"replicas": 2},
            "maxStreamDuration": "60s",
        },
    })
}

#[test]
fn nobody_who_streams_notices_what_happens_to_a_pool() {
    let (rollouts, seed) = (from_environment("KVASIR_ROLLOUTS", GATE), from_environment("KVASIR_SEED", 1));
    on_nodes(2, async |cluster| {
        let began = Instant::now();
        load_images(cluster, &[OPERATOR, WORKER, ROUTER]).await;
        load_program(cluster, WORKER_2, "kvasir-worker").await;
        shared_models(cluster, &COPIES).await;
        let namespace = cluster.namespace("tenants", &[("pod-security.kubernetes.io/enforce", "restricted")]).await.unwrap();
        for object in [claim(&namespace), secret(&namespace)] {
            apply(cluster, &object);
        }
        install(cluster, "", &namespace);
        apply(cluster, &pool(&namespace));
        let mut fleet = Fleet { cluster, namespace: &namespace, made: 0, chance: seed };
        fleet.settled(WORKERS).await;
        step("pool", began);

        let served =
            Pool { cluster, namespace: &namespace, service: "harbour-router", model: MODEL, key_secret: "harbour", key: KEY };
        let traffic = Traffic::begin(&served).await;
        let gate = [
            vec![Change::Image],
            vec![Change::Revision],
            vec![Change::Scale],
            vec![Change::RestartRouters, Change::KillOperator, Change::Drain],
        ];
        for changes in gate {
            fleet.survives(&changes, &traffic).await;
        }
        eprintln!("seed {seed}");
        for _ in GATE..rollouts {
            let changes = fleet.by_chance();
            fleet.survives(&changes, &traffic).await;
        }
        let at_drain = traffic.at_drain();
        let answered = traffic.end().await;
        eprintln!("{answered} streams, none cut; streams open at each worker's drain: {at_drain:?}");
        assert!(answered >= STREAMS_MIN, "{answered} streams");
        assert!(at_drain.iter().all(|open| *open >= OPEN_MIN), "{at_drain:?}");
    });
}

/// Cached tokens of each prompt token.
fn hits(asked: &[Asked]) -> f64 {
    let sums = asked.iter().filter_map(|it| it.outcome.as_ref().ok());
    let (cached, prompt) = sums.fold((0, 0), |sums, it| (sums.0 + it.0, sums.1 + it.1));
    cached as f64 / prompt as f64
}

// === impl Fleet ===

impl Fleet<'_> {
    /// Makes changes one upon the other under load, and looks at what clients got.
    async fn survives(&mut self, changes: &[Change], traffic: &Traffic) {
        traffic.spread(WORKERS).await;
        let before = traffic.mark();
        let known = self.asked(traffic, before, WINDOW).await;
        let began = Instant::now();
        traffic.mark();
        for change in changes {
            self.make(*change, traffic).await;
        }
        self.settled(WORKERS).await;
        step(&format!("{changes:?}"), began);
        let after = traffic.mark();
        let found = self.asked(traffic, after, REFILL + WINDOW).await;
        let (known, found) = (hits(&known), hits(&found[REFILL..]));
        eprintln!("          hits {known:.3} before, {found:.3} after {REFILL} questions");
        assert_eq!(traffic.failures(), [] as [String; 0], "{changes:?}");
        assert!(found >= known * HITS_MIN, "{changes:?}: {known} before, {found} after");
    }

    /// The first `count` answers under a mark.
    async fn asked(&self, traffic: &Traffic, mark: usize, count: usize) -> Vec<Asked> {
        let mut asked = eventually("enough questions are answered", || {
            let asked = traffic.asked(mark);
            if asked.len() >= count { Ok(asked) } else { Err(format!("{} of {count}", asked.len())) }
        })
        .await;
        asked.truncate(count);
        asked
    }

    async fn make(&mut self, change: Change, traffic: &Traffic) {
        self.made += 1;
        let odd = self.made % 2;
        match change {
            Change::Image => {
                let spec = get(self.cluster, &["-n", self.namespace, "spool", "harbour"])["spec"].clone();
                let next = if spec["images"]["worker"] == WORKER_2 { WORKER } else { WORKER_2 };
                self.patch(&json!({"images": {"worker": next}}));
            }
            Change::Flag => self.patch(&json!({"engine": {"stepTime": format!("{}ms", 50 + self.made % 50)}})),
            Change::Revision => {
                let copy = COPIES[odd];
                self.patch(&json!({"model": {"source": {"pvc": {"path": copy}}, "revision": format!("r{}", self.made)}}));
            }
            Change::Scale => {
                for replicas in [WORKERS - 1, WORKERS + 1, WORKERS] {
                    let wanted = format!("--replicas={replicas}");
                    kubectl(self.cluster, &["-n", self.namespace, "scale", &wanted, "spool/harbour"]);
                    self.settled(replicas).await;
                    traffic.spread(replicas).await;
                }
            }
            Change::RestartRouters => {
                kubectl(self.cluster, &["-n", self.namespace, "rollout", "restart", "deployment/harbour-router"]);
            }
            Change::KillRouter => {
                let routers = self.pods("router");
                let victim = routers[odd % routers.len()]["metadata"]["name"].as_str().unwrap();
                kubectl(self.cluster, &["-n", self.namespace, "delete", "pod", victim, "--wait=false"]);
            }
            Change::Drain => {
                // Routers that started anew spread streams anew.
                traffic.spread(WORKERS).await;
                self.drain(odd).await;
            }
            Change::KillOperator => self.kill_operator(),
        }
    }

    /// Empties a node, and gives it back once the pool is whole without it.
    async fn drain(&self, node: usize) {
        let node = format!("node-{node}");
        let limit = format!("--timeout={}s", CHANGE_MAX.as_secs());
        kubectl(self.cluster, &["drain", &node, "--ignore-daemonsets", "--delete-emptydir-data", &limit]);
        self.settled(WORKERS).await;
        kubectl(self.cluster, &["uncordon", &node]);
    }

    /// SIGKILL, as a crash or the kernel's memory killer does it.
    fn kill_operator(&self) {
        let pods = get(self.cluster, &["-n", SYSTEM, "pods", "-l", "app.kubernetes.io/component=operator"]);
        for pod in pods["items"].as_array().unwrap() {
            let uid = pod["metadata"]["uid"].as_str().unwrap();
            for pid in processes_of(uid, "kvasir-operator") {
                Cluster::output(Command::new("kill").args(["-9", &pid])).unwrap();
            }
        }
    }

    fn patch(&self, spec: &Value) {
        let patch = json!({"spec": spec}).to_string();
        kubectl(self.cluster, &["-n", self.namespace, "patch", "spool", "harbour", "--type=merge", "-p", &patch]);
    }

    fn pods(&self, component: &str) -> Vec<Value> {
        let label = format!("app.kubernetes.io/component={component}");
        get(self.cluster, &["-n", self.namespace, "pods", "-l", &label])["items"].as_array().unwrap().clone()
    }

    /// Waits until the pool is as its spec wants it, with `workers` workers, and says so.
    async fn settled(&self, workers: usize) {
        until("the pool is as its spec wants it", CHANGE_MAX, || std::future::ready(self.look(workers)))
            .await
            .unwrap_or_else(|error| panic!("{error}"));
    }

    fn look(&self, workers: usize) -> Result<(), String> {
        let wanted = ["-n", self.namespace, "get", "-o", "json", "deployment", "harbour-router"];
        let routers: Value = serde_json::from_str(&try_kubectl(self.cluster, &wanted)?).unwrap();
        let (wanted, status) = (&routers["spec"]["replicas"], &routers["status"]);
        let all = ["replicas", "updatedReplicas", "readyReplicas"].iter().all(|count| status[count] == *wanted);
        if !all || status["observedGeneration"] != routers["metadata"]["generation"] {
            return Err(status.to_string());
        }
        let spool = get(self.cluster, &["-n", self.namespace, "spool", "harbour"]);
        let status = &spool["status"];
        let is = |kind: &str, state: &str| {
            let conditions = status["conditions"].as_array();
            conditions.into_iter().flatten().any(|it| it["type"] == kind && it["status"] == state)
        };
        let whole = status["observedGeneration"] == spool["metadata"]["generation"]
            && ["replicas", "routableReplicas", "updatedReplicas"].iter().all(|count| status[count] == workers)
            && status["rollout"].is_null()
            && [("Ready", "True"), ("Reconciling", "False"), ("RoutersInSync", "True")]
                .iter()
                .all(|(kind, state)| is(kind, state))
            && self.pods("worker").len() == workers;
        if whole { Ok(()) } else { Err(status.to_string()) }
    }

    /// One or two changes, the operator killed in between every second time.
    fn by_chance(&mut self) -> Vec<Change> {
        const ALL: [Change; 7] = [
            Change::Image,
            Change::Flag,
            Change::Revision,
            Change::Scale,
            Change::RestartRouters,
            Change::KillRouter,
            Change::Drain,
        ];
        let first = ALL[self.draw(ALL.len())];
        match self.draw(4) {
            0 | 1 => vec![first, Change::KillOperator],
            2 => vec![first, Change::KillOperator, ALL[self.draw(ALL.len())]],
            _ => vec![first],
        }
    }

    /// A number below `limit` (xorshift).
    fn draw(&mut self, limit: usize) -> usize {
        for shift in [13_i32, -7, 17] {
            self.chance ^= if shift < 0 { self.chance >> -shift } else { self.chance << shift };
        }
        (self.chance % limit as u64) as usize
    }
}
