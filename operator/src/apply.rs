//! Apply: brings the objects of a pool to what `build` wants, and writes nothing when they are.
//!
//! Owns server-side apply with one field manager, the content hash that gates it, the comparison that finds drift, and pruning. Refuses to
//! know what the objects mean. Called by the controller; pods are not its business, they follow the rollout.
//!
//! Flow: for each wanted object compare hash and content with the live one → apply where they differ → delete owned objects that nobody wants.
//!
//! Guarantees
//! 1. An object whose hash is the wanted one and whose wanted fields stand as wanted is not written. Fields of others are never compared.
//! 2. An object that is put right because of drift, and not because of an edit, is reported as such.
//! 3. If the API server keeps a field otherwise than it was applied, the object is applied once and then left alone until it changes: no loop.
//! 4. An object of that name which the pool does not own is never touched; it is a fault.
//!
//! Costs: comparing is O(size of the wanted object); an apply is one request, the first one of an object two.

mod differ;

pub use differ::first_difference;
pub(crate) use differ::quantity;

use crate::api::ConditionReason;
use crate::lead::NotLeading;
use crate::status::Fault;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{Api, DeleteParams, DynamicObject, Patch, PatchParams, Preconditions};
use kube::core::ApiResource;
use kube::{Client, Resource, ResourceExt as _};
use serde::Serialize;
use serde_json::Value;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::time::timeout;

/// Name under which the operator owns fields.
pub const FIELD_MANAGER: &str = "kvasir-operator";
/// Annotation on each object of a pool: hash of what was applied.
pub const CONTENT_HASH: &str = "kvasir.dev/content-hash";
/// Longest wait for an answer of the API server; shorter than a lease minus its renew deadline.
pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(4);

/// An object as it should be.
#[derive(Clone, PartialEq, Debug)]
pub struct Desired {
    /// Its kind.
    pub resource: ApiResource,
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// All of it, with the content hash as annotation.
    pub body: Value,
    /// The hash.
    pub hash: String,
    /// Whether its content is made once and kept, as generated secrets are.
    pub once: bool,
}

/// What was done to an object.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Action {
    /// It was missing.
    Created,
    /// Something else is wanted than before.
    Updated,
    /// Someone else had changed it.
    Repaired,
    /// Nobody wants it any more.
    Pruned,
}

/// One object that was written.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Change {
    /// What was done.
    pub action: Action,
    /// Kind and name, for people.
    pub object: String,
    /// The field that had drifted.
    pub field: Option<String>,
}

/// What an apply came to.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Applied {
    /// What was written.
    pub changes: Vec<Change>,
    /// What could not be.
    pub faults: Vec<Fault>,
}

/// Writes objects.
pub struct Applier {
    client: Client,
    /// Objects that the server keeps otherwise than applied: hash and live version after the last apply.
    stubborn: Mutex<HashMap<String, (String, String)>>,
}

/// What an object needs.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Need {
    Nothing,
    Create,
    Update,
    Repair(String),
}

// === impl Desired ===

impl Desired {
    /// From a typed object with its name and namespace set.
    pub fn of<K: Resource<DynamicType = ()> + Serialize>(object: &K) -> Result<Self, serde_json::Error> {
        let resource = ApiResource::erase::<K>(&());
        Self::from_value(resource, serde_json::to_value(object)?)
    }

    /// From JSON.
    pub fn from_value(resource: ApiResource, mut body: Value) -> Result<Self, serde_json::Error> {
        body["apiVersion"] = Value::String(resource.api_version.clone());
        body["kind"] = Value::String(resource.kind.clone());
        let hash = content_hash(&body);
        body["metadata"]["annotations"][CONTENT_HASH] = Value::String(hash.clone());
        let text = |name: &str| body["metadata"][name].as_str().unwrap_or_default().to_owned();
        Ok(Self { namespace: text("namespace"), name: text("name"), resource, hash, once: false, body })
    }

    /// Marks it as made once and kept.
    #[must_use]
    pub fn kept(mut self) -> Self {
        self.once = true;
        self
    }

    fn api(&self, client: &Client) -> Api<DynamicObject> {
        Api::namespaced_with(client.clone(), &self.namespace, &self.resource)
    }

    fn label(&self) -> String {
        format!("{} {}", self.resource.kind, self.name)
    }

    fn need(&self, live: Option<&DynamicObject>) -> Need {
        let Some(live) = live else { return Need::Create };
        if self.once {
            return Need::Nothing;
        }
        if live.annotations().get(CONTENT_HASH) != Some(&self.hash) {
            return Need::Update;
        }
        let mut live = serde_json::to_value(live).unwrap_or_default();
        // Items of a list do not say what they are; whoever looked this one up by its kind knows.
        for name in ["apiVersion", "kind"] {
            live[name].clone_from(&self.body[name]);
        }
        first_difference(&self.body, &live).map_or(Need::Nothing, Need::Repair)
    }
}

/// Hash of an object's content, whatever the order of its members.
pub(crate) fn content_hash(body: &Value) -> String {
    fn feed(hasher: &mut blake3::Hasher, value: &Value) {
        match value {
            Value::Object(map) => {
                let mut names: Vec<&String> = map.keys().collect();
                names.sort();
                hasher.update(b"{");
                for name in names {
                    hasher.update(name.as_bytes()).update(&[0]);
                    feed(hasher, &map[name]);
                }
                hasher.update(b"}");
            }
            Value::Array(items) => {
                hasher.update(b"[");
                for item in items {
                    feed(hasher, item);
                }
                hasher.update(b"]");
            }
            scalar => {
                hasher.update(scalar.to_string().as_bytes()).update(&[0]);
            }
        }
    }
    let mut hasher = blake3::Hasher::new();
    feed(&mut hasher, body);
    hasher.finalize().to_hex()[..16].to_owned()
}

// === impl Applier ===

impl Applier {
    /// An applier that writes through `client`.
    pub fn new(client: Client) -> Self {
        Self { client, stubborn: Mutex::default() }
    }

    /// Brings every object of `wanted` to what it should be. `live` looks an object up in the cache.
    pub async fn apply<'a>(
        &self,
        owner: &OwnerReference,
        wanted: impl IntoIterator<Item = &'a Desired>,
        live: impl Fn(&Desired) -> Option<Arc<DynamicObject>>,
    ) -> Applied {
        let mut applied = Applied::default();
        for desired in wanted {
            let live = live(desired);
            let need = desired.need(live.as_deref());
            if need == Need::Nothing || self.is_stubborn(desired, live.as_deref()) {
                continue;
            }
            match self.write(owner, desired, &need).await {
                Ok(change) => applied.changes.extend(change),
                Err(fault) => applied.faults.push(fault),
            }
        }
        applied
    }

    /// Deletes `live` objects that the pool owns and nobody wants.
    pub async fn prune(
        &self,
        owner: &OwnerReference,
        wanted: &[Desired],
        live: impl Iterator<Item = (ApiResource, Arc<impl Resource>)>,
    ) -> Applied {
        let mut applied = Applied::default();
        for (resource, object) in live {
            let is = |desired: &Desired| {
                desired.resource.kind == resource.kind
                    && desired.resource.group == resource.group
                    && desired.name == object.name_any()
                    && Some(&desired.namespace) == object.namespace().as_ref()
            };
            if !owns(owner, &*object) || object.meta().deletion_timestamp.is_some() || wanted.iter().any(is) {
                continue;
            }
            let api: Api<DynamicObject> =
                Api::namespaced_with(self.client.clone(), &object.namespace().unwrap_or_default(), &resource);
            let params = DeleteParams {
                preconditions: Some(Preconditions { uid: object.uid(), resource_version: None }),
                ..DeleteParams::background()
            };
            let label = format!("{} {}", resource.kind, object.name_any());
            match answered(api.delete(&object.name_any(), &params)).await {
                Ok(_) => applied.changes.push(Change { action: Action::Pruned, object: label, field: None }),
                Err(error) if error.is_not_found() => {}
                Err(error) => applied.faults.push(error.fault("delete", &label)),
            }
        }
        applied
    }

    async fn write(&self, owner: &OwnerReference, desired: &Desired, need: &Need) -> Result<Option<Change>, Fault> {
        let (api, label) = (desired.api(&self.client), desired.label());
        if *need == Need::Create {
            // The cache holds our own objects only: one of that name may exist with another owner.
            let found = answered(api.get_metadata_opt(&desired.name)).await.map_err(|error| error.fault("get", &label))?;
            if let Some(found) = found {
                let ours = found.metadata.owner_references.iter().flatten().any(|it| it.uid == owner.uid);
                if !ours {
                    let text = format!("{label} exists and does not belong to this pool; rename or remove it");
                    return Err(Fault::new(ConditionReason::NameTaken, text));
                }
                if desired.once {
                    return Ok(None);
                }
            }
        }
        let params = PatchParams::apply(FIELD_MANAGER).force();
        let after = answered(api.patch(&desired.name, &params, &Patch::Apply(&desired.body)))
            .await
            .map_err(|error| error.fault("apply", &label))?;
        self.remember(desired, &after);
        let (action, field) = match need {
            Need::Create => (Action::Created, None),
            Need::Repair(field) => (Action::Repaired, Some(field.clone())),
            Need::Update | Need::Nothing => (Action::Updated, None),
        };
        Ok(Some(Change { action, object: label, field }))
    }

    /// Notes an object that still differs right after it was applied.
    fn remember(&self, desired: &Desired, after: &DynamicObject) {
        let key = format!("{}/{}", desired.label(), desired.namespace);
        let mut stubborn = self.stubborn.lock().unwrap_or_else(PoisonError::into_inner);
        if desired.need(Some(after)) == Need::Nothing {
            stubborn.remove(&key);
        } else {
            stubborn.insert(key, (desired.hash.clone(), after.resource_version().unwrap_or_default()));
        }
    }

    fn is_stubborn(&self, desired: &Desired, live: Option<&DynamicObject>) -> bool {
        let Some(live) = live else { return false };
        let key = format!("{}/{}", desired.label(), desired.namespace);
        let stubborn = self.stubborn.lock().unwrap_or_else(PoisonError::into_inner);
        stubborn.get(&key).is_some_and(|(hash, version)| {
            // An older version is the cache's, which has not seen our write yet.
            let live: Option<u64> = live.resource_version().and_then(|it| it.parse().ok());
            *hash == desired.hash && live <= version.parse().ok()
        })
    }
}

/// Whether the pool owns an object.
pub fn owns(owner: &OwnerReference, object: &impl kube::ResourceExt) -> bool {
    object.owner_references().iter().any(|it| it.uid == owner.uid)
}

// === errors ===

/// Why a request came to nothing.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    /// The API server refused it, or it never got there.
    #[error(transparent)]
    Kube(#[from] kube::Error),
    /// No answer in time; it may have been carried out.
    #[error("the API server did not answer within {} s", REQUEST_TIMEOUT.as_secs())]
    TimedOut,
}

/// Waits for an answer, but not for ever.
pub async fn answered<T>(request: impl Future<Output = Result<T, kube::Error>>) -> Result<T, RequestError> {
    match timeout(REQUEST_TIMEOUT, request).await {
        Ok(result) => Ok(result?),
        Err(_) => Err(RequestError::TimedOut),
    }
}

impl RequestError {
    fn code(&self) -> Option<u16> {
        match self {
            Self::Kube(kube::Error::Api(status)) => Some(status.code),
            Self::Kube(_) | Self::TimedOut => None,
        }
    }

    /// Whether there is no such object.
    pub fn is_not_found(&self) -> bool {
        self.code() == Some(404)
    }

    /// Whether the object is another one than was expected: it exists, has changed, or has another uid.
    pub fn is_conflict(&self) -> bool {
        self.code() == Some(409)
    }

    /// Whether the gate was shut.
    pub fn is_not_leading(&self) -> bool {
        matches!(self, Self::Kube(kube::Error::Service(error)) if error.downcast_ref::<NotLeading>().is_some())
    }

    /// What to say of it.
    pub fn fault(&self, verb: &str, object: &str) -> Fault {
        let message = match self {
            Self::Kube(kube::Error::Api(status)) => status.message.clone(),
            other => other.to_string(),
        };
        let reason = match self.code() {
            Some(403) if message.contains(" cannot ") => ConditionReason::Forbidden,
            Some(400 | 403 | 405 | 422) => ConditionReason::Refused,
            _ => ConditionReason::ApiUnavailable,
        };
        Fault::new(reason, format!("{verb} {object}: {message}"))
    }

    /// A word for metrics.
    pub fn word(&self) -> &'static str {
        match self.code() {
            Some(403) => "forbidden",
            Some(404) => "not_found",
            Some(409) => "conflict",
            Some(400..=499) => "refused",
            Some(_) => "server",
            None if self.is_not_leading() => "not_leading",
            None => "unreachable",
        }
    }
}

#[cfg(test)]
mod tests;
