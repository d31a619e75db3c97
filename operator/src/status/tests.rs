#![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]
//! The product of all states against an oracle, and the eight ways in which comparable systems' status lied.

use super::*;
use crate::rollout::{Free, Goal, Mode, Report, Revision, RouterView, Step};
use k8s_openapi::jiff::Timestamp;

fn at(second: i64) -> Time {
    Time(Timestamp::from_second(second).unwrap())
}

fn goal(replicas: u32) -> Goal {
    Goal {
        replicas,
        revision: Revision { shape: "new".to_owned(), image: "1".to_owned() },
        serving: None,
        mode: Mode::Auto,
        max_unavailable: 1,
        max_surge: 1,
        free: Free::Slots(0),
        paused: false,
        stream_max: Duration::from_mins(10),
        routers: RouterView::Known,
    }
}

fn plan(updated: u32, updated_routable: u32, outdated: u32, routable: u32, steps: Vec<Step>, waits: Vec<Wait>) -> Plan {
    Plan { steps, report: Report { strategy: None, updated, updated_routable, outdated, routable, waits } }
}

fn observed<'a>(goal: &'a Goal, plan: Option<&'a Plan>, second: i64) -> Observed<'a> {
    Observed {
        generation: Some(7),
        deleting: false,
        goal,
        plan,
        pods: &[],
        ready: 0,
        selector: "a=b",
        template_hash: "new-1".to_owned(),
        link: None,
        survives: None,
        progress_deadline: Duration::from_mins(15),
        model: ModelFacts { name: "m".to_owned(), ..ModelFacts::default() },
        draft: None,
        routers: RouterFacts { desired: 2, ready: 2, sync: RouterSync::InSync },
        scaling: None,
        faults: Vec::new(),
        notes: Vec::new(),
        now: at(second),
    }
}

fn is(status: &ServingPoolStatus, kind: C) -> (S, String) {
    let found = status.conditions.iter().find(|condition| condition.condition_type == kind.as_str()).unwrap();
    (found.status, found.reason.clone())
}

/// What `helm --wait` and `kubectl wait` make of it (kstatus, generic objects).
fn kstatus(status: &ServingPoolStatus) -> &'static str {
    let is = |kind| is(status, kind).0;
    match () {
        () if status.observed_generation != Some(7) || is(C::Reconciling) == S::True => "InProgress",
        () if is(C::Stalled) == S::True => "Failed",
        () if is(C::Ready) != S::True => "InProgress",
        () => "Current",
    }
}

fn steps() -> [Vec<Step>; 2] {
    [Vec::new(), vec![Step::Create { index: 0, revision: goal(1).revision }]]
}

fn waits() -> [Vec<Wait>; 7] {
    let coming = |why: &str| Wait::Coming { pod: "p-0".to_owned(), why: why.to_owned() };
    [
        Vec::new(),
        vec![Wait::Paused { outdated: 1 }],
        vec![coming("it starts")],
        vec![coming("CrashLoopBackOff")],
        vec![coming("0/3 nodes are available: 3 Insufficient nvidia.com/gpu")],
        vec![Wait::NoFreeDevice],
        vec![Wait::Draining { pod: "p-0".to_owned(), in_flight: Some(1), left: Duration::ZERO }],
    ]
}

fn faults() -> [Vec<Fault>; 5] {
    [
        Vec::new(),
        vec![Fault::new(R::ApiUnavailable, "503")],
        vec![Fault::new(R::InvalidSpec, "spec.engine")],
        vec![Fault::new(R::Forbidden, "create pods")],
        vec![Fault::new(R::MissingObject, "secret s")],
    ]
}

#[test]
fn statuses_equal_an_oracles_over_all_states() {
    let mut states = 0;
    for replicas in [0u32, 1, 3] {
        for routable in 0..=replicas + 1 {
            for outdated in [0u32, 1] {
                for (steps, waits, faults) in product() {
                    for (deleting, late, routers_ready) in
                        [(false, false, 2), (false, true, 2), (true, false, 2), (true, true, 0), (false, false, 0)]
                    {
                        states += 1;
                        let goal = goal(replicas);
                        let updated = replicas.saturating_sub(outdated);
                        let plan = plan(updated, updated.min(routable), outdated, routable, steps.clone(), waits.clone());
                        let mut now = observed(&goal, Some(&plan), 10_000);
                        now.faults.clone_from(&faults);
                        (now.deleting, now.routers.ready) = (deleting, routers_ready);
                        let former = former(&now, late);
                        let status = compute(&now, Some(&former));
                        check(&now, &status, late);
                        assert_eq!(status, compute(&now, Some(&status)), "computing again changes nothing");
                    }
                }
            }
        }
    }
    assert_eq!(states, 10 * 2 * (2 * 7 * 5) * 5);
}

fn product() -> impl Iterator<Item = (Vec<Step>, Vec<Wait>, Vec<Fault>)> {
    steps().into_iter().flat_map(|steps| {
        waits().into_iter().flat_map(move |waits| {
            let steps = steps.clone();
            faults().into_iter().map(move |faults| (steps.clone(), waits.clone(), faults))
        })
    })
}

/// A former status with a rollout under way that last moved just now or long ago.
fn former(now: &Observed<'_>, late: bool) -> ServingPoolStatus {
    let mut former = compute(now, None);
    let old = at(if late { 1_000 } else { 9_990 });
    former.template_hash = Some("new-1".to_owned());
    if let Some(rollout) = &mut former.rollout {
        (rollout.started_at, rollout.progressed_at) = (old.clone(), old);
    }
    former
}

fn check(now: &Observed<'_>, status: &ServingPoolStatus, late: bool) {
    let plan = now.plan.unwrap();
    let rolling = status.rollout.is_some();
    let late = late && rolling;
    let lasting = now.faults.iter().any(|fault| fault.reason != R::ApiUnavailable);
    let stalled = lasting || (late && !now.deleting);
    let under_way = !plan.steps.is_empty() || plan.report.waits.iter().any(|wait| !matches!(wait, Wait::Paused { .. }));
    let reconciling = now.deleting || (!stalled && (under_way || !now.faults.is_empty()));
    let truth = |yes: bool| if yes { S::True } else { S::False };
    let context = || format!("{now:?}\n{status:?}");
    // Of none, none are asked for: a router that refuses for them is all there is to wait for.
    let spec_at_fault = now.faults.iter().any(|fault| fault.lasting() && fault.reason.types().contains(&C::Ready));
    let none = now.goal.replicas == 0 && now.routers.ready > 0 && !spec_at_fault;
    let ready = (plan.report.routable > 0 || none) && !now.deleting;
    assert_eq!(is(status, C::Ready).0, truth(ready), "{}", context());
    assert_eq!(is(status, C::Stalled).0, truth(stalled), "{}", context());
    assert_eq!(is(status, C::Reconciling).0, truth(reconciling), "{}", context());
    assert!(!(is(status, C::Stalled).0 == S::True && is(status, C::Reconciling).0 == S::True) || now.deleting, "{}", context());
    assert_eq!(status.conditions.len(), C::ALL.len());
    for (condition, kind) in status.conditions.iter().zip(C::ALL) {
        let reason = R::ALL.iter().find(|reason| reason.as_str() == condition.reason);
        assert!(reason.is_some_and(|reason| reason.types().contains(&kind)), "{kind}: {}", condition.reason);
        assert_eq!(condition.observed_generation, Some(7));
        assert!(!condition.message.is_empty());
    }
    let current = ready && !under_way && now.faults.is_empty() && !late;
    assert_eq!(kstatus(status) == "Current", current, "{}", context());
    if late && !now.deleting && !lasting {
        assert_eq!(is(status, C::Progressing), (S::False, "ProgressDeadlineExceeded".to_owned()));
    }
}

/// operator.md §3 case 11: Ready while pods crash.
#[test]
fn a_pool_whose_workers_crash_is_not_ready_and_says_why() {
    let goal = goal(2);
    let wait = Wait::Coming { pod: "p-0".to_owned(), why: "CrashLoopBackOff".to_owned() };
    let status = compute(&observed(&goal, Some(&plan(2, 0, 0, 0, vec![], vec![wait])), 0), None);
    assert_eq!(is(&status, C::Ready), (S::False, "WorkersCrashing".to_owned()));
    assert_eq!(status.reason.as_deref(), Some("WorkersCrashing"));
}

/// Case 12: "successful" while old pods satisfy the count.
#[test]
fn a_rollout_is_not_complete_while_old_pods_make_up_the_count() {
    let goal = goal(2);
    let wait = Wait::Coming { pod: "p-2".to_owned(), why: "it starts".to_owned() };
    let status = compute(&observed(&goal, Some(&plan(1, 0, 2, 2, vec![], vec![wait])), 0), None);
    assert_eq!(is(&status, C::Progressing).0, S::True);
    assert_eq!(kstatus(&status), "InProgress");
    assert_eq!(status.rollout.unwrap().hold.unwrap().reason, "WaitingForRoutable");
}

/// Case 14: with 0 replicas the status stays empty and the reconcile never ends. Who waits for a pool that was asked for nothing need not wait
/// (ADR 0006), but for its routers, which refuse for it.
#[test]
fn no_replicas_is_a_state_with_a_status() {
    let goal = goal(0);
    let status = compute(&observed(&goal, Some(&plan(0, 0, 0, 0, vec![], vec![])), 0), None);
    assert_eq!(is(&status, C::Ready), (S::True, "ScaledToZero".to_owned()));
    assert_eq!((status.reason.as_deref(), kstatus(&status)), (Some("ScaledToZero"), "Current"));
    assert_eq!((status.replicas, status.desired_replicas, status.rollout), (0, Some(0), None));
}

#[test]
fn a_rollout_begins_with_a_new_template_moves_with_its_pods_and_ends_when_all_are_routable() {
    let goal = goal(2);
    let waiting = || vec![Wait::Coming { pod: "p-2".to_owned(), why: "it starts".to_owned() }];
    let done = plan(2, 2, 0, 2, vec![], vec![]);
    let settled = compute(&observed(&goal, Some(&done), 0), None);
    assert_eq!(settled.rollout, None);
    let mut former = settled.clone();
    former.template_hash = Some("old".to_owned());
    former.updated_replicas = 0;
    let begun = compute(&observed(&goal, Some(&plan(0, 0, 2, 2, waits_step(), vec![])), 10), Some(&former));
    let rollout = begun.rollout.clone().unwrap();
    assert_eq!((rollout.started_at, rollout.progressed_at, rollout.hold), (at(10), at(10), None));
    let held = compute(&observed(&goal, Some(&plan(1, 0, 2, 2, vec![], waiting())), 20), Some(&begun));
    let still = compute(&observed(&goal, Some(&plan(1, 0, 2, 2, vec![], waiting())), 400), Some(&held));
    let rollout = still.rollout.clone().unwrap();
    assert_eq!((rollout.started_at, rollout.progressed_at, rollout.hold.unwrap().since), (at(10), at(20), at(20)));
    assert_eq!(is(&still, C::Stalled).0, S::False);
    let late = compute(&observed(&goal, Some(&plan(1, 0, 2, 2, vec![], waiting())), 920), Some(&still));
    assert_eq!((is(&late, C::Stalled).0, kstatus(&late)), (S::True, "Failed"));
    let ended = compute(&observed(&goal, Some(&done), 930), Some(&late));
    assert_eq!((ended.rollout.is_none(), kstatus(&ended)), (true, "Current"));
    // A pod that fails later is no rollout.
    let broken = compute(&observed(&goal, Some(&plan(2, 1, 0, 1, vec![], waiting())), 940), Some(&ended));
    assert_eq!(broken.rollout, None);
}

fn waits_step() -> Vec<Step> {
    vec![Step::Create { index: 2, revision: goal(1).revision }]
}

#[test]
fn times_move_with_status_alone() {
    let goal = goal(1);
    let up = plan(1, 1, 0, 1, vec![], vec![]);
    let first = compute(&observed(&goal, Some(&up), 10), None);
    let second = compute(&observed(&goal, Some(&up), 99), Some(&first));
    assert_eq!(first, second);
    let down = compute(&observed(&goal, Some(&plan(1, 0, 0, 0, vec![], vec![])), 100), Some(&second));
    assert_eq!(down.conditions[0].last_transition_time, at(100));
    assert_eq!(down.conditions[3].last_transition_time, at(10), "ModelResolved did not change");
}

#[test]
fn live_figures_alone_are_not_written_within_a_minute() {
    let goal = goal(1);
    let up = plan(1, 1, 0, 1, vec![], vec![]);
    let fetched = |percent| {
        let mut now = observed(&goal, Some(&up), 10);
        now.model.fetched_percent = Some(percent);
        compute(&now, None)
    };
    assert_eq!(fetched(41), fetched(44), "figures go in steps of 5");
    let (old, new) = (fetched(40), fetched(60));
    assert_eq!(throttle(new.clone(), &old, Duration::from_secs(59)), old);
    assert_eq!(throttle(new.clone(), &old, Duration::from_mins(1)), new);
    let mut worse = new.clone();
    worse.ready_replicas = 9;
    assert_eq!(throttle(worse.clone(), &old, Duration::from_secs(1)), worse, "what is no live figure is written at once");
}

#[test]
fn a_digest_that_was_not_asked_for_is_named() {
    let goal = goal(1);
    let up = plan(1, 1, 0, 1, vec![], vec![]);
    let mut now = observed(&goal, Some(&up), 10);
    (now.model.digest, now.model.expected) = (Some("aa".to_owned()), Some("bb".to_owned()));
    assert_eq!(is(&compute(&now, None), C::ModelResolved), (S::False, "DigestMismatch".to_owned()));
    now.model.expected = None;
    assert_eq!(is(&compute(&now, None), C::ModelResolved), (S::True, "Resolved".to_owned()));
}

#[test]
fn what_pods_suffer_from_has_a_documented_word() {
    let word = |why: &str| wait_reason(&Wait::Coming { pod: String::new(), why: why.to_owned() }).as_str();
    assert_eq!(word("CrashLoopBackOff"), "WorkersCrashing");
    assert_eq!(word("ImagePullBackOff"), "ImageUnavailable");
    assert_eq!(word("0/3 nodes are available: 3 Insufficient nvidia.com/gpu."), "InsufficientAccelerators");
    assert_eq!(word("0/3 nodes are available: 3 Insufficient cpu."), "Unschedulable");
    assert_eq!(word("0/3 nodes are available: 3 node(s) had untolerated taint"), "Unschedulable");
    assert_eq!(word("it starts"), "WaitingForRoutable");
}

#[test]
fn a_pair_that_finds_no_linked_devices_is_said_with_its_link() {
    let goal = goal(1);
    let why = "0/2 nodes are available: 2 cannot allocate all claims.";
    let waits = vec![Wait::Coming { pod: "p-0".to_owned(), why: why.to_owned() }];
    let plan = plan(1, 0, 0, 0, vec![], waits);
    let mut now = observed(&goal, Some(&plan), 10);
    assert_eq!(is(&compute(&now, None), C::Progressing), (S::True, "InsufficientAccelerators".to_owned()));
    now.link = Some("gpu.example.com/link");
    let status = compute(&now, None);
    for kind in [C::Progressing, C::Degraded] {
        assert_eq!(is(&status, kind), (S::True, "NoLinkedDevices".to_owned()), "{kind}");
        let said = status.conditions.iter().find(|it| it.condition_type == kind.as_str()).unwrap();
        assert!(said.message.contains("gpu.example.com/link") && said.message.contains(why), "{}", said.message);
    }
}
