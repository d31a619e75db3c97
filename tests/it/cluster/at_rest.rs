//! The operator at rest, told by the API server's audit log: a hundred idle pools, and no write but the lease's; beside them a stuck one, which
//! is looked at ever more rarely.
//!
//! Time is told by looks at the resting pools, not by a clock: each of them is looked at once a second.

use super::api_server::{install, pool};
use super::operator::Operator;
use super::support::{apply, eventually, get, kubectl, on_cluster, step};
use kube::api::{Api, ListParams, Patch, PatchParams, PostParams};
use kvasir_cluster::{AuditEvent, Cluster, Layers, until};
use kvasir_operator::api::ServingPool;
use serde_json::json;
use std::time::{Duration, Instant};

const POOLS: usize = 100;
/// Looks at each pool that have to pass without a write.
const RESYNCS: usize = 10;
/// Writes for one change of a pool: the object, the status while it moves and after, events.
const WRITES_PER_EDIT_MAX: usize = 6;
/// Looks at the stuck pool while each resting one is looked at half as many times as that, and then as many: its wait grows by half each time,
/// from a second to two minutes, so that they are two or three.
const STUCK_LOOKS_MAX: usize = 6;
/// Memory of the operator with all of these pools; the design's bound is 64.
const RSS_MIB_MAX: u64 = 56;
const SETTLED_MAX: Duration = Duration::from_mins(2);
const USER: &str = "operator";

/// The pools and who looks after them.
struct Rest<'a> {
    cluster: &'a Cluster,
    namespace: String,
    pools: Api<ServingPool>,
    operator: Operator,
}

// === impl Rest ===

impl<'a> Rest<'a> {
    async fn begin(cluster: &'a Cluster) -> Self {
        install(cluster, &[]).await;
        let namespace = cluster.namespace("rest", &[]).await.unwrap();
        let pools = Api::<ServingPool>::namespaced(cluster.client().await.unwrap(), &namespace);
        // Someone else's object has the name of one of the stuck pool's own.
        let foreign = json!({"name": "stuck-router-flags", "namespace": namespace});
        apply(cluster, &json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": foreign}));
        for name in (0..POOLS).map(|number| format!("p-{number}")).chain(["stuck".to_owned()]) {
            let mut object = pool(&namespace, &name);
            // Idle: without a node, a worker would be waited for.
            object["spec"]["replicas"] = json!(0);
            pools.create(&PostParams::default(), &serde_json::from_value(object).unwrap()).await.unwrap();
        }
        Self { cluster, namespace, pools, operator: start(cluster) }
    }

    async fn every_pool_has_a_status(&self) {
        until("every pool has a status", SETTLED_MAX, || async {
            let listed = self.pools.list(&ListParams::default()).await.map_err(|error| error.to_string())?;
            let told = listed.items.iter().filter(|pool| pool.told().is_some()).count();
            if told == POOLS + 1 { Ok(()) } else { Err(format!("{told} have one")) }
        })
        .await
        .unwrap_or_else(|error| panic!("{error}; {}", self.operator.said()));
    }

    fn stuck(&self) -> String {
        get(self.cluster, &["-n", &self.namespace, "spool", "stuck"])["status"].to_string()
    }

    /// Waits until every resting pool has been looked at `resyncs` times on end without a write; gives what was asked meanwhile.
    async fn quiet(&self, resyncs: usize) -> Vec<AuditEvent> {
        let (audit, began) = (self.cluster.audit(), Instant::now());
        loop {
            let mark = audit.mark().unwrap();
            self.operator.passed(resyncs * POOLS).await;
            let events = audit.since(mark).unwrap();
            let written = writes(&events);
            if written.is_empty() {
                return events;
            }
            assert!(began.elapsed() < SETTLED_MAX, "it still writes: {written:?}");
        }
    }

    /// Looks at the stuck pool while the others rest.
    async fn looks_at_the_stuck_one(&self, resyncs: usize) -> usize {
        let events = self.quiet(resyncs).await;
        let own = || events.iter().filter(|event| event.user == USER);
        // Who rests is not asked about either.
        assert_eq!(own().filter(|event| event.name.starts_with("p-")).count(), 0, "a resting pool costs no request");
        own().filter(|event| event.resource == "configmaps" && event.name == "stuck-router-flags").count()
    }

    /// What one edit of one pool costs.
    async fn an_edit(&self) -> usize {
        let mark = self.cluster.audit().mark().unwrap();
        let edit = Patch::Merge(json!({"spec": {"router": {"replicas": 3}}}));
        self.pools.patch("p-7", &PatchParams::default(), &edit).await.unwrap();
        eventually("the edit arrives", || {
            let router = get(self.cluster, &["-n", &self.namespace, "deployment", "p-7-router"]);
            let replicas = router["spec"]["replicas"].clone();
            if replicas == 3 { Ok(()) } else { Err(replicas.to_string()) }
        })
        .await;
        self.quiet(3).await;
        let written = writes(&self.cluster.audit().since(mark).unwrap());
        assert!((1..=WRITES_PER_EDIT_MAX).contains(&written.len()), "{written:?}");
        assert!(written.iter().all(|write| write.contains("p-7")), "{written:?}");
        written.len()
    }

    /// Who starts anew finds everything as it should be.
    async fn another_operator(self) -> Self {
        self.quiet(1).await;
        let Self { cluster, namespace, pools, operator } = self;
        operator.end();
        let mark = cluster.audit().mark().unwrap();
        let rest = Self { cluster, namespace, pools, operator: start(cluster) };
        rest.operator.passed(2 * POOLS).await;
        assert_eq!(writes(&cluster.audit().since(mark).unwrap()), Vec::<String>::new());
        rest
    }

    /// What held the stuck pool up goes, and an edit is a reason to look at it at once.
    async fn the_stuck_one_goes_on(&self) {
        kubectl(self.cluster, &["-n", &self.namespace, "delete", "configmap", "stuck-router-flags"]);
        let edit = r#"{"spec":{"router":{"replicas":1}}}"#;
        kubectl(self.cluster, &["-n", &self.namespace, "patch", "spool", "stuck", "--type=merge", "-p", edit]);
        eventually("the stuck pool goes on", || {
            let status = self.stuck();
            if status.contains("NameTaken") { Err(status) } else { Ok(()) }
        })
        .await;
    }
}

fn start(cluster: &Cluster) -> Operator {
    let access = cluster.user(USER, Some("system:masters")).unwrap();
    Operator::start(cluster, access.kubeconfig(), "1", &["--lease-namespace=default", "--log=warn"])
}

/// What the operator wrote, leases aside.
fn writes(events: &[AuditEvent]) -> Vec<String> {
    let own = events.iter().filter(|event| event.user == USER && event.is_mutation() && !event.is_housekeeping());
    own.map(|event| format!("{} {}/{} {} {}", event.verb, event.resource, event.name, event.subresource, event.code)).collect()
}

#[test]
fn a_hundred_pools_at_rest_cost_no_write_and_one_edit_costs_few_and_a_stuck_pool_ever_less() {
    on_cluster(Layers::controllers(), async |cluster| {
        let began = Instant::now();
        let rest = Rest::begin(cluster).await;
        rest.every_pool_has_a_status().await;
        assert!(rest.stuck().contains("NameTaken"), "{}", rest.stuck());
        step("every pool has a status", began);
        let began = Instant::now();
        rest.quiet(1).await;
        step("silent", began);
        let began = Instant::now();
        let looks = [rest.looks_at_the_stuck_one(RESYNCS / 2).await, rest.looks_at_the_stuck_one(RESYNCS).await];
        assert!(looks.iter().sum::<usize>() <= STUCK_LOOKS_MAX, "looks at the stuck pool: {looks:?}");
        step("at rest", began);
        let began = Instant::now();
        let writes = rest.an_edit().await;
        step("an edit", began);
        rest.the_stuck_one_goes_on().await;
        let began = Instant::now();
        let rest = rest.another_operator().await;
        step("another operator finds nothing to do", began);
        let rss = rest.operator.rss_mib();
        eprintln!("{rss:>7} MiB resident, {writes} writes for an edit, looks at the stuck pool {looks:?}");
        assert!(rss <= RSS_MIB_MAX, "{rss} MiB");
        rest.operator.end();
    });
}
