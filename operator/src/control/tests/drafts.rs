//! Drafts in pods of their own, pairs of devices that are not found, and the blueprint that pools are really read by.

use super::*;
use crate::build::{self, Builder, Seed};
use crate::validate::Settings;

#[tokio::test(start_paused = true)]
async fn draft_pods_are_made_replaced_one_by_one_and_told_of() {
    let run = Run::new(8);
    run.create_labelled("p", &json!({"drafts": "2"}), |_| {});
    run.until_settled("p").await;
    assert_eq!(run.cluster.pods("draft").len(), 2);
    run.until("placed", |run| run.is("p", ConditionType::DraftPlaced, ConditionStatus::True, ConditionReason::Placed)).await;
    assert!(run.is("p", ConditionType::DraftCompatible, ConditionStatus::True, ConditionReason::Compatible), "{}", run.picture());
    assert_eq!((&run.pool("p")["status"]["replicas"], &run.pool("p")["status"]["draft"]["replicas"]), (&json!(2), &json!(2)));
    run.edit("p", |spec| spec["observability"] = json!({"log": "debug"}));
    let new = |pod: &Value| pod["spec"]["containers"][0]["args"] == json!(["draft", "debug"]);
    run.until("replaced", |run| run.cluster.pods("draft").iter().filter(|pod| new(pod)).count() == 2).await;
    run.until_settled("p").await;
    let writes = run.cluster.api.writes().len();
    sleep(Duration::from_mins(1)).await;
    assert_eq!(run.cluster.api.writes()[writes..], []);
}

/// No node has two devices: the pool is served without its draft, says so, and does not go back and forth.
#[tokio::test(start_paused = true)]
async fn where_no_pair_of_devices_is_found_the_pool_is_served_without_its_draft() {
    let run = Run::new(1);
    run.create_labelled("p", &json!({"pair": "yes"}), |spec| spec["replicas"] = json!(1));
    run.until("said", |run| {
        run.is("p", ConditionType::DraftPlaced, ConditionStatus::False, ConditionReason::ServingWithoutDraft)
    })
    .await;
    run.until_settled("p").await;
    let writes = run.cluster.api.writes().len();
    sleep(Duration::from_mins(2)).await;
    assert_eq!(run.cluster.api.writes()[writes..], []);
    let paired = Run::new(2);
    paired.create_labelled("p", &json!({"pair": "yes"}), |spec| spec["replicas"] = json!(1));
    paired.until_settled("p").await;
    assert_eq!(paired.workers()[0]["spec"]["containers"][0]["resources"]["limits"][crate::testing::DEVICE], "2");
}

/// Pools as the operator reads them: the same road, from the spec to rest.
#[tokio::test(start_paused = true)]
async fn a_pool_of_the_real_blueprint_serves_rests_and_rolls() {
    let mut run = Run::new(8);
    let settings = Settings {
        worker_image: "w:1".to_owned(),
        router_image: "r:1".to_owned(),
        pull_policy: crate::api::PullPolicy::IfNotPresent,
        pull_secrets: Vec::new(),
        operator_namespace: "kvasir-system".to_owned(),
        operator_labels: std::collections::BTreeMap::new(),
        service_monitors: false,
        image_volumes: false,
    };
    let builder = || Arc::new(Builder::new(settings.clone(), Seed::random().unwrap()));
    run.with(builder(), build::kinds(false)).await;
    run.create("p", |spec| {
        spec["tenants"] = json!([{"name": "t", "keySecretRef": {"name": "t-key", "key": "value"}}]);
        spec["rollout"] = json!({"mode": "SurgeFree"});
    });
    run.until("degraded", |run| run.is("p", ConditionType::Degraded, ConditionStatus::True, ConditionReason::MissingObject))
        .await;
    run.until_settled("p").await;
    let tenants = |run: &Run| run.cluster.api.get("secrets", NS, "p-keys").unwrap()["data"]["tenants.toml"].clone();
    let before = tenants(&run);
    // A key that appears is handed to routers at once, and what was generated stays as it was made.
    let bearer = run.cluster.api.get("secrets", NS, "p-bearer").unwrap();
    let key = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "t-key", "namespace": NS}, "data": {"value": "c2VjcmV0LWtleS1vZi10"}});
    run.cluster.api.put("secrets", key);
    let begun = Instant::now();
    run.until("handed over", |run| tenants(run) != before).await;
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
    run.until("as expected", |run| run.condition("p", ConditionType::Degraded).0 == "False").await;
    // Another process has another seed, and finds everything as it should be.
    run.until_settled("p").await;
    let writes = run.cluster.api.writes().len();
    run.with(builder(), build::kinds(false)).await;
    sleep(Duration::from_secs(30)).await;
    assert_eq!(run.cluster.api.get("secrets", NS, "p-bearer").unwrap(), bearer);
    assert_eq!(run.cluster.api.writes()[writes..], []);
    run.until_settled("p").await;
    let (writes, calls) = (run.cluster.api.writes().len(), run.cluster.api.calls().len());
    sleep(Duration::from_mins(1)).await;
    assert_eq!(run.cluster.api.writes()[writes..], []);
    assert!(run.cluster.api.calls()[calls..].iter().all(|call| call.verb == "watch"));
    run.edit("p", |spec| spec["images"] = json!({"worker": "w:2"}));
    run.until("rolled", |run| run.workers().iter().all(|pod| pod["spec"]["containers"][0]["image"] == "w:2")).await;
    run.until_settled("p").await;
    assert_eq!(run.cluster.fleet.cut(), 0);
}
