//! Caches: what the watches have delivered, and which pool a change belongs to.
//!
//! Owns one reflector per kind. Pools and pods are essential; any other kind may be missing, and says why. Refuses to write. Objects are kept
//! without their managed fields, those that pools turn into as text; of Secrets and ConfigMaps that pools name only metadata.

use super::ControllerSettings;
use super::memory::later;
use super::packed::Packed;
use crate::api::{ConditionReason, ServingPool};
use crate::apply::Desired;
use crate::design::{Blueprint, Reference};
use crate::names::{MANAGED_BY, MANAGER, Names, POOL};
use crate::status::Fault;
use futures::{Stream, StreamExt as _, TryStreamExt as _};
use k8s_openapi::api::core::v1::{ConfigMap, Pod, Secret};
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, DynamicObject, PartialObjectMeta};
use kube::core::{ApiResource, NamespaceResourceScope};
use kube::runtime::reflector::{self, ObjectRef, Store};
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Client, Resource, ResourceExt as _};
use serde::de::DeserializeOwned;
use std::collections::HashMap;
use std::fmt::Debug;
use std::hash::Hash;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

/// Shortest and longest time until a watch that failed begins anew.
const WATCHES: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(30));

/// Asks for a look at a pool; cheap to clone.
#[derive(Clone)]
pub(super) struct Trigger(mpsc::Sender<ObjectRef<ServingPool>>);

/// Everything that is watched.
pub(super) struct Caches {
    /// The pools.
    pub(super) pools: Store<ServingPool>,
    /// Their pods, routers included.
    pub(super) pods: Store<Pod>,
    /// Metadata of Secrets.
    pub(super) secrets: Store<PartialObjectMeta<Secret>>,
    /// Metadata of ConfigMaps.
    pub(super) config_maps: Store<PartialObjectMeta<ConfigMap>>,
    kinds: Vec<Kind>,
    named: [(&'static str, Complaint); 2],
    /// How many lists have been completed, of whatever kind.
    lists: watch::Sender<u64>,
}

/// One kind of object that pools turn into.
struct Kind {
    resource: ApiResource,
    store: Store<Packed>,
    complaint: Complaint,
}

/// Why a watch has not delivered.
#[derive(Clone, Default)]
struct Complaint(Arc<Mutex<Option<(ConditionReason, String)>>>);

/// What a follower needs beside its stream.
struct Watch<'a> {
    watches: &'a mut JoinSet<()>,
    trigger: &'a Trigger,
    lists: &'a watch::Sender<u64>,
}

// === impl Trigger ===

impl Trigger {
    pub(super) fn new(sender: mpsc::Sender<ObjectRef<ServingPool>>) -> Self {
        Self(sender)
    }

    /// Waits while the queue is full.
    pub(super) async fn send(&self, pool: ObjectRef<ServingPool>) {
        // Nobody listens any more at the end only.
        let _ended = self.0.send(pool).await;
    }
}

// === impl Caches ===

impl Caches {
    /// Begins to watch.
    pub(super) fn start(
        client: &Client,
        settings: &ControllerSettings,
        blueprint: &Arc<dyn Blueprint>,
        trigger: &Trigger,
    ) -> (Self, JoinSet<()>) {
        let mut watches = JoinSet::new();
        let lists = watch::Sender::new(0);
        let mut watch = Watch { watches: &mut watches, trigger, lists: &lists };
        let namespace = settings.namespace.as_deref();
        let (pools, writer) = reflector::store();
        let events = watcher(scoped::<ServingPool>(client, namespace), watcher::Config::default());
        watch.follow(events, writer, Complaint::default(), changed_pools());

        let (pods, writer) = reflector::store();
        let events = watcher(scoped::<Pod>(client, namespace), watcher::Config::default().labels(POOL));
        watch.follow(events, writer, Complaint::default(), owner(pools.clone()));

        let of_secrets = Complaint::default();
        let (secrets, writer) = reflector::store();
        let events = watcher(scoped::<PartialObjectMeta<Secret>>(client, namespace), watcher::Config::default());
        watch.follow(events, writer, of_secrets.clone(), namers(pools.clone(), Arc::clone(blueprint), Reference::Secret));

        let of_maps = Complaint::default();
        let (config_maps, writer) = reflector::store();
        let events = watcher(scoped::<PartialObjectMeta<ConfigMap>>(client, namespace), watcher::Config::default());
        watch.follow(events, writer, of_maps.clone(), namers(pools.clone(), Arc::clone(blueprint), Reference::ConfigMap));

        let kinds = settings.kinds.iter().map(|resource| {
            let writer = reflector::store::Writer::new(resource.clone());
            let (store, complaint) = (writer.as_reader(), Complaint::default());
            let api: Api<DynamicObject> = match namespace {
                Some(namespace) => Api::namespaced_with(client.clone(), namespace, resource),
                None => Api::all_with(client.clone(), resource),
            };
            let events = watcher(api, watcher::Config::default().labels(&format!("{MANAGED_BY}={MANAGER},{POOL}")));
            let events = events.map_ok(Packed::event);
            watch.follow(events, writer, complaint.clone(), owner(pools.clone()));
            Kind { resource: resource.clone(), store, complaint }
        });
        let kinds = kinds.collect();
        let named = [("Secret", of_secrets), ("ConfigMap", of_maps)];
        (Self { pools, pods, secrets, config_maps, kinds, named, lists }, watches)
    }

    /// Returns when pools and pods are known.
    pub(super) async fn essential(&self) {
        self.listed(Self::is_essential_ready).await;
    }

    /// Returns when everything is known.
    pub(super) async fn complete(&self) {
        self.listed(|caches| caches.missing().is_empty()).await;
    }

    /// Waits until so much is known. Nobody waits at a store itself: it wakes only the last one that asked, and probes ask as well.
    async fn listed(&self, known: impl Fn(&Self) -> bool) {
        // The sender lives in self, so waiting ends only with the condition.
        let _lives = self.lists.subscribe().wait_for(|_| known(self)).await.is_ok();
    }

    /// Whether pools and pods are known.
    pub(super) fn is_essential_ready(&self) -> bool {
        is_ready(&self.pools) && is_ready(&self.pods)
    }

    /// Kinds that are not known, with the reason.
    pub(super) fn missing(&self) -> Vec<String> {
        let named = [is_ready(&self.secrets), is_ready(&self.config_maps)];
        let named = self.named.iter().zip(named).filter(|(_, ready)| !ready).map(|((name, it), _)| it.of(name));
        let kinds = self.kinds.iter().filter(|kind| !is_ready(&kind.store)).map(|kind| kind.complaint.of(&kind.resource.kind));
        named.chain(kinds).collect()
    }

    /// Why objects of this kind cannot be compared with what is live; `None` if they can.
    pub(super) fn trouble(&self, resource: &ApiResource) -> Option<Fault> {
        match self.kind(resource) {
            Some(kind) if is_ready(&kind.store) => None,
            Some(kind) => Some(Fault::new(kind.complaint.reason(), kind.complaint.of(&resource.kind))),
            None => Some(Fault::new(ConditionReason::ApiUnavailable, format!("{} is not watched", resource.kind))),
        }
    }

    /// The live object of that kind and name.
    pub(super) fn live(&self, desired: &Desired) -> Option<Arc<DynamicObject>> {
        let kind = self.kind(&desired.resource)?;
        let packed = kind.store.get(&ObjectRef::new_with(&desired.name, kind.resource.clone()).within(&desired.namespace))?;
        packed.unpack().map(Arc::new)
    }

    /// All objects of a pool, but pods.
    pub(super) fn of_pool(&self, namespace: &str, stem: &str) -> Vec<(ApiResource, Arc<Packed>)> {
        let belongs = |object: &Packed| {
            object.meta().namespace.as_deref() == Some(namespace) && object.labels().get(POOL).map(String::as_str) == Some(stem)
        };
        let kinds = self.kinds.iter().filter(|kind| is_ready(&kind.store));
        kinds.flat_map(|kind| kind.store.state_filter(belongs).into_iter().map(|it| (kind.resource.clone(), it))).collect()
    }

    fn kind(&self, resource: &ApiResource) -> Option<&Kind> {
        self.kinds.iter().find(|kind| kind.resource.kind == resource.kind && kind.resource.group == resource.group)
    }
}

// === impl Complaint ===

impl Complaint {
    fn set(&self, problem: Option<&watcher::Error>) {
        let told = problem.map(|error| (reason_of(error), error.to_string()));
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = told;
    }

    fn reason(&self) -> ConditionReason {
        let told = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        told.as_ref().map_or(ConditionReason::ApiUnavailable, |(reason, _)| *reason)
    }

    fn of(&self, kind: &str) -> String {
        let told = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let why = told.as_ref().map_or("the first list has not come yet", |(_, why)| why);
        format!("{kind} cannot be watched: {why}")
    }
}

// === impl Watch ===

impl Watch<'_> {
    fn follow<K, N>(
        &mut self,
        events: impl Stream<Item = watcher::Result<watcher::Event<K>>> + Send + 'static,
        writer: reflector::store::Writer<K>,
        complaint: Complaint,
        notify: N,
    ) where
        K: Resource + Clone + Debug + Send + Sync + 'static,
        K::DynamicType: Eq + Hash + Clone + Send + Sync,
        N: FnMut(&K) -> Vec<ObjectRef<ServingPool>> + Send + 'static,
    {
        self.watches.spawn(follow(events, writer, complaint, self.trigger.clone(), self.lists.clone(), notify));
    }
}

async fn follow<K, N>(
    events: impl Stream<Item = watcher::Result<watcher::Event<K>>> + Send + 'static,
    mut writer: reflector::store::Writer<K>,
    complaint: Complaint,
    trigger: Trigger,
    lists: watch::Sender<u64>,
    mut notify: N,
) where
    K: Resource + Clone + Debug + Send + Sync + 'static,
    K::DynamicType: Eq + Hash + Clone,
    N: FnMut(&K) -> Vec<ObjectRef<ServingPool>> + Send,
{
    let mut events = std::pin::pin!(events.modify(|object| object.managed_fields_mut().clear()));
    // What a new list holds can be looked at when the list is complete.
    let (mut listed, mut failures) = (Vec::new(), 0);
    while let Some(event) = events.next().await {
        let event = match event {
            Ok(event) => event,
            Err(error) => {
                let wait = later(WATCHES, failures);
                tracing::warn!(%error, kind = std::any::type_name::<K>(), ?wait, "a watch failed; it begins anew");
                complaint.set(Some(&error));
                failures += 1;
                tokio::time::sleep(wait).await;
                continue;
            }
        };
        // The begin of a list is no success yet.
        failures = if matches!(event, watcher::Event::Init) { failures } else { 0 };
        writer.apply_watcher_event(&event);
        let pools = match &event {
            watcher::Event::Init => {
                listed.clear();
                continue;
            }
            watcher::Event::InitApply(object) => {
                listed.extend(notify(object));
                continue;
            }
            watcher::Event::InitDone => {
                complaint.set(None);
                lists.send_modify(|count| *count += 1);
                listed.sort_by_key(ToString::to_string);
                listed.dedup();
                std::mem::take(&mut listed)
            }
            watcher::Event::Apply(object) | watcher::Event::Delete(object) => notify(object),
        };
        for pool in pools {
            trigger.send(pool).await;
        }
    }
}

/// A missing right is told apart: it does not go away by itself.
fn reason_of(error: &watcher::Error) -> ConditionReason {
    let code = match error {
        watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status))
        | watcher::Error::WatchFailed(kube::Error::Api(status))
        | watcher::Error::WatchError(status) => status.code,
        _ => 0,
    };
    if code == 403 { ConditionReason::Forbidden } else { ConditionReason::ApiUnavailable }
}

fn scoped<K>(client: &Client, namespace: Option<&str>) -> Api<K>
where
    K: Resource<Scope = NamespaceResourceScope, DynamicType = ()> + DeserializeOwned + Clone + Debug,
{
    match namespace {
        Some(namespace) => Api::namespaced(client.clone(), namespace),
        None => Api::all(client.clone()),
    }
}

fn is_ready<K>(store: &Store<K>) -> bool
where
    K: reflector::Lookup + Clone + 'static,
    K::DynamicType: Eq + Hash + Clone,
{
    futures::FutureExt::now_or_never(store.wait_until_ready()).is_some_and(|ready| ready.is_ok())
}

// === whom a change concerns ===

/// Pools whose spec changed or that are being deleted; a status that we wrote ourselves is no news.
fn changed_pools() -> impl FnMut(&ServingPool) -> Vec<ObjectRef<ServingPool>> + Send + 'static {
    let mut seen: HashMap<String, (Option<i64>, Option<Timestamp>)> = HashMap::new();
    move |pool| {
        let now = (pool.metadata.generation, pool.metadata.deletion_timestamp.as_ref().map(|at| at.0));
        let before = seen.insert(pool.uid().unwrap_or_default(), now);
        // Uids of pools that are gone add up slowly; forgetting all costs one more look at each pool.
        if seen.len() > 16_384 {
            seen.clear();
        }
        if before == Some(now) { Vec::new() } else { vec![ObjectRef::from_obj(pool)] }
    }
}

/// The pool whose label an object carries.
fn owner<K: Resource>(pools: Store<ServingPool>) -> impl FnMut(&K) -> Vec<ObjectRef<ServingPool>> + Send + 'static {
    move |object| {
        let meta = object.meta();
        let label = meta.labels.as_ref().and_then(|labels| labels.get(POOL));
        let (Some(stem), Some(namespace)) = (label, meta.namespace.as_deref()) else { return Vec::new() };
        let named = ObjectRef::new(stem).within(namespace);
        if pools.get(&named).is_some() {
            return vec![named];
        }
        let is = |pool: &ServingPool| {
            pool.metadata.namespace.as_deref() == Some(namespace) && Names::new(&pool.name_any()).stem() == stem.as_str()
        };
        pools.find(is).map(|pool| ObjectRef::from_obj(&*pool)).into_iter().collect()
    }
}

/// The pools that name an object.
fn namers<K: Resource>(
    pools: Store<ServingPool>,
    blueprint: Arc<dyn Blueprint>,
    kind: fn(String) -> Reference,
) -> impl FnMut(&K) -> Vec<ObjectRef<ServingPool>> + Send + 'static {
    move |object| {
        let meta = object.meta();
        let named = kind(meta.name.clone().unwrap_or_default());
        let names = |pool: &ServingPool| pool.metadata.namespace == meta.namespace && blueprint.references(pool).contains(&named);
        pools.state_filter(names).iter().map(|pool| ObjectRef::from_obj(&**pool)).collect()
    }
}
