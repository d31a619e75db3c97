//! World: Kubernetes objects and routers' answers, read into the words of the planner.
//!
//! Owns how a pod's health follows from its status and from what routers say, and when a state has lasted long enough to be called broken.
//! Pure: time is handed in. Refuses to decide what follows. Called by the controller.

pub mod devices;
mod ended;
mod routers;

pub use ended::Ended;
pub use routers::{Answer, Routable, RouterPod, RouterWorld, router_pods};

use crate::clock::Clock;
use crate::design::{DRAIN_SINCE, INDEX, ROUTABLE, SHAPE, TEMPLATE, WORKER_CONTAINER};
use crate::rollout::{Health, Pod, Revision, RouterView};
use k8s_openapi::api::core::v1::{ContainerStatus, Pod as KubePod, PodCondition};
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt as _;
use std::collections::BTreeSet;
use std::time::Duration;

/// A ready pod that some router has not taken for so long is broken; until then it may be a moment of the router's.
pub const SETTLE: Duration = Duration::from_mins(1);
/// A pod that is not gone so long after its grace period stands on a lost node.
pub const OVERDUE: Duration = Duration::from_secs(30);

/// Reasons for which a container waits and will go on waiting.
const BROKEN_REASONS: [&str; 9] = [
    "CrashLoopBackOff",
    "ImagePullBackOff",
    "ErrImagePull",
    "ErrImageNeverPull",
    "InvalidImageName",
    "ImageInspectError",
    "CreateContainerConfigError",
    "CreateContainerError",
    "RunContainerError",
];

/// One pod with what the shell needs of it.
#[derive(Clone, Debug)]
pub struct SeenPod {
    /// For the planner.
    pub pod: Pod,
    /// Uid, as a precondition.
    pub uid: String,
    /// Address, once it has one.
    pub ip: Option<String>,
    /// Whether its containers are ready.
    pub ready: bool,
    /// What its readiness gate says now.
    pub gate: Option<bool>,
    /// What its readiness gate should say, with a reason if not; absent when it is not known.
    pub routable: Option<Result<(), String>>,
    /// Whether the worker's process runs, so that it can be asked.
    pub runs: bool,
    /// How often its container has started anew: with the uid this tells one life of the process from the next.
    pub restarts: i32,
    /// What it was made from, as text.
    pub template: Option<String>,
    /// Why its container's last life ended, if it ended badly.
    pub ended: Option<Ended>,
}

/// What makes a pod of a role routable.
#[derive(Clone, Copy, Debug)]
pub enum Taker<'a> {
    /// Routers take it, beside being ready.
    Routers(&'a RouterWorld),
    /// Nobody is asked: it is ready.
    Itself,
}

/// Reads a pod. `None` if it is none of ours. `ours` holds the uids that this process has deleted.
pub fn see(pod: &KubePod, taker: Taker<'_>, ours: &BTreeSet<String>, clock: &Clock) -> Option<SeenPod> {
    let annotations = pod.annotations();
    let index = annotations.get(INDEX)?.parse().ok()?;
    let shape = annotations.get(SHAPE)?.clone();
    let spec = pod.spec.as_ref()?;
    let image = spec.containers.iter().find(|container| container.name == WORKER_CONTAINER)?.image.clone()?;
    let uid = pod.uid()?;
    let draining = annotations.get(DRAIN_SINCE).and_then(|since| since.parse::<Timestamp>().ok()).map(|since| clock.since(since));
    let ip = pod.status.as_ref().and_then(|status| status.pod_ip.clone()).filter(|ip| !ip.is_empty());
    let ready = is_true(pod, "ContainersReady");
    let container = container(pod);
    let runs = container.is_some_and(|it| it.state.as_ref().is_some_and(|state| state.running.is_some()));
    let answer = match taker {
        Taker::Routers(routers) => routers.routable(&pod.name_any(), ip.as_deref()),
        Taker::Itself => Routable::Yes,
    };
    let routable = match answer {
        _ if !ready => Some(Err("its containers are not ready".to_owned())),
        Routable::Yes => Some(Ok(())),
        Routable::No(why) => Some(Err(why)),
        Routable::Unknown => None,
    };
    let gate = condition(pod, ROUTABLE).map(|it| it.status == "True");
    let taken = routable.as_ref().map_or(gate == Some(true), Result::is_ok);
    let health = health(pod, Look { ready, taken, taker, ours: ours.contains(&uid) || draining.is_some(), clock });
    let in_flight = match health {
        _ if !runs => Some(0),
        Health::Starting => Some(0),
        _ => None,
    };
    let age = pod.creation_timestamp().map_or(Duration::ZERO, |created| clock.since(created.0));
    let ended = container.and_then(Ended::of);
    let seen = Pod { name: pod.name_any(), index, revision: Revision { shape, image }, health, draining, in_flight, age };
    let (restarts, template) = (container.map_or(0, |it| it.restart_count), annotations.get(TEMPLATE).cloned());
    Some(SeenPod { pod: seen, uid, ip, ready, gate, routable, runs, restarts, template, ended })
}

#[derive(Clone, Copy)]
struct Look<'a> {
    ready: bool,
    taken: bool,
    taker: Taker<'a>,
    ours: bool,
    clock: &'a Clock,
}

fn health(pod: &KubePod, look: Look<'_>) -> Health {
    let status = pod.status.clone().unwrap_or_default();
    if let Some(at) = &pod.metadata.deletion_timestamp {
        // The timestamp lies at the end of the grace period.
        let overdue = look.clock.since(at.0) > OVERDUE;
        return Health::Terminating { ours: look.ours && !is_true(pod, "DisruptionTarget"), overdue };
    }
    if let Some(phase @ ("Failed" | "Succeeded")) = status.phase.as_deref() {
        return Health::Dead(status.reason.unwrap_or_else(|| phase.to_owned()));
    }
    if pod.spec.as_ref().is_none_or(|spec| spec.node_name.is_none()) {
        let scheduled = condition(pod, "PodScheduled").filter(|it| it.status == "False");
        return Health::Pending(scheduled.and_then(|it| it.message.clone()).filter(|message| !message.is_empty()));
    }
    if look.ready && look.taken {
        return Health::Routable;
    }
    if look.ready {
        let since = [condition(pod, ROUTABLE).filter(|it| it.status == "False"), condition(pod, "ContainersReady")];
        let since = since.into_iter().flatten().filter_map(|it| it.last_transition_time.as_ref()).map(|time| time.0).max();
        let settled = since.is_some_and(|since| look.clock.since(since) > SETTLE);
        let known = matches!(look.taker, Taker::Routers(routers) if *routers.view() == RouterView::Known);
        return if settled && known { Health::Broken("no router takes it".to_owned()) } else { Health::Unsettled };
    }
    let Some(container) = container(pod) else { return Health::Starting };
    let state = container.state.clone().unwrap_or_default();
    if let Some(reason) = state.waiting.and_then(|waiting| waiting.reason)
        && BROKEN_REASONS.contains(&&*reason)
    {
        return Health::Broken(match Ended::of(container) {
            Some(ended) => format!("{reason}: {}", ended.why),
            None => reason,
        });
    }
    if state.running.is_none() || container.started != Some(true) {
        return Health::Starting;
    }
    let unready = condition(pod, "ContainersReady").and_then(|it| it.last_transition_time.clone());
    if unready.is_some_and(|since| look.clock.since(since.0) > SETTLE) {
        return Health::Broken("it runs and its readiness probe fails".to_owned());
    }
    Health::Unsettled
}

fn container(pod: &KubePod) -> Option<&ContainerStatus> {
    pod.status.as_ref()?.container_statuses.as_ref()?.iter().find(|it| it.name == WORKER_CONTAINER)
}

/// A condition of a pod.
pub fn condition<'a>(pod: &'a KubePod, kind: &str) -> Option<&'a PodCondition> {
    pod.status.as_ref()?.conditions.as_ref()?.iter().find(|condition| condition.type_ == kind)
}

fn is_true(pod: &KubePod, kind: &str) -> bool {
    condition(pod, kind).is_some_and(|condition| condition.status == "True")
}

#[cfg(test)]
mod tests;
