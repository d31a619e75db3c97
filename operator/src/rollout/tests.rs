#![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]
//! Cases that comparable systems got wrong, one test each; random worlds are in `simulation`.

use super::*;

mod simulation;

const STREAM_MAX: Duration = Duration::from_mins(10);

fn revision(shape: &str, image: &str) -> Revision {
    Revision { shape: shape.to_owned(), image: image.to_owned() }
}

fn goal(replicas: u32, target: Revision) -> Goal {
    Goal {
        replicas,
        revision: target,
        serving: None,
        mode: Mode::Auto,
        max_unavailable: 1,
        max_surge: 1,
        free: Free::Slots(0),
        paused: false,
        stream_max: STREAM_MAX,
        routers: RouterView::Known,
    }
}

fn pod(index: u32, made_from: &Revision, health: Health) -> Pod {
    let in_flight = match health {
        Health::Routable | Health::Unsettled => Some(3),
        _ => Some(0),
    };
    Pod {
        name: format!("p-{index}"),
        index,
        revision: made_from.clone(),
        health,
        draining: None,
        in_flight,
        age: Duration::from_secs(1000 - u64::from(index)),
    }
}

fn drained(mut it: Pod) -> Pod {
    it.draining = Some(Duration::from_secs(3));
    it.in_flight = Some(0);
    it
}

fn routable(count: u32, made_from: &Revision) -> Vec<Pod> {
    (0..count).map(|index| pod(index, made_from, Health::Routable)).collect()
}

fn drains(plan: &Plan) -> Vec<&str> {
    plan.steps.iter().filter_map(|step| if let Step::BeginDrain { name, .. } = step { Some(&**name) } else { None }).collect()
}

fn creates(plan: &Plan) -> Vec<u32> {
    plan.steps.iter().filter_map(|step| if let Step::Create { index, .. } = step { Some(*index) } else { None }).collect()
}

fn deletes(plan: &Plan) -> Vec<&str> {
    plan.steps.iter().filter_map(|step| if let Step::Delete { name, .. } = step { Some(&**name) } else { None }).collect()
}

fn a() -> Revision {
    revision("a", "1")
}

fn b() -> Revision {
    revision("b", "1")
}

#[test]
fn a_new_pool_gets_its_pods_and_a_settled_one_gets_nothing() {
    let plan_new = plan(&goal(3, a()), &[]);
    assert_eq!(creates(&plan_new), [0, 1, 2]);
    assert_eq!(plan_new.report.strategy, None);
    let settled = plan(&goal(3, a()), &routable(3, &a()));
    assert!(settled.settled(), "{settled:?}");
    assert_eq!((settled.report.updated, settled.report.updated_routable, settled.report.outdated), (3, 3, 0));
}

#[test]
fn no_replicas_means_no_pods_and_a_settled_plan() {
    assert!(plan(&goal(0, a()), &[]).settled());
    let leaving = plan(&goal(0, a()), &routable(2, &a()));
    assert_eq!(drains(&leaving).len(), 2);
    // The same without any router: there is nothing to protect.
    let alone = Goal { routers: RouterView::NoneReady, ..goal(0, b()) };
    let pods = [pod(0, &a(), Health::Unsettled)];
    assert_eq!(drains(&plan(&alone, &pods)), ["p-0"]);
}

/// operator.md §3 case 1: the surge pod is Pending, the old pod never leaves.
#[test]
fn without_a_free_device_auto_rolls_surge_free_and_creates_nothing_beyond_the_replicas() {
    let pods = routable(3, &a());
    let rolled = plan(&goal(3, b()), &pods);
    assert_eq!(rolled.report.strategy, Some((Strategy::SurgeFree, Choice::DevicesScarce)));
    assert_eq!((drains(&rolled).len(), creates(&rolled).len()), (1, 0));
}

#[test]
fn with_a_free_device_auto_surges_and_drains_nothing_before_the_new_pod_is_routable() {
    let mut pods = routable(3, &a());
    let with_room = Goal { free: Free::Slots(1), ..goal(3, b()) };
    let first = plan(&with_room, &pods);
    assert_eq!(first.report.strategy, Some((Strategy::Surge, Choice::DevicesFree)));
    assert_eq!((creates(&first), drains(&first).len()), (vec![3], 0));
    // The surge pod took the device; the choice must not flip to surge-free.
    pods.push(pod(3, &b(), Health::Starting));
    let second = plan(&goal(3, b()), &pods);
    assert_eq!(second.report.strategy.as_ref().unwrap().0, Strategy::Surge);
    assert_eq!(second.steps, []);
    pods[3].health = Health::Routable;
    assert_eq!(drains(&plan(&goal(3, b()), &pods)).len(), 1);
}

#[test]
fn what_a_mode_cannot_do_is_said_and_the_next_best_is_done() {
    let pods = routable(2, &a());
    let strategy = |goal: Goal| plan(&goal, &pods).report.strategy.unwrap();
    let unknown = || Free::Unknown("this operator sees one namespace".to_owned());
    assert_eq!(
        strategy(Goal { free: unknown(), mode: Mode::Surge, ..goal(2, b()) }),
        (Strategy::SurgeFree, Choice::DevicesUnknown("this operator sees one namespace".to_owned()))
    );
    assert_eq!(strategy(Goal { mode: Mode::InPlace, ..goal(2, b()) }), (Strategy::SurgeFree, Choice::MoreThanTheImage));
    assert_eq!(strategy(Goal { mode: Mode::Surge, max_surge: 0, ..goal(2, b()) }), (Strategy::SurgeFree, Choice::NoSurgeAllowed));
    let waiting = plan(&Goal { mode: Mode::Surge, ..goal(2, b()) }, &pods);
    assert_eq!((&waiting.steps[..], &waiting.report.waits[0]), (&[][..], &Wait::NoFreeDevice));
}

#[test]
fn an_image_changes_in_place_after_a_drain_within_the_budget() {
    let target = revision("a", "2");
    let mut pods = routable(3, &a());
    let first = plan(&goal(3, target.clone()), &pods);
    assert_eq!(first.report.strategy, Some((Strategy::InPlace, Choice::OnlyTheImage)));
    assert_eq!(drains(&first), ["p-2"]);
    pods[2].draining = Some(Duration::from_secs(1));
    let waiting = plan(&goal(3, target.clone()), &pods);
    assert_eq!(waiting.steps, []);
    assert!(matches!(&waiting.report.waits[0], Wait::Draining { pod, in_flight: Some(3), .. } if pod == "p-2"));
    pods[2].in_flight = Some(0);
    let patch = plan(&goal(3, target.clone()), &pods);
    assert_eq!(patch.steps, [Step::PatchImage { name: "p-2".to_owned(), image: "2".to_owned() }]);
    // A pod that cannot pull its image needs neither drain nor budget.
    let broken = [pod(0, &a(), Health::Broken("ImagePullBackOff".to_owned()))];
    assert!(matches!(plan(&goal(1, target), &broken).steps[..], [Step::PatchImage { .. }]));
}

#[test]
fn a_budget_of_nothing_unavailable_is_kept_even_for_an_image() {
    let strict = Goal { max_unavailable: 0, ..goal(2, revision("a", "2")) };
    let stuck = plan(&strict, &routable(2, &a()));
    assert_eq!((&stuck.steps[..], &stuck.report.waits[0]), (&[][..], &Wait::NoFreeDevice));
    let roomy = plan(&Goal { free: Free::Slots(1), ..strict }, &routable(2, &a()));
    assert_eq!((creates(&roomy), drains(&roomy).len()), (vec![2], 0));
}

/// Case 3: a revert in mid-rollout deletes the serving generation.
#[test]
fn a_revert_in_mid_rollout_takes_the_new_pods_and_never_the_serving_ones() {
    let mut pods = routable(2, &a());
    pods.push(pod(2, &b(), Health::Starting));
    let reverted = plan(&goal(2, a()), &pods);
    assert_eq!(reverted.steps, [Step::Delete { name: "p-2".to_owned(), why: Why::OutdatedBroken }]);
    // The same when the new pod serves already and an old one has gone: the budget rules.
    let mut pods = vec![pod(0, &a(), Health::Routable), pod(1, &b(), Health::Routable)];
    assert_eq!(drains(&plan(&Goal { max_unavailable: 0, free: Free::Slots(1), ..goal(2, a()) }, &pods)), [""; 0]);
    pods.push(pod(2, &a(), Health::Routable));
    assert_eq!(drains(&plan(&Goal { max_unavailable: 0, ..goal(2, a()) }, &pods)), ["p-1"]);
}

/// Cases 4 and 9: a pod of a superseded revision lives on beside the healthy ones, one more for each edit.
#[test]
fn superseded_pods_that_do_not_serve_go_at_once_whatever_their_revision() {
    let mut pods = routable(2, &a());
    pods.push(pod(2, &b(), Health::Broken("CrashLoopBackOff".to_owned())));
    let edited = plan(&Goal { max_surge: 2, free: Free::Slots(5), ..goal(2, revision("c", "1")) }, &pods);
    assert_eq!(deletes(&edited), ["p-2"]);
}

/// Case 5: a pod counts as soon as it is Ready, before any router knows it.
#[test]
fn a_pod_that_no_router_takes_does_not_count() {
    let mut pods = routable(2, &a());
    pods.push(pod(2, &b(), Health::Unsettled));
    let waiting = plan(&Goal { mode: Mode::Surge, ..goal(2, b()) }, &pods);
    assert_eq!(waiting.steps, []);
    assert!(matches!(&waiting.report.waits[0], Wait::Coming { pod, .. } if pod == "p-2"));
}

/// Case 6: the old pod is killed first although a device is free.
#[test]
fn a_single_replica_with_a_free_device_is_never_without_a_routable_pod() {
    let first = plan(&Goal { free: Free::Slots(1), ..goal(1, b()) }, &routable(1, &a()));
    assert_eq!((creates(&first), drains(&first).len()), (vec![1], 0));
}

/// Case 7: a restarted controller rolls everything at once. The plan has no memory, so the same world gives the same plan.
#[test]
fn planning_again_from_the_same_world_changes_nothing() {
    let mut pods = routable(4, &a());
    pods[1].draining = Some(Duration::from_secs(9));
    let once = plan(&goal(4, b()), &pods);
    assert_eq!((drains(&once).len(), once.steps.len()), (0, 0));
    assert_eq!(once, plan(&goal(4, b()), &pods));
}

/// Case 8: all old pods are broken and the rollout is stuck.
#[test]
fn broken_old_pods_do_not_block() {
    let broken: Vec<Pod> = (0..3).map(|index| pod(index, &a(), Health::Broken("CrashLoopBackOff".to_owned()))).collect();
    for mode in [Mode::Auto, Mode::SurgeFree, Mode::Surge] {
        let rolled = plan(&Goal { mode, serving: Some(a()), ..goal(3, b()) }, &broken);
        assert_eq!(deletes(&rolled).len(), 3, "{mode:?}");
    }
}

/// Case 13: the routers are away, so nobody is routable, and that is no reason to replace everyone.
#[test]
fn while_no_router_is_ready_nothing_that_may_serve_is_rolled() {
    let pods: Vec<Pod> = (0..3).map(|index| pod(index, &a(), Health::Unsettled)).collect();
    for routers in [RouterView::NoneReady, RouterView::Unreachable("refused".to_owned())] {
        let held = plan(&Goal { routers, ..goal(3, b()) }, &pods);
        assert_eq!(held.steps, []);
        assert!(matches!(held.report.waits[0], Wait::NoRouterReady | Wait::RoutersUnreachable(_)), "{held:?}");
    }
    let flap = plan(&goal(3, b()), &pods);
    assert_eq!(flap.steps, []);
    assert!(matches!(flap.report.waits[0], Wait::Unsettled { .. }));
}

/// Case 20 has its part here too: what someone else deletes is replaced once, and not while our own deletion is on its way.
#[test]
fn an_evicted_pod_is_replaced_at_once_and_our_own_deletion_holds_its_place() {
    let terminating = |ours, overdue| Health::Terminating { ours, overdue };
    let mut pods = routable(2, &a());
    pods[1].health = terminating(false, false);
    assert_eq!(creates(&plan(&goal(2, a()), &pods)), [2]);
    pods[1].health = terminating(true, false);
    let ours = plan(&goal(2, a()), &pods);
    assert_eq!(ours.steps, []);
    assert_eq!(ours.report.waits, [Wait::Terminating { pod: "p-1".to_owned() }]);
    pods[1].health = terminating(true, true);
    assert_eq!(creates(&plan(&goal(2, a()), &pods)), [2]);
}

#[test]
fn the_dead_are_deleted_and_replaced_in_one_go() {
    let pods = [pod(0, &a(), Health::Dead("Evicted".to_owned())), pod(1, &a(), Health::Routable)];
    let repaired = plan(&Goal { paused: true, ..goal(2, a()) }, &pods);
    assert_eq!((deletes(&repaired), creates(&repaired)), (vec!["p-0"], vec![2]));
}

#[test]
fn a_paused_pool_repairs_in_the_serving_revision_and_does_not_roll() {
    let paused = Goal { paused: true, serving: Some(a()), free: Free::Slots(4), ..goal(3, b()) };
    let held = plan(&paused, &routable(2, &a()));
    assert_eq!(held.steps, [Step::Create { index: 2, revision: a() }]);
    assert_eq!(held.report.waits[0], Wait::Paused { outdated: 2 });
}

#[test]
fn a_bad_revision_does_not_eat_the_serving_one_pod_by_pod() {
    let bad = || Health::Broken("CrashLoopBackOff".to_owned());
    let mut pods = routable(3, &a());
    pods.extend([pod(3, &b(), bad()), pod(4, &b(), bad())]);
    pods.remove(0);
    let with_serving = Goal { serving: Some(a()), mode: Mode::Surge, max_surge: 1, ..goal(5, b()) };
    let repaired = plan(&with_serving, &pods);
    assert_eq!(repaired.steps, [Step::Create { index: 0, revision: a() }]);
    // What was repaired so is left alone while it starts.
    pods.push(pod(0, &a(), Health::Starting));
    assert_eq!(plan(&with_serving, &pods).steps, []);
}

#[test]
fn scaling_in_takes_those_that_serve_least() {
    let mut pods = routable(4, &a());
    pods[1].health = Health::Pending(None);
    pods[1].in_flight = Some(0);
    pods[3].in_flight = Some(1);
    let fewer = plan(&goal(2, a()), &pods);
    assert_eq!((deletes(&fewer), drains(&fewer)), (vec!["p-1"], vec!["p-3"]));
}

#[test]
fn a_drain_that_does_not_answer_ends_with_the_longest_stream() {
    let mut pods = routable(1, &a());
    pods[0].draining = Some(STREAM_MAX.checked_sub(Duration::from_secs(1)).unwrap());
    pods[0].in_flight = None;
    assert_eq!(plan(&goal(0, a()), &pods).steps, []);
    pods[0].draining = Some(STREAM_MAX);
    assert_eq!(deletes(&plan(&goal(0, a()), &pods)), ["p-0"]);
}

#[test]
fn a_drained_pod_that_is_wanted_again_is_made_anew() {
    let pods = [drained(pod(0, &a(), Health::Unsettled)), pod(1, &a(), Health::Routable)];
    let renewed = plan(&goal(2, a()), &pods);
    assert_eq!(deletes(&renewed), ["p-0"]);
    assert_eq!(creates(&renewed), [0; 0], "its place is free when it is gone");
}

#[test]
fn what_is_waited_for_is_told_with_the_cause_first() {
    let mut pods = routable(2, &a());
    pods.push(pod(2, &b(), Health::Pending(Some("0/3 nodes have a free nvidia.com/gpu".to_owned()))));
    let stuck = plan(&Goal { mode: Mode::Surge, ..goal(2, b()) }, &pods);
    let text: Vec<String> = stuck.report.waits.iter().map(ToString::to_string).collect();
    insta::assert_snapshot!(text.join("\n"), @r"
    pod p-2 is not routable yet: 0/3 nodes have a free nvidia.com/gpu
    2 pods are routable and 2 must stay so; allow more with rollout.maxUnavailable or repair the others
    ");
}
