use super::*;

const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 128, 128, 7);

fn pod(value: Value) -> Pod {
    let mut whole = json!({
        "metadata": {"name": "w", "namespace": "n", "generation": 1},
        "spec": {"nodeName": "gpu-0", "containers": [{"name": "main", "image": "a:1"}]},
    });
    merge(&mut whole, value);
    serde_json::from_value(whole).unwrap()
}

/// What the API server does with a strategic patch of a status, as far as these tests need it.
fn merge(into: &mut Value, from: Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => {
            for (key, value) in from {
                merge(into.entry(key).or_insert(Value::Null), value);
            }
        }
        (Value::Array(into), Value::Array(from)) if from.iter().all(|item| item.get("type").is_some()) => {
            for new in from {
                into.retain(|old| old["type"] != new["type"]);
                into.push(new);
            }
        }
        (into, from) => *into = from,
    }
}

fn play(pod: &Pod, play: Play) -> Step {
    step(pod, play, ADDRESS, Timestamp::from_second(1_000).unwrap())
}

fn status(step: Step) -> Value {
    match step {
        Step::Status(status) => status,
        other => panic!("expected a status, not {other:?}"),
    }
}

fn after(pod: &Pod, patch: &Value) -> Pod {
    let mut value = serde_json::to_value(pod).unwrap();
    merge(&mut value, json!({"status": patch}));
    serde_json::from_value(value).unwrap()
}

fn condition<'a>(status: &'a Value, kind: &str) -> &'a Value {
    status["conditions"].as_array().unwrap().iter().find(|it| it["type"] == kind).unwrap()
}

#[test]
fn a_scheduled_pod_runs_with_an_address_and_is_ready() {
    let status = status(play(&pod(json!({})), Play::Run));
    assert_eq!(status["phase"], "Running");
    assert_eq!(status["podIP"], ADDRESS.to_string());
    assert_eq!(condition(&status, "Ready")["status"], "True");
    assert_eq!(status["containerStatuses"][0]["ready"], true);
}

#[test]
fn a_status_that_says_the_same_is_not_written_again() {
    for how in [Play::Run, Play::Hold, Play::Unready, Play::Crash] {
        let before = pod(json!({}));
        let once = after(&before, &status(play(&before, how)));
        assert_eq!(play(&once, how), Step::Nothing, "{how:?}");
    }
}

#[test]
fn a_readiness_gate_holds_readiness_back_until_its_owner_opens_it() {
    let gated = pod(json!({"spec": {"readinessGates": [{"conditionType": "kvasir.dev/routable"}]}}));
    let shut = status(play(&gated, Play::Run));
    assert_eq!(condition(&shut, "ContainersReady")["status"], "True");
    assert_eq!(condition(&shut, "Ready")["status"], "False");
    assert_eq!(condition(&shut, "Ready")["message"], "conditions are not True: kvasir.dev/routable");
    let gate = json!({"conditions": [{"type": "kvasir.dev/routable", "status": "True"}]});
    let opened = after(&after(&gated, &shut), &gate);
    let open = status(play(&opened, Play::Run));
    assert_eq!(condition(&open, "Ready")["status"], "True");
    let kinds: Vec<_> = open["conditions"].as_array().unwrap().iter().map(|it| it["type"].as_str().unwrap()).collect();
    assert!(!kinds.contains(&"kvasir.dev/routable"), "the gate is its owner's");
}

#[test]
fn a_changed_image_restarts_the_container_in_place() {
    let before = pod(json!({}));
    let running = after(&before, &status(play(&before, Play::Run)));
    let mut changed = running;
    changed.spec.as_mut().unwrap().containers[0].image = Some("a:2".to_owned());
    let status = status(play(&changed, Play::Run));
    assert_eq!(status["containerStatuses"][0]["restartCount"], 1);
    assert_eq!(status["containerStatuses"][0]["imageID"], "played://a:2");
    assert_eq!(status["podIP"], ADDRESS.to_string());
}

#[test]
fn a_deleted_pod_goes_unless_it_drains() {
    let deleted = pod(json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}));
    assert_eq!(play(&deleted, Play::Run), Step::Gone);
    assert!(matches!(play(&deleted, Play::Linger), Step::Status(_)));
}

#[test]
fn a_finished_pod_never_moves_again() {
    let before = pod(json!({}));
    let done = after(&before, &status(play(&before, Play::Finish(1))));
    assert_eq!(done.status.as_ref().unwrap().phase.as_deref(), Some("Failed"));
    assert_eq!(play(&done, Play::Run), Step::Nothing);
}

#[test]
fn a_crash_counts_once_and_shows_the_back_off() {
    let before = pod(json!({}));
    let running = after(&before, &status(play(&before, Play::Run)));
    let crashed = status(play(&running, Play::Crash));
    assert_eq!(crashed["containerStatuses"][0]["restartCount"], 1);
    assert_eq!(crashed["containerStatuses"][0]["state"]["waiting"]["reason"], "CrashLoopBackOff");
    assert_eq!(condition(&crashed, "Ready")["status"], "False");
}

#[test]
fn a_held_pod_stays_pending_without_an_address() {
    let status = status(play(&pod(json!({"spec": {"initContainers": [{"name": "fetch", "image": "f:1"}]}})), Play::Hold));
    assert_eq!(status["phase"], "Pending");
    assert!(status.get("podIP").is_none());
    assert_eq!(status["initContainerStatuses"][0]["state"]["waiting"]["reason"], "PodInitializing");
}
