//! Build: what a validated pool turns into, every object of it.
//!
//! Owns the shape of objects and the order in which they are applied. Refuses to know what is live: what it makes depends on the pool, on the
//! objects that the pool names, and on a seed that never leaves the process. Called by the controller through [`Blueprint`].
//!
//! Invariants (held by `tests.rs`)
//! 1. The same input gives the same objects, byte by byte; an operator that restarts or is replaced by a newer one changes no worker.
//! 2. What was generated once is never generated anew while it exists: the bearer and the pool's secret.
//! 3. No secret stands in arguments, variables, ConfigMaps, labels, annotations or names; a template tells its bearer by a digest.
//! 4. Workers carry their flags as arguments, because a pod that was made for other flags must not take these up at a restart; routers, which hold
//!    nothing, read theirs from a ConfigMap.
//! 5. A tenant whose Secret is gone has no key: withdrawing a key needs no valid spec elsewhere.

mod devices;
mod frame;
mod network;
mod pod;
mod router;
mod secrets;
#[cfg(test)]
mod tests;
mod worker;

pub use secrets::Seed;

use crate::api::ServingPool;
use crate::apply::Desired;
use crate::design::{Blueprint, Design, Found, Reference, RolloutRules, RouterDesign};
use crate::names::{Component, Names, selector_text};
use crate::rollout::Mode;
use crate::status::{Fault, ModelFacts};
use crate::validate::{self, Pool, Settings};
use frame::Frame;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{ConfigMap, Secret, Service, ServiceAccount};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::rbac::v1::{Role, RoleBinding};
use k8s_openapi::api::resource::v1::ResourceClaimTemplate;
use kube::core::ApiResource;

/// Port of a worker's gRPC services.
pub const WORKER_PORT: u16 = 7401;
/// Port of a worker's probes and metrics.
pub const WORKER_METRICS_PORT: u16 = 7402;
/// Port of a router's doors, HTTP and gRPC.
pub const ROUTER_PORT: u16 = 7300;
/// Port of a router's admin service.
pub const ROUTER_ADMIN_PORT: u16 = 7301;
/// Port of a router's probes and metrics.
pub const ROUTER_METRICS_PORT: u16 = 7302;

/// Designs pools under the operator's settings.
pub struct Builder {
    settings: Settings,
    seed: Seed,
}

/// Kinds of the objects that [`Builder`] makes, for watching and pruning.
pub fn kinds(service_monitors: bool) -> Vec<ApiResource> {
    let mut kinds = vec![
        ApiResource::erase::<ServiceAccount>(&()),
        ApiResource::erase::<Secret>(&()),
        ApiResource::erase::<ConfigMap>(&()),
        ApiResource::erase::<ResourceClaimTemplate>(&()),
        ApiResource::erase::<Role>(&()),
        ApiResource::erase::<RoleBinding>(&()),
        ApiResource::erase::<Service>(&()),
        ApiResource::erase::<PodDisruptionBudget>(&()),
        ApiResource::erase::<NetworkPolicy>(&()),
        ApiResource::erase::<Deployment>(&()),
    ];
    kinds.extend(service_monitors.then(router::service_monitor_kind));
    kinds
}

// === impl Builder ===

impl Builder {
    /// A builder under `settings`; secrets that do not exist yet are derived from `seed`.
    pub fn new(settings: Settings, seed: Seed) -> Self {
        Self { settings, seed }
    }

    fn objects(&self, frame: &Frame<'_>, secrets: &secrets::Material) -> Result<Vec<Desired>, serde_json::Error> {
        let pool = frame.pool;
        let mut objects = vec![
            Desired::of(&frame.account(Component::Worker))?,
            Desired::of(&frame.account(Component::Router))?,
            Desired::of(&secrets.bearer_secret(frame))?.kept(),
        ];
        if pool.draft_pods() {
            objects.push(Desired::of(&frame.account(Component::Draft))?);
        }
        if pool.pool_secret.is_none() {
            objects.push(Desired::of(&secrets.pool_secret(frame))?.kept());
        }
        objects.push(Desired::of(&secrets.keys_secret(frame))?);
        objects.push(Desired::of(&router::flags(frame))?);
        for template in devices::templates(frame) {
            objects.push(Desired::of(&template)?);
        }
        objects.push(Desired::of(&router::role(frame))?);
        objects.push(Desired::of(&router::role_binding(frame))?);
        for service in worker::services(frame).into_iter().chain(router::services(frame, &self.settings)) {
            objects.push(Desired::of(&service)?);
        }
        objects.push(Desired::of(&frame.budget(Component::Worker, pool.disruption.clone()))?);
        objects.push(Desired::of(&frame.budget(Component::Router, router::EVICTABLE))?);
        for policy in network::policies(frame, &self.settings) {
            objects.push(Desired::of(&policy)?);
        }
        objects.push(Desired::of(&router::deployment(frame))?);
        if router::is_monitored(pool, &self.settings) {
            objects.push(Desired::from_value(router::service_monitor_kind(), router::service_monitor(frame))?);
        }
        Ok(objects)
    }
}

impl Blueprint for Builder {
    fn references(&self, pool: &ServingPool) -> Vec<Reference> {
        secrets::references(pool)
    }

    fn design(&self, object: &ServingPool, found: &Found) -> Result<Design, Vec<Fault>> {
        let pool = validate::read(object, &self.settings)?;
        let names = Names::new(&pool.name);
        let secrets = secrets::Material::find(&pool, &names, found, &self.seed)?;
        let frame = Frame { pool: &pool, names: &names, bearer_digest: secrets.bearer_digest() };
        let objects = self.objects(&frame, &secrets).map_err(|error| vec![frame::unserialisable(&error)])?;
        let drafts = pool.draft.as_ref().filter(|_| pool.draft_pods());
        let selector = names.selector(Component::Worker);
        Ok(Design {
            objects,
            workers: worker::template(&frame, worker::Role::Target { draft_devices: true })?,
            without_draft: if devices::is_optional_pair(&pool) {
                Some(worker::template(&frame, worker::Role::Target { draft_devices: false })?)
            } else {
                None
            },
            drafts: match drafts {
                Some(draft) => Some((worker::template(&frame, worker::Role::Draft(draft))?, draft.replicas)),
                None => None,
            },
            routers: RouterDesign {
                labels: names.selector(Component::Router),
                replicas: pool.router.replicas,
                admin_port: ROUTER_ADMIN_PORT,
                metrics_port: ROUTER_METRICS_PORT,
            },
            bearer: secrets.found_bearer(),
            selector: selector_text(&selector),
            rollout: rules(&pool),
            model: ModelFacts {
                name: pool.served_name.clone(),
                revision: pool.model.revision.clone(),
                expected: pool.model.digest.clone(),
                ..ModelFacts::default()
            },
            draft: pool.draft.is_some(),
            link: devices::link(&pool),
            survives: Some(survives(&pool)),
            notes: secrets.notes.into_iter().chain(pool.notes.iter().cloned()).collect(),
        })
    }
}

fn rules(pool: &Pool) -> RolloutRules {
    use crate::api::RolloutMode;
    let rollout = &pool.rollout;
    RolloutRules {
        replicas: rollout.replicas,
        mode: match rollout.mode {
            RolloutMode::Auto => Mode::Auto,
            RolloutMode::InPlace => Mode::InPlace,
            RolloutMode::SurgeFree => Mode::SurgeFree,
            RolloutMode::Surge => Mode::Surge,
        },
        max_unavailable: rollout.max_unavailable,
        max_surge: rollout.max_surge,
        progress_deadline: rollout.progress_deadline,
        stream_max: pool.stream_max,
        paused: rollout.paused,
    }
}

/// What a change in place keeps, for people.
fn survives(pool: &Pool) -> String {
    let mut kept = Vec::new();
    if pool.model.source.is_fetched() {
        kept.push("the fetched model");
    }
    if pool.host_tier.as_ref().is_some_and(|tier| tier.survives_restart) {
        kept.push("the host tier's volume");
    }
    match &*kept {
        [] => "weights are loaded and caches filled anew".to_owned(),
        kept => format!("{} stays; weights are loaded and the KV pool filled anew", kept.join(" and ")),
    }
}
