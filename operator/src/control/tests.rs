#![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]
//! The controller on a mock API server with a small cluster behind it, in paused time.

use super::*;
use crate::api::{ConditionReason, ConditionStatus, ConditionType};
use crate::lead::GateLayer;
use crate::testing::{Cluster, Fault, Sketch};
use k8s_openapi::jiff::Timestamp;
use kube::client::ClientBuilder;
use kvasir_telemetry::Registry;
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

mod deletion;
mod drafts;
mod faults;
mod rollouts;
mod scaling;
mod statuses;

/// Longest time in which anything settles.
const SOON: Duration = Duration::from_mins(2);
const NS: &str = "ns";

/// A controller that runs on a cluster.
struct Run {
    cluster: Cluster,
    gate: Gate,
    stop: CancellationToken,
    task: JoinHandle<()>,
    registry: Registry,
}

// === impl Run ===

impl Run {
    fn new(devices: u32) -> Self {
        Self::on(Cluster::new(devices))
    }

    /// A process that leads from the beginning.
    fn on(cluster: Cluster) -> Self {
        let gate = Gate::open();
        let (stop, task, registry) = start(&cluster, &gate, None);
        Self { cluster, gate, stop, task, registry }
    }

    /// Another process in place of the first, which ends at once or in order.
    async fn restart(&mut self, orderly: bool) {
        self.stop.cancel();
        if orderly {
            (&mut self.task).await.unwrap();
        } else {
            self.task.abort();
        }
        self.gate = Gate::open();
        (self.stop, self.task, self.registry) = start(&self.cluster, &self.gate, None);
    }

    /// A process of another blueprint than the sketch.
    async fn with(&mut self, blueprint: Arc<dyn Blueprint>, kinds: Vec<ApiResource>) {
        self.stop.cancel();
        (&mut self.task).await.unwrap();
        (self.stop, self.task, self.registry) = start_with(&self.cluster, &self.gate, None, blueprint, kinds);
    }

    fn create(&self, name: &str, change: impl FnOnce(&mut Value)) {
        self.create_labelled(name, &json!({}), change);
    }

    fn create_labelled(&self, name: &str, labels: &Value, change: impl FnOnce(&mut Value)) {
        let mut pool = json!({"apiVersion": "kvasir.dev/v1alpha1", "kind": "ServingPool", "metadata": {"name": name, "namespace": NS, "labels": labels},
            "spec": {"model": {"source": {"file": {"path": "/m"}}}, "replicas": 2, "images": {"worker": "w:1"},
                "maxStreamDuration": "60s"}});
        change(&mut pool["spec"]);
        self.cluster.api.put("servingpools", pool);
    }

    fn edit(&self, name: &str, change: impl FnOnce(&mut Value)) {
        self.cluster.api.change("servingpools", NS, name, |pool| change(&mut pool["spec"]));
    }

    fn pool(&self, name: &str) -> Value {
        self.cluster.api.get("servingpools", NS, name).unwrap_or_default()
    }

    fn workers(&self) -> Vec<Value> {
        self.cluster.pods("worker")
    }

    fn condition(&self, name: &str, kind: ConditionType) -> (String, String) {
        let pool = self.pool(name);
        let conditions = pool["status"]["conditions"].as_array().cloned().unwrap_or_default();
        let found = conditions.iter().find(|it| it["type"] == kind.as_str()).cloned().unwrap_or_default();
        (found["status"].as_str().unwrap_or_default().to_owned(), found["reason"].as_str().unwrap_or_default().to_owned())
    }

    fn is(&self, name: &str, kind: ConditionType, status: ConditionStatus, reason: ConditionReason) -> bool {
        self.condition(name, kind) == (format!("{status:?}"), reason.as_str().to_owned())
    }

    /// Whether the pool serves as asked and nothing more is to be done.
    fn settled(&self, name: &str) -> bool {
        let pool = self.pool(name);
        let status = &pool["status"];
        status["observedGeneration"] == pool["metadata"]["generation"]
            && status["updatedReplicas"] == status["desiredReplicas"]
            && status["routableReplicas"] == status["desiredReplicas"]
            && status["replicas"] == status["desiredReplicas"]
            && status["rollout"].is_null()
            && self.condition(name, ConditionType::Reconciling).0 == "False"
            && self.condition(name, ConditionType::Stalled).0 == "False"
    }

    /// Waits until something holds; says what the world is like if it does not.
    async fn until(&self, what: &str, holds: impl Fn(&Self) -> bool) {
        let end = Instant::now() + SOON;
        while !holds(self) {
            assert!(Instant::now() < end, "not {what}:\n{}", self.picture());
            sleep(Duration::from_millis(100)).await;
        }
    }

    async fn until_settled(&self, name: &str) {
        self.until("settled", |run| run.settled(name)).await;
        // The kubelet takes a moment to follow the gates.
        sleep(Duration::from_millis(500)).await;
    }

    fn picture(&self) -> String {
        let pools: Vec<String> =
            self.cluster.api.all("servingpools").iter().map(|pool| format!("{:#}", pool["status"])).collect();
        let pods: Vec<String> = self
            .workers()
            .iter()
            .map(|pod| format!("{} {} {}", pod["metadata"]["name"], pod["spec"]["containers"][0]["image"], pod["status"]))
            .collect();
        let calls = self.cluster.api.calls();
        let last = &calls[calls.len().saturating_sub(20)..];
        format!("{}\n{}\n{last:#?}", pools.join("\n"), pods.join("\n"))
    }

    fn events(&self, reason: &str) -> Vec<String> {
        let events = self.cluster.api.all("events");
        let notes =
            events.iter().filter(|event| event["reason"] == reason).map(|event| event["note"].as_str().unwrap().to_owned());
        notes.collect()
    }

    fn routable(&self) -> usize {
        let routable = |pod: &Value| {
            let conditions = pod["status"]["conditions"].as_array().cloned().unwrap_or_default();
            conditions.iter().any(|it| it["type"] == "Ready" && it["status"] == "True")
                && pod["metadata"]["deletionTimestamp"].is_null()
        };
        self.workers().iter().filter(|pod| routable(pod)).count()
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn start(cluster: &Cluster, gate: &Gate, namespace: Option<&str>) -> (CancellationToken, JoinHandle<()>, Registry) {
    start_with(cluster, gate, namespace, Arc::new(Sketch), Sketch::kinds())
}

fn start_with(
    cluster: &Cluster,
    gate: &Gate,
    namespace: Option<&str>,
    blueprint: Arc<dyn Blueprint>,
    kinds: Vec<ApiResource>,
) -> (CancellationToken, JoinHandle<()>, Registry) {
    let registry = Registry::default();
    let client = ClientBuilder::new(cluster.api.service(), NS).with_layer(&GateLayer::new(gate.clone())).build();
    let controller = Controller::start(Parts {
        client,
        admin: Arc::clone(&cluster.fleet) as Arc<dyn Admin>,
        blueprint,
        gate: gate.clone(),
        clock: cluster.clock.clone(),
        metrics: OperatorMetrics::new(&registry),
        tracer: Tracer::disabled(),
        settings: ControllerSettings {
            namespace: namespace.map(str::to_owned),
            kinds,
            concurrency: 4,
            rest: Duration::from_secs(5),
            instance: "test".to_owned(),
        },
    });
    let stop = CancellationToken::new();
    probe(controller.readiness());
    (stop.clone(), tokio::spawn(controller.run(stop)), registry)
}

/// Probes come from the first moment on. They must not take the news of a complete list away from the controller, which waits for the same lists.
fn probe(readiness: Readiness) {
    tokio::spawn(async move {
        // Bounded, because paused time does not go on while somebody is busy.
        for _ in 0..1_000 {
            let _answer = readiness.is_ready();
            tokio::task::yield_now().await;
        }
    });
}

#[tokio::test(start_paused = true)]
async fn a_pool_becomes_pods_that_routers_take_and_is_ready_then_and_not_before() {
    let run = Run::new(8);
    run.create("p", |_| {});
    run.until("two ready workers", |run| run.workers().len() == 2).await;
    assert_eq!(run.condition("p", ConditionType::Ready).0, "False");
    assert_eq!(run.routable(), 0);
    run.until_settled("p").await;
    assert!(run.is("p", ConditionType::Ready, ConditionStatus::True, ConditionReason::Serving), "{}", run.picture());
    assert!(run.is("p", ConditionType::RoutersInSync, ConditionStatus::True, ConditionReason::InSync));
    assert!(run.is("p", ConditionType::ModelResolved, ConditionStatus::True, ConditionReason::Resolved));
    run.until("gates open", |run| run.routable() == 2).await;
    assert_eq!(run.pool("p")["status"]["model"]["digest"], "d1");
    assert_eq!(run.events("PodCreated").len(), 2);
    assert_eq!(run.pool("p")["status"]["selector"], "app.kubernetes.io/component=worker,kvasir.dev/pool=p");
}

/// Operator.md §5 (1), R55: nothing is written at rest, whatever others put on the objects.
#[tokio::test(start_paused = true)]
async fn r55_at_rest_nothing_is_written() {
    let run = Run::new(40);
    for at in 0..10 {
        run.create(&format!("p{at}"), |_| {});
    }
    for at in 0..10 {
        run.until_settled(&format!("p{at}")).await;
    }
    run.cluster.api.change("deployments", NS, "p0-router", |it| it["metadata"]["labels"]["foreign"] = json!("label"));
    sleep(Duration::from_secs(5)).await;
    let (writes, calls) = (run.cluster.api.writes().len(), run.cluster.api.calls().len());
    // Ten resyncs of five seconds, and more.
    sleep(Duration::from_secs(70)).await;
    assert_eq!(run.cluster.api.writes()[writes..], [], "{}", run.picture());
    let requests: Vec<_> = run.cluster.api.calls()[calls..].iter().filter(|call| call.verb != "watch").cloned().collect();
    assert_eq!(requests, [], "nothing is even read");
    let text = run.registry.render();
    assert!(text.contains("kvasir_operator_pools{phase=\"ready\"} 10"), "{text}");
}

#[tokio::test(start_paused = true)]
async fn an_edit_costs_a_few_writes_and_a_drifted_object_is_repaired_and_told() {
    let run = Run::new(8);
    run.create("p", |_| {});
    run.until_settled("p").await;
    sleep(Duration::from_secs(10)).await;
    let before = run.cluster.api.writes().len();
    run.edit("p", |spec| spec["observability"] = json!({"sampling": "7%"}));
    run.until("written", |run| run.cluster.api.get("configmaps", NS, "p-router-flags").unwrap()["data"]["sampling"] == "7%")
        .await;
    run.until_settled("p").await;
    sleep(Duration::from_secs(10)).await;
    let writes = run.cluster.api.writes();
    assert!(writes.len() - before <= 3, "an object, the status and an event: {:?}", &writes[before..]);
    run.cluster.api.change("configmaps", NS, "p-router-flags", |map| map["data"]["sampling"] = json!("99%"));
    run.until("repaired", |run| run.cluster.api.get("configmaps", NS, "p-router-flags").unwrap()["data"]["sampling"] == "7%")
        .await;
    run.until("told", |run| run.events("DriftRepaired").len() == 1).await;
    assert!(run.events("DriftRepaired")[0].contains("data.sampling"));
    // What someone deletes comes back.
    run.cluster.api.remove("configmaps", NS, "p-router-flags");
    run.until("made anew", |run| run.cluster.api.get("configmaps", NS, "p-router-flags").is_some()).await;
}

/// Case 22: what is switched off goes away.
#[tokio::test(start_paused = true)]
async fn what_a_spec_no_longer_asks_for_is_removed() {
    let run = Run::new(8);
    run.create("p", |_| {});
    run.until_settled("p").await;
    assert!(run.cluster.api.get("configmaps", NS, "p-monitor").is_some());
    run.edit("p", |spec| spec["networkPolicy"] = json!("Off"));
    run.until("removed", |run| run.cluster.api.get("configmaps", NS, "p-monitor").is_none()).await;
    assert!(run.cluster.api.get("configmaps", NS, "p-router-flags").is_some());
}

/// R56: what happened while nobody led is made up for, and streams go on all the while.
#[tokio::test(start_paused = true)]
async fn r56_a_restart_makes_up_for_what_was_missed_and_changes_nothing_else() {
    let mut run = Run::new(8);
    for name in ["kept", "edited", "deleted"] {
        run.create(name, |_| {});
    }
    for name in ["kept", "edited", "deleted"] {
        run.until_settled(name).await;
    }
    let uids = |run: &Run, name: &str| -> Vec<String> {
        let of = |pod: &&Value| pod["metadata"]["labels"]["kvasir.dev/pool"] == name;
        run.workers().iter().filter(of).map(|pod| pod["metadata"]["uid"].to_string()).collect()
    };
    let before = uids(&run, "kept");
    run.stop.cancel();
    (&mut run.task).await.unwrap();
    run.cluster.api.remove("servingpools", NS, "deleted");
    run.edit("edited", |spec| spec["replicas"] = json!(1));
    run.cluster.api.remove("configmaps", NS, "kept-router-flags");
    sleep(Duration::from_secs(5)).await;
    run.restart(false).await;
    run.until("child restored", |run| run.cluster.api.get("configmaps", NS, "kept-router-flags").is_some()).await;
    run.until("scaled", |run| uids(run, "edited").len() == 1 && uids(run, "deleted").is_empty()).await;
    run.until_settled("edited").await;
    assert_eq!(uids(&run, "kept"), before);
    assert_eq!(run.cluster.fleet.cut(), 0);
}

/// R65: one kind that may not be watched holds up that kind only.
#[tokio::test(start_paused = true)]
async fn r65_a_missing_right_degrades_one_kind_and_is_said() {
    let cluster = Cluster::new(8);
    cluster.api.forbid("configmaps");
    let run = Run::on(cluster);
    run.create("p", |_| {});
    run.until("serving", |run| run.condition("p", ConditionType::Ready).0 == "True").await;
    run.until("told", |run| run.is("p", ConditionType::Degraded, ConditionStatus::True, ConditionReason::Forbidden)).await;
    assert!(run.cluster.api.all("configmaps").is_empty());
    run.cluster.api.allow();
    run.until_settled("p").await;
    assert!(run.cluster.api.get("configmaps", NS, "p-router-flags").is_some());
}

#[tokio::test(start_paused = true)]
async fn an_orderly_end_finishes_the_pass_in_hand() {
    let mut run = Run::new(8);
    run.create("p", |_| {});
    run.until("begun", |run| !run.workers().is_empty()).await;
    run.stop.cancel();
    let ended = Instant::now();
    (&mut run.task).await.unwrap();
    assert!(ended.elapsed() < FINISH_MAX, "{:?}", ended.elapsed());
}

fn at(seconds: i64) -> Timestamp {
    Timestamp::from_second(seconds).unwrap()
}
