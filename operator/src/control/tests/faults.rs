//! Faults: whatever happens to one request, and whoever leads, the world becomes the same.

use super::*;
use std::collections::BTreeMap;

/// What matters of the world: everything but times, versions, and which index a pod has.
fn golden(run: &Run) -> BTreeMap<String, Vec<Value>> {
    let mut golden: BTreeMap<String, Vec<Value>> = BTreeMap::new();
    for ((plural, _, name), mut object) in run.cluster.api.everything() {
        if ["events", "leases", "nodes"].contains(&&*plural) {
            continue;
        }
        strip(&mut object);
        let key = match plural.as_str() {
            "pods" => {
                object["metadata"].as_object_mut().unwrap().remove("name");
                for volatile in ["podIP", "containerStatuses", "conditions"] {
                    object["status"].as_object_mut().unwrap().remove(volatile);
                }
                object["metadata"]["annotations"].as_object_mut().map(|it| it.remove("kvasir.dev/index"));
                format!("pods/{}", name.trim_end_matches(|letter: char| letter.is_ascii_digit()))
            }
            _ => format!("{plural}/{name}"),
        };
        golden.entry(key).or_default().push(object);
    }
    golden
}

fn strip(value: &mut Value) {
    match value {
        Value::Object(map) => {
            for volatile in
                ["uid", "resourceVersion", "creationTimestamp", "generation", "lastTransitionTime", "startedAt", "progressedAt"]
            {
                map.remove(volatile);
            }
            map.values_mut().for_each(strip);
        }
        Value::Array(items) => items.iter_mut().for_each(strip),
        _ => {}
    }
}

#[derive(Clone, Copy, Debug)]
enum Scene {
    Create,
    EditImage,
    EditTemplate,
    Revert,
    ScaleDown,
    Foreground,
    Background,
    Orphan,
}

const SCENES: [Scene; 8] = [
    Scene::Create,
    Scene::EditImage,
    Scene::EditTemplate,
    Scene::Revert,
    Scene::ScaleDown,
    Scene::Foreground,
    Scene::Background,
    Scene::Orphan,
];

/// Plays a scene with a fault at its `nth` request, and waits until the world is at rest. `None` if the scene has fewer requests.
async fn play(scene: Scene, fault: Option<(u64, Fault)>) -> Option<BTreeMap<String, Vec<Value>>> {
    let run = Run::new(4);
    if !matches!(scene, Scene::Create) {
        run.create("p", |_| {});
        run.until_settled("p").await;
        sleep(Duration::from_secs(8)).await;
    }
    if let Some((nth, fault)) = fault {
        run.cluster.api.fault(nth, fault);
    }
    let delete = |policy: &str| run.cluster.api.delete("servingpools", NS, "p", policy);
    match scene {
        Scene::Create => run.create("p", |_| {}),
        Scene::EditImage => run.edit("p", |spec| spec["images"]["worker"] = json!("w:2")),
        Scene::EditTemplate => run.edit("p", |spec| spec["observability"] = json!({"log": "debug"})),
        Scene::Revert => {
            run.edit("p", |spec| spec["observability"] = json!({"log": "debug"}));
            sleep(Duration::from_millis(1_500)).await;
            run.edit("p", |spec| spec["observability"] = json!({"log": "info"}));
        }
        Scene::ScaleDown => run.edit("p", |spec| spec["replicas"] = json!(1)),
        Scene::Foreground => delete("Foreground"),
        Scene::Background => delete("Background"),
        Scene::Orphan => delete("Orphan"),
    }
    match scene {
        Scene::Foreground | Scene::Background | Scene::Orphan => {
            run.until("gone", |run| run.cluster.api.get("servingpools", NS, "p").is_none()).await;
            sleep(Duration::from_secs(30)).await;
        }
        _ => {
            sleep(Duration::from_secs(1)).await;
            run.until_settled("p").await;
            sleep(Duration::from_secs(15)).await;
            run.until_settled("p").await;
        }
    }
    let met = fault.is_none() || run.cluster.api.fault_met();
    assert_eq!(run.cluster.fleet.cut(), 0, "{scene:?} {fault:?}: streams were cut");
    met.then(|| golden(&run))
}

#[tokio::test(start_paused = true)]
async fn whichever_request_fails_hangs_or_loses_its_answer_the_world_becomes_the_same() {
    let mut played = 0;
    for scene in SCENES {
        let wanted = play(scene, None).await.unwrap();
        for fault in [Fault::Fails, Fault::LosesAnswer, Fault::Takes(Duration::from_secs(30))] {
            for nth in 0.. {
                let Some(found) = play(scene, Some((nth, fault))).await else { break };
                assert_eq!(found, wanted, "{scene:?}, request {nth} {fault:?}");
                played += 1;
            }
        }
    }
    assert!(played >= 120, "only {played} faults were met");
}

/// Conflicts all over: someone else changes pods and pool all the time, and the rollout still ends.
#[tokio::test(start_paused = true)]
async fn a_storm_of_foreign_changes_does_not_keep_a_rollout_from_its_end() {
    let run = Run::new(3);
    run.create("p", |spec| spec["replicas"] = json!(3));
    run.until_settled("p").await;
    run.edit("p", |spec| spec["observability"] = json!({"log": "debug"}));
    let api = run.cluster.api.clone();
    let storm = tokio::spawn(async move {
        for round in 0u32.. {
            let touch = |object: &mut Value| object["metadata"]["annotations"]["foreign"] = json!(round.to_string());
            for index in 0..4 {
                api.change("pods", NS, &format!("p-worker-{index}"), touch);
            }
            api.change("servingpools", NS, "p", touch);
            api.change("deployments", NS, "p-router", touch);
            sleep(Duration::from_millis(20)).await;
        }
    });
    sleep(Duration::from_secs(1)).await;
    run.until_settled("p").await;
    storm.abort();
    assert_eq!(run.cluster.fleet.cut(), 0);
    assert!(run.workers().iter().all(|pod| pod["spec"]["containers"][0]["args"] == json!(["worker", "debug"])));
}

/// Leadership is lost in the middle of a rollout and taken by another process: nothing is written by the first after that.
#[tokio::test(start_paused = true)]
async fn a_process_that_no_longer_leads_writes_nothing_and_the_next_one_goes_on() {
    for cut_at in [300, 1_100, 2_300, 3_700] {
        let mut run = Run::new(3);
        run.create("p", |spec| spec["replicas"] = json!(3));
        run.until_settled("p").await;
        run.edit("p", |spec| spec["observability"] = json!({"log": "debug"}));
        sleep(Duration::from_millis(cut_at)).await;
        run.gate.close();
        sleep(Duration::from_millis(10)).await;
        let writes = run.cluster.api.writes().len();
        sleep(Duration::from_secs(20)).await;
        assert_eq!(run.cluster.api.writes()[writes..], []);
        // The first goes on running as a follower.
        let (stop, task, _registry) = {
            let gate = Gate::open();
            start(&run.cluster, &gate, None)
        };
        sleep(Duration::from_secs(1)).await;
        run.until_settled("p").await;
        assert_eq!(run.cluster.fleet.cut(), 0);
        // And the lead comes back to it.
        stop.cancel();
        task.await.unwrap();
        run.gate = Gate::open();
        run.restart(false).await;
        run.edit("p", |spec| spec["replicas"] = json!(1));
        sleep(Duration::from_secs(1)).await;
        run.until_settled("p").await;
    }
}

/// The API server is away for two minutes (R56): afterwards everything goes on by itself.
#[tokio::test(start_paused = true)]
async fn r56_after_two_minutes_without_an_api_server_everything_goes_on() {
    let run = Run::new(8);
    run.create("p", |_| {});
    run.until_settled("p").await;
    run.cluster.api.break_off(true);
    run.edit("p", |spec| spec["replicas"] = json!(3));
    sleep(Duration::from_mins(2)).await;
    run.cluster.api.break_off(false);
    run.until_settled("p").await;
    assert_eq!(run.workers().len(), 3);
}
