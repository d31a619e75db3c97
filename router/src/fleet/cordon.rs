//! Lives of workers that get nothing new for a while, because the operator is about to take them down.
//!
//! Pure. Soft state on purpose: each cordon ends by itself, so that an operator that dies leaves no worker idle for good, and a router that restarts
//! without it does nothing wrong, since the worker's own drain is what counts.

use kvasir_core::{Incarnation, WorkerUid};
use std::collections::HashMap;
use tokio::time::Instant;

/// All cordons; as many as there are lives that were known when they were set.
#[derive(Debug, Default)]
pub(super) struct Cordons(HashMap<(WorkerUid, Incarnation), Instant>);

// === impl Cordons ===

impl Cordons {
    pub(super) fn set(&mut self, uid: WorkerUid, incarnation: Incarnation, until: Instant) {
        self.0.insert((uid, incarnation), until);
    }

    /// Forgets what is over.
    pub(super) fn end(&mut self, now: Instant) {
        self.0.retain(|_, until| *until > now);
    }

    /// When the next one is over.
    pub(super) fn first_end(&self) -> Option<Instant> {
        self.0.values().min().copied()
    }

    pub(super) fn until(&self, uid: &WorkerUid, incarnation: Incarnation) -> Option<Instant> {
        if self.0.is_empty() {
            return None;
        }
        self.0.get(&(uid.clone(), incarnation)).copied()
    }
}
