//! Leader election by a Lease, and the gate that it opens for writes.
//!
//! Owns the campaign (get, decide, replace with the resource version that was read) and the moment until which this process may write.
//! Refuses to know what is written. Run beside the controller, whose client has the [`GateLayer`] under it.
//!
//! Invariants
//! 1. The gate is open only until `renew_deadline` after a renewal that succeeded, counted from before its request was sent; a mutating
//!    request that comes later is refused on this side, whatever the state of the network.
//! 2. Another one's lease is taken only when it has not changed for its whole duration on this process's own monotonic clock; clocks of
//!    machines are never compared.
//! 3. On shutdown the lease is given up at once, so that a rollout of the operator does not cost a lease duration.
//!
//! Assumptions: `renew_deadline` is shorter than `lease_duration` by more than a request takes. A write that was sent before the deadline may
//! arrive after it; writes are idempotent and conditional, so it cannot undo what the next leader did.
//!
//! Cost: one GET and one PUT per `retry_period` while leading, one GET while following.

mod gate;

pub use gate::{Gate, GateLayer, NotLeading};

use crate::clock::Clock;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use kube::Client;
use kube::api::{Api, ObjectMeta, PostParams};
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

/// How to campaign.
#[derive(Clone, Debug)]
pub struct LeadSettings {
    /// Namespace of the Lease.
    pub namespace: String,
    /// Name of the Lease.
    pub lease: String,
    /// Unique name of this process.
    pub identity: String,
    /// After so long without renewal others may take the lease.
    pub lease_duration: Duration,
    /// After so long without renewal this process stops writing.
    pub renew_deadline: Duration,
    /// Time between two attempts.
    pub retry_period: Duration,
}

/// Campaigns for the lease.
pub struct Elector {
    api: Api<Lease>,
    settings: LeadSettings,
    clock: Clock,
    gate: Gate,
    /// Another one's lease as it was last seen to change, and when.
    seen: Option<(LeaseSpec, Instant)>,
}

/// What to do about a lease.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Move {
    /// It is ours: renew it.
    Renew,
    /// It is nobody's, or its holder is gone.
    Take,
    /// It is another one's.
    Follow,
}

// === impl LeadSettings ===

impl LeadSettings {
    /// Usual periods for a lease of this name.
    pub fn new(namespace: impl Into<String>, lease: impl Into<String>, identity: impl Into<String>) -> Self {
        Self {
            namespace: namespace.into(),
            lease: lease.into(),
            identity: identity.into(),
            lease_duration: Duration::from_secs(15),
            renew_deadline: Duration::from_secs(10),
            retry_period: Duration::from_secs(2),
        }
    }
}

// === impl Elector ===

impl Elector {
    /// An elector that opens and closes `gate`. Its client must not be behind that gate.
    pub fn new(client: Client, settings: LeadSettings, clock: Clock, gate: Gate) -> Self {
        Self { api: Api::namespaced(client, &settings.namespace), settings, clock, gate, seen: None }
    }

    /// Campaigns until `stop`, then gives the lease up if it is ours.
    pub async fn run(mut self, stop: CancellationToken) {
        loop {
            self.step().await;
            tokio::select! {
                () = stop.cancelled() => break,
                () = sleep(self.settings.retry_period) => {}
            }
        }
        if self.gate.is_open() {
            self.gate.close();
            match timeout(self.settings.retry_period, self.release()).await {
                Ok(Ok(())) => tracing::info!(lease = self.settings.lease, "gave the lease up"),
                Ok(Err(error)) => tracing::warn!(%error, "the lease could not be given up; it runs out by itself"),
                Err(_) => tracing::warn!("giving the lease up took too long; it runs out by itself"),
            }
        }
    }

    async fn step(&mut self) {
        let started = Instant::now();
        let led = self.gate.is_open();
        match timeout(self.settings.renew_deadline, self.attempt()).await {
            Ok(Ok(true)) => {
                self.gate.open_until(started + self.settings.renew_deadline);
                if !led {
                    tracing::info!(lease = self.settings.lease, identity = self.settings.identity, "leading");
                }
            }
            Ok(Ok(false)) => {
                self.gate.close();
                if led {
                    tracing::warn!(lease = self.settings.lease, "another one holds the lease");
                }
            }
            // The gate closes by itself at its deadline.
            Ok(Err(error)) => tracing::warn!(%error, leading = self.gate.is_open(), "the lease could not be read or renewed"),
            Err(_) => tracing::warn!(leading = self.gate.is_open(), "renewing the lease took too long"),
        }
    }

    /// One round; whether the lease is ours after it.
    async fn attempt(&mut self) -> Result<bool, kube::Error> {
        let name = self.settings.lease.clone();
        let Some(mut lease) = self.api.get_opt(&name).await? else {
            let lease = Lease { metadata: ObjectMeta { name: Some(name), ..ObjectMeta::default() }, spec: Some(self.held(None)) };
            return won(self.api.create(&PostParams::default(), &lease).await);
        };
        let spec = lease.spec.take().unwrap_or_default();
        match self.decide(&spec) {
            Move::Follow => Ok(false),
            Move::Renew | Move::Take => {
                lease.spec = Some(self.held(Some(&spec)));
                won(self.api.replace(&name, &PostParams::default(), &lease).await)
            }
        }
    }

    fn decide(&mut self, spec: &LeaseSpec) -> Move {
        let holder = spec.holder_identity.as_deref().unwrap_or_default();
        if holder == self.settings.identity {
            return Move::Renew;
        }
        if holder.is_empty() {
            return Move::Take;
        }
        let since = match &self.seen {
            Some((seen, since)) if seen == spec => *since,
            _ => {
                let now = Instant::now();
                self.seen = Some((spec.clone(), now));
                now
            }
        };
        let duration = Duration::from_secs(spec.lease_duration_seconds.map_or(15, |seconds| seconds.max(1) as u64));
        if since.elapsed() >= duration { Move::Take } else { Move::Follow }
    }

    fn held(&self, former: Option<&LeaseSpec>) -> LeaseSpec {
        let now = self.clock.micro_time();
        let ours = former.filter(|spec| spec.holder_identity.as_deref() == Some(&*self.settings.identity));
        let transitions = former.map_or(0, |spec| spec.lease_transitions.unwrap_or(0) + i32::from(ours.is_none()));
        LeaseSpec {
            holder_identity: Some(self.settings.identity.clone()),
            lease_duration_seconds: Some(self.settings.lease_duration.as_secs() as i32),
            acquire_time: ours.and_then(|spec| spec.acquire_time.clone()).or_else(|| Some(now.clone())),
            renew_time: Some(now),
            lease_transitions: Some(transitions),
            ..LeaseSpec::default()
        }
    }

    async fn release(&self) -> Result<(), kube::Error> {
        let name = &self.settings.lease;
        let Some(mut lease) = self.api.get_opt(name).await? else { return Ok(()) };
        let spec = lease.spec.get_or_insert_default();
        if spec.holder_identity.as_deref() == Some(&*self.settings.identity) {
            spec.holder_identity = None;
            spec.lease_duration_seconds = Some(1);
            spec.renew_time = Some(self.clock.micro_time());
            self.api.replace(name, &PostParams::default(), &lease).await?;
        }
        Ok(())
    }
}

/// A conflict means that someone else was faster.
fn won<T>(result: Result<T, kube::Error>) -> Result<bool, kube::Error> {
    match result {
        Ok(_) => Ok(true),
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests;
