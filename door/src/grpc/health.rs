//! `grpc.health.v1`: the answer is [`Serve::ready`](crate::Serve::ready), asked each time.

use crate::door::Door;
use futures::StreamExt as _;
use futures::stream::{self, BoxStream};
use std::time::Duration;
use tonic::{Request, Response, Status};
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_server::Health;
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};

/// Services that health is known of; the empty name is the whole server.
const SERVICES: [&str; 2] = ["", super::service::INFERENCE];

/// How often a watched state is looked at.
const WATCH_INTERVAL: Duration = Duration::from_millis(500);

/// The health service of a door.
pub(crate) struct HealthService(pub(crate) Door);

// === impl HealthService ===

fn reply(status: ServingStatus) -> HealthCheckResponse {
    HealthCheckResponse { status: status.into() }
}

fn status(door: &Door, service: &str) -> ServingStatus {
    if !SERVICES.contains(&service) {
        ServingStatus::ServiceUnknown
    } else if door.serve().ready().is_ok() {
        ServingStatus::Serving
    } else {
        ServingStatus::NotServing
    }
}

#[tonic::async_trait]
impl Health for HealthService {
    type WatchStream = BoxStream<'static, Result<HealthCheckResponse, Status>>;

    async fn check(&self, request: Request<HealthCheckRequest>) -> Result<Response<HealthCheckResponse>, Status> {
        match status(&self.0, &request.into_inner().service) {
            ServingStatus::ServiceUnknown => {
                Err(Status::not_found("health is known of the whole server and of the inference service"))
            }
            known => Ok(Response::new(reply(known))),
        }
    }

    async fn watch(&self, request: Request<HealthCheckRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let (door, service) = (self.0.clone(), request.into_inner().service);
        let states = stream::unfold((door, service, None), |(door, service, mut last)| async move {
            loop {
                let now = status(&door, &service);
                if last != Some(now) {
                    last = Some(now);
                    return Some((Ok(reply(now)), (door, service, last)));
                }
                tokio::time::sleep(WATCH_INTERVAL).await;
            }
        });
        Ok(Response::new(states.boxed()))
    }
}
