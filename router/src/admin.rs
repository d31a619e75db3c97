//! The admin service: what this router knows and has open, and which secret it derives domains from.
//!
//! Owns the wire form of the fleet's view. Refuses to change anything but the active secret and cordons. Called by the operator and by people, each of
//! whom shows the pool's bearer secret (the guard is put around it where it is served).

use crate::admit::Admission;
use crate::fleet::Fleet;
use crate::index::Trust;
use crate::secrets::Secrets;
use crate::view::{Readiness, WorkerView};
use kvasir_core::{Error, Incarnation, Reason, SecretEpoch, WorkerUid};
use kvasir_proto::convert;
use kvasir_proto::router as wire;
use kvasir_proto::router::router_admin_server::RouterAdmin;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;
use tonic::{Request, Response, Status};

/// The service.
pub struct Admin {
    fleet: Fleet,
    admission: Admission,
    secrets: Arc<Secrets>,
}

/// Longest cordon; an operator that is alive extends it.
const CORDON_MAX: Duration = Duration::from_hours(1);

// === impl Admin ===

impl Admin {
    /// An admin service over one router.
    pub fn new(fleet: Fleet, admission: Admission, secrets: Arc<Secrets>) -> Self {
        Self { fleet, admission, secrets }
    }

    fn worker(&self, worker: &WorkerView, now: Instant) -> wire::RegisteredWorker {
        let (state, reason) = match &worker.readiness {
            Readiness::Unprobed => (wire::WorkerState::Unprobed, Some(Error::new(Reason::NotReady, "not probed yet"))),
            Readiness::Ready => (wire::WorkerState::Ready, None),
            Readiness::Unready(error) => (wire::WorkerState::Unready, Some(error.clone())),
            Readiness::Draining => {
                let why = if worker.cordoned.is_some() { "the worker is cordoned" } else { "the worker is draining" };
                (wire::WorkerState::Draining, Some(Error::new(Reason::Draining, why)))
            }
            Readiness::Lost(error) => (wire::WorkerState::Lost, Some(error.clone())),
        };
        let trust = worker.described.as_ref().map_or(Trust::Fallback, |it| {
            let index = self.fleet.index();
            index.read().trust(it.member, index.time(now))
        });
        let index = match trust {
            Trust::Exact => wire::IndexState::Exact,
            Trust::Degraded => wire::IndexState::Degraded,
            Trust::Fallback => wire::IndexState::Fallback,
        };
        let models = worker.described.iter().flat_map(|it| it.models.iter());
        wire::RegisteredWorker {
            uid: worker.uid.to_string(),
            incarnation: worker.described.as_ref().map(|it| it.incarnation.0.to_vec()).unwrap_or_default(),
            address: worker.address.clone(),
            state: state.into(),
            reason: reason.as_ref().map(convert::error_to_pb),
            index: index.into(),
            load_age_ms: worker.load.as_ref().map(|report| now.saturating_duration_since(report.measured).as_millis() as u64),
            in_flight: worker.live.gauge.read().attempts as u32,
            identities: models.clone().map(|(_, identity)| identity.0.as_bytes().to_vec()).collect(),
            models: models.map(|(name, _)| name.clone()).collect(),
            cordoned_ms: worker.cordoned.map(|until| until.saturating_duration_since(now).as_millis() as u64),
        }
    }
}

#[tonic::async_trait]
impl RouterAdmin for Admin {
    async fn workers(&self, _request: Request<wire::WorkersRequest>) -> Result<Response<wire::WorkersResponse>, Status> {
        let (view, now) = (self.fleet.view(), Instant::now());
        let workers = view.workers().iter().map(|worker| self.worker(worker, now)).collect();
        let stale = view.source.stale.as_ref().map(|stale| Error::new(Reason::NotReady, stale.message.clone()));
        let (complete, listed) = (view.complete, view.source.listed);
        Ok(Response::new(wire::WorkersResponse { workers, complete, listed, stale: stale.as_ref().map(convert::error_to_pb) }))
    }

    async fn in_flight(&self, request: Request<wire::InFlightRequest>) -> Result<Response<wire::InFlightResponse>, Status> {
        let uid = request.into_inner().uid;
        let workers = self.fleet.in_flight().await;
        let workers = workers.into_iter().filter(|(name, ..)| uid.as_deref().is_none_or(|uid| uid == &*name.0));
        let workers = workers.map(|(name, incarnation, attempts)| wire::WorkerInFlight {
            uid: name.to_string(),
            incarnation: incarnation.0.to_vec(),
            in_flight: attempts as u32,
        });
        Ok(Response::new(wire::InFlightResponse { workers: workers.collect(), waiting: self.admission.waiting() as u32 }))
    }

    async fn secrets(&self, _request: Request<wire::SecretsRequest>) -> Result<Response<wire::SecretsResponse>, Status> {
        let standing = self.secrets.standing();
        Ok(Response::new(wire::SecretsResponse {
            loaded: standing.loaded.into_iter().map(|epoch| epoch.0.to_vec()).collect(),
            active: standing.active.map(|epoch| epoch.0.to_vec()).unwrap_or_default(),
            stale: standing.stale.as_ref().map(convert::error_to_pb),
            resource_version: standing.version,
            tenants: standing.tenants as u32,
        }))
    }

    async fn activate(&self, request: Request<wire::ActivateRequest>) -> Result<Response<wire::ActivateResponse>, Status> {
        let epoch = convert::bytes_from_wire("epoch", &request.into_inner().epoch).map_err(convert::Malformed::into_invalid);
        let activated = epoch.map(SecretEpoch).and_then(|epoch| self.secrets.activate(epoch).map(|()| epoch));
        let epoch = activated.map_err(|error| convert::error_to_status(&error))?;
        Ok(Response::new(wire::ActivateResponse { active: epoch.0.to_vec() }))
    }

    async fn cordon(&self, request: Request<wire::CordonRequest>) -> Result<Response<wire::CordonResponse>, Status> {
        let wire::CordonRequest { uid, incarnation, cordon_ms } = request.into_inner();
        let refuse = |error: Error| convert::error_to_status(&error);
        let incarnation =
            convert::bytes_from_wire("incarnation", &incarnation).map_err(|malformed| refuse(malformed.into_invalid()))?;
        let time = Duration::from_millis(cordon_ms);
        if time > CORDON_MAX {
            let message = format!("{cordon_ms} ms is more than {} s; cordon again before it ends", CORDON_MAX.as_secs());
            return Err(refuse(Error::invalid("cordon_ms", message)));
        }
        let open = self.fleet.cordon(WorkerUid(uid.into()), Incarnation(incarnation), Instant::now() + time).await;
        Ok(Response::new(wire::CordonResponse { in_flight: open.map_err(refuse)? as u32 }))
    }
}
