//! The pool secrets that a router has loaded, and the tenants that follow from the active one.
//!
//! Owns which secret derives domains. Refuses to print one. Read and switched by the admin service; the tenants table that doors authenticate against
//! is replaced as a whole, so that no request sees half of a rotation.

use kvasir_core::{Error, PoolSecret, Reason, SecretEpoch};
use kvasir_door::{Isolation, TenantFileError, TenantTable, Tenants};
use std::sync::{Mutex, PoisonError};

/// Where tenants come from.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum TenantSource {
    /// Everyone is the tenant `default`; no key is asked for.
    Open,
    /// The text of a tenants file.
    File {
        /// Its TOML.
        text: String,
        /// Who may reuse whose state.
        isolation: Isolation,
    },
}

/// Loaded secrets and the active one.
pub struct Secrets {
    loaded: Vec<PoolSecret>,
    source: TenantSource,
    tenants: Tenants,
    active: Mutex<SecretEpoch>,
}

// === impl Secrets ===

impl Secrets {
    /// Starts with `first` active; `others` are loaded beside it for a rotation.
    pub fn new(first: PoolSecret, others: Vec<PoolSecret>, source: TenantSource) -> Result<Self, TenantFileError> {
        let tenants = Tenants::new(table(&source, &first)?);
        let active = Mutex::new(first.epoch());
        let mut loaded = vec![first];
        loaded.extend(others);
        Ok(Self { loaded, source, tenants, active })
    }

    /// The tenants that follow from the active secret; clones see every change.
    pub fn tenants(&self) -> &Tenants {
        &self.tenants
    }

    /// Epochs of the loaded secrets.
    pub fn loaded(&self) -> Vec<SecretEpoch> {
        self.loaded.iter().map(PoolSecret::epoch).collect()
    }

    /// Epoch of the active secret.
    pub fn active(&self) -> SecretEpoch {
        *self.active.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Derives domains from another loaded secret from the next request on.
    pub fn activate(&self, epoch: SecretEpoch) -> Result<(), Error> {
        let secret = self.loaded.iter().find(|secret| secret.epoch() == epoch);
        let secret = secret.ok_or_else(|| {
            let message = format!("no secret of epoch {} is loaded; wait until `Secrets` lists it", hex::encode(epoch.0));
            Error::invalid("epoch", message)
        })?;
        let mut active = self.active.lock().unwrap_or_else(PoisonError::into_inner);
        let table = table(&self.source, secret).map_err(|error| Error::new(Reason::Internal, error.to_string()))?;
        self.tenants.replace(table);
        *active = epoch;
        Ok(())
    }
}

fn table(source: &TenantSource, secret: &PoolSecret) -> Result<TenantTable, TenantFileError> {
    match source {
        TenantSource::Open => Ok(TenantTable::open(secret.clone())),
        TenantSource::File { text, isolation } => TenantTable::parse(text, secret, isolation),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret(text: &str) -> PoolSecret {
        PoolSecret::new(text.as_bytes()).unwrap()
    }

    #[test]
    fn activating_a_loaded_secret_moves_every_domain_and_an_unknown_one_is_refused() {
        let (old, new) = (secret("the old secret of the pool"), secret("the new secret of the pool"));
        let secrets = Secrets::new(old.clone(), vec![new.clone()], TenantSource::Open).unwrap();
        let tenants = secrets.tenants().clone();
        let domain = || tenants.current().authenticate(None).unwrap().domain(None);
        let before = domain();
        assert_eq!((secrets.active(), secrets.loaded()), (old.epoch(), vec![old.epoch(), new.epoch()]));
        let error = secrets.activate(SecretEpoch([0; 8])).unwrap_err();
        assert_eq!((error.reason, domain()), (Reason::InvalidArgument, before));
        secrets.activate(new.epoch()).unwrap();
        assert_eq!(secrets.active(), new.epoch());
        assert_ne!(domain(), before);
        assert_eq!(tenants.current().authenticate(None).unwrap().secret_epoch(), new.epoch());
    }
}
