//! Random worlds: edits, reverts, deaths, evictions, flaps, routers and capacity that come and go, while a small cluster carries out plans.

use super::super::{Free, Goal, Health, Mode, Plan, Pod, Revision, RouterView, Step, plan, serving};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// One tick stands for this long.
const TICK: Duration = Duration::from_secs(5);
const STREAM_MAX: Duration = Duration::from_secs(40);
/// Ticks until a placed pod is ready, until routers take it, and until a deleted pod is gone.
const START_TICKS: u32 = 2;
/// Ticks after which a ready pod that no router takes counts as broken.
const SETTLE_TICKS: u32 = 6;
/// A pod that is so far from being gone stands on a lost node.
const LOST_TICKS: u32 = 20;
/// Within so many ticks a calm world that allows it is as wanted: pods × (start + settle + drain + terminate), and some.
const CALM_TICKS: u32 = 400;

#[derive(Clone, Debug)]
enum Act {
    Edit(u8),
    EditImage(u8),
    Scale(u32),
    Devices(u32),
    Kill(u32),
    Evict(u32),
    LoseNode(u32),
    Flap(u32),
    Routers(bool),
    Pause(bool),
    Mode(u8),
    Tick(u32),
}

#[derive(Clone, Debug)]
struct SimPod {
    revision: Revision,
    placed: bool,
    ready_in: u32,
    unrouted: u32,
    flapping: u32,
    drain: Option<u32>,
    streams: u32,
    dead: bool,
    terminating: Option<(u32, bool)>,
    age: u32,
}

struct World {
    goal: Goal,
    devices: u32,
    devices_known: bool,
    pods: BTreeMap<u32, SimPod>,
    routers: bool,
}

impl World {
    fn bad(revision: &Revision) -> bool {
        revision.shape == "s2" || revision.image == "i2"
    }

    fn holding(&self) -> u32 {
        self.pods.values().filter(|pod| pod.placed).count() as u32
    }

    fn waiting(&self) -> u32 {
        self.pods.values().filter(|pod| !pod.placed && !pod.dead && pod.terminating.is_none()).count() as u32
    }

    fn free(&self) -> u32 {
        self.devices.saturating_sub(self.holding() + self.waiting())
    }

    fn routable(&self, pod: &SimPod) -> bool {
        self.routers
            && pod.placed
            && !pod.dead
            && pod.terminating.is_none()
            && pod.ready_in == 0
            && pod.flapping == 0
            && pod.drain.is_none()
            && !Self::bad(&pod.revision)
    }

    fn health(&self, pod: &SimPod) -> Health {
        if let Some((left, ours)) = pod.terminating {
            return Health::Terminating { ours, overdue: left > LOST_TICKS };
        }
        match () {
            () if pod.dead => Health::Dead("Evicted".to_owned()),
            () if !pod.placed => Health::Pending(None),
            () if Self::bad(&pod.revision) && pod.ready_in == 0 => Health::Broken("CrashLoopBackOff".to_owned()),
            () if pod.ready_in > 0 => Health::Starting,
            () if self.routable(pod) => Health::Routable,
            () if self.routers && pod.unrouted > SETTLE_TICKS => Health::Broken("no router takes it".to_owned()),
            () => Health::Unsettled,
        }
    }

    fn seen(&self) -> Vec<Pod> {
        let pods = self.pods.iter().map(|(index, pod)| Pod {
            name: index.to_string(),
            index: *index,
            revision: pod.revision.clone(),
            health: self.health(pod),
            draining: pod.drain.map(|ticks| TICK * ticks),
            in_flight: Some(pod.streams),
            age: TICK * pod.age,
        });
        pods.collect()
    }

    fn goal(&self) -> Goal {
        let free = if self.devices_known { Free::Slots(self.free()) } else { Free::Unknown("one namespace".to_owned()) };
        let routers = if self.routers { RouterView::Known } else { RouterView::NoneReady };
        Goal { free, routers, serving: serving(&self.goal.revision, &self.seen()), ..self.goal.clone() }
    }

    fn routable_count(&self) -> u32 {
        self.pods.values().filter(|pod| self.routable(pod)).count() as u32
    }

    /// Carries out a plan and checks what must hold for every step.
    fn reconcile(&mut self) -> Result<Plan, TestCaseError> {
        let (goal, seen) = (self.goal(), self.seen());
        let plan = plan(&goal, &seen);
        let before = self.routable_count();
        let room = self.free();
        let counted = |world: &Self| {
            let counts = |pod: &&SimPod| !pod.dead && pod.terminating.is_none_or(|(left, ours)| ours && left <= LOST_TICKS);
            world.pods.values().filter(counts).count() as u32
        };
        let surplus_before = counted(self);
        for step in &plan.steps {
            match step {
                Step::Create { index, revision } => {
                    prop_assert!(!self.pods.contains_key(index), "index {index} is taken");
                    prop_assert!(
                        *revision == goal.revision || Some(revision) == goal.serving.as_ref(),
                        "a pod of a revision that nobody wants"
                    );
                    self.pods.insert(*index, SimPod::new(revision.clone()));
                }
                Step::Delete { name, .. } => {
                    let pod = self.pod(name);
                    prop_assert!(
                        pod.streams == 0 || pod.drain.is_some_and(|ticks| TICK * ticks >= STREAM_MAX),
                        "pod {name} was deleted with {} streams",
                        pod.streams
                    );
                    if pod.dead || !pod.placed {
                        self.pods.remove(&name.parse::<u32>().unwrap());
                    } else {
                        pod.terminating = Some((2, true));
                    }
                }
                Step::BeginDrain { name, .. } => {
                    let target = goal.revision.clone();
                    let (surplus, pod) = (surplus_before > goal.replicas, self.pod(name));
                    prop_assert!(pod.drain.is_none(), "pod {name} is drained twice");
                    prop_assert!(surplus || pod.revision != target, "a wanted pod was taken without excess");
                    pod.drain = Some(0);
                }
                Step::PatchImage { name, image } => {
                    let pod = self.pod(name);
                    prop_assert!(pod.streams == 0 || pod.drain.is_some_and(|ticks| TICK * ticks >= STREAM_MAX));
                    image.clone_into(&mut pod.revision.image);
                    (pod.drain, pod.streams, pod.ready_in, pod.unrouted) = (None, 0, START_TICKS, 0);
                }
            }
        }
        let after = self.routable_count();
        let floor = goal.floor().min(before);
        prop_assert!(after >= floor, "routable fell from {before} to {after} by our own steps, floor {floor}: {:?}", plan.steps);
        let creates = plan.steps.iter().filter(|step| matches!(step, Step::Create { .. })).count() as u32;
        if creates > 0 {
            prop_assert!(counted(self) <= goal.replicas + goal.max_surge, "{} pods", counted(self));
            let beyond = counted(self).saturating_sub(goal.replicas).min(creates);
            prop_assert!(
                beyond == 0 || creates <= room,
                "{creates} new pods, {beyond} of them in surge, for {room} free devices"
            );
            prop_assert!(self.devices_known || beyond == 0, "a surge pod although nobody knows whether a device is free");
        }
        Ok(plan)
    }

    fn pod(&mut self, name: &str) -> &mut SimPod {
        self.pods.get_mut(&name.parse::<u32>().unwrap()).unwrap()
    }

    fn tick(&mut self) {
        let mut room = self.devices.saturating_sub(self.holding());
        let routers = self.routers;
        for pod in self.pods.values_mut() {
            pod.age += 1;
            if let Some((left, _)) = &mut pod.terminating {
                *left -= 1;
                pod.streams = 0;
                continue;
            }
            if !pod.placed {
                pod.placed = !pod.dead && room > 0;
                room -= u32::from(pod.placed);
                continue;
            }
            pod.ready_in = pod.ready_in.saturating_sub(1);
            pod.flapping = pod.flapping.saturating_sub(1);
            let taken = routers && pod.flapping == 0 && !Self::bad(&pod.revision);
            pod.unrouted = if taken || pod.ready_in > 0 { 0 } else { pod.unrouted + 1 };
            match &mut pod.drain {
                // The first stream of a draining pod goes on to the end of the longest stream, the others end soon.
                Some(ticks) => (*ticks, pod.streams) = (*ticks + 1, pod.streams.min(1) * u32::from(*ticks < 5)),
                None if taken && pod.ready_in == 0 => pod.streams = 3,
                None => {}
            }
        }
        self.pods.retain(|_, pod| pod.terminating.is_none_or(|(left, _)| left > 0));
    }

    fn act(&mut self, act: &Act) {
        let pick = |world: &Self, at: u32| {
            let names: Vec<u32> = world.pods.keys().copied().collect();
            (!names.is_empty()).then(|| names[at as usize % names.len()])
        };
        match act {
            Act::Edit(shape) => self.goal.revision.shape = format!("s{}", shape % 4),
            Act::EditImage(image) => self.goal.revision.image = format!("i{}", image % 4),
            Act::Scale(replicas) => self.goal.replicas = *replicas,
            Act::Devices(devices) => self.devices = *devices,
            Act::Kill(at) => {
                if let Some(pod) = pick(self, *at).and_then(|at| self.pods.get_mut(&at)).filter(|pod| pod.terminating.is_none()) {
                    (pod.dead, pod.placed, pod.streams) = (true, false, 0);
                }
            }
            Act::Evict(at) => {
                if let Some(pod) = pick(self, *at).and_then(|at| self.pods.get_mut(&at)).filter(|pod| pod.terminating.is_none()) {
                    pod.terminating = Some((4, false));
                }
            }
            Act::LoseNode(at) => {
                if let Some(pod) = pick(self, *at).and_then(|at| self.pods.get_mut(&at)) {
                    (pod.terminating, pod.streams) = (Some((LOST_TICKS + 9, true)), 0);
                }
            }
            Act::Flap(at) => {
                if let Some(pod) = pick(self, *at).and_then(|at| self.pods.get_mut(&at)) {
                    pod.flapping = 3;
                }
            }
            Act::Routers(up) => self.routers = *up,
            Act::Pause(paused) => self.goal.paused = *paused,
            Act::Mode(mode) => {
                self.goal.mode = [Mode::Auto, Mode::InPlace, Mode::SurgeFree, Mode::Surge][*mode as usize % 4];
            }
            Act::Tick(_) => {}
        }
    }

    fn as_wanted(&self) -> bool {
        self.pods.len() as u32 == self.goal.replicas
            && self.pods.values().all(|pod| pod.revision == self.goal.revision && self.routable(pod))
    }
}

impl SimPod {
    fn new(revision: Revision) -> Self {
        Self {
            revision,
            placed: false,
            ready_in: START_TICKS,
            unrouted: 0,
            flapping: 0,
            drain: None,
            streams: 0,
            dead: false,
            terminating: None,
            age: 0,
        }
    }
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let act = prop_oneof![
        3 => (0u8..4).prop_map(Act::Edit),
        3 => (0u8..4).prop_map(Act::EditImage),
        2 => (0u32..6).prop_map(Act::Scale),
        2 => (0u32..9).prop_map(Act::Devices),
        2 => any::<u32>().prop_map(Act::Kill),
        2 => any::<u32>().prop_map(Act::Evict),
        1 => any::<u32>().prop_map(Act::LoseNode),
        2 => any::<u32>().prop_map(Act::Flap),
        1 => any::<bool>().prop_map(Act::Routers),
        1 => any::<bool>().prop_map(Act::Pause),
        1 => any::<u8>().prop_map(Act::Mode),
        12 => (1u32..12).prop_map(Act::Tick),
    ];
    prop::collection::vec(act, 1..40)
}

fn world(replicas: u32, budgets: (u32, u32), devices: u32, devices_known: bool) -> World {
    let goal = Goal {
        replicas,
        revision: Revision { shape: "s0".to_owned(), image: "i0".to_owned() },
        serving: None,
        mode: Mode::Auto,
        max_unavailable: budgets.0,
        max_surge: budgets.1,
        free: Free::Slots(0),
        paused: false,
        stream_max: STREAM_MAX,
        routers: RouterView::Known,
    };
    World { goal, devices, devices_known, pods: BTreeMap::new(), routers: true }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3_000, ..ProptestConfig::default() })]

    #[test]
    fn budgets_hold_at_every_step_and_a_calm_world_becomes_as_wanted(
        replicas in 0u32..6,
        budgets in prop_oneof![Just((0u32, 1u32)), Just((1, 0)), Just((1, 1)), Just((2, 2)), Just((0, 2))],
        devices in 0u32..9,
        devices_known in any::<bool>(),
        acts in acts(),
    ) {
        let mut world = world(replicas, budgets, devices, devices_known);
        for act in &acts {
            world.act(act);
            let ticks = if let Act::Tick(ticks) = act { *ticks } else { 1 };
            for _ in 0..ticks {
                world.reconcile()?;
                world.tick();
            }
        }
        // Calm: everything works, there is a device for each replica and one to spare, the wanted revision is good.
        (world.routers, world.goal.paused, world.devices_known) = (true, false, true);
        world.devices = world.goal.replicas + world.goal.max_surge + world.pods.len() as u32;
        for part in [&mut world.goal.revision.shape, &mut world.goal.revision.image] {
            *part = part.replace('2', "3");
        }
        if world.goal.max_unavailable == 0 {
            world.goal.mode = Mode::Auto;
        }
        let mut ticks = 0;
        while !world.as_wanted() {
            let plan = world.reconcile()?;
            prop_assert!(ticks < CALM_TICKS, "not as wanted after {ticks} ticks: {plan:?}\n{:?}\n{:?}", world.goal(), world.seen());
            world.tick();
            ticks += 1;
        }
        let plan = world.reconcile()?;
        prop_assert!(plan.settled(), "as wanted and not at rest: {plan:?}");
    }

    #[test]
    fn without_a_spare_device_a_rollout_still_ends_if_one_pod_may_be_unavailable(replicas in 1u32..6, image_only in any::<bool>()) {
        let mut world = world(replicas, (1, 1), replicas, true);
        let mut outdated_seen = BTreeSet::new();
        for edit in 0..3u8 {
            if edit > 0 && image_only { world.act(&Act::EditImage(edit + edit / 2)) } else { world.act(&Act::Edit(edit + edit / 2)) }
            let mut ticks = 0;
            while !world.as_wanted() {
                let plan = world.reconcile()?;
                outdated_seen.insert(plan.report.outdated);
                prop_assert!(ticks < CALM_TICKS, "{plan:?}");
                let pods = world.pods.len() as u32;
                prop_assert!(pods <= replicas, "{pods} pods on {replicas} devices");
                world.tick();
                ticks += 1;
            }
        }
        prop_assert!(outdated_seen.contains(&replicas), "the rollout was never under way");
    }
}
