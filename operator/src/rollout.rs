//! Rollout: what to do with the pods of one pool now, and why nothing more can be done.
//!
//! Owns the decision: from a goal and the pods that exist to a list of steps and a report. Refuses to know Kubernetes objects, clocks and
//! sockets: the caller measures ages, asks routers and counts free devices. Called by the controller at each reconcile; pure.
//!
//! Invariants (held by `tests/simulation.rs` over random worlds)
//! 1. No step takes a routable pod away while fewer than `replicas - max_unavailable` would stay; in a surge fewer than `replicas`.
//! 2. No pod is created beyond `replicas + max_surge`, those that we are removing included; what someone else evicts is replaced at once.
//! 3. A pod beyond `replicas` is created only onto a device that is known to be free.
//! 4. A pod that may hold streams is deleted only after a drain that has ended: nothing in flight, or `stream_max` has passed.
//! 5. A pod of the wanted revision is never taken for a rollout, only for having too many pods; so a revert keeps the serving pods.
//! 6. Pods that cannot serve are replaced without asking a budget, so they never block; while routers cannot be asked, nothing that may
//!    serve is rolled.
//! 7. A wanted revision that does not come up takes at most its window of pods: what is lost beyond it comes back in the serving revision.
//!
//! Cost: O(pods log pods) per call.

mod plan;

pub use plan::plan;

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

/// What a pod was made from. Pods of one shape differ in nothing but the image, so an image can change in place.
#[derive(Clone, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct Revision {
    /// Hash of the pod template without its image.
    pub shape: String,
    /// The worker's image.
    pub image: String,
}

/// How pods are replaced, as the user asks for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// In place if only the image changes, else surge-free when devices are scarce, else surge.
    Auto,
    /// In place; a change of anything but the image is rolled surge-free.
    InPlace,
    /// Old pod away, then new pod.
    SurgeFree,
    /// New pod first, then old pod away.
    Surge,
}

/// How many more worker pods the cluster could place now.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Free {
    /// Counted: this many.
    Slots(u32),
    /// Not countable, with the reason for people.
    Unknown(String),
}

/// Whether the routers can say who is routable.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum RouterView {
    /// Every Ready router answered.
    Known,
    /// There is no Ready router.
    NoneReady,
    /// A Ready router could not be asked, with the reason.
    Unreachable(String),
}

/// What is wanted.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Goal {
    /// Pods that should serve.
    pub replicas: u32,
    /// What they should be made from.
    pub revision: Revision,
    /// What lost pods may be made from while the wanted revision has not proven itself; see [`serving`].
    pub serving: Option<Revision>,
    /// How to get there.
    pub mode: Mode,
    /// How many of `replicas` may be unroutable by our own doing.
    pub max_unavailable: u32,
    /// How many pods there may be beyond `replicas`.
    pub max_surge: u32,
    /// Room for more pods.
    pub free: Free,
    /// Repair what is lost, but roll nothing.
    pub paused: bool,
    /// Longest stream: a drain that lasts this long has ended.
    pub stream_max: Duration,
    /// Whether routers could be asked.
    pub routers: RouterView,
}

/// How a pod is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Health {
    /// Not placed on a node, with the scheduler's reason if it gave one.
    Pending(Option<String>),
    /// On a node, never ready yet.
    Starting,
    /// Ready, and every Ready router takes it.
    Routable,
    /// Was ready or is ready, but not every router takes it at the moment.
    Unsettled,
    /// Cannot serve and has not been able to for long enough to say so.
    Broken(String),
    /// Has ended for good (phase Failed or Succeeded).
    Dead(String),
    /// Being deleted.
    Terminating {
        /// Whether we asked for it.
        ours: bool,
        /// Whether its grace period is over, so that its node is probably lost.
        overdue: bool,
    },
}

/// One pod as the planner sees it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Pod {
    /// Name.
    pub name: String,
    /// Its place among the pool's pods; the name is made from it.
    pub index: u32,
    /// What it was made from.
    pub revision: Revision,
    /// How it is.
    pub health: Health,
    /// How long ago its drain began.
    pub draining: Option<Duration>,
    /// Requests in flight, if known. A pod whose container does not run has none.
    pub in_flight: Option<u32>,
    /// Time since its creation.
    pub age: Duration,
}

/// Why a pod is taken away.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Why {
    /// It has ended; another takes its place.
    Dead,
    /// There are more pods than wanted.
    Excess,
    /// Another revision is wanted.
    Outdated,
    /// Another revision is wanted and this one cannot serve.
    OutdatedBroken,
}

/// One thing to do.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Step {
    /// Create the pod of this index.
    Create {
        /// Lowest index that no pod has.
        index: u32,
        /// What to make it from.
        revision: Revision,
    },
    /// Change the image of a pod where it stands.
    PatchImage {
        /// Which.
        name: String,
        /// To what.
        image: String,
    },
    /// Tell the worker and with it the routers that nothing new may come.
    BeginDrain {
        /// Which.
        name: String,
        /// Why.
        why: Why,
    },
    /// Delete a pod that holds no stream.
    Delete {
        /// Which.
        name: String,
        /// Why.
        why: Why,
    },
}

/// How pods are being replaced.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Strategy {
    /// The image changes in the running pod.
    InPlace,
    /// Old pod away, then new pod.
    SurgeFree,
    /// New pod first.
    Surge,
}

/// Why a strategy was chosen.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Choice {
    /// As the user asked.
    AsAsked,
    /// Only the image differs.
    OnlyTheImage,
    /// More than the image differs, so it cannot be done in place.
    MoreThanTheImage,
    /// A device is free for a surge pod.
    DevicesFree,
    /// No device is free for a surge pod.
    DevicesScarce,
    /// Free devices cannot be counted, with the reason.
    DevicesUnknown(String),
    /// `max_surge` is 0.
    NoSurgeAllowed,
}

/// Why something that is wanted is not done now.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Wait {
    /// `paused` is set and this many pods are outdated.
    Paused {
        /// How many.
        outdated: u32,
    },
    /// No router is Ready, so nothing that may serve is touched.
    NoRouterReady,
    /// A router cannot be asked, so nothing that may serve is touched.
    RoutersUnreachable(String),
    /// A drain has not ended.
    Draining {
        /// Which pod.
        pod: String,
        /// Requests in flight, if known.
        in_flight: Option<u32>,
        /// Longest time that it can still last.
        left: Duration,
    },
    /// A pod that was deleted is not gone.
    Terminating {
        /// Which pod.
        pod: String,
    },
    /// A new pod is not routable yet.
    Coming {
        /// Which pod.
        pod: String,
        /// What it waits for or suffers from.
        why: String,
    },
    /// An old pod is unroutable for the moment; it is left alone until it has settled.
    Unsettled {
        /// Which pod.
        pod: String,
    },
    /// Taking another pod would break the budget.
    Budget {
        /// Routable now.
        routable: u32,
        /// Must stay routable.
        floor: u32,
    },
    /// A surge pod has no device.
    NoFreeDevice,
}

/// What the plan is about, for status and events.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Report {
    /// How pods are replaced; absent when none is outdated.
    pub strategy: Option<(Strategy, Choice)>,
    /// Pods of the wanted revision that stay.
    pub updated: u32,
    /// Of these the routable ones.
    pub updated_routable: u32,
    /// Pods of other revisions that exist.
    pub outdated: u32,
    /// Routable pods that are not being taken away.
    pub routable: u32,
    /// Why nothing more is done, most telling first; empty when nothing more is wanted.
    pub waits: Vec<Wait>,
}

/// What to do and what to say.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Plan {
    /// In this order.
    pub steps: Vec<Step>,
    /// About the state after them.
    pub report: Report,
}

/// The revision that serves beside the wanted one: of the others the one with most routable pods, then with most pods. It is read from the pods
/// alone, so a controller that restarts in mid-rollout finds the same.
pub fn serving(wanted: &Revision, pods: &[Pod]) -> Option<Revision> {
    let mut counts: BTreeMap<&Revision, (usize, usize)> = BTreeMap::new();
    for pod in pods.iter().filter(|pod| pod.revision != *wanted && !pod.dead() && !pod.terminating()) {
        let count = counts.entry(&pod.revision).or_default();
        *count = (count.0 + usize::from(pod.routable()), count.1 + 1);
    }
    counts.into_iter().max_by_key(|(_, count)| *count).map(|(revision, _)| revision.clone())
}

// === impl Goal ===

impl Goal {
    /// Pods that must stay routable whatever we do ourselves.
    pub fn floor(&self) -> u32 {
        self.replicas.saturating_sub(self.max_unavailable)
    }
}

// === impl Pod ===

impl Pod {
    fn terminating(&self) -> bool {
        matches!(self.health, Health::Terminating { .. })
    }

    fn dead(&self) -> bool {
        matches!(self.health, Health::Dead(_))
    }

    fn routable(&self) -> bool {
        self.health == Health::Routable && self.draining.is_none()
    }

    /// Whether a drain has to come before the deletion.
    fn may_hold_streams(&self) -> bool {
        match self.health {
            Health::Routable | Health::Unsettled => true,
            Health::Pending(_) | Health::Dead(_) | Health::Terminating { .. } => false,
            Health::Starting | Health::Broken(_) => self.in_flight != Some(0),
        }
    }
}

// === impl Plan ===

impl Plan {
    /// Whether the pods are as wanted: all of the wanted revision, as many as asked for, all routable, and nothing under way.
    pub fn settled(&self) -> bool {
        self.steps.is_empty() && self.report.waits.is_empty()
    }
}

// === text for people ===

impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::InPlace => "InPlace",
            Self::SurgeFree => "SurgeFree",
            Self::Surge => "Surge",
        })
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AsAsked => f.write_str("as rollout.mode asks"),
            Self::OnlyTheImage => f.write_str("only the image changes"),
            Self::MoreThanTheImage => f.write_str("more than the image changes, which cannot be done in place"),
            Self::DevicesFree => f.write_str("a device is free for a surge pod"),
            Self::DevicesScarce => f.write_str("no device is free for a surge pod"),
            Self::DevicesUnknown(why) => write!(f, "free devices are not known: {why}"),
            Self::NoSurgeAllowed => f.write_str("rollout.maxSurge is 0"),
        }
    }
}

impl fmt::Display for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Paused { outdated } => write!(f, "the pool is paused with {outdated} outdated pods"),
            Self::NoRouterReady => f.write_str("no router is Ready, so nothing that may serve is touched"),
            Self::RoutersUnreachable(why) => write!(f, "a router cannot be asked who is routable: {why}"),
            // No live figure here: this text goes into status, which is written when it changes.
            Self::Draining { pod, .. } => {
                write!(f, "pod {pod} drains; it goes on when nothing is in flight or maxStreamDuration has passed")
            }
            Self::Terminating { pod } => write!(f, "pod {pod} is not gone yet"),
            Self::Coming { pod, why } => write!(f, "pod {pod} is not routable yet: {why}"),
            Self::Unsettled { pod } => write!(f, "pod {pod} is not taken by every router at the moment"),
            Self::Budget { routable, floor } => write!(
                f,
                "{routable} pods are routable and {floor} must stay so; allow more with rollout.maxUnavailable or repair the others"
            ),
            Self::NoFreeDevice => f.write_str("no device is free for a surge pod"),
        }
    }
}

#[cfg(test)]
mod tests;
