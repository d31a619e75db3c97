//! Tell: what a pass says: status, events of what has changed in it, and a trace if it did something.
//!
//! Owns the comparison that keeps a status at rest from being written, and which differences of two statuses are worth an event. Refuses to
//! compute status ([`crate::status`]).

use super::events::Occurrence;
use super::memory::{Ending, version};
use super::observe::{Look, is_ready};
use super::pass::{Decided, Pass};
use crate::api::{ConditionReason, ConditionStatus, ConditionType, ServingPool, ServingPoolStatus};
use crate::apply::{FIELD_MANAGER, answered};
use crate::design::{Design, revision_hash};
use crate::names::{Component, Names, selector_text};
use crate::rollout::{self, Free, Goal, Health, Mode, Plan, Pod, Revision, RouterView};
use crate::status::{self, DraftFacts, Fault, ModelFacts, Observed, RouterFacts, RouterSync};
use crate::world::SeenPod;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, Patch, PatchParams};
use kube::runtime::reflector::ObjectRef;
use kube::{Resource as _, ResourceExt as _};
use kvasir_telemetry::names::span;
use serde_json::json;
use std::time::{Duration, SystemTime};
use tokio::time::Instant;

/// What is not known of a pool whose spec was never read.
const PROGRESS_DEADLINE: Duration = Duration::from_mins(15);

/// Parts of a status that differ from case to case; the rest is read off the look.
struct Words<'a> {
    goal: &'a Goal,
    plan: Option<&'a Plan>,
    pods: &'a [Pod],
    template_hash: String,
    model: ModelFacts,
    draft: Option<DraftFacts>,
    routers: RouterFacts,
}

// === impl Pass ===

impl Pass<'_> {
    /// Says how a pool is that was looked at.
    pub(super) async fn say(&mut self, design: &Design, look: &Look, decided: &Decided) {
        let ready = look.workers.iter().filter(|seen| is_ready(seen));
        let settled = ready.filter(|seen| seen.pod.draining.is_none()).map(|seen| (&*seen.pod.name, seen.ip.as_deref()));
        let words = Words {
            goal: &decided.goal,
            plan: Some(&decided.plan),
            pods: &decided.pods,
            template_hash: revision_hash(&decided.goal.revision),
            model: self.model(design, look, &decided.goal.revision),
            draft: design.draft.then(|| self.draft(design, look, decided)),
            routers: RouterFacts {
                desired: design.routers.replicas,
                ready: look.routers.len() as u32,
                sync: look.world.sync(settled, self.keys_version().as_deref()),
            },
        };
        let mut observed = self.observed(words, look.workers.iter().filter(|seen| is_ready(seen)).count());
        observed.selector = &design.selector;
        observed.link = design.link.as_deref();
        observed.survives = design.survives.as_deref();
        observed.progress_deadline = design.rollout.progress_deadline;
        observed.scaling.clone_from(&decided.scaling);
        observed.notes = design.notes.iter().chain(&decided.notes).cloned().collect();
        let new = status::compute(&observed, self.former().as_ref());
        self.write(new).await;
    }

    /// Says that a spec cannot be served, of a pool that this process has never seen otherwise.
    pub(super) async fn say_unserved(&mut self, look: &Look) {
        let pods: Vec<Pod> = look.workers.iter().map(|seen| seen.pod.clone()).collect();
        let goal = self.unknown_goal(&pods);
        let plan = Plan { steps: Vec::new(), ..rollout::plan(&goal, &pods) };
        let words = Words {
            goal: &goal,
            plan: Some(&plan),
            pods: &pods,
            template_hash: self.former().and_then(|status| status.template_hash).unwrap_or_default(),
            model: ModelFacts::default(),
            draft: None,
            routers: RouterFacts {
                desired: u32::try_from(self.pool.spec.router.replicas).unwrap_or(0),
                ready: look.routers.len() as u32,
                sync: look.world.sync(std::iter::empty(), None),
            },
        };
        let selector = selector_text(&Names::new(&self.pool.name_any()).selector(Component::Worker));
        let mut observed = self.observed(words, look.workers.iter().filter(|seen| is_ready(seen)).count());
        observed.selector = &selector;
        let new = status::compute(&observed, self.former().as_ref());
        self.write(new).await;
    }

    /// Pods could not be read: everything else stands, and the fault is said.
    pub(super) async fn say_blind(&mut self) {
        if let Some(former) = self.former() {
            self.restate(former, false).await;
        }
    }

    /// Says that the pool is being deleted, and does nothing else.
    pub(super) async fn say_deleting(&mut self) {
        let former = self.former().unwrap_or_default();
        self.restate(former, true).await;
    }

    /// The former status with only its conditions computed anew.
    async fn restate(&mut self, former: ServingPoolStatus, deleting: bool) {
        let goal = self.unknown_goal(&[]);
        let words = Words {
            goal: &goal,
            plan: None,
            pods: &[],
            template_hash: former.template_hash.clone().unwrap_or_default(),
            model: ModelFacts::default(),
            draft: None,
            routers: RouterFacts { desired: 0, ready: 0, sync: RouterSync::NoneReady },
        };
        let mut observed = self.observed(words, 0);
        observed.deleting = deleting;
        let computed = status::compute(&observed, Some(&former));
        let spoken = |kind: &str| deleting || kind == ConditionType::Reconciling.as_str();
        let mut new = former.clone();
        for condition in computed.conditions.into_iter().filter(|condition| spoken(&condition.condition_type)) {
            match new.conditions.iter_mut().find(|old| old.condition_type == condition.condition_type) {
                Some(old) => *old = condition,
                None => new.conditions.push(condition),
            }
        }
        if deleting {
            new.reason = Some(ConditionReason::Deleting.as_str().to_owned());
        }
        self.write(new).await;
    }

    fn observed<'w>(&self, words: Words<'w>, ready: usize) -> Observed<'w> {
        let mut faults = self.faults.clone();
        faults.sort_by_key(|fault| !fault.lasting());
        Observed {
            generation: self.pool.metadata.generation,
            deleting: false,
            goal: words.goal,
            plan: words.plan,
            pods: words.pods,
            ready,
            selector: "",
            template_hash: words.template_hash,
            link: None,
            survives: None,
            progress_deadline: PROGRESS_DEADLINE,
            model: words.model,
            draft: words.draft,
            routers: words.routers,
            scaling: None,
            faults,
            notes: Vec::new(),
            now: self.context.clock.time(),
        }
    }

    /// A goal for counting what exists, where it is not known what is wanted.
    fn unknown_goal(&self, pods: &[Pod]) -> Goal {
        let nothing = Revision { shape: String::new(), image: String::new() };
        Goal {
            replicas: u32::try_from(self.pool.spec.replicas).unwrap_or(0),
            revision: rollout::serving(&nothing, pods).unwrap_or(nothing),
            serving: None,
            mode: Mode::Auto,
            max_unavailable: 1,
            max_surge: 0,
            free: Free::Slots(0),
            paused: true,
            stream_max: Duration::ZERO,
            routers: RouterView::Unreachable("the pool's spec cannot be served as written".to_owned()),
        }
    }

    fn draft(&self, design: &Design, look: &Look, decided: &Decided) -> DraftFacts {
        let described = |seen: &SeenPod| self.memory.described.get(&(seen.uid.clone(), seen.restarts)).cloned();
        let draft = look.drafts.iter().find_map(described);
        let target = look.workers.iter().find_map(described);
        let wanted = design.drafts.as_ref().map_or(0, |(_, replicas)| *replicas);
        let ready = look.drafts.iter().filter(|seen| is_ready(seen)).count() as u32;
        let waits = look.drafts.iter().find_map(|seen| match &seen.pod.health {
            Health::Pending(Some(why)) | Health::Broken(why) => {
                Some((status::pod_reason(why), format!("pod {}: {why}", seen.pod.name)))
            }
            _ => None,
        });
        // A pair that waits for linked devices is a worker that waits.
        let unlinked = design.link.as_deref().and_then(|link| {
            look.workers.iter().find_map(|seen| match &seen.pod.health {
                Health::Pending(Some(why)) if status::lacks_claim(why) => {
                    let text =
                        format!("pod {}: no node has free devices for target and draft with the same {link}", seen.pod.name);
                    Some((ConditionReason::NoLinkedDevices, format!("{text} ({why})")))
                }
                _ => None,
            })
        });
        let placeable = |reason: &ConditionReason| reason.types().contains(&ConditionType::DraftPlaced);
        DraftFacts {
            same_tokenizer: draft.as_ref().zip(target.as_ref()).map(|(draft, target)| draft.tokenizer == target.tokenizer),
            digest: draft.map(|draft| draft.weights),
            placed: design.drafts.is_some() && wanted > 0 && ready >= wanted,
            misplaced: if decided.without_draft {
                let text = "no node has free devices for target and draft together, so the pool is served without its draft";
                Some((ConditionReason::ServingWithoutDraft, text.to_owned()))
            } else {
                unlinked.or_else(|| waits.filter(|(reason, _)| placeable(reason)))
            },
            replicas: look
                .drafts
                .iter()
                .filter(|seen| !matches!(seen.pod.health, Health::Terminating { .. } | Health::Dead(_)))
                .count() as u32,
            ready,
        }
    }

    /// Version of the Secret that routers read their keys from.
    fn keys_version(&self) -> Option<String> {
        let name = Names::new(&self.pool.name_any()).keys();
        let reference = ObjectRef::new(&name).within(&self.pool.namespace().unwrap_or_default());
        self.context.caches.secrets.get(&reference)?.resource_version()
    }

    /// The newest status that is known: the cache's, or our own that it does not show yet.
    pub(super) fn former(&self) -> Option<ServingPoolStatus> {
        match &self.memory.status {
            Some((written, status)) if version(self.pool).is_none_or(|cached| cached < *written) => Some(status.clone()),
            _ => self.pool.told().cloned(),
        }
    }

    /// Writes a status, if it says something else than the former one.
    async fn write(&mut self, new: ServingPoolStatus) {
        self.context.memories.note(self.pool, phase(&new), &self.existing());
        let former = self.former();
        let since = self.memory.status_at.map_or(status::LIVE_INTERVAL, |at| at.elapsed());
        let new = match &former {
            Some(former) => status::throttle(new, former, since),
            None => new,
        };
        if former.as_ref() == Some(&new) || self.lost_lead() {
            return;
        }
        self.occurrences.extend(differences(former.as_ref(), &new));
        let namespace = self.pool.namespace().unwrap_or_default();
        let api: Api<ServingPool> = Api::namespaced(self.context.client.clone(), &namespace);
        let body = json!({"apiVersion": ServingPool::api_version(&()), "kind": ServingPool::kind(&()),
            "metadata": {"name": self.pool.name_any(), "namespace": namespace, "uid": self.pool.uid()}, "status": new});
        let params = PatchParams::apply(FIELD_MANAGER).force();
        match answered(api.patch_status(&self.pool.name_any(), &params, &Patch::Apply(body))).await {
            Ok(written) => {
                self.writes += 1;
                self.memory.status = version(&written).map(|version| (version, new));
                self.memory.status_at = Some(Instant::now());
            }
            // The pool is gone, or another one has its name: nothing is to be said of this one.
            Err(error) if error.is_not_found() || error.is_conflict() => {}
            Err(error) => self.request_failed(&error, "patch", "status of the pool"),
        }
    }
}

/// Whether the scheduler's words say that devices are missing.
pub(super) fn lacks_devices(why: &str) -> bool {
    status::pod_reason(why) == ConditionReason::InsufficientAccelerators
}

fn phase(status: &ServingPoolStatus) -> &'static str {
    let is = |kind: ConditionType, wanted: ConditionStatus| {
        status.conditions.iter().any(|it| it.condition_type == kind.as_str() && it.status == wanted)
    };
    match &status.rollout {
        _ if is(ConditionType::Stalled, ConditionStatus::True) => "stalled",
        _ if !is(ConditionType::Ready, ConditionStatus::True) => "not_ready",
        Some(rollout) if rollout.hold.is_some() => "held",
        Some(_) => "rolling",
        None => "ready",
    }
}

/// What a person wants to know of the difference of two statuses.
fn differences(former: Option<&ServingPoolStatus>, new: &ServingPoolStatus) -> Vec<Occurrence> {
    let mut told = Vec::new();
    for kind in [ConditionType::Ready, ConditionType::Degraded, ConditionType::Stalled] {
        let find = |status: &ServingPoolStatus| status.conditions.iter().find(|it| it.condition_type == kind.as_str()).cloned();
        let (old, Some(now)) = (former.and_then(find), find(new)) else { continue };
        let good = if kind == ConditionType::Ready { ConditionStatus::True } else { ConditionStatus::False };
        let same = old.as_ref().is_some_and(|old| old.status == now.status && (now.status == good || old.reason == now.reason));
        // A pool that begins is not ready, and nobody is surprised.
        let begins = old.is_none() && (now.status == good || kind != ConditionType::Stalled);
        let Some(reason) = ConditionReason::ALL.iter().find(|reason| reason.as_str() == now.reason) else { continue };
        if same || begins {
            continue;
        }
        let text = format!("{kind} is {:?}: {}", now.status, now.message);
        told.push(if now.status == good {
            Occurrence::normal(reason.as_str(), "Observe", text)
        } else {
            Occurrence::warning(reason.as_str(), "Observe", text)
        });
    }
    let (before, now) = (former.and_then(|status| status.rollout.as_ref()), new.rollout.as_ref());
    match (before, now) {
        (old, Some(rollout)) if old.is_none_or(|old| old.to != rollout.to) => {
            let why = rollout.mode_message.as_deref().unwrap_or("workers are made");
            told.push(Occurrence::normal(
                "RolloutStarted",
                "Roll",
                format!("rolling to {} ({:?}): {why}", rollout.to, rollout.mode),
            ));
        }
        (Some(old), None) => told.push(Occurrence::normal("RolloutComplete", "Roll", format!("every worker is of {}", old.to))),
        _ => {}
    }
    let hold = |rollout: Option<&crate::api::RolloutStatus>| rollout.and_then(|it| it.hold.as_ref()).map(|it| it.reason.clone());
    if let Some(held) = now.and_then(|rollout| rollout.hold.as_ref()).filter(|held| hold(before).as_ref() != Some(&held.reason)) {
        told.push(Occurrence::normal("RolloutWaits", "Roll", format!("{}: {}", held.reason, held.message)));
    }
    let desired = |status: Option<&ServingPoolStatus>| status.and_then(|status| status.desired_replicas);
    if let (Some(old), Some(now)) = (desired(former), desired(Some(new)))
        && old != now
    {
        let why = new
            .scaling
            .as_ref()
            .and_then(|scaling| scaling.message.clone())
            .unwrap_or_else(|| "spec.replicas changed".to_owned());
        told.push(Occurrence::normal("Scaled", "Scale", format!("{old} to {now} workers: {why}")));
    }
    told
}

/// Exports a trace of a pass that wrote something or failed; at rest there is nothing to see.
pub(super) fn trace(pass: &Pass<'_>, began: Timestamp, ending: Ending) {
    if pass.writes == 0 && ending != Ending::Failed {
        return;
    }
    let root = pass.context.tracer.start_at(span::RECONCILE, SystemTime::from(began));
    root.set("k8s.namespace.name", pass.pool.namespace().unwrap_or_default());
    root.set("kvasir.pool", pass.pool.name_any());
    root.set("kvasir.writes", pass.writes);
    if !pass.created.is_empty() {
        root.set("kvasir.pods_created", pass.created.join(","));
    }
    root.stages(root.started(), &pass.stages);
    if let Some(Fault { reason, .. }) = pass.faults.first() {
        root.fail(reason.as_str());
    }
}
