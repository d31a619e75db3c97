#![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]
//! Pod statuses as kubelet, scheduler and routers leave them.

use super::*;
use crate::admin::{Registered, RegisteredWorker};
use serde_json::{Value, json};

const NOW: i64 = 10_000;

fn clock() -> Clock {
    Clock::fixed(Timestamp::from_second(NOW).unwrap())
}

fn ago(seconds: i64) -> String {
    Timestamp::from_second(NOW - seconds).unwrap().to_string()
}

fn router(workers: &[(&str, Option<&str>)]) -> Answer {
    let workers = workers.iter().map(|(uid, refusal)| RegisteredWorker {
        uid: (*uid).to_owned(),
        incarnation: vec![1],
        address: "http://10.0.0.9:7401".to_owned(),
        refusal: refusal.map(str::to_owned),
        in_flight: 2,
    });
    Answer {
        router: "r-0".to_owned(),
        answer: Ok(Registered {
            complete: true,
            keys_version: "7".to_owned(),
            workers: workers.collect(),
            ..Registered::default()
        }),
    }
}

fn taking() -> RouterWorld {
    RouterWorld::new(vec![router(&[("p-0", None)])])
}

fn pod(metadata: &Value, status: &Value) -> KubePod {
    let mut pod = json!({"metadata": {"name": "p-0", "uid": "u", "creationTimestamp": ago(500),
        "annotations": {INDEX: "0", SHAPE: "s"}},
        "spec": {"nodeName": "n", "containers": [{"name": "worker", "image": "i:1"}]}, "status": {"podIP": "10.0.0.9"}});
    let merge = |base: &mut Value, patch: &Value| {
        for (name, value) in patch.as_object().unwrap() {
            base[name] = value.clone();
        }
    };
    merge(&mut pod["metadata"], metadata);
    merge(&mut pod["status"], status);
    serde_json::from_value(pod).unwrap()
}

fn health(pod: &KubePod, routers: &RouterWorld) -> Health {
    see(pod, Taker::Routers(routers), &BTreeSet::new(), &clock()).unwrap().pod.health
}

fn ready(since: i64) -> Value {
    json!({"phase": "Running", "conditions": [{"type": "ContainersReady", "status": "True", "lastTransitionTime": ago(since)}],
        "containerStatuses": [container(&json!({"running": {}}), true)]})
}

fn container(state: &Value, started: bool) -> Value {
    json!({"name": "worker", "image": "i:1", "imageID": "", "ready": started, "restartCount": 0, "started": started, "state": state})
}

fn broken(reason: &str) -> KubePod {
    let status = json!({"phase": "Pending", "containerStatuses": [container(&json!({"waiting": {"reason": reason}}), false)]});
    pod(&json!({}), &status)
}

#[test]
fn ready_is_not_routable_until_every_ready_router_takes_the_pod() {
    let fresh = pod(&json!({}), &ready(5));
    assert_eq!(health(&fresh, &taking()), Health::Routable);
    let two = RouterWorld::new(vec![router(&[("p-0", None)]), router(&[])]);
    assert_eq!(health(&fresh, &two), Health::Unsettled);
    let seen = see(&fresh, Taker::Routers(&two), &BTreeSet::new(), &clock()).unwrap();
    assert_eq!(seen.routable, Some(Err("router r-0 does not know it".to_owned())));
    let refused = RouterWorld::new(vec![router(&[("p-0", Some("draining"))])]);
    assert_eq!(health(&fresh, &refused), Health::Unsettled);
    // By address while the worker has not told its name.
    assert_eq!(health(&fresh, &RouterWorld::new(vec![router(&[("10.0.0.9:7401", None)])])), Health::Routable);
}

#[test]
fn a_pod_that_no_router_takes_for_a_minute_is_broken_unless_no_router_can_be_asked() {
    let old = pod(&json!({}), &ready(100));
    assert!(matches!(health(&old, &RouterWorld::new(vec![router(&[])])), Health::Broken(_)));
    assert_eq!(health(&old, &RouterWorld::new(vec![])), Health::Unsettled);
    // Nobody to ask: what the gate says stands.
    let mut status = ready(100);
    status["conditions"].as_array_mut().unwrap().push(json!({"type": ROUTABLE, "status": "True", "lastTransitionTime": ago(90)}));
    let silent = RouterWorld::new(vec![Answer { router: "r-0".to_owned(), answer: Err("refused".to_owned()) }]);
    assert_eq!(health(&pod(&json!({}), &status), &silent), Health::Routable);
    assert_eq!(see(&pod(&json!({}), &status), Taker::Routers(&silent), &BTreeSet::new(), &clock()).unwrap().routable, None);
}

#[test]
fn what_the_kubelet_says_is_read() {
    for reason in ["CrashLoopBackOff", "ImagePullBackOff", "ErrImageNeverPull"] {
        assert_eq!(health(&broken(reason), &taking()), Health::Broken(reason.to_owned()));
    }
    assert_eq!(health(&broken("ContainerCreating"), &taking()), Health::Starting);
    let loading = json!({"phase": "Running", "containerStatuses": [container(&json!({"running": {}}), false)]});
    let seen = see(&pod(&json!({}), &loading), Taker::Routers(&taking()), &BTreeSet::new(), &clock()).unwrap();
    assert_eq!((seen.pod.health, seen.pod.in_flight), (Health::Starting, Some(0)));
    assert_eq!(
        health(&pod(&json!({}), &json!({"phase": "Failed", "reason": "Evicted"})), &taking()),
        Health::Dead("Evicted".to_owned())
    );
    let mut pending = pod(
        &json!({}),
        &json!({"conditions": [
        {"type": "PodScheduled", "status": "False", "message": "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."}]}),
    );
    pending.spec.as_mut().unwrap().node_name = None;
    assert!(matches!(health(&pending, &taking()), Health::Pending(Some(why)) if why.contains("nvidia.com/gpu")));
}

#[test]
fn a_pod_that_no_router_knows_by_design_counts_as_soon_as_it_is_ready() {
    let seen = see(&pod(&json!({}), &ready(100)), Taker::Itself, &BTreeSet::new(), &clock()).unwrap();
    assert_eq!((seen.pod.health, seen.routable), (Health::Routable, Some(Ok(()))));
}

#[test]
fn our_own_deletions_are_told_from_evictions() {
    let leaving = |since: i64| pod(&json!({"deletionTimestamp": ago(since)}), &ready(100));
    let see = |pod: &KubePod, ours: &[&str]| {
        let ours = ours.iter().map(|uid| (*uid).to_owned()).collect();
        super::see(pod, Taker::Routers(&taking()), &ours, &clock()).unwrap().pod.health
    };
    assert_eq!(see(&leaving(0), &["u"]), Health::Terminating { ours: true, overdue: false });
    assert_eq!(see(&leaving(0), &[]), Health::Terminating { ours: false, overdue: false });
    assert_eq!(see(&leaving(31), &["u"]), Health::Terminating { ours: true, overdue: true });
    let mut drained = leaving(0);
    drained.annotations_mut().insert(DRAIN_SINCE.to_owned(), ago(30));
    assert_eq!(see(&drained, &[]), Health::Terminating { ours: true, overdue: false });
}

#[test]
fn a_drain_is_as_old_as_its_annotation_says() {
    let mut draining = pod(&json!({}), &ready(100));
    draining.annotations_mut().insert(DRAIN_SINCE.to_owned(), ago(30));
    let seen = see(&draining, Taker::Routers(&taking()), &BTreeSet::new(), &clock()).unwrap();
    assert_eq!((seen.pod.draining, seen.pod.in_flight), (Some(Duration::from_secs(30)), None));
    assert_eq!(see(&KubePod::default(), Taker::Routers(&taking()), &BTreeSet::new(), &clock()).map(|seen| seen.uid), None);
}

#[test]
fn routers_are_in_sync_when_each_knows_every_ready_worker() {
    let ready = || [("p-0", Some("10.0.0.9"))].into_iter();
    assert_eq!(taking().sync(ready(), None), crate::status::RouterSync::InSync);
    assert!(
        matches!(RouterWorld::new(vec![router(&[])]).sync(ready(), None), crate::status::RouterSync::CatchingUp(why) if why.contains("r-0"))
    );
    assert_eq!(RouterWorld::new(vec![]).sync(ready(), None), crate::status::RouterSync::NoneReady);
    assert_eq!(taking().in_flight("p-0", None), Some(2));
}

#[test]
fn routers_with_old_keys_or_a_list_that_may_be_behind_are_not_in_sync() {
    let none = || std::iter::empty();
    assert_eq!(taking().sync(none(), Some("7")), crate::status::RouterSync::InSync);
    assert!(matches!(taking().sync(none(), Some("8")), crate::status::RouterSync::CatchingUp(why) if why.contains("keys")));
    let mut behind = router(&[]);
    behind.answer.as_mut().unwrap().stale = Some("workers: the watch is closed".to_owned());
    assert!(
        matches!(RouterWorld::new(vec![behind]).sync(none(), None), crate::status::RouterSync::CatchingUp(why) if why.contains("r-0"))
    );
}
