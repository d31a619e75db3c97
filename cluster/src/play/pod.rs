//! What a kubelet would say about a pod: a function of the pod and of what the test wants it to do.
//!
//! Invariants
//! - A pod is Ready only when its containers are and every readiness gate is True; conditions of others are never touched.
//! - A changed image restarts its container in place and counts; a finished pod never moves again.
//! - A status that says the same is not written again.

use k8s_openapi::api::core::v1::{Container, ContainerStatus, Pod, PodCondition, PodSpec, PodStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};
use std::net::Ipv4Addr;

/// What a pod does on a played node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Play {
    /// Starts at once, is ready, and goes at once when deleted.
    #[default]
    Run,
    /// Containers are being made and never are: a pull that hangs, a volume that does not come.
    Hold,
    /// Runs, but its readiness probe fails.
    Unready,
    /// Ends with an error over and over.
    Crash,
    /// Runs, and stays when deleted: a server that drains.
    Linger,
    /// Ends for good with this exit code.
    Finish(i32),
}

/// What the kubelet does next.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Step {
    Nothing,
    /// Strategic merge patch of the status.
    Status(Value),
    /// The containers have ended; the object may go.
    Gone,
}

pub(super) fn step(pod: &Pod, play: Play, address: Ipv4Addr, now: Timestamp) -> Step {
    let (Some(spec), status) = (&pod.spec, pod.status.clone().unwrap_or_default()) else { return Step::Nothing };
    if pod.metadata.deletion_timestamp.is_some() && play != Play::Linger {
        return Step::Gone;
    }
    if matches!(status.phase.as_deref(), Some("Succeeded" | "Failed")) {
        return Step::Nothing;
    }
    let now = Time(now);
    let containers: Vec<ContainerStatus> = spec.containers.iter().map(|it| container(it, play, &status, &now)).collect();
    let inits: Vec<Value> = spec.init_containers.iter().flatten().map(|it| init_container(it, play, &now)).collect();
    let conditions = conditions(spec, play, &status, &containers, &now);
    let phase = phase(play);
    if says_the_same(&status, phase, &containers, &conditions) && status.observed_generation == pod.metadata.generation {
        return Step::Nothing;
    }
    let started = status.start_time.unwrap_or_else(|| now.clone());
    let mut patch = json!({
        "phase": phase,
        "startTime": started,
        "observedGeneration": pod.metadata.generation,
        "hostIP": address_of_host(address),
        "hostIPs": [{"ip": address_of_host(address)}],
        "conditions": conditions,
        "containerStatuses": containers,
        "initContainerStatuses": inits,
    });
    if play != Play::Hold {
        patch["podIP"] = json!(address);
        patch["podIPs"] = json!([{"ip": address}]);
    }
    Step::Status(patch)
}

/// Played nodes have no machine, so any address of the pods' range that no pod gets will do.
fn address_of_host(pod: Ipv4Addr) -> Ipv4Addr {
    let [first, second, ..] = pod.octets();
    Ipv4Addr::new(first, second, 127, 1)
}

const fn phase(play: Play) -> &'static str {
    match play {
        Play::Hold => "Pending",
        Play::Run | Play::Unready | Play::Crash | Play::Linger => "Running",
        Play::Finish(0) => "Succeeded",
        Play::Finish(_) => "Failed",
    }
}

fn container(container: &Container, play: Play, before: &PodStatus, now: &Time) -> ContainerStatus {
    let image = container.image.clone().unwrap_or_default();
    let old = before.container_statuses.iter().flatten().find(|status| status.name == container.name);
    let was_running = old.is_some_and(|old| old.state.as_ref().is_some_and(|state| state.running.is_some()));
    let new_image = old.is_some_and(|old| old.image != image);
    let restarts = old.map_or(0, |old| old.restart_count) + i32::from(was_running && (new_image || play == Play::Crash));
    let started = match old.and_then(|old| old.state.as_ref()?.running.as_ref()?.started_at.clone()) {
        Some(started) if !new_image => started,
        _ => now.clone(),
    };
    let state = match play {
        Play::Hold => json!({"waiting": {"reason": "ContainerCreating"}}),
        Play::Run | Play::Unready | Play::Linger => json!({"running": {"startedAt": started}}),
        Play::Crash => json!({"waiting": {"reason": "CrashLoopBackOff", "message": "played: ends with an error"}}),
        Play::Finish(code) => {
            let reason = if code == 0 { "Completed" } else { "Error" };
            json!({"terminated": {"exitCode": code, "reason": reason, "startedAt": started, "finishedAt": now}})
        }
    };
    let running = matches!(play, Play::Run | Play::Unready | Play::Linger);
    ContainerStatus {
        name: container.name.clone(),
        image_id: format!("played://{image}"),
        image,
        ready: matches!(play, Play::Run | Play::Linger),
        started: Some(running),
        restart_count: restarts,
        state: serde_json::from_value(state).ok(),
        ..ContainerStatus::default()
    }
}

fn init_container(container: &Container, play: Play, now: &Time) -> Value {
    let sidecar = container.restart_policy.as_deref() == Some("Always");
    let state = match (play, sidecar) {
        (Play::Hold, _) => json!({"waiting": {"reason": "PodInitializing"}}),
        (_, true) => json!({"running": {"startedAt": now}}),
        (_, false) => json!({"terminated": {"exitCode": 0, "reason": "Completed", "startedAt": now, "finishedAt": now}}),
    };
    let done = play != Play::Hold;
    json!({
        "name": container.name, "image": container.image, "imageID": format!("played://{}", container.image.as_deref().unwrap_or_default()),
        "ready": done, "started": done && sidecar, "restartCount": 0, "state": state,
    })
}

fn conditions(spec: &PodSpec, play: Play, before: &PodStatus, containers: &[ContainerStatus], now: &Time) -> Vec<PodCondition> {
    let holds =
        |kind: &str| before.conditions.iter().flatten().any(|condition| condition.type_ == kind && condition.status == "True");
    let made = play != Play::Hold;
    let ready = containers.iter().all(|container| container.ready);
    let closed: Vec<&str> =
        spec.readiness_gates.iter().flatten().map(|gate| gate.condition_type.as_str()).filter(|gate| !holds(gate)).collect();
    let reason = match (ready, closed.is_empty()) {
        (true, true) => None,
        (false, _) => Some(("ContainersNotReady", "containers with unready status".to_owned())),
        (true, false) => Some(("ReadinessGatesNotReady", format!("conditions are not True: {}", closed.join(", ")))),
    };
    let own = [
        ("PodReadyToStartContainers", made, None),
        ("Initialized", made, None),
        ("ContainersReady", ready, (!ready).then(|| ("ContainersNotReady", "containers with unready status".to_owned()))),
        ("Ready", reason.is_none(), reason),
    ];
    let mut all = Vec::new();
    for (kind, holds, why) in own {
        let status = if holds { "True" } else { "False" };
        let old = before.conditions.iter().flatten().find(|condition| condition.type_ == kind && condition.status == status);
        let (reason, message) = why.unzip();
        all.push(PodCondition {
            type_: kind.to_owned(),
            status: status.to_owned(),
            last_transition_time: old.and_then(|old| old.last_transition_time.clone()).or_else(|| Some(now.clone())),
            reason: reason.map(str::to_owned),
            message,
            ..PodCondition::default()
        });
    }
    all
}

fn says_the_same(before: &PodStatus, phase: &str, containers: &[ContainerStatus], conditions: &[PodCondition]) -> bool {
    let conditions_hold = conditions.iter().all(|new| {
        before
            .conditions
            .iter()
            .flatten()
            .any(|old| old.type_ == new.type_ && old.status == new.status && old.message == new.message)
    });
    let kind = |status: &ContainerStatus| {
        let state = status.state.clone().unwrap_or_default();
        (state.running.is_some(), state.terminated.is_some(), state.waiting.and_then(|waiting| waiting.reason))
    };
    let old = before.container_statuses.as_deref().unwrap_or_default();
    let containers_hold = old.len() == containers.len()
        && old.iter().zip(containers).all(|(old, new)| {
            (&old.name, &old.image, old.ready, old.restart_count) == (&new.name, &new.image, new.ready, new.restart_count)
                && kind(old) == kind(new)
        });
    before.phase.as_deref() == Some(phase) && conditions_hold && containers_hold
}

#[cfg(test)]
mod tests;
