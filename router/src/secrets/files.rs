//! Pool secrets and tenants from files, read again and again: a mounted Secret, or files that someone edits.
//!
//! Owns when a change counts. Refuses to know what is in force. One task polls; notifications are not used, because mounted Secrets change by
//! swapping a link and network volumes notify nobody.
//!
//! A change counts when two readings in a row, [`POLL_EVERY`] apart, found the same bytes: a file that is being written, or one of two files that belong
//! together, is not taken half. A withdrawn key is thus refused at most twice [`POLL_EVERY`] after the last write.

use super::Secrets;
use super::material::{Material, MaterialError, Raw, SECRET_BYTES_MAX, TENANTS_BYTES_MAX};
use kvasir_core::Digest;
use kvasir_door::Isolation;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{MissedTickBehavior, interval};

/// Which files hold what.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SecretFiles {
    /// Pool secrets; the first derives domains unless another one was made active.
    pub pool_secrets: Vec<PathBuf>,
    /// Tenants; without a file everyone is the tenant `default`.
    pub tenants: Option<PathBuf>,
    /// Who may reuse whose state.
    pub isolation: Isolation,
}

/// What one reading found.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Found {
    Bytes(Digest),
    /// Why they cannot be read.
    Nothing(String),
}

/// Decides when what was found counts.
pub(crate) struct Settle {
    last: Found,
    /// What was taken in last, whether it could be used or not.
    taken: Found,
}

/// Time between two readings.
pub(super) const POLL_EVERY: Duration = Duration::from_secs(1);

// === impl SecretFiles ===

impl SecretFiles {
    /// Reads and checks all of them, for the start.
    pub fn read(&self) -> Result<Material, MaterialError> {
        Ok(self.first()?.0)
    }

    /// As [`Self::read`], with where polling begins.
    pub(crate) fn first(&self) -> Result<(Material, Settle), MaterialError> {
        let raw = self.bytes()?;
        let found = Found::Bytes(raw.digest());
        let material = Material::parse(raw, &self.isolation)?;
        Ok((material, Settle::new(found)))
    }

    fn bytes(&self) -> Result<Raw, MaterialError> {
        let part = |path: &PathBuf, max| Ok((path.display().to_string(), read(path, max)?));
        Ok(Raw {
            pool_secrets: self.pool_secrets.iter().map(|path| part(path, SECRET_BYTES_MAX)).collect::<Result<_, _>>()?,
            tenants: self.tenants.as_ref().map(|path| part(path, TENANTS_BYTES_MAX)).transpose()?,
        })
    }
}

fn read(path: &Path, max: usize) -> Result<Vec<u8>, MaterialError> {
    let what = || path.display().to_string();
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path).map_err(|source| MaterialError::Unreadable { what: what(), source })?;
    file.take(max as u64 + 1).read_to_end(&mut bytes).map_err(|source| MaterialError::Unreadable { what: what(), source })?;
    if bytes.len() > max {
        return Err(MaterialError::TooLarge { what: what(), max });
    }
    Ok(bytes)
}

/// Polls until it is dropped. Reading and parsing block, so they are done aside.
pub(crate) async fn follow(files: SecretFiles, settle: Settle, secrets: Arc<Secrets>) {
    let mut polls = interval(POLL_EVERY);
    polls.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut state = (files, settle, secrets);
    loop {
        polls.tick().await;
        let polled = tokio::task::spawn_blocking(move || {
            let (files, settle, secrets) = &mut state;
            poll(files, settle, secrets);
            state
        });
        let Ok(next) = polled.await else {
            // The runtime is going down.
            return;
        };
        state = next;
    }
}

pub(super) fn poll(files: &SecretFiles, settle: &mut Settle, secrets: &Secrets) {
    let read = files.bytes();
    let found = match &read {
        Ok(raw) => Found::Bytes(raw.digest()),
        Err(error) => Found::Nothing(error.to_string()),
    };
    if !settle.counts(found) {
        return;
    }
    match read {
        // An error has been recorded by whoever refused it.
        Ok(raw) => match Material::parse(raw, &files.isolation) {
            Ok(material) => drop(secrets.apply(material, String::new())),
            Err(error) => secrets.refused(&error),
        },
        Err(error) => secrets.unreadable(&error.to_string()),
    }
}

// === impl Settle ===

impl Settle {
    pub(crate) fn new(found: Found) -> Self {
        Self { last: found.clone(), taken: found }
    }

    /// Whether what was found is new and has stood still since the last reading.
    pub(crate) fn counts(&mut self, found: Found) -> bool {
        let still = self.last == found;
        let counts = still && self.taken != found;
        if counts {
            self.taken = found.clone();
        }
        self.last = found;
        counts
    }
}
