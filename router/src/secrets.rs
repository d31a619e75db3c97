//! The pool secrets that a router has loaded, and the tenants that follow from the active one.
//!
//! Owns which material is in force: pool secrets and tenants of one version, taken over as a whole or not at all. Refuses to print any of it, and to know
//! where it comes from (see [`files`] and [`object`]). Read and switched by the admin service; doors authenticate against the table.
//!
//! Invariants
//! 1. A request sees one version: its gate takes one table, and tenant, domain and secret epoch come from that table. Requests that were let in
//!    go on to their end, also when their key is withdrawn meanwhile: rotating a key cuts no stream.
//! 2. Material that cannot be used changes nothing. It is told in the log, in a metric, in `/readyz` and by the admin service until it is mended.
//! 3. The active secret stays active while it is loaded; when it is withdrawn, the first one becomes active.

mod files;
mod material;
mod object;
#[cfg(test)]
mod tests;

pub use files::SecretFiles;
pub(crate) use files::follow as follow_files;
pub use material::{Material, MaterialError, TenantSource};
pub(crate) use object::follow as follow_object;

use kvasir_core::{Error, PoolSecret, Reason, SecretEpoch};
use kvasir_door::{TenantTable, Tenants};
use kvasir_telemetry::RouterMetrics;
use std::sync::{Mutex, MutexGuard, PoisonError};
use tokio::sync::watch;

/// Loaded secrets, the active one, and the tenants that follow.
pub struct Secrets {
    tenants: Tenants,
    state: Mutex<State>,
    loaded: watch::Sender<bool>,
    metrics: RouterMetrics,
}

#[derive(Default)]
struct State {
    held: Option<Held>,
    /// What is there now was looked at and cannot be used.
    refused: Option<Error>,
    /// What is there now cannot be looked at.
    unreadable: Option<Error>,
}

/// What is in force.
struct Held {
    material: Material,
    active: SecretEpoch,
    version: String,
}

/// What the admin service tells.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Standing {
    /// Epochs of the loaded secrets.
    pub loaded: Vec<SecretEpoch>,
    /// Epoch of the active one; absent before the first material.
    pub active: Option<SecretEpoch>,
    /// Version of the material where its source counts versions.
    pub version: String,
    /// Tenants in force.
    pub tenants: usize,
    /// Why the newest is not in force.
    pub stale: Option<Error>,
}

// === impl Secrets ===

impl Secrets {
    /// Before the first material: requests are told to come back.
    pub fn awaited(metrics: RouterMetrics) -> Self {
        let loaded = watch::Sender::new(false);
        Self { tenants: Tenants::new(TenantTable::awaited()), state: Mutex::default(), loaded, metrics }
    }

    /// Starts with this material in force.
    pub fn new(material: Material, metrics: RouterMetrics) -> Result<Self, MaterialError> {
        let secrets = Self::awaited(metrics);
        secrets.apply(material, String::new())?;
        Ok(secrets)
    }

    /// The tenants that follow from the active secret; clones see every change.
    pub fn tenants(&self) -> &Tenants {
        &self.tenants
    }

    /// Puts other material in force from the next request on, or changes nothing.
    pub fn apply(&self, material: Material, version: String) -> Result<(), MaterialError> {
        let mut state = self.lock();
        let active = state.held.as_ref().map(|held| held.active);
        let kept = active.and_then(|active| material.secret(active)).is_some();
        let active = active.filter(|_| kept).unwrap_or_else(|| material.first().epoch());
        let secret = material.secret(active).unwrap_or_else(|| material.first());
        let table = material.table(secret).inspect_err(|error| self.refuse(&mut state, error))?;
        let tenants = table.tenants().len();
        let withdrawn = state.held.is_some() && !kept;
        // Replaced while the state is held: no other change can come between.
        self.tenants.replace(table);
        state.held = Some(Held { material, active, version });
        (state.refused, state.unreadable) = (None, None);
        self.loaded.send_replace(true);
        self.metrics.secrets_loaded("applied");
        self.metrics.secrets(tenants as u64, false);
        let epoch = hex::encode(active.0);
        if withdrawn {
            tracing::warn!(
                tenants,
                active = epoch,
                "the active pool secret was withdrawn; the first one is active now, and caches begin anew"
            );
        } else {
            tracing::info!(tenants, active = epoch, "secrets and tenants are in force");
        }
        Ok(())
    }

    /// What is there now cannot be used.
    pub fn refused(&self, error: &MaterialError) {
        self.refuse(&mut self.lock(), error);
    }

    /// What is there now cannot be looked at.
    pub fn unreadable(&self, why: &str) {
        let mut state = self.lock();
        self.metrics.secrets_loaded("unreadable");
        let error = Error::new(Reason::NotReady, why);
        if state.unreadable.as_ref() != Some(&error) {
            tracing::warn!(why, "secrets and tenants cannot be read; what was in force stays");
        }
        state.unreadable = Some(error);
        self.told(&state);
    }

    /// What is there now was looked at, and it is what was looked at before.
    pub fn unchanged(&self) {
        let mut state = self.lock();
        if state.unreadable.take().is_some() {
            tracing::info!("secrets and tenants can be read again; nothing has changed");
            self.told(&state);
        }
    }

    /// Whether requests can be authenticated.
    pub fn ready(&self) -> Result<(), Error> {
        let state = self.lock();
        if state.held.is_some() {
            return Ok(());
        }
        let why = state.hint().map_or_else(String::new, |hint| format!(": {hint}"));
        Err(Error::new(Reason::NotReady, format!("secrets and tenants have not been loaded yet{why}")))
    }

    /// Waits for the first material.
    pub async fn loaded(&self) {
        let mut loaded = self.loaded.subscribe();
        // An error would mean that `self` is gone.
        let _loaded = loaded.wait_for(|loaded| *loaded).await;
    }

    /// Why what is in force may be behind, for those who may not know tenants' names.
    pub fn hint(&self) -> Option<String> {
        self.lock().hint()
    }

    /// Everything that may be told.
    pub fn standing(&self) -> Standing {
        let state = self.lock();
        let held = state.held.as_ref();
        Standing {
            loaded: held.map_or_else(Vec::new, |held| held.material.epochs()),
            active: held.map(|held| held.active),
            version: held.map_or_else(String::new, |held| held.version.clone()),
            tenants: self.tenants.current().tenants().len(),
            stale: state.stale().cloned(),
        }
    }

    /// Derives domains from another loaded secret from the next request on.
    pub fn activate(&self, epoch: SecretEpoch) -> Result<(), Error> {
        let mut state = self.lock();
        let unknown = || {
            let message = format!("no secret of epoch {} is loaded; wait until `Secrets` lists it", hex::encode(epoch.0));
            Error::invalid("epoch", message)
        };
        let held = state.held.as_mut().ok_or_else(unknown)?;
        let secret: &PoolSecret = held.material.secret(epoch).ok_or_else(unknown)?;
        let table = held.material.table(secret).map_err(|error| Error::new(Reason::Internal, error.to_string()))?;
        self.tenants.replace(table);
        held.active = epoch;
        tracing::info!(active = hex::encode(epoch.0), "another pool secret is active");
        Ok(())
    }

    fn refuse(&self, state: &mut State, error: &MaterialError) {
        self.metrics.secrets_loaded("refused");
        tracing::error!(%error, "new secrets and tenants cannot be used; what was in force stays");
        state.refused = Some(Error::new(Reason::InvalidArgument, error.to_string()));
        state.unreadable = None;
        self.told(state);
    }

    fn told(&self, state: &State) {
        self.metrics.secrets(self.tenants.current().tenants().len() as u64, state.stale().is_some());
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl State ===

impl State {
    fn stale(&self) -> Option<&Error> {
        self.unreadable.as_ref().or(self.refused.as_ref())
    }

    fn hint(&self) -> Option<String> {
        let refused = || "what is there now cannot be used; the log and the admin service say why".to_owned();
        self.unreadable.as_ref().map(|error| error.message.clone()).or_else(|| self.refused.as_ref().map(|_| refused()))
    }
}
