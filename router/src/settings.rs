//! Settings of one router, with the defaults that are documented for users.
//!
//! Parsed once (from flags or by `kvasir local`), then only read.

use crate::admit::AdmitSettings;
use crate::pick::PickSettings;
use kvasir_proto::auth::Credentials;
use std::time::Duration;

/// How a router places and attempts.
#[derive(Clone, Debug)]
pub struct RouterSettings {
    /// How far placement looks.
    pub pick: PickSettings,
    /// Admission limits.
    pub admit: AdmitSettings,
    /// Bytes of the prefix index: 256 MiB, about a million blocks.
    pub index_bytes: usize,
    /// Attempts per request at most, the first included: 3.
    pub attempts_max: u32,
    /// Time that a request may go on after its deadline before the router ends it itself: 1 s. The worker is the one to keep the deadline.
    pub deadline_grace: Duration,
    /// Ready workers without which the router is not ready itself: 0, as a pool with 0 workers has Ready routers.
    pub ready_workers_min: usize,
    /// What the router shows to its workers; `None` only where workers ask for nothing.
    pub credentials: Option<Credentials>,
}

impl Default for RouterSettings {
    fn default() -> Self {
        Self {
            pick: PickSettings::default(),
            admit: AdmitSettings::default(),
            index_bytes: 256 << 20,
            attempts_max: 3,
            deadline_grace: Duration::from_secs(1),
            ready_workers_min: 0,
            credentials: None,
        }
    }
}
