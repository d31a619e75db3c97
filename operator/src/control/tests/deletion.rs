//! Deletions: by whoever and however, they end, and nothing comes back.

use super::*;

fn left(run: &Run) -> Vec<String> {
    let objects = run.cluster.api.everything();
    let ours = objects.iter().filter(|((plural, ..), _)| !["nodes", "events", "leases"].contains(&&**plural));
    ours.map(|((plural, _, name), _)| format!("{plural}/{name}")).collect()
}

async fn serving() -> Run {
    let run = Run::new(8);
    run.create("p", |_| {});
    run.until_settled("p").await;
    run
}

/// Case 20: a foreground deletion must not meet an operator that makes anew what is being deleted.
#[tokio::test(start_paused = true)]
async fn a_foreground_deletion_ends_and_nothing_is_made_anew() {
    let run = serving().await;
    run.cluster.fleet.set_load(20);
    sleep(Duration::from_secs(5)).await;
    run.cluster.api.delete("servingpools", NS, "p", "Foreground");
    run.until("said", |run| run.is("p", ConditionType::Ready, ConditionStatus::False, ConditionReason::Deleting)).await;
    let created = || run.cluster.api.writes().iter().filter(|call| ["create", "apply"].contains(&call.verb)).count();
    let before = created();
    run.until("gone", |run| left(run).is_empty()).await;
    let events = run.cluster.api.writes().iter().filter(|call| call.resource == "events").count();
    assert!(created() - before <= events, "{:?}", run.cluster.api.writes());
    assert_eq!(run.cluster.fleet.cut(), 0, "streams end in the grace of their pods");
}

#[tokio::test(start_paused = true)]
async fn a_background_deletion_leaves_nothing() {
    let run = serving().await;
    run.cluster.api.delete("servingpools", NS, "p", "Background");
    run.until("gone", |run| left(run).is_empty()).await;
    sleep(Duration::from_secs(30)).await;
    assert!(left(&run).is_empty());
    assert_eq!(run.cluster.fleet.cut(), 0);
}

#[tokio::test(start_paused = true)]
async fn what_is_orphaned_is_left_as_it_is() {
    let run = serving().await;
    let before: Vec<String> = left(&run).into_iter().filter(|it| !it.starts_with("servingpools")).collect();
    run.cluster.api.delete("servingpools", NS, "p", "Orphan");
    sleep(Duration::from_mins(1)).await;
    assert_eq!(left(&run), before);
    assert_eq!(run.routable(), 2);
    let writes = run.cluster.api.writes().len();
    sleep(Duration::from_mins(1)).await;
    assert_eq!(run.cluster.api.writes()[writes..], []);
}

/// The same name again, at once: the new pool gets its own objects once the old ones are gone.
#[tokio::test(start_paused = true)]
async fn a_pool_that_is_made_anew_under_its_name_gets_its_own_objects() {
    let run = serving().await;
    run.cluster.api.delete("servingpools", NS, "p", "Background");
    run.create("p", |spec| spec["replicas"] = json!(1));
    run.until_settled("p").await;
    let uid = run.pool("p")["metadata"]["uid"].clone();
    assert!(run.workers().iter().all(|pod| pod["metadata"]["ownerReferences"][0]["uid"] == uid));
    assert_eq!(run.workers().len(), 1);
}
