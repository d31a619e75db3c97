//! Status: what a pool says of itself, computed from its spec, what was observed and what was applied.
//!
//! Owns the rules by which a condition has its status and reason. Refuses to read or write anything, and to remember: of the former status it
//! takes times only (since when a condition holds, since when a rollout runs and has not moved). Called by the controller after every apply.
//!
//! Invariants (held by `tests.rs` over the product of all states)
//! 1. Ready is True if and only if a pod is routable and the pool is not being deleted; the moment none is, it is False.
//! 2. At most one of Reconciling and Stalled is True; neither is for a pool that is as wanted (kstatus: current), nor for a paused one.
//! 3. Every condition carries the generation that it was computed from, and its time moves with its status alone.
//! 4. The same world gives the same status, whatever the time, but for a progress deadline that passes.
//! 5. No text holds a live figure: a status at rest is not written again.

mod facts;

pub use facts::{DraftFacts, Fault, ModelFacts, Note, Observed, RouterFacts, RouterSync};

use crate::api::{
    Condition, ConditionReason as R, ConditionStatus as S, ConditionType as C, DraftStatus, HoldStatus, ModelStatus, RolloutMode,
    RolloutStatus, RoutersStatus, ServingPoolStatus,
};
use crate::rollout::{Health, Plan, Pod, Strategy, Wait};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use std::time::Duration;

/// Least time between two writes of a status in which nothing but a live figure differs.
pub const LIVE_INTERVAL: Duration = Duration::from_mins(1);

/// Status and reason with a message, before they become a condition.
type Verdict = (S, R, String);

/// Computes the whole status. `former` gives times only.
pub fn compute(observed: &Observed<'_>, former: Option<&ServingPoolStatus>) -> ServingPoolStatus {
    let rollout = rollout(observed, former);
    let late = rollout.as_ref().is_some_and(|it| elapsed(&it.progressed_at, &observed.now) >= observed.progress_deadline);
    let view = View { observed, late, rolling: rollout.is_some() };
    let verdicts = [
        (C::Ready, view.ready()),
        (C::Progressing, view.progressing()),
        (C::Degraded, view.degraded()),
        (C::ModelResolved, view.model()),
        (C::DraftCompatible, view.draft_compatible()),
        (C::DraftPlaced, view.draft_placed()),
        (C::RoutersInSync, view.routers_in_sync()),
        (C::Reconciling, view.reconciling()),
        (C::Stalled, view.stalled()),
    ];
    let reason = headline(&verdicts);
    let old = former.map_or(&[][..], |status| &status.conditions);
    let conditions = verdicts.into_iter().map(|(kind, (status, reason, message))| {
        Condition::new(kind, status, reason, message, observed.generation, observed.now.clone()).merged(old)
    });
    ServingPoolStatus {
        observed_generation: observed.generation,
        conditions: conditions.collect(),
        replicas: number(observed.pods.iter().filter(|pod| stays(pod)).count()),
        ready_replicas: number(observed.ready),
        routable_replicas: count(view.plan().report.routable),
        updated_replicas: count(view.plan().report.updated),
        desired_replicas: Some(count(observed.goal.replicas)),
        selector: Some(observed.selector.to_owned()),
        template_hash: Some(observed.template_hash.clone()).filter(|hash| !hash.is_empty()),
        model: Some(ModelStatus {
            name: observed.model.name.clone(),
            digest: observed.model.digest.clone(),
            revision: observed.model.revision.clone(),
            fetched_percent: observed.model.fetched_percent.map(|percent| count(percent.min(100) / 5 * 5)),
        }),
        draft: observed.draft.as_ref().map(|draft| DraftStatus {
            digest: draft.digest.clone(),
            replicas: count(draft.replicas),
            ready_replicas: count(draft.ready),
        }),
        routers: Some(RoutersStatus { desired: count(observed.routers.desired), ready: count(observed.routers.ready) }),
        rollout,
        scaling: observed.scaling.clone(),
        reason: Some(reason),
    }
}

/// What to write: the former status if the new one differs in live figures only and was written a moment ago.
pub fn throttle(new: ServingPoolStatus, former: &ServingPoolStatus, since_written: Duration) -> ServingPoolStatus {
    if since_written >= LIVE_INTERVAL {
        return new;
    }
    let mut still = new.clone();
    if let (Some(model), Some(old)) = (&mut still.model, &former.model) {
        model.fetched_percent = old.fetched_percent;
    }
    if let (Some(scaling), Some(old)) = (&mut still.scaling, &former.scaling) {
        scaling.message.clone_from(&old.message);
    }
    if still == *former { still } else { new }
}

/// The rollout that is running: begun when the template changed, over when every wanted pod is of it and routable.
fn rollout(observed: &Observed<'_>, former: Option<&ServingPoolStatus>) -> Option<RolloutStatus> {
    // Without a hash it is not known what is wanted.
    let (plan, now) = (observed.plan.filter(|_| !observed.template_hash.is_empty())?, &observed.now);
    let old = former.and_then(|status| status.rollout.as_ref()).filter(|rollout| rollout.to == observed.template_hash);
    let report = &plan.report;
    let changed = former.and_then(|status| status.template_hash.as_deref()) != Some(&*observed.template_hash);
    let complete = report.outdated == 0 && report.updated_routable >= observed.goal.replicas && plan.settled();
    if complete || (old.is_none() && !changed && report.outdated == 0) {
        return None;
    }
    let moved = former.is_none_or(|status| {
        let outdated = status.replicas - status.updated_replicas;
        count(report.updated) > status.updated_replicas
            || count(report.outdated) < outdated
            || count(report.routable) > status.routable_replicas
    });
    let progressed_at = old.filter(|_| !moved).map_or_else(|| now.clone(), |rollout| rollout.progressed_at.clone());
    let (mode, message) = match &report.strategy {
        Some((strategy, choice)) => {
            let survives = if *strategy == Strategy::InPlace { observed.survives } else { None };
            let survives = survives.map_or_else(String::new, |it| format!("; {it}"));
            (mode(*strategy), Some(format!("{choice}{survives}")))
        }
        None => old.map_or((RolloutMode::Auto, None), |rollout| (rollout.mode, rollout.mode_message.clone())),
    };
    let hold = plan.report.waits.first().filter(|_| plan.steps.is_empty()).map(|wait| {
        let (reason, message) = held(wait, observed.link);
        let reason = reason.as_str().to_owned();
        let same = old.and_then(|rollout| rollout.hold.as_ref()).filter(|hold| hold.reason == reason);
        HoldStatus { since: same.map_or_else(|| now.clone(), |hold| hold.since.clone()), reason, message }
    });
    Some(RolloutStatus {
        to: observed.template_hash.clone(),
        mode,
        mode_message: message,
        started_at: old.map_or_else(|| now.clone(), |rollout| rollout.started_at.clone()),
        progressed_at,
        hold,
    })
}

/// The word for the Reason column: what is wrong first, then what goes on, then that all is well.
fn headline(verdicts: &[(C, Verdict); 9]) -> String {
    let of = |kind: C, status: S| verdicts.iter().find(|(at, verdict)| *at == kind && verdict.0 == status).map(|(_, it)| it.1);
    of(C::Stalled, S::True)
        .or_else(|| of(C::Ready, S::False))
        .or_else(|| of(C::Progressing, S::True))
        .or_else(|| of(C::Degraded, S::True))
        .or_else(|| of(C::Ready, S::True))
        .unwrap_or(R::Pending)
        .as_str()
        .to_owned()
}

/// Word and message for what a plan waits for. Where target and draft need linked devices and none can be allocated, the link is named: the
/// scheduler says only that claims cannot be met.
fn held(wait: &Wait, link: Option<&str>) -> (R, String) {
    match (wait, link) {
        (Wait::Coming { why, .. }, Some(link)) if lacks_claim(why) => {
            (R::NoLinkedDevices, format!("{wait}; target and draft need free devices of one node with the same {link}"))
        }
        _ => (wait_reason(wait), wait.to_string()),
    }
}

/// Whether the scheduler says that claims cannot be met.
pub fn lacks_claim(why: &str) -> bool {
    why.contains("cannot allocate")
}

/// The documented word for what a plan waits for.
pub fn wait_reason(wait: &Wait) -> R {
    match wait {
        Wait::Paused { .. } => R::Paused,
        Wait::NoRouterReady | Wait::RoutersUnreachable(_) | Wait::Unsettled { .. } => R::WaitingForRoutable,
        Wait::NoFreeDevice => R::InsufficientAccelerators,
        Wait::Coming { why, .. } => pod_reason(why),
        Wait::Draining { .. } | Wait::Terminating { .. } => R::WaitingForDrain,
        Wait::Budget { .. } => R::BudgetExhausted,
    }
}

/// The documented word for what the kubelet or the scheduler says of a pod that does not come up.
pub fn pod_reason(why: &str) -> R {
    let has = |words: &[&str]| words.iter().any(|word| why.contains(word));
    match () {
        () if has(&["CrashLoopBackOff", "restarts again and again", "RunContainerError"]) => R::WorkersCrashing,
        () if has(&["ImagePull", "ErrImage", "InvalidImageName"]) => R::ImageUnavailable,
        // Extended resources and device classes have a slash in their names or are "allocated"; cpu and memory have neither.
        () if lacks_claim(why) || lacks_device(why) => R::InsufficientAccelerators,
        () if has(&["nodes are available", "no nodes available", "Insufficient"]) => R::Unschedulable,
        () => R::WaitingForRoutable,
    }
}

fn lacks_device(why: &str) -> bool {
    why.split("Insufficient ").skip(1).any(|rest| rest.split([',', ' ']).next().is_some_and(|resource| resource.contains('/')))
}

struct View<'a> {
    observed: &'a Observed<'a>,
    late: bool,
    rolling: bool,
}

// === impl View ===

impl View<'_> {
    fn plan(&self) -> &Plan {
        static NOTHING: Plan = Plan {
            steps: Vec::new(),
            report: crate::rollout::Report {
                strategy: None,
                updated: 0,
                updated_routable: 0,
                outdated: 0,
                routable: 0,
                waits: Vec::new(),
            },
        };
        self.observed.plan.unwrap_or(&NOTHING)
    }

    fn routable(&self) -> u32 {
        self.plan().report.routable
    }

    fn wished(&self) -> u32 {
        self.observed.goal.replicas
    }

    /// A fault that nobody but a person can lift.
    fn lasting(&self) -> Option<&Fault> {
        self.observed.faults.iter().find(|fault| fault.lasting())
    }

    /// What keeps new pods from coming up, if they say so.
    fn trouble(&self) -> Option<(R, String)> {
        let waits = &self.plan().report.waits;
        waits.iter().filter(|wait| matches!(wait, Wait::Coming { .. })).find_map(|wait| {
            let (reason, message) = held(wait, self.observed.link);
            (reason != R::WaitingForRoutable).then_some((reason, message))
        })
    }

    fn ready(&self) -> Verdict {
        let (routable, wished) = (self.routable(), self.wished());
        let numbers = format!("{routable} of {wished} workers are routable");
        if self.observed.deleting {
            return (S::False, R::Deleting, "the pool is being deleted".to_owned());
        }
        if routable >= wished && routable > 0 {
            return (S::True, R::Serving, numbers);
        }
        if routable > 0 {
            return (S::True, R::ServingWithFewer, numbers);
        }
        if let Some(fault) = self.lasting().filter(|fault| fault.reason.types().contains(&C::Ready)) {
            return (S::False, fault.reason, fault.message.clone());
        }
        if self.observed.routers.ready == 0 {
            let text = format!("none of {} routers is Ready, so no worker can be routable", self.observed.routers.desired);
            return (S::False, R::NoReadyRouters, text);
        }
        // As of a Deployment without replicas: who waits for the pool waits for what was asked for, and that is here.
        if wished == 0 {
            let text = "replicas is 0, as asked for, so requests are refused; raise it to serve";
            return (S::True, R::ScaledToZero, text.to_owned());
        }
        match self.trouble() {
            Some((reason, message)) if reason.types().contains(&C::Ready) => (S::False, reason, message),
            _ => (S::False, R::NoRoutableWorkers, numbers),
        }
    }

    fn progressing(&self) -> Verdict {
        let report = &self.plan().report;
        if self.observed.deleting {
            return (S::False, R::Deleting, "the pool is being deleted".to_owned());
        }
        if let Some(fault) = self.lasting().filter(|fault| fault.reason.types().contains(&C::Progressing)) {
            return (S::False, fault.reason, fault.message.clone());
        }
        if self.late {
            let waits = report.waits.first().map_or_else(|| "no worker moved on".to_owned(), ToString::to_string);
            return (S::False, R::ProgressDeadlineExceeded, format!("nothing moved for rollout.progressDeadline: {waits}"));
        }
        if self.observed.goal.paused && report.outdated > 0 {
            let text = format!("{} workers are outdated and stay so while the pool is paused", report.outdated);
            return (S::False, R::Paused, text);
        }
        let numbers = format!("{} of {} workers are of the newest template", report.updated, self.wished());
        match report.waits.first() {
            None if self.plan().steps.is_empty() && self.observed.plan.is_some() => (S::False, R::RolloutComplete, numbers),
            None if self.observed.plan.is_none() => {
                (S::Unknown, R::Pending, "the workers have not been looked at yet".to_owned())
            }
            Some(wait) if self.plan().steps.is_empty() => {
                let (reason, message) = held(wait, self.observed.link);
                (S::True, reason, message)
            }
            _ if self.rolling => (S::True, R::RollingOut, numbers),
            _ => (S::True, R::Scaling, format!("{} workers for {} wished", self.observed.pods.len(), self.wished())),
        }
    }

    fn degraded(&self) -> Verdict {
        let is = |reason: R| reason.types().contains(&C::Degraded);
        if let Some(fault) = self.observed.faults.iter().find(|fault| is(fault.reason)) {
            return (S::True, fault.reason, fault.message.clone());
        }
        if self.late {
            return (S::True, R::ProgressDeadlineExceeded, "the rollout has not moved for rollout.progressDeadline".to_owned());
        }
        if let Some((reason, message)) = self.trouble().filter(|(reason, _)| is(*reason)) {
            return (S::True, reason, message);
        }
        let (routable, floor) = (self.routable(), self.observed.goal.floor());
        if routable < floor && self.observed.plan.is_some() {
            let text = format!("{routable} workers are routable, {floor} should be even during a rollout");
            return (S::True, R::ServingWithFewer, text);
        }
        match self.observed.notes.iter().find(|note| is(note.reason)) {
            Some(note) => (S::True, note.reason, note.message.clone()),
            None => (S::False, R::AsExpected, "as asked for".to_owned()),
        }
    }

    fn model(&self) -> Verdict {
        let model = &self.observed.model;
        if let Some(fault) = self.lasting().filter(|fault| fault.reason.types().contains(&C::ModelResolved)) {
            return (S::False, fault.reason, fault.message.clone());
        }
        if let Some(trouble) = &model.trouble {
            return (S::False, R::ModelUnavailable, trouble.clone());
        }
        match (&model.digest, &model.expected) {
            (Some(digest), Some(expected)) if digest != expected => {
                let text = format!("workers serve {digest} and model.digest asks for {expected}; correct one of them");
                (S::False, R::DigestMismatch, text)
            }
            (Some(digest), _) => (S::True, R::Resolved, format!("workers serve {digest}")),
            (None, _) if model.fetched_percent.is_some() => {
                (S::Unknown, R::Fetching, "workers fetch the model; see status.model.fetchedPercent".to_owned())
            }
            (None, _) => (S::Unknown, R::Unreported, "no worker has reported a digest yet".to_owned()),
        }
    }

    fn draft_compatible(&self) -> Verdict {
        let Some(draft) = &self.observed.draft else {
            return (S::True, R::NoDraft, "no draft is asked for".to_owned());
        };
        match draft.same_tokenizer {
            Some(true) => (S::True, R::Compatible, "draft and target have one tokeniser".to_owned()),
            Some(false) => {
                (S::False, R::TokenizerDiffers, "draft and target have different tokenisers; choose another draft".to_owned())
            }
            None => match self.note(C::DraftCompatible) {
                Some(note) => (S::Unknown, note.reason, note.message.clone()),
                None => (S::Unknown, R::Unreported, "the draft's tokeniser is not reported yet".to_owned()),
            },
        }
    }

    fn draft_placed(&self) -> Verdict {
        let Some(draft) = &self.observed.draft else {
            return (S::True, R::NoDraft, "no draft is asked for".to_owned());
        };
        if let Some((reason, message)) = &draft.misplaced {
            return (S::False, *reason, message.clone());
        }
        // A draft that runs runs, whatever its workers cannot do with it yet: that is said under Degraded.
        match self.note(C::DraftPlaced) {
            _ if draft.placed => (S::True, R::Placed, "the draft runs where it was asked to".to_owned()),
            Some(note) => (S::False, note.reason, note.message.clone()),
            None => (S::Unknown, R::Pending, "the draft is not running yet".to_owned()),
        }
    }

    fn note(&self, kind: C) -> Option<&Note> {
        self.observed.notes.iter().find(|note| note.reason.types().contains(&kind))
    }

    fn routers_in_sync(&self) -> Verdict {
        match &self.observed.routers.sync {
            RouterSync::NoneReady => (S::Unknown, R::NoReadyRouters, "no router is Ready".to_owned()),
            RouterSync::Unreachable(message) => (S::Unknown, R::RouterUnreachable, message.clone()),
            RouterSync::CatchingUp(message) => (S::False, R::CatchingUp, message.clone()),
            RouterSync::InSync => (S::True, R::InSync, "every Ready router knows every ready worker".to_owned()),
        }
    }

    fn stalled(&self) -> Verdict {
        if let Some(fault) = self.lasting().filter(|fault| fault.reason.types().contains(&C::Stalled)) {
            return (S::True, fault.reason, fault.message.clone());
        }
        if self.late && !self.observed.deleting {
            return (
                S::True,
                R::ProgressDeadlineExceeded,
                "fix the cause that Progressing names, or revert the change".to_owned(),
            );
        }
        (S::False, R::AsExpected, "nothing waits for a person".to_owned())
    }

    fn reconciling(&self) -> Verdict {
        if self.observed.deleting {
            return (S::True, R::Deleting, "the pool is being deleted".to_owned());
        }
        if self.stalled().0 == S::True {
            return (S::False, R::AsExpected, "see Stalled".to_owned());
        }
        if let Some(fault) = self.observed.faults.first() {
            return (S::True, R::ApiUnavailable, fault.message.clone());
        }
        if self.observed.plan.is_none() {
            return (S::True, R::Applying, "objects of the pool are being written".to_owned());
        }
        let (plan, report) = (self.plan(), &self.plan().report);
        let waits: Vec<&Wait> = report.waits.iter().filter(|wait| !matches!(wait, Wait::Paused { .. })).collect();
        if plan.steps.is_empty() && waits.is_empty() {
            return (S::False, R::AsExpected, "the newest spec is carried out".to_owned());
        }
        let reason = match waits.first().map(|wait| wait_reason(wait)) {
            Some(reason @ (R::WaitingForRoutable | R::WaitingForDrain)) if plan.steps.is_empty() => reason,
            _ if self.rolling => R::RollingOut,
            _ => R::Scaling,
        };
        (S::True, reason, "workers move towards the newest spec; see Progressing".to_owned())
    }
}

fn stays(pod: &Pod) -> bool {
    !matches!(pod.health, Health::Terminating { .. } | Health::Dead(_))
}

fn mode(strategy: Strategy) -> RolloutMode {
    match strategy {
        Strategy::InPlace => RolloutMode::InPlace,
        Strategy::SurgeFree => RolloutMode::SurgeFree,
        Strategy::Surge => RolloutMode::Surge,
    }
}

fn elapsed(from: &Time, to: &Time) -> Duration {
    Duration::try_from(to.0.duration_since(from.0)).unwrap_or_default()
}

fn count(count: u32) -> i32 {
    i32::try_from(count).unwrap_or(i32::MAX)
}

fn number(count: usize) -> i32 {
    i32::try_from(count).unwrap_or(i32::MAX)
}

#[cfg(test)]
mod tests;
