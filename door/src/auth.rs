//! Who is calling, and which cached state the caller may reuse.
//!
//! Owns the tenants: API key → tenant → reuse domain, weight, priority. Refuses to know routes (see [`gate`]) and quotas (the router's).
//! Called by the gate of both doors once per request and by `prepare` for the domain.
//!
//! Invariants
//! 1. A key is never stored nor compared as text: only its SHA-256, looked up under a keyed hash whose key lives in this process alone, then
//!    compared in constant time. Timing tells nothing about a stored key.
//! 2. A domain comes from the tenant's configured name and epoch; the client's `cache_salt` only narrows it.
//! 3. Nothing that a client sends names a tenant: there is no tenant header.
//!
//! Costs: one SHA-256 and one BLAKE3 of 32 bytes per lookup, about 0.3 µs, whatever the number of keys.

mod config;
mod gate;

pub use config::{Isolation, TenantFileError};
pub(crate) use gate::{gate, is_grpc};

use kvasir_core::{Error, PoolSecret, Reason, ReuseDomain, SecretEpoch, SharedDomain, TenantTag};
use sha2::{Digest as _, Sha256};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use subtle::ConstantTimeEq as _;
use tokio::sync::watch;

/// A caller that was authenticated, with everything that follows from it.
#[derive(Clone, Debug)]
pub struct Tenant {
    tag: TenantTag,
    /// Share of the fleet under load, relative to other tenants; at least 1.
    pub weight: u32,
    /// Added to the priority of each of its requests.
    pub priority: i32,
    /// Highest priority that one of its requests may ask for beside its own.
    pub priority_max: i32,
    cache_epoch: u64,
    scope: Arc<Scope>,
}

/// All tenants of a door at one moment.
pub struct TenantTable {
    awaited: bool,
    open: Option<Arc<Tenant>>,
    by_key: HashMap<[u8; 32], Entry>,
    lookup_key: [u8; 32],
    tenants: Vec<Arc<Tenant>>,
}

/// Handle to the current [`TenantTable`]; replacing it takes effect on the next request of every clone.
#[derive(Clone)]
pub struct Tenants(Arc<watch::Sender<Arc<TenantTable>>>);

struct Entry {
    key_sha256: [u8; 32],
    tenant: Arc<Tenant>,
}

/// When callers of a door without a table are to come back: a table is usually there within a second of the start.
const AWAITED_RETRY: Duration = Duration::from_secs(1);

#[derive(Debug)]
struct Scope {
    secret: PoolSecret,
    shared: Option<SharedDomain>,
}

// === impl Tenant ===

impl Tenant {
    /// Opaque name for quotas, floors and metrics.
    pub fn tag(&self) -> &TenantTag {
        &self.tag
    }

    /// The reuse domain of this tenant's requests, narrowed by the client's salt if there is one.
    pub fn domain(&self, cache_salt: Option<&str>) -> ReuseDomain {
        match &self.scope.shared {
            Some(shared) => shared.as_reuse_domain(&self.scope.secret, cache_salt),
            None => ReuseDomain::derive(&self.scope.secret, &self.tag.0, self.cache_epoch, cache_salt),
        }
    }

    /// Epoch of the secret that the domain is derived under.
    pub fn secret_epoch(&self) -> SecretEpoch {
        self.scope.secret.epoch()
    }
}

// === impl TenantTable ===

impl TenantTable {
    /// Most API keys in one table.
    pub const KEYS_MAX: usize = 65_536;

    /// Name of the only tenant of an open door.
    pub const DEFAULT_TENANT: &'static str = "default";

    /// A door without keys: everyone is the tenant `default`.
    pub fn open(secret: PoolSecret) -> Self {
        let tenant = Arc::new(Tenant {
            tag: TenantTag(Self::DEFAULT_TENANT.into()),
            weight: 1,
            priority: 0,
            priority_max: crate::params::PRIORITY_MAX,
            cache_epoch: 0,
            scope: Arc::new(Scope { secret, shared: None }),
        });
        Self { awaited: false, open: Some(tenant.clone()), by_key: HashMap::new(), lookup_key: [0; 32], tenants: vec![tenant] }
    }

    /// A door whose tenants are not known yet: everyone is told to come back, for "unauthenticated" would be a lie to those with a key.
    pub fn awaited() -> Self {
        Self { awaited: true, open: None, by_key: HashMap::new(), lookup_key: [0; 32], tenants: Vec::new() }
    }

    /// Whether requests without a key are served.
    pub fn is_open(&self) -> bool {
        self.open.is_some()
    }

    /// Every tenant, in the order of the file.
    pub fn tenants(&self) -> &[Arc<Tenant>] {
        &self.tenants
    }

    /// Finds the caller by the value of its `Authorization` header.
    pub fn authenticate(&self, authorization: Option<&[u8]>) -> Result<Arc<Tenant>, Error> {
        if let Some(tenant) = &self.open {
            return Ok(tenant.clone());
        }
        if self.awaited {
            let message = "the tenants' keys have not been loaded yet; send the request again";
            return Err(Error::new(Reason::NotReady, message).with_retry_after(AWAITED_RETRY));
        }
        let key = bearer(authorization)?;
        let key_sha256: [u8; 32] = Sha256::digest(key).into();
        let entry = self.by_key.get(&self.lookup(&key_sha256));
        match entry {
            Some(entry) if bool::from(entry.key_sha256.ct_eq(&key_sha256)) => Ok(entry.tenant.clone()),
            _ => Err(refused("the API key is not known here; check the key, or ask for one that is listed in the tenants file")),
        }
    }

    fn lookup(&self, key_sha256: &[u8; 32]) -> [u8; 32] {
        *blake3::keyed_hash(&self.lookup_key, key_sha256).as_bytes()
    }
}

fn bearer(authorization: Option<&[u8]>) -> Result<&[u8], Error> {
    const HOW: &str = "send `Authorization: Bearer <key>`";
    let value = authorization.ok_or_else(|| refused(format!("no API key was sent; {HOW}")))?;
    let (scheme, key) = match value.iter().position(|byte| *byte == b' ') {
        Some(at) => (&value[..at], value[at..].trim_ascii()),
        None => (value, &b""[..]),
    };
    if !scheme.eq_ignore_ascii_case(b"bearer") {
        return Err(refused(format!("the Authorization header has another scheme than Bearer; {HOW}")));
    }
    if key.is_empty() {
        return Err(refused(format!("the bearer key is empty; {HOW}")));
    }
    Ok(key)
}

fn refused(message: impl Into<String>) -> Error {
    Error::new(Reason::Unauthenticated, message)
}

// === impl Tenants ===

impl Tenants {
    /// Starts with one table.
    pub fn new(table: TenantTable) -> Self {
        Self(Arc::new(watch::Sender::new(Arc::new(table))))
    }

    /// The table of this moment.
    pub fn current(&self) -> Arc<TenantTable> {
        self.0.borrow().clone()
    }

    /// Puts another table in place: keys that it lacks are refused from the next request on, also on connections that are open. A request that
    /// was let in goes on to its end: it was authenticated once, as a whole.
    pub fn replace(&self, table: TenantTable) {
        self.0.send_replace(Arc::new(table));
    }
}

#[cfg(test)]
mod tests;
