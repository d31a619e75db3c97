//! References: Secrets and ConfigMaps that pools name, read when they changed and not before.
//!
//! Owns their contents, by resource version. Whether they changed is told by the watch on metadata; that one is missing is believed only after
//! asking the API server, because from a missing secret a new one is made.

use super::caches::Caches;
use crate::api::ServingPool;
use crate::apply::{RequestError, answered};
use crate::design::{Found, Reference};
use crate::status::Fault;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::api::{Api, PartialObjectMeta};
use kube::core::NamespaceResourceScope;
use kube::runtime::reflector::{ObjectRef, Store};
use kube::{Client, Resource, ResourceExt as _};
use serde::de::DeserializeOwned;
use std::collections::HashMap;
use std::fmt::Debug;
use std::sync::{Arc, Mutex, PoisonError};

/// Most contents that are kept; beyond it all are forgotten and read anew.
const KEPT_MAX: usize = 16_384;

/// Contents by namespace and name.
type Kept<K> = Mutex<HashMap<(String, String), Arc<K>>>;

/// Reads what pools name.
pub(super) struct References {
    client: Client,
    secrets: Kept<Secret>,
    config_maps: Kept<ConfigMap>,
}

// === impl References ===

impl References {
    pub(super) fn new(client: Client) -> Self {
        Self { client, secrets: Mutex::default(), config_maps: Mutex::default() }
    }

    /// Everything that a pool names and that exists.
    pub(super) async fn find(&self, pool: &ServingPool, names: &[Reference], caches: &Caches) -> Result<Found, Fault> {
        let namespace = pool.namespace().unwrap_or_default();
        let mut found = Found::default();
        for reference in names {
            match reference {
                Reference::Secret(name) => {
                    let secret = read(&self.client, &namespace, name, &caches.secrets, &self.secrets).await;
                    let secret = secret.map_err(|error| error.fault("get", &format!("Secret {name}")))?;
                    found.secrets.extend(secret.map(|secret| (name.clone(), secret)));
                }
                Reference::ConfigMap(name) => {
                    let map = read(&self.client, &namespace, name, &caches.config_maps, &self.config_maps).await;
                    let map = map.map_err(|error| error.fault("get", &format!("ConfigMap {name}")))?;
                    found.config_maps.extend(map.map(|map| (name.clone(), map)));
                }
            }
        }
        Ok(found)
    }
}

async fn read<K>(
    client: &Client,
    namespace: &str,
    name: &str,
    metadata: &Store<PartialObjectMeta<K>>,
    kept: &Kept<K>,
) -> Result<Option<Arc<K>>, RequestError>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + DeserializeOwned + Clone + Debug + Send + Sync + 'static,
{
    let key = (namespace.to_owned(), name.to_owned());
    let newest = metadata.get(&ObjectRef::new(name).within(namespace)).and_then(|it| it.resource_version());
    let lock = || kept.lock().unwrap_or_else(PoisonError::into_inner);
    if newest.is_some() {
        let known = lock().get(&key).filter(|it| it.resource_version() == newest).cloned();
        if known.is_some() {
            return Ok(known);
        }
    }
    let api: Api<K> = Api::namespaced(client.clone(), namespace);
    let found = answered(api.get_opt(name)).await?.map(Arc::new);
    let mut kept = lock();
    if kept.len() >= KEPT_MAX {
        kept.clear();
    }
    match &found {
        Some(object) => kept.insert(key, Arc::clone(object)),
        None => kept.remove(&key),
    };
    Ok(found)
}
