//! Rollouts from end to end: what moves, what stays, and that no stream is cut.

use super::*;
use std::collections::BTreeSet;
use std::sync::atomic::Ordering;

fn images(run: &Run) -> BTreeSet<String> {
    run.workers().iter().map(|pod| pod["spec"]["containers"][0]["image"].as_str().unwrap().to_owned()).collect()
}

fn uids(run: &Run) -> BTreeSet<String> {
    run.workers().iter().map(|pod| pod["metadata"]["uid"].to_string()).collect()
}

/// Watches a rollout to its end: the fewest routable workers and the most pods on the way.
async fn watch(run: &Run, name: &str) -> (usize, usize) {
    let (mut fewest, mut most) = (usize::MAX, 0);
    let begun = Instant::now();
    // What was edited a moment ago is seen after half a second at the latest.
    while begun.elapsed() < Duration::from_millis(500) || !run.settled(name) {
        assert!(begun.elapsed() < SOON * 2, "{}", run.picture());
        (fewest, most) = (fewest.min(run.routable()), most.max(run.workers().len()));
        sleep(Duration::from_millis(50)).await;
    }
    (fewest, most)
}

#[tokio::test(start_paused = true)]
async fn an_image_alone_changes_in_place_pod_by_pod_without_cutting_a_stream() {
    let run = Run::new(3);
    run.create("p", |spec| spec["replicas"] = json!(3));
    run.until_settled("p").await;
    let before = uids(&run);
    run.edit("p", |spec| spec["images"]["worker"] = json!("w:2"));
    let (fewest, most) = watch(&run, "p").await;
    assert_eq!((fewest, most), (2, 3));
    assert_eq!((uids(&run), images(&run)), (before, BTreeSet::from(["w:2".to_owned()])));
    assert_eq!((run.cluster.fleet.cut(), run.events("ImageChanged").len()), (0, 3));
    assert!(
        run.events("RolloutStarted").iter().any(|note| note.contains("only the image changes")),
        "{:?}",
        run.events("RolloutStarted")
    );
}

#[tokio::test(start_paused = true)]
async fn without_a_free_device_a_template_is_rolled_surge_free() {
    let run = Run::new(3);
    run.create("p", |spec| spec["replicas"] = json!(3));
    run.until_settled("p").await;
    let before = uids(&run);
    run.edit("p", |spec| spec["observability"] = json!({"log": "debug"}));
    let (fewest, most) = watch(&run, "p").await;
    assert_eq!((fewest, most), (2, 3));
    assert!(uids(&run).is_disjoint(&before));
    assert_eq!(run.cluster.fleet.cut(), 0);
}

#[tokio::test(start_paused = true)]
async fn with_a_free_device_a_template_is_rolled_with_surge_and_nobody_is_missing() {
    let run = Run::new(4);
    run.create("p", |spec| spec["replicas"] = json!(3));
    run.until_settled("p").await;
    run.edit("p", |spec| spec["observability"] = json!({"log": "debug"}));
    let (fewest, most) = watch(&run, "p").await;
    assert_eq!((fewest, most), (3, 4));
    assert_eq!(run.cluster.fleet.cut(), 0);
}

/// Two pools with one free device between them: one surges, and no pod of the other waits for it.
#[tokio::test(start_paused = true)]
async fn two_pools_never_count_on_one_device() {
    let run = Run::new(5);
    for name in ["a", "b"] {
        run.create(name, |_| {});
        run.until_settled(name).await;
    }
    for name in ["a", "b"] {
        run.edit(name, |spec| spec["observability"] = json!({"log": "debug"}));
    }
    let end = Instant::now() + SOON * 2;
    sleep(Duration::from_millis(500)).await;
    while !(run.settled("a") && run.settled("b")) {
        assert!(Instant::now() < end, "{}", run.picture());
        let stuck =
            |pod: &Value| pod["spec"]["nodeName"].is_null() && pod["status"]["conditions"].to_string().contains("Insufficient");
        assert!(!run.workers().iter().any(stuck) || run.workers().len() <= 4, "{}", run.picture());
        sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(run.cluster.fleet.cut(), 0);
}

/// Case 3: a revert in mid-rollout keeps the pods that serve.
#[tokio::test(start_paused = true)]
async fn a_revert_in_mid_rollout_keeps_the_serving_generation() {
    let run = Run::new(8);
    run.create("p", |spec| spec["replicas"] = json!(3));
    run.until_settled("p").await;
    let before = uids(&run);
    run.edit("p", |spec| spec["observability"] = json!({"log": "debug"}));
    run.until("under way", |run| run.workers().len() > 3).await;
    run.edit("p", |spec| spec["observability"] = json!({"log": "info"}));
    let (fewest, _) = watch(&run, "p").await;
    assert_eq!((fewest, uids(&run)), (3, before), "{}", run.picture());
}

/// Cases 8 and 9: a bad revision never eats the good one, and goes away as soon as another is wanted.
#[tokio::test(start_paused = true)]
async fn a_bad_image_stops_within_the_budget_and_is_said_after_the_deadline() {
    let run = Run::new(3);
    run.create("p", |spec| {
        spec["replicas"] = json!(3);
        spec["rollout"] = json!({"progressDeadline": "60s"});
    });
    run.until_settled("p").await;
    run.edit("p", |spec| spec["images"]["worker"] = json!("w:crash"));
    run.until("crashing", |run| run.is("p", ConditionType::Degraded, ConditionStatus::True, ConditionReason::WorkersCrashing))
        .await;
    run.until("stalled", |run| {
        run.is("p", ConditionType::Stalled, ConditionStatus::True, ConditionReason::ProgressDeadlineExceeded)
    })
    .await;
    assert_eq!((run.routable(), run.condition("p", ConditionType::Ready).0.as_str()), (2, "True"), "{}", run.picture());
    let writes = run.cluster.api.writes().len();
    sleep(Duration::from_mins(2)).await;
    assert!(run.cluster.api.writes().len() - writes <= 2, "a stuck pool is calm: {:?}", &run.cluster.api.writes()[writes..]);
    run.edit("p", |spec| spec["images"]["worker"] = json!("w:3"));
    watch(&run, "p").await;
    assert_eq!((images(&run), run.cluster.fleet.cut()), (BTreeSet::from(["w:3".to_owned()]), 0));
}

#[tokio::test(start_paused = true)]
async fn a_paused_pool_repairs_and_does_not_roll() {
    let run = Run::new(8);
    run.create("p", |_| {});
    run.until_settled("p").await;
    let before = uids(&run);
    run.edit("p", |spec| {
        spec["paused"] = json!(true);
        spec["observability"] = json!({"log": "debug"});
    });
    run.until("said", |run| run.is("p", ConditionType::Progressing, ConditionStatus::False, ConditionReason::Paused)).await;
    assert_eq!(uids(&run), before);
    // A lost pod comes back as it was.
    run.cluster.api.remove("pods", NS, "p-worker-0");
    run.until("repaired", |run| run.routable() == 2).await;
    let arguments: BTreeSet<String> = run.workers().iter().map(|pod| pod["spec"]["containers"][0]["args"].to_string()).collect();
    assert_eq!(arguments, BTreeSet::from(["[\"worker\",\"info\"]".to_owned()]));
    run.edit("p", |spec| spec["paused"] = json!(false));
    watch(&run, "p").await;
    assert!(run.workers().iter().all(|pod| pod["spec"]["containers"][0]["args"] == json!(["worker", "debug"])));
}

/// Case 13, and the gap of case 5: routers that are silent are no reason to touch anyone.
#[tokio::test(start_paused = true)]
async fn while_routers_are_silent_nothing_is_rolled_and_nobody_is_called_unready() {
    let run = Run::new(8);
    run.create("p", |_| {});
    run.until_settled("p").await;
    run.cluster.fleet.set_silent(true);
    run.edit("p", |spec| spec["images"]["worker"] = json!("w:2"));
    sleep(Duration::from_mins(1)).await;
    assert_eq!((images(&run), run.routable()), (BTreeSet::from(["w:1".to_owned()]), 2));
    assert!(
        run.is("p", ConditionType::RoutersInSync, ConditionStatus::Unknown, ConditionReason::RouterUnreachable),
        "{}",
        run.picture()
    );
    assert_eq!(run.condition("p", ConditionType::Ready).0, "True");
    run.cluster.fleet.set_silent(false);
    watch(&run, "p").await;
    assert_eq!(run.cluster.fleet.cut(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_is_evicted_or_whose_node_is_lost_is_replaced() {
    let run = Run::new(8);
    run.create("p", |_| {});
    run.until_settled("p").await;
    run.cluster.api.change("pods", NS, "p-worker-1", |pod| pod["status"] = json!({"phase": "Failed", "reason": "Evicted"}));
    run.until("replaced", |run| run.routable() == 2 && run.settled("p")).await;
    run.cluster.api.delete("pods", NS, "p-worker-0", "Background");
    run.until("three for a moment", |run| run.workers().len() == 3).await;
    run.until_settled("p").await;
    assert_eq!(run.cluster.fleet.cut(), 0);
}

/// Streams that do not end are waited for until maxStreamDuration, and not for ever.
#[tokio::test(start_paused = true)]
async fn a_drain_ends_with_its_streams_or_with_the_longest_stream() {
    let run = Run::new(8);
    run.cluster.fleet.set_load(20);
    run.create("p", |_| {});
    run.until_settled("p").await;
    let begun = Instant::now();
    run.edit("p", |spec| spec["replicas"] = json!(1));
    run.until("draining", |run| run.cluster.fleet.drains() > 0).await;
    assert!(
        run.is("p", ConditionType::Progressing, ConditionStatus::True, ConditionReason::WaitingForDrain)
            || begun.elapsed() < Duration::from_secs(1)
    );
    run.until_settled("p").await;
    // Twenty streams end one by one, one each tick.
    assert!(begun.elapsed() >= Duration::from_secs(3) && run.cluster.fleet.cut() == 0, "{:?}", begun.elapsed());
    run.cluster.fleet.set_load(100_000);
    sleep(Duration::from_secs(5)).await;
    let begun = Instant::now();
    run.edit("p", |spec| spec["replicas"] = json!(0));
    run.until("deleted after a minute", |run| run.workers().iter().all(|pod| !pod["metadata"]["deletionTimestamp"].is_null()))
        .await;
    assert!(begun.elapsed() >= Duration::from_mins(1), "{:?}", begun.elapsed());
}

/// Case 7: a new process in mid-rollout goes on where the last one was.
#[tokio::test(start_paused = true)]
async fn a_restart_in_mid_rollout_keeps_the_budget_and_goes_on() {
    let mut run = Run::new(4);
    run.create("p", |spec| spec["replicas"] = json!(4));
    run.until_settled("p").await;
    run.edit("p", |spec| spec["observability"] = json!({"log": "debug"}));
    for round in 0..6 {
        sleep(Duration::from_millis(1_700)).await;
        assert!(run.routable() >= 3, "{round}: {}", run.picture());
        run.restart(round % 2 == 0).await;
    }
    let (fewest, most) = watch(&run, "p").await;
    assert_eq!((fewest, most), (3, 4));
    assert_eq!(run.cluster.fleet.cut(), 0);
    assert_eq!(run.cluster.devices.load(Ordering::Relaxed), 4);
}

/// In one namespace nodes cannot be seen: rollouts never surge and say so.
#[tokio::test(start_paused = true)]
async fn an_operator_of_one_namespace_rolls_surge_free_and_says_why() {
    let mut run = Run::new(8);
    run.stop.cancel();
    (&mut run.task).await.unwrap();
    (run.stop, run.task, run.registry) = start(&run.cluster, &run.gate, Some(NS));
    run.create("p", |_| {});
    run.until_settled("p").await;
    run.edit("p", |spec| spec["observability"] = json!({"log": "debug"}));
    run.until("said", |run| run.pool("p")["status"]["rollout"]["modeMessage"].to_string().contains("one namespace")).await;
    assert_eq!(run.pool("p")["status"]["rollout"]["mode"], "SurgeFree");
    watch(&run, "p").await;
    assert!(run.cluster.api.calls().iter().all(|call| call.resource != "nodes"));
}
