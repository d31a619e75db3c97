//! Oracle: what a pool's status has to say at rest, computed from its spec, from pods and nodes, and from what routers know. It shares no code
//! with the operator, and says too whether a world is at rest at all.

use super::answers::{Seen, Truth, lacks_device};
use super::steps::Wish;
use k8s_openapi::api::core::v1::Node;
use serde_json::{Value, json};

/// What was observed.
pub struct World<'a> {
    pub wish: &'a Wish,
    pub truth: &'a Truth,
    pub nodes: &'a [Node],
    pub pool: &'a Value,
}

/// Why a worker does not serve and will not by itself.
fn stuck(seen: &Seen) -> Option<&'static str> {
    if lacks_device(&seen.pod) {
        return Some("InsufficientAccelerators");
    }
    let containers = seen.pod.status.as_ref().and_then(|status| status.container_statuses.as_ref());
    let waits = containers.and_then(|all| all.first()?.state.as_ref()?.waiting.as_ref()?.reason.clone());
    (waits.as_deref() == Some("CrashLoopBackOff")).then_some("WorkersCrashing")
}

// === impl World ===

impl World<'_> {
    fn workers(&self) -> Vec<(&String, &Seen)> {
        self.truth.workers().collect()
    }

    fn is_new(&self, seen: &Seen) -> bool {
        let container = &seen.pod.spec.as_ref().unwrap().containers[0];
        let flag = format!("--step-tokens={}", self.wish.tokens);
        container.image.as_deref() == Some(&*self.wish.image()) && container.args.iter().flatten().any(|arg| *arg == flag)
    }

    /// Devices that no pod has.
    fn free(&self) -> i64 {
        let on = |node: &str| {
            let placed = |seen: &Seen| !seen.dead && seen.pod.spec.as_ref().unwrap().node_name.as_deref() == Some(node);
            self.workers().iter().filter(|(_, seen)| placed(seen)).count() as i64
        };
        let node = |node: &Node| {
            let has = node.status.as_ref().and_then(|it| it.allocatable.as_ref()?.get("nvidia.com/gpu")?.0.parse::<i64>().ok());
            (has.unwrap_or_default() - on(node.metadata.name.as_deref().unwrap_or_default())).max(0)
        };
        self.nodes.iter().map(node).sum()
    }

    /// `Ok` if all is at rest and said as it is; else what is not.
    pub fn check(&self) -> Result<(), String> {
        let (workers, wish) = (self.workers(), self.wish);
        if let Some((_, seen)) = workers.iter().find(|(_, seen)| !seen.lives()) {
            return Err(format!("{} leaves", seen.name));
        }
        let routable = workers.iter().filter(|(uid, _)| self.truth.routable(uid)).count() as u32;
        let still: Vec<(&Seen, &'static str)> = workers.iter().filter_map(|(_, seen)| Some((*seen, stuck(seen)?))).collect();
        let moving = |uid: &String, seen: &Seen| !self.truth.routable(uid) && stuck(seen).is_none();
        if let Some((_, seen)) = workers.iter().find(|(uid, seen)| moving(uid, seen)) {
            return Err(format!("{} comes", seen.name));
        }
        let updated = workers.iter().filter(|(_, seen)| self.is_new(seen)).count() as u32;
        let (count, outdated) = (workers.len() as u32, workers.len() as u32 - updated);
        let troubles: Vec<&'static str> = still.iter().filter(|(seen, _)| self.is_new(seen)).map(|(_, why)| *why).collect();
        if self.free() > 0 && still.iter().any(|(_, why)| *why == "InsufficientAccelerators") {
            return Err("a device is free and a worker waits for one".to_owned());
        }
        // A surge that finds no device and may take nobody away waits for one.
        let surges = wish.mode == "Surge" || wish.mode == "Auto" && wish.away.is_zero();
        let starved = !wish.paused && outdated > 0 && troubles.is_empty() && surges && self.free() == 0;
        let excess = count > wish.replicas + if troubles.is_empty() { 0 } else { wish.most() - wish.replicas };
        if count < wish.replicas || excess || outdated > 0 && !wish.paused && troubles.is_empty() && !starved {
            return Err(format!("{count} workers, {outdated} of them outdated, for {} wished", wish.replicas));
        }
        let facts = Facts { routable, count, updated, outdated, troubles, starved };
        let differs: Vec<String> = self.expected(&facts).into_iter().filter_map(|line| self.differs(&line)).collect();
        if differs.is_empty() { Ok(()) } else { Err(differs.join("; ")) }
    }

    fn expected(&self, facts: &Facts) -> Vec<Line> {
        let wish = self.wish;
        let generation = self.pool["metadata"]["generation"].clone();
        let complete = facts.outdated == 0 && facts.routable >= wish.replicas && facts.troubles.is_empty();
        let ready = facts.count;
        let stuck_count = self.workers().iter().filter(|(_, seen)| stuck(seen).is_some()).count() as u32;
        let number = |path: &'static str, value: u32| Line::Field(path, json!(value));
        let mut lines = vec![
            Line::Field("/observedGeneration", generation),
            number("/replicas", facts.count),
            number("/readyReplicas", ready - stuck_count),
            number("/routableReplicas", facts.routable),
            number("/updatedReplicas", facts.updated),
            number("/desiredReplicas", wish.replicas),
            number("/routers/desired", 2),
            number("/routers/ready", 2),
        ];
        if complete {
            lines.push(Line::Field("/rollout", Value::Null));
        }
        let mut say = |kind, status, reasons: &[&'static str]| lines.push(Line::Condition(kind, status, reasons.to_vec()));
        match (facts.routable, wish.replicas) {
            (some, wished) if some >= wished && some > 0 => say("Ready", "True", &["Serving"]),
            (some, _) if some > 0 => say("Ready", "True", &["ServingWithFewer"]),
            (_, 0) => say("Ready", "True", &["ScaledToZero"]),
            _ if facts.troubles.contains(&"WorkersCrashing") => say("Ready", "False", &["WorkersCrashing", "NoRoutableWorkers"]),
            _ => say("Ready", "False", &["NoRoutableWorkers"]),
        }
        match () {
            () if complete => say("Progressing", "False", &["RolloutComplete"]),
            () if wish.paused && facts.outdated > 0 => say("Progressing", "False", &["Paused"]),
            () if facts.starved => say("Progressing", "True", &["InsufficientAccelerators"]),
            () => {
                let may = if surge_may_wait(wish) { &["InsufficientAccelerators"][..] } else { &[] };
                say("Progressing", "True", &[&facts.troubles, may].concat());
            }
        }
        if !facts.troubles.is_empty() {
            say("Degraded", "True", &facts.troubles);
        } else if facts.routable < wish.floor() {
            say("Degraded", "True", &["ServingWithFewer"]);
        } else {
            // Nothing is wrong; what is asked for and not there yet is said here, and that the devices are idle is all of it.
            say("Degraded", "True", &["NotYetSupported"]);
        }
        let reconciling = facts.starved || !facts.troubles.is_empty();
        if reconciling {
            say("Reconciling", "True", &["RollingOut", "Scaling", "WaitingForRoutable"]);
        } else {
            say("Reconciling", "False", &["AsExpected"]);
        }
        say("Stalled", "False", &["AsExpected"]);
        say("RoutersInSync", "True", &["InSync"]);
        say("DraftPlaced", "True", &["NoDraft"]);
        say("DraftCompatible", "True", &["NoDraft"]);
        if facts.routable > 0 {
            say("ModelResolved", "True", &["Resolved"]);
        }
        lines
    }

    fn differs(&self, line: &Line) -> Option<String> {
        let status = &self.pool["status"];
        match line {
            Line::Field(path, wanted) => {
                let got = status.pointer(path).cloned().unwrap_or_default();
                let zero = *wanted == json!(0) && got.is_null();
                (got != *wanted && !zero).then(|| format!("{path} is {got}, the oracle says {wanted}"))
            }
            Line::Condition(kind, wanted, reasons) => {
                let all = status["conditions"].as_array().cloned().unwrap_or_default();
                let Some(got) = all.into_iter().find(|it| it["type"] == *kind) else { return Some(format!("no {kind}")) };
                let known = got["reason"].as_str().is_some_and(|reason| reasons.contains(&reason));
                let newest = got["observedGeneration"] == self.pool["metadata"]["generation"];
                let same = got["status"] == *wanted && known && newest;
                (!same).then(|| format!("{got}, the oracle says {wanted} {reasons:?}"))
            }
        }
    }
}

/// Whether a surge without a device can be the first that is said.
fn surge_may_wait(wish: &Wish) -> bool {
    matches!(wish.mode, "Surge" | "Auto") && !wish.more.is_zero()
}

struct Facts {
    routable: u32,
    count: u32,
    updated: u32,
    outdated: u32,
    /// Why workers of the newest template do not serve.
    troubles: Vec<&'static str>,
    starved: bool,
}

/// One thing that status says.
enum Line {
    Field(&'static str, Value),
    Condition(&'static str, &'static str, Vec<&'static str>),
}
