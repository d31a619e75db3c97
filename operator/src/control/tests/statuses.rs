//! What status says must be so: the bugs that comparable systems had, through the whole controller.

use super::*;

/// Case 11: ready while pods crash.
#[tokio::test(start_paused = true)]
async fn a_pool_whose_pods_crash_is_not_ready_and_names_the_cause() {
    let run = Run::new(8);
    run.create("p", |spec| spec["images"]["worker"] = json!("w:crash"));
    run.until("said", |run| run.is("p", ConditionType::Ready, ConditionStatus::False, ConditionReason::WorkersCrashing)).await;
    assert_eq!(run.pool("p")["status"]["routableReplicas"], 0);
    let missing = Run::new(8);
    missing.create("p", |spec| spec["images"]["worker"] = json!("w:missing"));
    missing
        .until("said", |run| run.is("p", ConditionType::Ready, ConditionStatus::False, ConditionReason::ImageUnavailable))
        .await;
}

/// Case 12: successful while old pods make up the count.
#[tokio::test(start_paused = true)]
async fn a_rollout_is_over_only_when_every_worker_is_of_the_newest_template() {
    let run = Run::new(2);
    run.create("p", |_| {});
    run.until_settled("p").await;
    run.edit("p", |spec| spec["images"]["worker"] = json!("w:missing"));
    sleep(Duration::from_mins(1)).await;
    assert_ne!(run.condition("p", ConditionType::Progressing).1, "RolloutComplete");
    assert_eq!(run.condition("p", ConditionType::Reconciling).0, "True");
    assert!(run.pool("p")["status"]["rollout"].is_object(), "{}", run.picture());
}

/// Case 11 again: the moment nobody is routable, the pool is not ready, although every pod says it is.
#[tokio::test(start_paused = true)]
async fn ready_ends_the_moment_that_routers_take_nobody() {
    let run = Run::new(8);
    run.create("p", |_| {});
    run.until_settled("p").await;
    run.cluster.fleet.set_blind(true);
    let begun = Instant::now();
    run.until("said", |run| run.is("p", ConditionType::Ready, ConditionStatus::False, ConditionReason::NoRoutableWorkers)).await;
    assert!(begun.elapsed() <= Duration::from_secs(6), "{:?}", begun.elapsed());
    run.until("gates shut", |run| run.routable() == 0).await;
    run.cluster.fleet.set_blind(false);
    run.until("ready again", |run| run.condition("p", ConditionType::Ready).0 == "True").await;
}

/// Too few devices: the number that fits serves, and the rest is said with the scheduler's words.
#[tokio::test(start_paused = true)]
async fn what_finds_no_device_is_said_with_the_schedulers_words() {
    let run = Run::new(1);
    run.create("p", |_| {});
    run.until("said", |run| {
        run.is("p", ConditionType::Degraded, ConditionStatus::True, ConditionReason::InsufficientAccelerators)
            && run.is("p", ConditionType::Ready, ConditionStatus::True, ConditionReason::ServingWithFewer)
    })
    .await;
    run.cluster.devices.store(2, std::sync::atomic::Ordering::Relaxed);
    run.until_settled("p").await;
    assert_eq!(run.condition("p", ConditionType::Degraded).0, "False");
}

/// A spec that cannot be served is said, changes nothing, and what serves goes on serving, over a restart too.
#[tokio::test(start_paused = true)]
async fn a_spec_that_cannot_be_served_changes_nothing() {
    let mut run = Run::new(8);
    run.create("p", |_| {});
    run.until_settled("p").await;
    run.edit("p", |spec| {
        spec["images"]["router"] = json!("broken-spec");
        spec["replicas"] = json!(7);
    });
    run.until("said", |run| run.is("p", ConditionType::Stalled, ConditionStatus::True, ConditionReason::InvalidSpec)).await;
    let serves = |run: &Run| run.condition("p", ConditionType::Ready).0 == "True" && run.routable() == 2;
    assert!(serves(&run), "{}", run.picture());
    run.restart(false).await;
    sleep(Duration::from_secs(20)).await;
    assert!(serves(&run), "{}", run.picture());
    let writes = run.cluster.api.writes().len();
    sleep(Duration::from_mins(1)).await;
    assert_eq!(run.cluster.api.writes()[writes..], []);
    run.edit("p", |spec| {
        spec["images"].as_object_mut().unwrap().remove("router");
        spec["replicas"] = json!(2);
    });
    run.until_settled("p").await;
}

/// R53, case 15: long names share their beginning, and each pool finds its own.
#[tokio::test(start_paused = true)]
async fn r53_pools_with_long_names_that_begin_alike_find_their_own_pods() {
    let run = Run::new(8);
    let names = [format!("{}-a", "x".repeat(61)), format!("{}-b", "x".repeat(61)), "y".repeat(200)];
    for name in &names {
        run.create(name, |spec| spec["replicas"] = json!(1));
    }
    for name in &names {
        run.until_settled(name).await;
        assert_eq!(run.pool(name)["status"]["replicas"], 1);
    }
    for object in run.cluster.api.everything().values() {
        if object["metadata"]["ownerReferences"].is_array() {
            assert!(object["metadata"]["name"].as_str().unwrap().len() <= 63, "{}", object["metadata"]["name"]);
        }
    }
}

/// Something of another owner is in the way: it is left alone and named.
#[tokio::test(start_paused = true)]
async fn what_belongs_to_somebody_else_is_left_alone_and_named() {
    let run = Run::new(8);
    let foreign = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p-worker-0", "namespace": NS}, "spec": {"containers": []}});
    run.cluster.api.put("pods", foreign.clone());
    run.create("p", |_| {});
    run.until("said", |run| run.is("p", ConditionType::Stalled, ConditionStatus::True, ConditionReason::NameTaken)).await;
    assert_eq!(run.cluster.api.get("pods", NS, "p-worker-0").unwrap()["spec"]["containers"], json!([]));
    assert!(run.pool("p")["status"]["conditions"].to_string().contains("p-worker-0"));
    run.cluster.api.remove("pods", NS, "p-worker-0");
    run.until_settled("p").await;
}

#[tokio::test(start_paused = true)]
async fn events_tell_what_happened_once_and_a_series_when_it_happens_again() {
    let run = Run::new(8);
    run.create("p", |_| {});
    run.until_settled("p").await;
    for round in 0..3 {
        run.cluster.api.change("configmaps", NS, "p-router-flags", |map| map["data"]["sampling"] = json!(format!("{round}")));
        run.until("repaired", |run| run.cluster.api.get("configmaps", NS, "p-router-flags").unwrap()["data"]["sampling"] == "1%")
            .await;
        sleep(Duration::from_secs(2)).await;
    }
    let repaired: Vec<Value> =
        run.cluster.api.all("events").into_iter().filter(|event| event["reason"] == "DriftRepaired").collect();
    assert_eq!((repaired.len(), &repaired[0]["series"]["count"], &repaired[0]["type"]), (1, &json!(3), &json!("Warning")));
    assert_eq!(repaired[0]["regarding"]["name"], "p");
    assert!(repaired[0]["eventTime"].as_str().unwrap().parse::<Timestamp>().unwrap() > at(1_600_000_000));
}

/// Whoever waits for a model reads how far it is, and why it does not come in the worker's own words.
#[tokio::test(start_paused = true)]
async fn a_model_that_comes_or_does_not_come_is_told_of() {
    let run = Run::new(8);
    run.cluster.fleet.set_fetched(Some(42));
    run.create("p", |spec| spec["images"]["worker"] = json!("w:fetches"));
    run.until("told", |run| run.is("p", ConditionType::ModelResolved, ConditionStatus::Unknown, ConditionReason::Fetching)).await;
    assert_eq!(run.pool("p")["status"]["model"]["fetchedPercent"], 40);
    run.cluster.fleet.set_fetched(None);
    run.until_settled("p").await;
    assert!(run.pool("p")["status"]["model"]["fetchedPercent"].is_null());
    run.edit("p", |spec| spec["images"]["worker"] = json!("w:crash-model"));
    run.until("told", |run| run.is("p", ConditionType::ModelResolved, ConditionStatus::False, ConditionReason::ModelUnavailable))
        .await;
    assert!(run.picture().contains("nobody has it"), "{}", run.picture());
    run.edit("p", |spec| spec["images"]["worker"] = json!("w:crash"));
    run.until("told", |run| run.is("p", ConditionType::ModelResolved, ConditionStatus::True, ConditionReason::Resolved)).await;
}
