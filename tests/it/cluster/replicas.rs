//! Who says how many: kubectl scale, an autoscaler, helm upgrades and restarts of the operator on one pool, in any order. The number that was said
//! last stands, nobody meets a conflict, and who waits is told the truth.
//!
//! Pods are played, so that a pool with workers is ready within a second; the autoscaler is Kubernetes' own. It moves a pool that lies outside of
//! its bounds without asking for metrics, which is how it is told what to do here.

use super::api_server::{install, pool};
use super::lives::answers::Shared;
use super::operator::Operator;
use super::support::{PATIENCE, apply, eventually, feed, from_environment, get, kubectl, on_cluster, step, try_kubectl};
use kvasir_cluster::{Access, Cluster, Component, Layers, NodeSpec, Play, PlayedNodes, until};
use serde_json::{Value, json};
use std::fs;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::time::Instant;

/// Rounds in the gate; the soak asks for more.
const ROUNDS: u64 = 20;
const USER: &str = "operator";

/// The pool, its chart and its operator.
struct Stage<'a> {
    cluster: &'a Cluster,
    namespace: String,
    chart: PathBuf,
    access: Access,
    operator: Option<Operator>,
}

/// What one round does, beside a helm upgrade.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Who {
    Person,
    Autoscaler,
}

/// A chart with the pool, which says nothing of replicas.
fn chart(cluster: &Cluster, namespace: &str) -> PathBuf {
    let folder = cluster.folder().join("pool-chart");
    fs::create_dir_all(folder.join("templates")).unwrap();
    fs::write(folder.join("Chart.yaml"), "apiVersion: v2\nname: pool\nversion: 1.0.0\n").unwrap();
    let mut object = pool(namespace, "a");
    object["spec"]["router"] = json!({"replicas": "ROUTERS"});
    object["spec"]["engine"] = json!({"contextLength": "CONTEXT"});
    let text = object.to_string().replace("\"ROUTERS\"", "{{ .Values.routers }}").replace("\"CONTEXT\"", "{{ .Values.context }}");
    fs::write(folder.join("templates/pool.json"), text).unwrap();
    folder
}

// === impl Stage ===

impl Stage<'_> {
    fn pool(&self) -> Value {
        get(self.cluster, &["-n", &self.namespace, "spool", "a"])
    }

    /// A helm upgrade that waits, under way.
    fn upgrade(&self, routers: u64, context: u64, timeout: &str) -> Child {
        let mut helm = self.cluster.helm().unwrap();
        helm.args(["upgrade", "--install", "pool"]).arg(&self.chart).args(["--namespace", &self.namespace, "--wait"]);
        helm.args(["--timeout", timeout, "--set", &format!("routers={routers},context={context}")]);
        helm.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    /// Another operator; the one before ends as it is told to, or at once.
    fn restart_operator(&mut self, kill: bool) {
        match self.operator.take() {
            Some(mut operator) if kill => operator.kill(),
            Some(operator) => drop(operator.end()),
            None => {}
        }
        let lease = format!("--lease-namespace={}", self.namespace);
        self.operator = Some(Operator::start(self.cluster, self.access.kubeconfig(), "1", &[&lease]));
    }

    /// Somebody says a number.
    fn say(&self, who: Who, replicas: u64) {
        match who {
            Who::Person => {
                try_kubectl(self.cluster, &["-n", &self.namespace, "delete", "hpa", "a", "--ignore-not-found"]).unwrap();
                kubectl(self.cluster, &["-n", &self.namespace, "scale", "spool", "a", &format!("--replicas={replicas}")]);
            }
            Who::Autoscaler => apply(
                self.cluster,
                &json!({"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler",
                    "metadata": {"name": "a", "namespace": self.namespace},
                    "spec": {"minReplicas": replicas, "maxReplicas": replicas,
                        "scaleTargetRef": {"apiVersion": "kvasir.dev/v1alpha1", "kind": "ServingPool", "name": "a"},
                        "metrics": [{"type": "External", "external": {"metric": {"name": "queue"},
                            "target": {"type": "AverageValue", "averageValue": "4"}}}]}}),
            ),
        }
    }

    /// Waits until the pool has that many and is at rest with them.
    async fn comes_to(&self, replicas: u64) {
        eventually(&format!("the pool has {replicas} workers"), || {
            let pool = self.pool();
            let pods = get(self.cluster, &["-n", &self.namespace, "pods", "-l", "app.kubernetes.io/component=worker"]);
            let pods = pods["items"].as_array().unwrap().len() as u64;
            let status = &pool["status"];
            let held = pool["spec"]["replicas"] == replicas && status["replicas"] == replicas && pods == replicas;
            if held { Ok(()) } else { Err(format!("{} {pods} {status}", pool["spec"]["replicas"])) }
        })
        .await;
    }

    /// What who waits for the pool may rely on, the moment the wait ends.
    fn is_ready_as_told(&self) {
        let pool = self.pool();
        let conditions = pool["status"]["conditions"].as_array().unwrap();
        let ready = conditions.iter().find(|it| it["type"] == "Ready").unwrap();
        assert_eq!(
            (&ready["status"], &ready["observedGeneration"]),
            (&json!("True"), &pool["metadata"]["generation"]),
            "{conditions:?}"
        );
        let pods = get(self.cluster, &["-n", &self.namespace, "pods", "-l", "app.kubernetes.io/component=worker"]);
        let is_ready = |pod: &&Value| {
            let conditions = pod["status"]["conditions"].as_array().cloned().unwrap_or_default();
            conditions.iter().any(|it| it["type"] == "Ready" && it["status"] == "True")
        };
        let ready = pods["items"].as_array().unwrap().iter().filter(is_ready).count() as u64;
        let wanted = pool["spec"]["replicas"].as_u64().unwrap();
        assert!(ready >= wanted.saturating_sub(1), "{ready} of {wanted} are ready");
    }

    fn waits(&self, timeout: &str) -> Result<String, String> {
        let timeout = format!("--timeout={timeout}");
        try_kubectl(self.cluster, &["-n", &self.namespace, "wait", "--for=condition=Ready", &timeout, "spool/a"])
    }

    /// Nobody wrote the pool's spec but people, helm and the autoscaler; nobody met a conflict.
    fn the_log_is_clean(&self) {
        let events = self.cluster.audit().all().unwrap();
        let pools: Vec<_> = events.iter().filter(|it| it.resource == "servingpools" && it.is_mutation()).collect();
        let own: Vec<_> = pools.iter().filter(|it| it.user == USER && it.subresource != "status").collect();
        assert!(own.is_empty(), "the operator wrote a spec: {own:?}");
        let conflicts: Vec<_> = pools.iter().filter(|it| it.code == 409).collect();
        assert!(conflicts.is_empty(), "{conflicts:?}");
        let scaled = |user: &str| pools.iter().filter(|it| it.user == user && it.subresource == "scale").count();
        let autoscaler = "system:serviceaccount:kube-system:horizontal-pod-autoscaler";
        assert!(scaled(autoscaler) > 0 && scaled("admin") > 0, "both have scaled: {} {}", scaled(autoscaler), scaled("admin"));
    }
}

fn ended(child: Child) -> Result<String, String> {
    let output = child.wait_with_output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    if output.status.success() { Ok(text(output.stdout)) } else { Err(text(output.stderr)) }
}

/// One round: a number, an upgrade, often a restart, all at once.
async fn round(stage: &mut Stage<'_>, number: u64, replicas: u64) -> u64 {
    // An autoscaler leaves a pool of none alone, so a person wakes it.
    let who = if number % 2 == 1 && replicas > 0 { Who::Autoscaler } else { Who::Person };
    let before = stage.pool()["spec"]["replicas"].as_u64().unwrap();
    if who == Who::Autoscaler && before == 0 {
        stage.say(Who::Person, 1);
    }
    let upgrade = stage.upgrade(1 + number % 2, 1024 * (1 + number / 4 % 2), "60s");
    if number.is_multiple_of(3) {
        stage.restart_operator(number.is_multiple_of(2));
    }
    stage.say(who, replicas);
    if number % 3 == 1 {
        stage.restart_operator(number.is_multiple_of(2));
    }
    let told = tokio::task::spawn_blocking(|| ended(upgrade)).await.unwrap();
    told.unwrap_or_else(|error| panic!("round {number}: {error}"));
    stage.comes_to(replicas).await;
    stage.waits("30s").unwrap_or_else(|error| panic!("round {number}: {error}"));
    stage.is_ready_as_told();
    replicas
}

/// Whoever waits for a pool that does not come is not told that it did.
async fn waiting_is_told_the_truth(stage: &Stage<'_>, nodes: &PlayedNodes) {
    stage.say(Who::Person, 2);
    stage.comes_to(2).await;
    nodes.script(|pod| {
        let worker = pod
            .metadata
            .labels
            .as_ref()
            .is_some_and(|labels| labels.get("app.kubernetes.io/component").is_some_and(|it| it == "worker"));
        if worker { Play::Hold } else { Play::Run }
    });
    // Not waited for: the next ones have the same names, and kubectl may take one for the other.
    let workers = ["-l", "app.kubernetes.io/component=worker", "--wait=false"];
    kubectl(stage.cluster, &[&["-n", &stage.namespace, "delete", "pods"][..], &workers].concat());
    eventually("a pool without workers is not ready", || {
        let pool = stage.pool();
        let ready =
            pool["status"]["conditions"].as_array().unwrap().iter().find(|it| it["type"] == "Ready").unwrap()["status"].clone();
        if ready == "True" { Err(pool["status"].to_string()) } else { Ok(()) }
    })
    .await;
    let upgrade = stage.upgrade(3, 1024, "3s");
    let told = tokio::task::spawn_blocking(|| ended(upgrade)).await.unwrap();
    assert!(told.is_err(), "helm said that a pool without workers is there: {told:?}");
    assert!(stage.waits("1s").is_err());
    nodes.script(|_| Play::Run);
    let upgrade = stage.upgrade(2, 1024, "60s");
    let told = tokio::task::spawn_blocking(|| ended(upgrade)).await.unwrap();
    told.unwrap_or_else(|error| panic!("{error}"));
    stage.is_ready_as_told();
}

#[test]
fn the_number_that_was_said_last_stands_whoever_else_writes_and_waiting_is_told_the_truth() {
    let layers = Layers::controllers().flag(Component::ControllerManager, "--horizontal-pod-autoscaler-sync-period=1s");
    on_cluster(layers, async |cluster| {
        install(cluster, &[]).await;
        let nodes = cluster.play_nodes(&[NodeSpec::new("a")]).await.unwrap();
        nodes.serve_pods();
        let namespace = cluster.namespace("scaled", &[]).await.unwrap();
        let access = cluster.user(USER, Some("system:masters")).unwrap();
        let chart = chart(cluster, &namespace);
        let answers = Shared::default().answer(&cluster.client().await.unwrap(), &namespace);
        let mut stage = Stage { cluster, namespace, chart, access, operator: None };
        let began = Instant::now();
        stage.restart_operator(false);
        let first = stage.upgrade(1, 1024, "60s");
        tokio::task::spawn_blocking(|| ended(first)).await.unwrap().unwrap_or_else(|error| panic!("{error}"));
        stage.is_ready_as_told();
        step("the first release waits for the pool", began);

        let began = Instant::now();
        let rounds = from_environment("KVASIR_SCALE_ROUNDS", ROUNDS);
        // Every number after every other one, nought included, in an order that is the same each time.
        let mut replicas = 1;
        for number in 0..rounds {
            replicas = round(&mut stage, number, (replicas + 1 + number * 7 % 3) % 4).await;
        }
        step(&format!("{rounds} rounds"), began);
        let began = Instant::now();
        stage.say(Who::Person, 0);
        stage.comes_to(0).await;
        stage.restart_operator(false);
        // An autoscaler does not wake it, and neither does an upgrade or a restart.
        stage.say(Who::Person, 0);
        let hpa = json!({"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": {"name": "a", "namespace": stage.namespace},
            "spec": {"minReplicas": 2, "maxReplicas": 3, "scaleTargetRef": {"apiVersion": "kvasir.dev/v1alpha1", "kind": "ServingPool", "name": "a"}}});
        feed(cluster, &["apply"], &hpa).unwrap();
        until("the autoscaler says that it leaves the pool alone", PATIENCE, || {
            let hpa = get(cluster, &["-n", &stage.namespace, "hpa", "a"])["status"].to_string();
            std::future::ready(if hpa.contains("ScalingDisabled") { Ok(()) } else { Err(hpa) })
        })
        .await
        .unwrap_or_else(|error| panic!("{error}"));
        let upgrade = stage.upgrade(2, 1024, "60s");
        tokio::task::spawn_blocking(|| ended(upgrade)).await.unwrap().unwrap_or_else(|error| panic!("{error}"));
        stage.comes_to(0).await;
        step("none stays none", began);
        kubectl(cluster, &["-n", &stage.namespace, "delete", "hpa", "a"]);
        let began = Instant::now();
        waiting_is_told_the_truth(&stage, &nodes).await;
        step("waiting is told the truth", began);
        stage.the_log_is_clean();
        drop(stage.operator.take());
        drop(answers);
        nodes.stop().await;
    });
}
