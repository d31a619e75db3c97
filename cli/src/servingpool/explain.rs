//! Why a pool is as it is, from its status, its pods and its events. Pure.

use k8s_openapi::api::core::v1::{Event, Pod};
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt as _;
use kvasir_operator::api::{
    CacheMode, Condition, ConditionReason, ConditionStatus, ConditionType, Isolation, ServingPool, ServingPoolStatus,
};
use kvasir_operator::names::COMPONENT;
use serde::Serialize;

/// Most pods that are told one by one.
const PODS_MAX: usize = 20;

/// One part of the answer.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Answer {
    /// What it is about.
    pub topic: &'static str,
    /// Whether it is as it should be.
    pub state: State,
    /// Why, in lines.
    pub lines: Vec<String>,
}

/// Whether something is as it should be.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub enum State {
    /// It is.
    Good,
    /// It is on its way.
    Waiting,
    /// It is not.
    Bad,
    /// It cannot be told.
    Unknown,
}

/// All parts, what matters most first.
pub fn explain(pool: &ServingPool, pods: &[Pod], events: &[Event]) -> Vec<Answer> {
    let Some(status) = pool.told() else {
        let text = "the operator has not looked at it yet; check that it runs and watches this namespace";
        return vec![Answer { topic: "Serving", state: State::Unknown, lines: vec![text.to_owned()] }];
    };
    let behind = status.observed_generation.zip(pool.metadata.generation).filter(|(seen, newest)| seen < newest);
    let mut serving = from_condition("Serving", status, ConditionType::Ready, false);
    serving.lines.extend(behind.map(|(seen, newest)| format!("status is of generation {seen}, the newest spec is {newest}")));
    let mut answers = vec![serving, rollout(status), placement(pods)];
    answers.push(from_condition("Model", status, ConditionType::ModelResolved, false));
    answers.push(cache(pool, status));
    if pool.spec.speculation.draft.is_some() {
        let mut draft = from_condition("Draft", status, ConditionType::DraftPlaced, false);
        draft.lines.extend(from_condition("Draft", status, ConditionType::DraftCompatible, false).lines);
        answers.push(draft);
    }
    answers.push(from_condition("Routers", status, ConditionType::RoutersInSync, false));
    answers.push(from_condition("Degraded", status, ConditionType::Degraded, true));
    answers.extend(warning(events));
    answers
}

/// When an event was last seen.
pub(super) fn last_seen(event: &Event) -> Option<Timestamp> {
    let series = event.series.as_ref().and_then(|series| series.last_observed_time.as_ref()).map(|time| time.0);
    let once = event.event_time.as_ref().map(|time| time.0);
    series.or(once).or_else(|| event.last_timestamp.as_ref().map(|time| time.0))
}

fn condition(status: &ServingPoolStatus, kind: ConditionType) -> Option<&Condition> {
    status.conditions.iter().find(|condition| condition.condition_type == kind.as_str())
}

/// `abnormal` conditions are bad when they are true.
fn from_condition(topic: &'static str, status: &ServingPoolStatus, kind: ConditionType, abnormal: bool) -> Answer {
    let Some(condition) = condition(status, kind) else {
        return Answer { topic, state: State::Unknown, lines: vec![format!("no condition {kind}")] };
    };
    let state = match (condition.status, abnormal) {
        (ConditionStatus::Unknown, _) => State::Unknown,
        (ConditionStatus::True, false) | (ConditionStatus::False, true) => State::Good,
        (ConditionStatus::True, true) | (ConditionStatus::False, false) => State::Bad,
    };
    Answer { topic, state, lines: vec![format!("{}: {}", condition.reason, condition.message)] }
}

fn rollout(status: &ServingPoolStatus) -> Answer {
    let numbers = format!(
        "{} of {} workers are of the newest template, {} of all are routable",
        status.updated_replicas,
        status.desired_replicas.unwrap_or(status.replicas),
        status.routable_replicas
    );
    let Some(rollout) = &status.rollout else {
        let progressing = condition(status, ConditionType::Progressing);
        let late = progressing.is_some_and(|it| it.reason == ConditionReason::ProgressDeadlineExceeded.as_str());
        let lines = progressing.map(|it| format!("{}: {}", it.reason, it.message)).into_iter().chain([numbers]).collect();
        return Answer { topic: "Rollout", state: if late { State::Bad } else { State::Good }, lines };
    };
    let why = rollout.mode_message.as_deref().map_or_else(String::new, |why| format!(", because {why}"));
    let mut lines = vec![format!("to {} by {:?}{why}", rollout.to, rollout.mode), numbers];
    lines.extend(rollout.hold.iter().map(|hold| format!("holds since {}: {}: {}", hold.since.0, hold.reason, hold.message)));
    Answer { topic: "Rollout", state: State::Waiting, lines }
}

fn placement(pods: &[Pod]) -> Answer {
    let role = |pod: &Pod| pod.labels().get(COMPONENT).cloned().unwrap_or_default();
    let is_true = |pod: &Pod, kind: &str| conditions(pod).any(|it| it.type_ == kind && it.status == "True");
    let ready = pods.iter().filter(|pod| is_true(pod, "Ready")).count();
    let mut lines = vec![format!("{ready} of {} pods are Ready", pods.len())];
    let waiting: Vec<&Pod> = pods.iter().filter(|pod| !is_true(pod, "Ready")).collect();
    lines.extend(waiting.iter().take(PODS_MAX).map(|pod| format!("{} {}: {}", role(pod), pod.name_any(), obstacle(pod))));
    lines.extend((waiting.len() > PODS_MAX).then(|| format!("and {} more", waiting.len() - PODS_MAX)));
    let pending = waiting.iter().any(|pod| conditions(pod).any(|it| it.type_ == "PodScheduled" && it.status == "False"));
    let state = match () {
        () if pending => State::Bad,
        () if waiting.is_empty() => State::Good,
        () => State::Waiting,
    };
    Answer { topic: "Placement", state, lines }
}

fn conditions(pod: &Pod) -> impl Iterator<Item = &k8s_openapi::api::core::v1::PodCondition> {
    pod.status.iter().flat_map(|status| status.conditions.iter().flatten())
}

/// What keeps a pod from being Ready: the first thing on its way.
fn obstacle(pod: &Pod) -> String {
    if pod.metadata.deletion_timestamp.is_some() {
        return "is leaving; its streams end first".to_owned();
    }
    let refused = |kind: &str| conditions(pod).find(|it| it.type_ == kind && it.status == "False");
    if let Some(unscheduled) = refused("PodScheduled") {
        return format!("no node: {}", unscheduled.message.as_deref().unwrap_or("the scheduler gives no reason"));
    }
    let mut statuses = pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
    let waiting = statuses.find_map(|it| Some((it, it.state.as_ref()?.waiting.as_ref()?)));
    if let Some((container, waiting)) = waiting {
        let (reason, message) = (waiting.reason.as_deref().unwrap_or("waiting"), waiting.message.as_deref().unwrap_or_default());
        return format!("container {} after {} restarts: {reason} {message}", container.name, container.restart_count)
            .trim_end()
            .to_owned();
    }
    if let Some(unready) = refused("ContainersReady") {
        return format!(
            "starts or loads its model: {}",
            unready.message.as_deref().unwrap_or("its readiness probe has not succeeded")
        );
    }
    match refused(kvasir_operator::design::ROUTABLE) {
        Some(gate) => format!("not routable: {}", gate.message.as_deref().unwrap_or("a router does not take it")),
        None => "waits for its first status".to_owned(),
    }
}

fn cache(pool: &ServingPool, status: &ServingPoolStatus) -> Answer {
    let spec = &pool.spec.prefix_cache;
    let mode = match spec.mode {
        CacheMode::Auto => "Auto: used where it is measured to pay",
        CacheMode::On => "On",
        CacheMode::Off => "Off: nothing is reused",
    };
    let isolation = match spec.isolation {
        Isolation::PerTenant => "each tenant reuses its own state only",
        Isolation::Pool => "all tenants share one domain",
    };
    let mut lines = vec![format!("mode {mode}; {isolation}; {} of KV per worker", pool.spec.engine.kv_memory)];
    let unsupported =
        condition(status, ConditionType::Degraded).filter(|it| it.reason == ConditionReason::NotYetSupported.as_str());
    let about_cache = unsupported.filter(|it| it.message.contains("prefixCache"));
    lines.extend(about_cache.map(|it| it.message.clone()));
    Answer { topic: "Cache", state: if about_cache.is_some() { State::Bad } else { State::Good }, lines }
}

fn warning(events: &[Event]) -> Option<Answer> {
    let event = events.iter().rev().find(|event| event.type_.as_deref() == Some("Warning"))?;
    let when = last_seen(event).map_or_else(String::new, |time| format!("{time} "));
    let (reason, message) = (event.reason.as_deref().unwrap_or_default(), event.message.as_deref().unwrap_or_default());
    Some(Answer { topic: "Last warning", state: State::Unknown, lines: vec![format!("{when}{reason}: {message}")] })
}
