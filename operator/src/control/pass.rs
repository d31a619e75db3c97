//! Pass: one look at one pool, from what it asks for to what it says of itself.
//!
//! Owns the order, and what a pass gathers on its way: faults, writes, things to tell, times. Each part of the order is a method here or in a
//! module beside; none of them ends the pass early, so that status is always told.

use super::Context;
use super::events::Occurrence;
use super::memory::{Ending, Memory};
use super::observe::{Look, owner};
use super::steps::Role;
use super::tell;
use crate::api::{ConditionReason, ScalingStatus, ServingPool};
use crate::apply::{Action as Applied, Applied as Outcome, Desired, RequestError};
use crate::design::{Design, Template, revision_hash};
use crate::names::Names;
use crate::rollout::{self, Free, Goal, Mode, Plan, Pod, Revision, RouterView, Step};
use crate::status::{Fault, Note};
use crate::world::{RouterPod, RouterWorld, SeenPod};
use kube::ResourceExt as _;
use kube::runtime::controller::Action;
use kvasir_telemetry::names::span;
use std::collections::HashSet;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// A pod that waits for devices so long waits for a pair that does not come.
const PAIR_WAIT: Duration = Duration::from_secs(15);

/// One look at one pool.
pub(super) struct Pass<'a> {
    pub(super) context: &'a Context,
    pub(super) pool: &'a ServingPool,
    pub(super) memory: &'a mut Memory,
    /// What went wrong.
    pub(super) faults: Vec<Fault>,
    /// Whether something went wrong that another try may mend.
    failed: bool,
    /// What was written.
    pub(super) writes: u32,
    /// What to tell.
    pub(super) occurrences: Vec<Occurrence>,
    /// Whom to tell of drains.
    pub(super) told: Option<(Arc<Design>, Vec<RouterPod>, RouterWorld)>,
    pub(super) stages: Vec<(&'static str, Duration)>,
    /// Pods that were created, for the trace.
    pub(super) created: Vec<String>,
}

/// What was decided on workers.
pub(super) struct Decided {
    pub(super) goal: Goal,
    pub(super) plan: Plan,
    /// What the plan saw.
    pub(super) pods: Vec<Pod>,
    /// Whether the draft is left out because no pair of devices was found.
    pub(super) without_draft: bool,
    /// Whether draft pods are as wanted.
    pub(super) drafts_settled: bool,
    pub(super) scaling: Option<ScalingStatus>,
    pub(super) notes: Vec<Note>,
}

/// Looks at a pool once.
pub(super) async fn reconcile(pool: Arc<ServingPool>, context: Arc<Context>) -> Result<Action, Infallible> {
    if !context.gate.is_open() {
        // Whoever begins to lead looks at every pool.
        return Ok(Action::await_change());
    }
    let (started, began) = (Instant::now(), context.clock.now());
    let mut memory = context.memories.of(&pool).await;
    let mut pass = Pass::new(&context, &pool, &mut memory);
    let settled = pass.run().await;
    let ending = pass.ending(settled);
    tell::trace(&pass, began, ending);
    let (writes, occurrences) = (pass.writes, std::mem::take(&mut pass.occurrences));
    for occurrence in &occurrences {
        context.recorder.publish(&pool, occurrence).await;
    }
    let outcome = match ending {
        Ending::Failed => "fault",
        _ if writes > 0 => "changed",
        _ => "rest",
    };
    context.metrics.reconciled(outcome, started.elapsed());
    Ok(Action::requeue(memory.delay(&pool.uid().unwrap_or_default(), ending, context.settings.rest)))
}

// === impl Pass ===

impl<'a> Pass<'a> {
    fn new(context: &'a Context, pool: &'a ServingPool, memory: &'a mut Memory) -> Self {
        Self {
            context,
            pool,
            memory,
            faults: Vec::new(),
            failed: false,
            writes: 0,
            occurrences: Vec::new(),
            told: None,
            stages: Vec::new(),
            created: Vec::new(),
        }
    }

    /// Everything in its order; whether all is as wanted.
    async fn run(&mut self) -> bool {
        if self.pool.metadata.deletion_timestamp.is_some() {
            self.say_deleting().await;
            return true;
        }
        let made = self.design().await;
        if let Some((_, objects)) = &made {
            let at = Instant::now();
            self.apply(objects).await;
            self.stages.push((span::APPLY, at.elapsed()));
        }
        let design = made.map(|(design, _)| design);
        // A spec that cannot be served changes nothing; what was made from the last one is still looked after by routers and kubelet.
        let known = design.clone().or_else(|| self.memory.design.clone());
        let at = Instant::now();
        let Some(look) = self.look(known.as_ref()).await else {
            self.say_blind().await;
            return false;
        };
        self.open_gates(&look).await;
        self.stages.push((span::OBSERVE, at.elapsed()));
        let Some(known) = known else {
            self.say_unserved(&look).await;
            return self.faults.iter().all(Fault::lasting);
        };
        let at = Instant::now();
        let decided = self.decide(&known, &look, design.is_some()).await;
        self.stages.push((span::STEPS, at.elapsed()));
        let at = Instant::now();
        self.say(&known, &look, &decided).await;
        self.stages.push((span::STATUS, at.elapsed()));
        let in_sync = look.world.view() == &RouterView::Known || decided.goal.replicas == 0;
        decided.plan.settled() && decided.drafts_settled && in_sync && known.bearer.is_some()
    }

    /// What the pool asks for, if it can be served, and its objects. Only the first outlives the pass: objects are large, and stand in the cache.
    async fn design(&mut self) -> Option<(Arc<Design>, Vec<Desired>)> {
        let at = Instant::now();
        let references = self.context.blueprint.references(self.pool);
        let found = self.context.references.find(self.pool, &references, &self.context.caches).await;
        self.stages.push((span::FETCH, at.elapsed()));
        let found = match found {
            Ok(found) => found,
            Err(fault) => {
                self.failed = true;
                self.fault(fault);
                return None;
            }
        };
        let at = Instant::now();
        let design = self.context.blueprint.design(self.pool, &found);
        self.stages.push((span::DESIGN, at.elapsed()));
        match design {
            Ok(mut design) => {
                let objects = std::mem::take(&mut design.objects);
                let design = Arc::new(design);
                self.memory.design = Some(Arc::clone(&design));
                Some((design, objects))
            }
            Err(faults) => {
                for fault in faults {
                    self.fault(fault);
                }
                None
            }
        }
    }

    /// Brings every object but pods to what it should be.
    async fn apply(&mut self, objects: &[Desired]) {
        let owner = match owner(self.pool) {
            Ok(owner) => owner,
            Err(fault) => return self.fault(fault),
        };
        let caches = &self.context.caches;
        let (known, unknown): (Vec<_>, Vec<_>) =
            objects.iter().partition(|desired: &&Desired| caches.trouble(&desired.resource).is_none());
        let outcome = self.context.applier.apply(&owner, known, |desired| caches.live(desired)).await;
        self.took(outcome);
        let mut kinds: Vec<&str> = Vec::new();
        for desired in unknown {
            if let Some(trouble) = caches.trouble(&desired.resource).filter(|_| !kinds.contains(&&*desired.resource.kind)) {
                kinds.push(&desired.resource.kind);
                self.failed = true;
                let message = format!("{}; objects of this kind are left as they are", trouble.message);
                self.fault(Fault::new(trouble.reason, message));
            }
        }
        if self.lost_lead() {
            return;
        }
        let names = Names::new(&self.pool.name_any());
        let live = caches.of_pool(&self.pool.namespace().unwrap_or_default(), names.stem());
        let outcome = self.context.applier.prune(&owner, objects, live.into_iter()).await;
        self.took(outcome);
    }

    fn took(&mut self, outcome: Outcome) {
        let of = |action: Applied| {
            let objects: Vec<&str> = outcome.changes.iter().filter(|it| it.action == action).map(|it| &*it.object).collect();
            (!objects.is_empty()).then(|| objects.join(", "))
        };
        // One pass may write many objects at once; they are one occurrence.
        let told = [
            of(Applied::Created).map(|objects| Occurrence::normal("Created", "Apply", format!("created {objects}"))),
            of(Applied::Updated).map(|objects| Occurrence::normal("Updated", "Apply", format!("updated {objects}"))),
            of(Applied::Pruned)
                .map(|objects| Occurrence::normal("Removed", "Delete", format!("removed {objects}: not needed any more"))),
        ];
        self.occurrences.extend(told.into_iter().flatten());
        for change in &outcome.changes {
            self.writes += 1;
            tracing::info!(pool = self.name(), action = ?change.action, object = change.object, field = change.field, "wrote an object");
            if change.action == Applied::Repaired {
                let field = change.field.as_deref().unwrap_or("a field");
                let text = format!("put {} right: {field} had been changed by someone else", change.object);
                self.occurrences.push(Occurrence::warning(ConditionReason::DriftRepaired.as_str(), "Apply", text));
            }
        }
        for fault in outcome.faults {
            self.failed = true;
            self.fault(fault);
        }
    }

    /// Plans and, if the spec can be served, carries out.
    async fn decide(&mut self, design: &Design, look: &Look, may_act: bool) -> Decided {
        let former = self.former().and_then(|status| status.template_hash);
        let (target, without_draft) = target(design, look, former.as_deref());
        let wanted = target.revision();
        let scaled = self.scale(design, look).await;
        let (replicas, scaling, mut notes) = scaled;
        let pods: Vec<Pod> = look.workers.iter().map(|seen| seen.pod.clone()).collect();
        let recalled = |revision: &Revision| {
            look.workers.iter().filter_map(|seen| seen.template.as_deref()).any(|text| target.recall(text, revision).is_some())
        };
        let rules = &design.rollout;
        let mut goal = Goal {
            replicas,
            serving: rollout::serving(&wanted, &pods).filter(recalled),
            revision: wanted,
            mode: rules.mode,
            max_unavailable: rules.max_unavailable,
            max_surge: rules.max_surge,
            free: Free::Slots(0),
            paused: rules.paused || !may_act,
            stream_max: rules.stream_max,
            routers: look.world.view().clone(),
        };
        let mut plan = rollout::plan(&goal, &pods);
        // Devices are counted only where the plan depends on them.
        let plenty = rollout::plan(&Goal { free: Free::Slots(u32::MAX), ..goal.clone() }, &pods);
        let counted = if plan == plenty {
            None
        } else {
            let guard = self.context.room.lock().await;
            goal.free = super::room::free(self.context, &target).await;
            plan = rollout::plan(&goal, &pods);
            Some(guard).filter(|_| plan.steps.iter().any(|step| matches!(step, Step::Create { .. })))
        };
        // Pods read what components show each other when they start, so it has to exist first.
        let acts = may_act && design.bearer.is_some();
        if acts {
            let role = Role { template: &target, seen: &look.workers, fresh: look.fresh };
            self.carry_out(&role, &plan.steps).await;
        }
        drop(counted);
        let drafts_settled = self.tend_drafts(design, look, acts).await;
        if let Some((_, rollout::Choice::DevicesUnknown(why))) = &plan.report.strategy {
            notes.push(Note { reason: ConditionReason::DevicesUnknown, message: format!("rollouts do not surge: {why}") });
        }
        Decided { goal, plan, pods, without_draft, drafts_settled, scaling, notes }
    }

    /// Draft pods are replaced one by one; no router knows them.
    async fn tend_drafts(&mut self, design: &Design, look: &Look, acts: bool) -> bool {
        let wanted = design.drafts.as_ref();
        if wanted.is_none() && look.drafts.is_empty() {
            return true;
        }
        let (template, replicas) = wanted.map_or((&design.workers, 0), |(template, replicas)| (template, *replicas));
        let pods: Vec<Pod> = look.drafts.iter().map(|seen| seen.pod.clone()).collect();
        let goal = Goal {
            replicas,
            revision: template.revision(),
            serving: None,
            mode: Mode::SurgeFree,
            max_unavailable: 1,
            max_surge: 0,
            free: Free::Slots(0),
            paused: design.rollout.paused || !acts,
            stream_max: design.rollout.stream_max,
            routers: RouterView::Known,
        };
        let plan = rollout::plan(&goal, &pods);
        if acts {
            self.carry_out(&Role { template, seen: &look.drafts, fresh: look.fresh }, &plan.steps).await;
        }
        plan.settled()
    }

    // === what a pass gathers ===

    /// Whether this process no longer leads, so that the pass ends without another word.
    pub(super) fn lost_lead(&self) -> bool {
        !self.context.gate.is_open()
    }

    /// Notes what went wrong.
    pub(super) fn fault(&mut self, fault: Fault) {
        self.context.metrics.fault(fault.reason.as_str());
        if !self.faults.contains(&fault) {
            self.faults.push(fault);
        }
    }

    /// Notes a request that came to nothing.
    pub(super) fn request_failed(&mut self, error: &RequestError, verb: &str, object: &str) {
        self.failed = true;
        if !error.is_not_leading() {
            tracing::warn!(%error, verb, object, pool = self.name(), "a request came to nothing");
        }
        self.fault(error.fault(verb, object));
    }

    /// Notes a step that was carried out.
    pub(super) fn did(&mut self, step: &'static str, occurrence: Occurrence) {
        self.writes += 1;
        self.context.metrics.step(step);
        tracing::info!(pool = self.name(), step, "{}", occurrence.note);
        self.occurrences.push(occurrence);
    }

    fn ending(&self, settled: bool) -> Ending {
        match () {
            () if self.failed => Ending::Failed,
            () if self.writes > 0 => Ending::Moved,
            () if settled => Ending::Rest,
            () => Ending::Waits,
        }
    }

    /// Namespace and name, for people.
    pub(super) fn name(&self) -> String {
        format!("{}/{}", self.pool.namespace().unwrap_or_default(), self.pool.name_any())
    }

    /// Uids of all pools that exist.
    pub(super) fn existing(&self) -> HashSet<String> {
        self.context.caches.pools.state().iter().filter_map(|pool| pool.uid()).collect()
    }
}

/// What workers are made from: without devices for a draft once no pair of them was found, and then until the template changes. That it was
/// given up stands in status, because the pod that waited in vain is gone by then.
fn target(design: &Design, look: &Look, former: Option<&str>) -> (Template, bool) {
    let Some(without) = &design.without_draft else { return (design.workers.clone(), false) };
    let (pair, alone) = (design.workers.revision(), without.revision());
    let starved = |seen: &SeenPod| match &seen.pod.health {
        rollout::Health::Pending(Some(why)) => seen.pod.revision == pair && seen.pod.age >= PAIR_WAIT && tell::lacks_devices(why),
        _ => false,
    };
    let gave_up = former == Some(&*revision_hash(&alone)) || look.workers.iter().any(starved);
    (if gave_up { without.clone() } else { design.workers.clone() }, gave_up)
}
