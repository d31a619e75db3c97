//! The decision itself: passes over a working copy, each of which takes something away or adds something within what the former left.
//!
//! Flow: bury the dead → finish drains → trim what is too many → replace what is outdated → fill what is missing → say what is waited for.

use super::{Choice, Free, Goal, Health, Mode, Plan, Pod, Report, Revision, RouterView, Step, Strategy, Wait, Why};
use std::collections::BTreeSet;
use std::time::Duration;

/// What becomes of a pod in this plan.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// It stays as it is.
    Stays,
    /// It stays and gets, or is about to get, the wanted image.
    Changes,
    /// It is being taken away and still holds its device.
    Leaves,
    /// It no longer counts: dead, or someone else is deleting it.
    Gone,
}

struct Draft<'a> {
    goal: &'a Goal,
    pods: &'a [Pod],
    fates: Vec<Fate>,
    routable: u32,
    free: u32,
    steps: Vec<Step>,
    waits: Vec<Wait>,
}

/// Decides what to do with `pods` to come nearer to `goal`.
pub fn plan(goal: &Goal, pods: &[Pod]) -> Plan {
    let mut draft = Draft::new(goal, pods);
    let strategy = draft.strategy();
    draft.bury_the_dead();
    draft.finish_drains();
    let how = strategy.as_ref().map(|(strategy, _)| *strategy);
    draft.trim_excess(how);
    draft.replace_outdated(how);
    draft.fill(how);
    draft.explain();
    draft.into_plan(strategy)
}

// === impl Draft ===

impl<'a> Draft<'a> {
    fn new(goal: &'a Goal, pods: &'a [Pod]) -> Self {
        let fates = pods.iter().map(|pod| match pod.health {
            Health::Terminating { ours: true, overdue: false } => Fate::Leaves,
            Health::Terminating { .. } => Fate::Gone,
            _ => Fate::Stays,
        });
        Self {
            goal,
            pods,
            fates: fates.collect(),
            routable: count(pods.iter().filter(|pod| pod.routable())),
            free: if let Free::Slots(slots) = goal.free { slots } else { 0 },
            steps: Vec::new(),
            waits: Vec::new(),
        }
    }

    fn bury_the_dead(&mut self) {
        for at in 0..self.pods.len() {
            if self.pods[at].dead() {
                self.steps.push(Step::Delete { name: self.pods[at].name.clone(), why: Why::Dead });
                self.fates[at] = Fate::Gone;
            }
        }
    }

    /// A drained worker takes no work until its process starts anew, so a drain is always carried through.
    fn finish_drains(&mut self) {
        let in_place = matches!(self.goal.mode, Mode::Auto | Mode::InPlace);
        for at in 0..self.pods.len() {
            let pod = &self.pods[at];
            let Some(elapsed) = pod.draining.filter(|_| self.fates[at] == Fate::Stays) else { continue };
            let changes = in_place && self.differs_in_image_only(pod) && self.staying() <= self.goal.replicas;
            self.fates[at] = if changes { Fate::Changes } else { Fate::Leaves };
            if pod.in_flight != Some(0) && elapsed < self.goal.stream_max {
                let left = self.goal.stream_max.saturating_sub(elapsed);
                self.waits.push(Wait::Draining { pod: pod.name.clone(), in_flight: pod.in_flight, left });
            } else if changes {
                self.steps.push(self.patch(pod));
            } else {
                let why = if self.is_outdated(pod) { Why::Outdated } else { Why::Excess };
                self.steps.push(Step::Delete { name: pod.name.clone(), why });
            }
        }
    }

    fn trim_excess(&mut self, strategy: Option<Strategy>) {
        let Goal { replicas, max_surge, .. } = *self.goal;
        let surging = strategy == Some(Strategy::Surge) && replicas > 0;
        let most = if surging { replicas.saturating_add(max_surge) } else { replicas };
        let mut victims: Vec<usize> = self.indices(|_, _| true).collect();
        victims.sort_by_key(|&at| self.rank(at, !self.is_outdated(&self.pods[at])));
        for at in victims {
            if self.staying() <= most {
                break;
            }
            if self.pods[at].routable() && self.routable <= self.goal.floor() {
                self.waits.push(Wait::Budget { routable: self.routable, floor: self.goal.floor() });
                break;
            }
            self.take(at, Why::Excess);
        }
    }

    fn replace_outdated(&mut self, strategy: Option<Strategy>) {
        let mut outdated: Vec<usize> = self.indices(|draft, at| draft.is_outdated(&draft.pods[at])).collect();
        if outdated.is_empty() {
            return;
        }
        if self.goal.paused {
            self.waits.push(Wait::Paused { outdated: outdated.len() as u32 });
            return;
        }
        let Some(strategy) = strategy else { return };
        outdated.sort_by_key(|&at| self.rank(at, false));
        let floor = if strategy == Strategy::Surge { self.goal.replicas } else { self.goal.floor() };
        let (mut unproven, window) = (self.unproven(), self.window());
        for at in outdated {
            let pod = &self.pods[at];
            match pod.health {
                Health::Routable | Health::Unsettled if self.held() => {}
                Health::Routable if self.routable > floor => self.replace(at, strategy, Why::Outdated),
                Health::Routable => {
                    self.waits.push(Wait::Budget { routable: self.routable, floor });
                    break;
                }
                Health::Unsettled => self.waits.push(Wait::Unsettled { pod: pod.name.clone() }),
                _ if strategy != Strategy::InPlace && self.is_serving(pod) && unproven >= window => {}
                _ => {
                    unproven += 1;
                    self.replace(at, strategy, Why::OutdatedBroken);
                }
            }
        }
    }

    fn replace(&mut self, at: usize, strategy: Strategy, why: Why) {
        if strategy != Strategy::InPlace {
            return self.take(at, why);
        }
        let pod = &self.pods[at];
        let step = if pod.may_hold_streams() { Step::BeginDrain { name: pod.name.clone(), why } } else { self.patch(pod) };
        self.steps.push(step);
        self.routable -= u32::from(pod.routable());
        self.fates[at] = Fate::Changes;
    }

    fn take(&mut self, at: usize, why: Why) {
        let pod = &self.pods[at];
        let name = pod.name.clone();
        self.steps.push(if pod.may_hold_streams() { Step::BeginDrain { name, why } } else { Step::Delete { name, why } });
        self.routable -= u32::from(pod.routable());
        self.fates[at] = Fate::Leaves;
    }

    /// Creates what is missing, then what a surge allows.
    fn fill(&mut self, strategy: Option<Strategy>) {
        let Goal { replicas, max_surge, .. } = *self.goal;
        let mut taken: BTreeSet<u32> = self.pods.iter().map(|pod| pod.index).collect();
        let (mut staying, mut total) = (self.staying(), self.total());
        let (mut updated, mut unproven) = (self.updated(), self.unproven());
        let mut create = |draft: &mut Self, revision: &Revision| {
            let index = (0..=u32::MAX).find(|index| !taken.contains(index)).unwrap_or(u32::MAX);
            taken.insert(index);
            draft.steps.push(Step::Create { index, revision: revision.clone() });
        };
        while staying < replicas {
            if total >= replicas && (total >= replicas.saturating_add(max_surge) || self.free == 0) {
                break;
            }
            // A pod that is missing may wait for a device; whatever it takes is not there for a surge.
            self.free = self.free.saturating_sub(1);
            let revision = self.repair_revision(unproven);
            if *revision == self.goal.revision {
                updated += 1;
                unproven += 1;
            }
            create(self, revision);
            (staying, total) = (staying + 1, total + 1);
        }
        let outdated = self.indices(|draft, at| draft.is_outdated(&draft.pods[at])).next().is_some();
        if strategy != Some(Strategy::Surge) || self.goal.paused || !outdated {
            return;
        }
        while total < replicas.saturating_add(max_surge) && updated < replicas {
            if self.free == 0 {
                if staying <= replicas {
                    self.waits.push(Wait::NoFreeDevice);
                }
                break;
            }
            self.free -= 1;
            create(self, &self.goal.revision);
            (updated, total, staying) = (updated + 1, total + 1, staying + 1);
        }
    }

    /// What to make a lost pod from: the wanted revision, unless it has its window of unproven pods already and another one serves.
    fn repair_revision(&self, unproven: u32) -> &'a Revision {
        match &self.goal.serving {
            Some(serving) if self.goal.paused || unproven >= self.window() => serving,
            _ => &self.goal.revision,
        }
    }

    /// How many pods of the wanted revision may be unproven at once while another revision serves.
    fn window(&self) -> u32 {
        let protects = self.pods.iter().any(|pod| pod.routable() && self.is_serving(pod));
        if protects { self.goal.max_unavailable.saturating_add(self.goal.max_surge).max(1) } else { u32::MAX }
    }

    fn explain(&mut self) {
        let goal = self.goal;
        let mut waits = Vec::new();
        let rolling = self.indices(|draft, at| draft.is_outdated(&draft.pods[at])).next().is_some();
        if self.held() && rolling && !goal.paused {
            waits.push(match &goal.routers {
                RouterView::Unreachable(why) => Wait::RoutersUnreachable(why.clone()),
                RouterView::Known | RouterView::NoneReady => Wait::NoRouterReady,
            });
        }
        for (pod, fate) in self.pods.iter().zip(&self.fates) {
            let why = match (&pod.health, fate) {
                (Health::Terminating { .. }, Fate::Leaves) => {
                    waits.push(Wait::Terminating { pod: pod.name.clone() });
                    continue;
                }
                (_, Fate::Leaves | Fate::Gone) => continue,
                (Health::Routable, _) if pod.draining.is_none() => continue,
                _ if self.is_outdated(pod) => continue,
                (Health::Pending(Some(why)) | Health::Broken(why), _) => why.clone(),
                (Health::Pending(None), _) => "it is not placed on a node yet".to_owned(),
                (Health::Starting, _) => "it starts".to_owned(),
                _ => "not every Ready router takes it".to_owned(),
            };
            waits.push(Wait::Coming { pod: pod.name.clone(), why });
        }
        // What names a cause comes before what follows from it.
        waits.append(&mut self.waits);
        waits.sort_by_key(|wait| match wait {
            Wait::Paused { .. } => 0,
            Wait::NoRouterReady | Wait::RoutersUnreachable(_) => 1,
            Wait::NoFreeDevice => 2,
            Wait::Coming { .. } => 3,
            Wait::Draining { .. } => 4,
            Wait::Terminating { .. } => 5,
            Wait::Unsettled { .. } => 6,
            Wait::Budget { .. } => 7,
        });
        self.waits = waits;
    }

    fn into_plan(self, strategy: Option<(Strategy, Choice)>) -> Plan {
        let outdated = self.pods.iter().filter(|pod| !pod.dead() && !pod.terminating() && pod.revision != self.goal.revision);
        let current = self.indices(|draft, at| draft.pods[at].revision == draft.goal.revision);
        let report = Report {
            updated: self.updated(),
            updated_routable: count(current.filter(|&at| self.pods[at].routable())),
            outdated: count(outdated),
            routable: self.routable,
            waits: self.waits,
            strategy,
        };
        Plan { steps: self.steps, report }
    }

    // === questions ===

    fn strategy(&self) -> Option<(Strategy, Choice)> {
        let goal = self.goal;
        let alive = || self.pods.iter().filter(|pod| !pod.dead() && !pod.terminating());
        let mut outdated = alive().filter(|pod| pod.revision != goal.revision).peekable();
        outdated.peek()?;
        let only_image = outdated.all(|pod| pod.revision.shape == goal.revision.shape);
        let surge = |choice| match &goal.free {
            _ if goal.max_surge == 0 => (Strategy::SurgeFree, Choice::NoSurgeAllowed),
            Free::Unknown(why) => (Strategy::SurgeFree, Choice::DevicesUnknown(why.clone())),
            Free::Slots(_) => (Strategy::Surge, choice),
        };
        Some(match goal.mode {
            Mode::InPlace if only_image => (Strategy::InPlace, Choice::AsAsked),
            Mode::InPlace => (Strategy::SurgeFree, Choice::MoreThanTheImage),
            Mode::SurgeFree => (Strategy::SurgeFree, Choice::AsAsked),
            Mode::Surge => surge(Choice::AsAsked),
            Mode::Auto if only_image && goal.max_unavailable > 0 => (Strategy::InPlace, Choice::OnlyTheImage),
            Mode::Auto => {
                // A device that a surge under way holds, or that its old pod is about to give back, counts as free; else the choice would
                // flip at every step.
                let ours = alive().count() + self.fates.iter().filter(|fate| **fate == Fate::Leaves).count();
                let missing = goal.replicas.saturating_sub(ours as u32);
                let spare = if let Free::Slots(slots) = goal.free { slots.saturating_sub(missing) } else { 1 };
                let scarce = spare == 0 && ours <= goal.replicas as usize;
                if scarce && goal.max_unavailable > 0 {
                    (Strategy::SurgeFree, Choice::DevicesScarce)
                } else {
                    surge(Choice::DevicesFree)
                }
            }
        })
    }

    /// Whether what may serve must not be touched; a pool that shall have no pods has nothing to protect.
    fn held(&self) -> bool {
        self.goal.routers != RouterView::Known && self.goal.replicas > 0
    }

    fn differs_in_image_only(&self, pod: &Pod) -> bool {
        pod.revision.shape == self.goal.revision.shape && pod.revision.image != self.goal.revision.image
    }

    fn is_outdated(&self, pod: &Pod) -> bool {
        pod.revision != self.goal.revision
    }

    fn is_serving(&self, pod: &Pod) -> bool {
        self.is_outdated(pod) && self.goal.serving.as_ref() == Some(&pod.revision)
    }

    fn patch(&self, pod: &Pod) -> Step {
        Step::PatchImage { name: pod.name.clone(), image: self.goal.revision.image.clone() }
    }

    /// Order in which pods are taken: those that serve least first, then the emptiest, then the youngest.
    fn rank(&self, at: usize, wanted: bool) -> (u8, bool, u32, Duration, u32) {
        let pod = &self.pods[at];
        let health = match pod.health {
            Health::Broken(_) | Health::Dead(_) | Health::Terminating { .. } => 0,
            Health::Pending(_) => 1,
            Health::Starting => 2,
            Health::Unsettled => 3,
            Health::Routable => 4,
        };
        (health, wanted, pod.in_flight.unwrap_or(u32::MAX), pod.age, u32::MAX - pod.index)
    }

    fn indices<'b>(&'b self, keep: impl Fn(&Self, usize) -> bool + 'b) -> impl Iterator<Item = usize> + 'b {
        (0..self.pods.len()).filter(move |&at| self.fates[at] == Fate::Stays && keep(self, at))
    }

    fn staying(&self) -> u32 {
        count(self.fates.iter().filter(|fate| matches!(fate, Fate::Stays | Fate::Changes)))
    }

    fn total(&self) -> u32 {
        count(self.fates.iter().filter(|fate| **fate != Fate::Gone))
    }

    fn updated(&self) -> u32 {
        let pods = self.pods.iter().zip(&self.fates);
        count(pods.filter(|(pod, fate)| match fate {
            Fate::Stays => pod.revision == self.goal.revision,
            Fate::Changes => true,
            Fate::Leaves | Fate::Gone => false,
        }))
    }

    /// Pods of the wanted revision that are not routable.
    fn unproven(&self) -> u32 {
        count(self.indices(|draft, at| !draft.is_outdated(&draft.pods[at]) && !draft.pods[at].routable()))
    }
}

fn count<T>(items: impl Iterator<Item = T>) -> u32 {
    items.count() as u32
}
