//! Observe: pods, routers and workers of one pool as they are in this pass.
//!
//! Owns which pods are looked at (the cache, unless a write of ours is not in it yet), the readiness gates that follow from the routers'
//! answers, and what workers say of themselves. Refuses to decide.

use super::ask;
use super::memory::version;
use super::pass::Pass;
use crate::api::ServingPool;
use crate::apply::answered;
use crate::design::{Design, ROUTABLE};
use crate::names::{Component, Names, POOL};
use crate::rollout::{Health, Revision};
use crate::status::{Fault, ModelFacts};
use crate::world::{Answer, RouterPod, RouterWorld, SeenPod, Taker, router_pods, see};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use kube::api::{ListParams, Patch, PatchParams};
use serde_json::json;
use std::sync::Arc;

/// A pool as it was seen in one pass.
pub(super) struct Look {
    /// Its workers.
    pub(super) workers: Vec<SeenPod>,
    /// Its draft pods.
    pub(super) drafts: Vec<SeenPod>,
    /// Its Ready routers.
    pub(super) routers: Vec<RouterPod>,
    /// What they say.
    pub(super) world: RouterWorld,
    /// Whether pods were read from the API server in this pass.
    pub(super) fresh: bool,
    /// Progress of the slowest fetch, 0 to 100; absent when nothing is being fetched.
    pub(super) fetched: Option<u32>,
}

// === impl Pass ===

impl Pass<'_> {
    /// Looks at everything. Without a design nobody can be asked, and what readiness gates say stands.
    pub(super) async fn look(&mut self, design: Option<&Arc<Design>>) -> Option<Look> {
        let (pods, fresh) = self.pods().await?;
        self.memory.keep_only(&pods);
        let names = Names::new(&self.pool.name_any());
        let of = |component: Component| {
            let selector = names.selector(component);
            move |pod: &&Arc<Pod>| selector.iter().all(|(name, value)| pod.labels().get(name) == Some(value))
        };
        let routers = router_pods(pods.iter().filter(of(Component::Router)));
        let world = match design {
            Some(design) => ask::routers(self.context, design, &routers).await,
            None => blind(&routers),
        };
        let uid = self.pool.uid().unwrap_or_default();
        let ours = |pod: &&Arc<Pod>| pod.owner_references().iter().any(|owner| owner.uid == uid);
        let see_all = |component: Component, taker: Taker<'_>| {
            let of_role = pods.iter().filter(of(component)).filter(ours);
            let seen = of_role.filter_map(|pod| see(pod, taker, &self.memory.ours, &self.context.clock));
            seen.collect::<Vec<_>>()
        };
        let mut look = Look {
            workers: see_all(Component::Worker, Taker::Routers(&world)),
            drafts: see_all(Component::Draft, Taker::Itself),
            routers,
            world,
            fresh,
            fetched: None,
        };
        for seen in look.workers.iter_mut().filter(|seen| seen.pod.health == Health::Routable) {
            seen.pod.in_flight = look.world.in_flight(&seen.pod.name, seen.ip.as_deref());
        }
        if let Some(design) = design {
            self.told = Some((Arc::clone(design), look.routers.clone(), look.world.clone()));
            for seen in look.workers.iter_mut().chain(&mut look.drafts) {
                let drains =
                    seen.pod.draining.is_some() && !matches!(seen.pod.health, Health::Terminating { .. } | Health::Dead(_));
                if drains && !self.lost_lead() {
                    seen.pod.in_flight = self.tell_drain(seen).await;
                }
            }
            self.describe(design, &look).await;
            let starts = |seen: &&SeenPod| seen.runs && seen.pod.health == Health::Starting;
            let starting: Vec<&SeenPod> = look.workers.iter().chain(&look.drafts).filter(starts).collect();
            look.fetched = ask::fetched(self.context, design, &starting).await;
        }
        Some(look)
    }

    /// Tells a drain, or tells it again.
    pub(super) async fn tell_drain(&self, seen: &SeenPod) -> Option<u32> {
        let (design, routers, world) = self.told.as_ref()?;
        ask::drain(self.context, design, routers, world, seen).await
    }

    /// The pods of the pool, routers included, and whether they come from the API server.
    async fn pods(&mut self) -> Option<(Vec<Arc<Pod>>, bool)> {
        let namespace = self.pool.namespace().unwrap_or_default();
        let names = Names::new(&self.pool.name_any());
        let belongs = |pod: &Pod| {
            pod.metadata.namespace.as_deref() == Some(&*namespace)
                && pod.labels().get(POOL).map(String::as_str) == Some(names.stem())
        };
        let cached = self.context.caches.pods.state_filter(belongs);
        if self.memory.is_current(&cached) {
            return Some((sorted(cached), false));
        }
        let params = ListParams::default().labels(&format!("{POOL}={}", names.stem()));
        match answered(self.pods_api().list(&params)).await {
            Ok(list) => {
                self.memory.listed();
                Some((sorted(list.items.into_iter().map(Arc::new).collect()), true))
            }
            Err(error) => {
                self.request_failed(&error, "list", "pods");
                None
            }
        }
    }

    /// Brings readiness gates to what routers say.
    pub(super) async fn open_gates(&mut self, look: &Look) {
        for seen in &look.workers {
            let leaves = matches!(seen.pod.health, Health::Terminating { .. } | Health::Dead(_));
            let (Some(routable), false) = (&seen.routable, leaves) else { continue };
            // A gate that was never opened is shut.
            if seen.gate.unwrap_or(false) == routable.is_ok() || self.lost_lead() {
                continue;
            }
            let (status, reason, message) = match routable {
                Ok(()) => ("True", "Routable", "every Ready router takes it"),
                Err(why) => ("False", "NotRoutable", why.as_str()),
            };
            let now = self.context.clock.time();
            let patch = json!({"metadata": {"uid": seen.uid}, "status": {"conditions": [
                {"type": ROUTABLE, "status": status, "reason": reason, "message": message, "lastTransitionTime": now}]}});
            let params = PatchParams { field_manager: Some(crate::apply::FIELD_MANAGER.to_owned()), ..PatchParams::default() };
            match answered(self.pods_api().patch_status(&seen.pod.name, &params, &Patch::Strategic(patch))).await {
                Ok(pod) => {
                    self.memory.wrote(&pod);
                    self.writes += 1;
                }
                Err(error) if error.is_not_found() || error.is_conflict() => self.memory.unsure(),
                Err(error) => self.request_failed(&error, "patch", &format!("status of Pod {}", seen.pod.name)),
            }
        }
    }

    /// Asks ready workers that have not told yet what they serve.
    async fn describe(&mut self, design: &Design, look: &Look) {
        let unknown = |seen: &&SeenPod| seen.ready && !self.memory.described.contains_key(&(seen.uid.clone(), seen.restarts));
        let asked: Vec<&SeenPod> = look.workers.iter().chain(&look.drafts).filter(unknown).collect();
        if !asked.is_empty() {
            self.memory.described.extend(ask::describe(self.context, design, &asked).await);
        }
    }

    /// What is known of the model: from the spec, and from a worker of `wanted` or else any.
    pub(super) fn model(&self, design: &Design, look: &Look, wanted: &Revision) -> ModelFacts {
        let mut told: Vec<(bool, &str)> = Vec::new();
        for seen in &look.workers {
            if let Some(described) = self.memory.described.get(&(seen.uid.clone(), seen.restarts)) {
                told.push((seen.pod.revision != *wanted, &described.weights));
            }
        }
        told.sort_unstable();
        let fails = look.workers.iter().filter(|seen| !seen.ready && look.fetched.is_none());
        let trouble = fails.filter_map(|seen| Some((&seen.pod.name, seen.ended.as_ref().filter(|ended| ended.about_model)?)));
        ModelFacts {
            digest: told.first().map(|(_, digest)| (*digest).to_owned()),
            trouble: trouble.map(|(pod, ended)| format!("pod {pod}: {}", ended.why)).next(),
            fetched_percent: look.fetched,
            ..design.model.clone()
        }
    }
}

fn blind(routers: &[RouterPod]) -> RouterWorld {
    let answer = || Err("the pool's spec cannot be served as written, so it is not known how to ask".to_owned());
    RouterWorld::new(routers.iter().map(|router| Answer { router: router.name.clone(), answer: answer() }).collect())
}

fn sorted(mut pods: Vec<Arc<Pod>>) -> Vec<Arc<Pod>> {
    pods.sort_by_key(|pod| (pod.name_any(), version(&**pod)));
    pods
}

/// Pods whose containers are ready and that are not leaving.
pub(super) fn is_ready(seen: &SeenPod) -> bool {
    seen.ready && !matches!(seen.pod.health, Health::Terminating { .. } | Health::Dead(_))
}

/// The pool as owner of what is made for it.
pub(super) fn owner(pool: &ServingPool) -> Result<k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference, Fault> {
    kube::Resource::controller_owner_ref(pool, &()).ok_or_else(|| {
        Fault::new(crate::api::ConditionReason::InvalidSpec, "the pool has no uid; this is a fault of the operator")
    })
}
