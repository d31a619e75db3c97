//! The `WorkerAdmin` service: what is resident, dropping it, and the few settings that change without a restart.

use super::WorkerService;
use crate::kv::FlushScope;
use kvasir_core::{Error, ModelIdentity, Reason, SecretEpoch, SpeculationMode, TenantTag, Tier};
use kvasir_proto::convert::{
    Malformed, bytes_from_wire, cache_mode_from_wire, cache_mode_to_wire, digest_from_wire, error_to_status,
    speculation_mode_from_wire, tier_to_wire,
};
use kvasir_proto::pb;
use kvasir_proto::worker as wire;
use kvasir_proto::worker::flush_request::Scope;
use kvasir_proto::worker::worker_admin_server::WorkerAdmin;
use std::time::Duration;
use tonic::{Request, Response, Status};

#[tonic::async_trait]
impl WorkerAdmin for WorkerService {
    async fn inspect(&self, request: Request<wire::InspectRequest>) -> Result<Response<wire::InspectResponse>, Status> {
        let wanted = request.into_inner().tenant_tag;
        let shown = |tenant: &TenantTag| wanted.as_deref().is_none_or(|tag| *tag == *tenant.0);
        let seen = self.engine().inspect().await.map_err(|error| error_to_status(&error))?;
        let device = tier_to_wire(Tier::Device) as i32;
        Ok(Response::new(wire::InspectResponse {
            worker_uid: self.uid().to_string(),
            incarnation: self.incarnation().0.to_vec(),
            running: seen.running,
            waiting: seen.waiting,
            tiers: vec![wire::TierLoad {
                tier: device,
                free: seen.blocks.free,
                cached: seen.blocks.cached,
                held: seen.blocks.held,
            }],
            tenants: seen
                .tenants
                .iter()
                .filter(|(tenant, ..)| shown(tenant))
                .map(|(tenant, cached, held)| wire::TenantBlocks {
                    tenant_tag: tenant.0.to_string(),
                    tier: device,
                    cached: *cached,
                    held: *held,
                })
                .collect(),
            requests: self.0.flights.list().iter().filter(|flight| shown(&flight.tenant)).map(in_flight).collect(),
            flags: Some(self.flags()),
            uptime_s: self.0.started.elapsed().as_secs(),
        }))
    }

    async fn flush(&self, request: Request<wire::FlushRequest>) -> Result<Response<wire::FlushResponse>, Status> {
        let scope = scope(request.into_inner()).map_err(|error| error_to_status(&error.into_invalid()))?;
        let blocks = self.engine().flush(scope).await.map_err(|error| error_to_status(&error))?;
        let flushed = vec![wire::FlushedBlocks { tier: tier_to_wire(Tier::Device) as i32, blocks }];
        Ok(Response::new(wire::FlushResponse { flushed }))
    }

    async fn set_flags(&self, request: Request<wire::SetFlagsRequest>) -> Result<Response<wire::SetFlagsResponse>, Status> {
        let flags = request.into_inner().flags;
        let flags = flags.ok_or_else(|| error_to_status(&Error::invalid("flags", "flags is required")))?;
        self.apply(&flags).map_err(|error| error_to_status(&error))?;
        Ok(Response::new(wire::SetFlagsResponse { flags: Some(self.flags()) }))
    }
}

// === impl WorkerService ===

impl WorkerService {
    fn flags(&self) -> wire::Flags {
        wire::Flags {
            prefix_cache: Some(cache_mode_to_wire(self.cache_mode()) as i32),
            speculation: Some(pb::SpeculationMode::Off as i32),
            max_draft_tokens: Some(0),
            padded_output: Some(false),
            drain_deadline_ms: Some(u64::try_from(self.drain_deadline().as_millis()).unwrap_or(u64::MAX)),
        }
    }

    /// Checks everything before it changes anything.
    fn apply(&self, flags: &wire::Flags) -> Result<(), Error> {
        let read = |error: Malformed| error.into_invalid();
        let speculation =
            flags.speculation.map(|mode| speculation_mode_from_wire("flags.speculation", mode).map_err(read)).transpose()?;
        if speculation.is_some_and(|mode| mode != SpeculationMode::Off) {
            return Err(unbuilt("flags.speculation", "this worker has no drafter"));
        }
        if flags.max_draft_tokens.is_some_and(|tokens| tokens != 0) {
            return Err(unbuilt("flags.max_draft_tokens", "this worker has no drafter"));
        }
        if flags.padded_output == Some(true) {
            return Err(unbuilt("flags.padded_output", "padded output is not built in this version"));
        }
        let cache = flags.prefix_cache.map(|mode| cache_mode_from_wire("flags.prefix_cache", mode).map_err(read)).transpose()?;
        if let Some(mode) = cache {
            self.set_cache_mode(mode)?;
        }
        if let Some(deadline) = flags.drain_deadline_ms {
            *self.0.flags.deadline() = Duration::from_millis(deadline);
        }
        Ok(())
    }
}

fn unbuilt(field: &str, why: &str) -> Error {
    Error::new(Reason::Unimplemented, format!("{field} cannot be set: {why}")).with_field(field)
}

fn in_flight(flight: &super::InFlightRequest) -> wire::InFlight {
    wire::InFlight {
        request_id: flight.id.0.to_vec(),
        tenant_tag: flight.tenant.0.to_string(),
        started: flight.started,
        prompt_tokens: flight.prompt_tokens,
        output_tokens: flight.output_tokens,
        age_ms: u64::try_from(flight.age.as_millis()).unwrap_or(u64::MAX),
    }
}

fn scope(request: wire::FlushRequest) -> Result<FlushScope, Malformed> {
    match request.scope {
        Some(Scope::TenantTag(tag)) if !tag.is_empty() => Ok(FlushScope::Tenant(TenantTag(tag.into()))),
        Some(Scope::TenantTag(_)) => Err(Malformed::new("tenant_tag", "must not be empty")),
        Some(Scope::Identity(identity)) => Ok(FlushScope::Identity(ModelIdentity(digest_from_wire("identity", &identity)?))),
        Some(Scope::SecretEpochNot(epoch)) => {
            Ok(FlushScope::SecretEpochNot(SecretEpoch(bytes_from_wire("secret_epoch_not", &epoch)?)))
        }
        Some(Scope::All(true)) => Ok(FlushScope::All),
        Some(Scope::All(false)) => Err(Malformed::new("all", "must be true; name a scope or leave it to another")),
        None => Err(Malformed::new("scope", "is required: a tenant, an identity, a secret epoch, or all")),
    }
}
