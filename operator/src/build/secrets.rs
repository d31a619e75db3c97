//! Secrets of a pool: what its components show each other, what reuse domains are derived from, and whose keys routers accept.
//!
//! Owns generation (once), the tenants file that routers read, and what is said when a key's Secret is missing. Routers get digests of keys and
//! never the keys.
//!
//! What does not exist yet is derived from a seed of the process and the pool's uid: until the Secret is seen, each reconcile makes the same one.

use super::frame::Frame;
use crate::api::{ConditionReason, SecretKeyRef, ServingPool};
use crate::design::{Found, Reference};
use crate::names::{Component, Names};
use crate::status::{Fault, Note};
use crate::validate::{Pool, Tenant};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::ResourceExt as _;
use kvasir_core::PoolSecret;
use kvasir_proto::auth::BearerSecret;
use sha2::{Digest as _, Sha256};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Write as _};

/// Key in the bearer's Secret.
pub(super) const BEARER_KEY: &str = "bearer";
/// Key in the pool secret's Secret if it is the operator's own.
const POOL_SECRET_KEY: &str = "value";
/// Keys in the Secret that routers read.
const TENANTS_FILE: &str = "tenants.toml";
const ROUTERS_POOL_SECRET: &str = "pool-secret";
/// Digits by which a bearer is told apart.
const DIGEST_DIGITS: usize = 10;

/// Randomness of one process, from which secrets are derived that do not exist yet.
pub struct Seed([u8; 32]);

/// The secrets of one pool.
pub(super) struct Material {
    bearer: String,
    /// Whether it stands in a Secret.
    bearer_found: Option<BearerSecret>,
    pool_secret: Vec<u8>,
    tenants: String,
    pub(super) notes: Vec<Note>,
}

/// Objects that a pool's design depends on.
pub(super) fn references(pool: &ServingPool) -> Vec<Reference> {
    let (spec, names) = (&pool.spec, Names::new(&pool.name_any()));
    let mut secrets: BTreeSet<String> = [names.bearer(), names.keys()].into();
    secrets.insert(spec.pool_secret_ref.as_ref().map_or_else(|| names.pool_secret(), |secret| secret.name.clone()));
    secrets.extend(spec.tenants.iter().map(|tenant| tenant.key_secret_ref.name.clone()));
    let models = [Some(&spec.model), spec.speculation.draft.as_ref().map(|draft| &draft.model)];
    secrets.extend(models.into_iter().flatten().filter_map(|model| {
        let hub = model.source.hugging_face.as_ref().and_then(|hub| hub.token_secret_ref.as_ref());
        let https = model.source.https.as_ref().and_then(|https| https.token_secret_ref.as_ref());
        Some(hub.or(https)?.name.clone())
    }));
    let prefixes: BTreeSet<String> = spec.prefix_cache.shared_prefixes.iter().map(|it| it.config_map_ref.name.clone()).collect();
    secrets.into_iter().map(Reference::Secret).chain(prefixes.into_iter().map(Reference::ConfigMap)).collect()
}

// === impl Seed ===

impl Seed {
    /// From the system's random source.
    pub fn random() -> Result<Self, getrandom::Error> {
        let mut seed = [0; 32];
        getrandom::fill(&mut seed)?;
        Ok(Self(seed))
    }

    /// A known one, so that what is built can be compared.
    #[cfg(test)]
    pub(super) fn known() -> Self {
        Self([7; 32])
    }

    fn derive(&self, purpose: &str, uid: &str) -> String {
        let mut hasher = blake3::Hasher::new_keyed(&self.0);
        hasher.update(purpose.as_bytes()).update(&[0]).update(uid.as_bytes());
        hasher.finalize().to_hex().to_string()
    }
}

impl fmt::Debug for Seed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Seed(..)")
    }
}

// === impl Material ===

impl Material {
    /// What exists, completed by what is derived.
    pub(super) fn find(pool: &Pool, names: &Names, found: &Found, seed: &Seed) -> Result<Self, Vec<Fault>> {
        let mut notes = Vec::new();
        let bearer_found = if found.secrets.contains_key(&names.bearer()) {
            Some(read_bearer(found, &names.bearer()).map_err(|fault| vec![fault])?)
        } else {
            None
        };
        let bearer =
            bearer_found.as_ref().map_or_else(|| seed.derive("kvasir pool bearer v1", &pool.uid), |(text, _)| text.clone());
        let pool_secret = find_pool_secret(pool, names, found, seed, &mut notes).map_err(|fault| vec![fault])?;
        let tenants = tenants_file(&pool.tenants, found, &mut notes).map_err(|fault| vec![fault])?;
        note_missing(pool, found, &mut notes);
        Ok(Self { bearer, bearer_found: bearer_found.map(|(_, secret)| secret), pool_secret, tenants, notes })
    }

    /// What components show each other, once its Secret exists.
    pub(super) fn found_bearer(&self) -> Option<BearerSecret> {
        self.bearer_found.clone()
    }

    /// Tells bearers apart.
    pub(super) fn bearer_digest(&self) -> String {
        let mut hasher = blake3::Hasher::new_derive_key("kvasir pool bearer digest v1");
        hasher.update(self.bearer.as_bytes());
        hasher.finalize().to_hex()[..DIGEST_DIGITS].to_owned()
    }

    /// The bearer. It cannot be edited: components read it at their start and would no longer know each other.
    pub(super) fn bearer_secret(&self, frame: &Frame<'_>) -> Secret {
        Secret { immutable: Some(true), ..secret(frame, frame.names.bearer(), None, [(BEARER_KEY, self.bearer.as_bytes())]) }
    }

    /// The pool's secret.
    pub(super) fn pool_secret(&self, frame: &Frame<'_>) -> Secret {
        secret(frame, frame.names.pool_secret(), None, [(POOL_SECRET_KEY, &*self.pool_secret)])
    }

    /// What routers read.
    pub(super) fn keys_secret(&self, frame: &Frame<'_>) -> Secret {
        let data = [(TENANTS_FILE, self.tenants.as_bytes()), (ROUTERS_POOL_SECRET, &*self.pool_secret)];
        secret(frame, frame.names.keys(), Some(Component::Router), data)
    }
}

fn secret<const N: usize>(frame: &Frame<'_>, name: String, component: Option<Component>, data: [(&str, &[u8]); N]) -> Secret {
    Secret {
        metadata: frame.metadata(name, component),
        type_: Some("Opaque".to_owned()),
        data: Some(data.into_iter().map(|(key, value)| (key.to_owned(), ByteString(value.to_vec()))).collect()),
        ..Secret::default()
    }
}

fn read_bearer(found: &Found, name: &str) -> Result<(String, BearerSecret), Fault> {
    let text = String::from_utf8_lossy(found.secret_value(name, BEARER_KEY)?).trim().to_owned();
    let secret = BearerSecret::new(&text).map_err(|error| {
        let fix = format!("Secret {name}, key `{BEARER_KEY}`: {error}; delete the Secret, and it is made anew");
        Fault::new(ConditionReason::InvalidSpec, fix)
    })?;
    Ok((text, secret))
}

/// The named secret, or the operator's own. One that vanished stays in force, because routers still have it.
fn find_pool_secret(pool: &Pool, names: &Names, found: &Found, seed: &Seed, notes: &mut Vec<Note>) -> Result<Vec<u8>, Fault> {
    let own = SecretKeyRef { name: names.pool_secret(), key: POOL_SECRET_KEY.to_owned() };
    let wanted = pool.pool_secret.as_ref().unwrap_or(&own);
    let problem = match found.secret_value(&wanted.name, &wanted.key) {
        Ok(value) => {
            let value = value.trim_ascii_end();
            if PoolSecret::new(value).is_some() {
                return Ok(value.to_vec());
            }
            let text = format!(
                "Secret {}, key `{}` has {} bytes; a pool secret needs {}, for example from `openssl rand -hex 32`",
                wanted.name,
                wanted.key,
                value.len(),
                PoolSecret::LEN_MIN
            );
            Fault::new(ConditionReason::InvalidSpec, text)
        }
        Err(fault) => fault,
    };
    if let Ok(in_force) = found.secret_value(&names.keys(), ROUTERS_POOL_SECRET)
        && PoolSecret::new(in_force).is_some()
    {
        let message = format!("{}; the one that routers have stays in force", problem.message);
        notes.push(Note { reason: ConditionReason::MissingObject, message });
        return Ok(in_force.to_vec());
    }
    match pool.pool_secret {
        None => Ok(seed.derive("kvasir pool secret v1", &pool.uid).into_bytes()),
        Some(_) => Err(problem),
    }
}

/// The tenants file. A tenant without keys is left out, so nobody can be it.
fn tenants_file(tenants: &[Tenant], found: &Found, notes: &mut Vec<Note>) -> Result<String, Fault> {
    if tenants.is_empty() {
        return Ok("open = true\n".to_owned());
    }
    let mut file = String::new();
    let mut owners: BTreeMap<String, &str> = BTreeMap::new();
    for tenant in tenants {
        let digests = match key_digests(tenant, found) {
            Ok(digests) => digests,
            Err(message) => {
                let message = format!("tenant {} has no key, so nobody can call as it: {message}", tenant.name);
                notes.push(Note { reason: ConditionReason::MissingObject, message });
                continue;
            }
        };
        for digest in &digests {
            if let Some(other) = owners.insert(digest.clone(), &tenant.name).filter(|other| *other != tenant.name) {
                let text = format!("tenants {other} and {} have a key in common; give each its own", tenant.name);
                return Err(Fault::new(ConditionReason::InvalidSpec, text));
            }
        }
        let keys: Vec<String> = digests.iter().map(|digest| format!("\"{digest}\"")).collect();
        let _ = write!(
            file,
            "[[tenant]]\nname = \"{}\"\nkey_sha256 = [{}]\nweight = {}\npriority = {}\npriority_max = {}\ncache_epoch = {}\n\n",
            tenant.name,
            keys.join(", "),
            tenant.weight,
            tenant.priority,
            tenant.priority_max,
            tenant.cache_epoch
        );
    }
    Ok(if file.is_empty() { "tenant = []\n".to_owned() } else { file })
}

/// Digests of a tenant's keys, one per line of the Secret.
fn key_digests(tenant: &Tenant, found: &Found) -> Result<BTreeSet<String>, String> {
    let SecretKeyRef { name, key } = &tenant.keys;
    let value = found.secret_value(name, key).map_err(|fault| fault.message)?;
    let lines = value.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii).filter(|line| !line.is_empty());
    let digests: BTreeSet<String> = lines.map(|line| hex::encode(Sha256::digest(line))).collect();
    if digests.is_empty() {
        Err(format!("Secret {name}, key `{key}` is empty; write a key there, one per line"))
    } else {
        Ok(digests)
    }
}

/// What pods name and does not exist. The pool is built all the same, so that what depends on nothing missing goes on.
fn note_missing(pool: &Pool, found: &Found, notes: &mut Vec<Note>) {
    let models = [Some(&pool.model), pool.draft.as_ref().map(|draft| &draft.model)];
    for token in models.into_iter().flatten().filter_map(|model| model.source.token()) {
        if let Err(fault) = found.secret_value(&token.name, &token.key) {
            notes.push(Note { reason: fault.reason, message: format!("access token of the model: {}", fault.message) });
        }
    }
    for prefix in &pool.shared_prefixes {
        let exists = found.config_maps.get(&prefix.name).is_some_and(|map| {
            let text = map.data.as_ref().is_some_and(|data| data.contains_key(&prefix.key));
            text || map.binary_data.as_ref().is_some_and(|data| data.contains_key(&prefix.key))
        });
        if !exists {
            let message = format!(
                "ConfigMap {} with the key `{}` does not exist; create it or remove the shared prefix",
                prefix.name, prefix.key
            );
            notes.push(Note { reason: ConditionReason::MissingObject, message });
        }
    }
}
