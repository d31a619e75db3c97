//! The gRPC client of the admin services.

use super::{Admin, AdminError, Cordon, Described, Drained, Registered, RegisteredWorker};
use kvasir_proto::auth::{BearerSecret, Credentials};
use kvasir_proto::router::router_admin_client::RouterAdminClient;
use kvasir_proto::worker::worker_client::WorkerClient;
use kvasir_proto::{convert, router, worker};
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Channel, Endpoint};
use tonic::{Response, Status};

/// Longest time to build up a connection.
const CONNECT_MAX: Duration = Duration::from_secs(1);
/// Longest wait for an answer.
const ANSWER_MAX: Duration = Duration::from_secs(2);
/// Most connections that are kept; beyond it all are closed and made anew when needed.
const CHANNELS_MAX: usize = 4_096;

/// Speaks to routers and workers.
#[derive(Default)]
pub struct GrpcAdmin {
    channels: Mutex<HashMap<String, Channel>>,
}

// === impl GrpcAdmin ===

impl GrpcAdmin {
    fn channel(&self, address: &str) -> Result<Channel, AdminError> {
        let mut channels = self.channels.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(channel) = channels.get(address) {
            return Ok(channel.clone());
        }
        let endpoint = Endpoint::from_shared(format!("http://{address}"))
            .map_err(|error| AdminError::Address { address: address.to_owned(), message: error.to_string() })?;
        let channel = endpoint.connect_timeout(CONNECT_MAX).timeout(ANSWER_MAX).connect_lazy();
        if channels.len() >= CHANNELS_MAX {
            channels.clear();
        }
        channels.insert(address.to_owned(), channel.clone());
        Ok(channel)
    }

    fn stub(&self, address: &str, secret: &BearerSecret) -> Result<InterceptedService<Channel, Credentials>, AdminError> {
        let credentials = Credentials::new(secret)
            .map_err(|error| AdminError::Address { address: address.to_owned(), message: error.to_string() })?;
        Ok(InterceptedService::new(self.channel(address)?, credentials))
    }
}

fn answer<T>(address: &str, method: &'static str, result: Result<Response<T>, Status>) -> Result<T, AdminError> {
    match result {
        Ok(response) => Ok(response.into_inner()),
        Err(status) => Err(AdminError::Call {
            address: address.to_owned(),
            method,
            code: status.code().description().to_owned(),
            message: status.message().to_owned(),
        }),
    }
}

#[tonic::async_trait]
impl Admin for GrpcAdmin {
    async fn workers(&self, address: &str, secret: &BearerSecret) -> Result<Registered, AdminError> {
        let mut client = RouterAdminClient::new(self.stub(address, secret)?);
        let listed = answer(address, "Workers", client.workers(router::WorkersRequest {}).await)?;
        let open = answer(address, "InFlight", client.in_flight(router::InFlightRequest { uid: None }).await)?;
        let secrets = answer(address, "Secrets", client.secrets(router::SecretsRequest {}).await)?;
        let mut behind = [("workers", listed.stale), ("keys", secrets.stale)].into_iter();
        let stale = behind.find_map(|(what, error)| Some(format!("{what}: {}", convert::error_from_pb(error?))));
        let workers = listed.workers.into_iter().map(|worker| {
            let refusal = (worker.state() != router::WorkerState::Ready).then(|| match worker.reason.clone() {
                Some(reason) => convert::error_from_pb(reason).to_string(),
                None => worker.state().as_str_name().trim_start_matches("WORKER_STATE_").to_lowercase(),
            });
            RegisteredWorker {
                uid: worker.uid,
                incarnation: worker.incarnation,
                address: worker.address,
                refusal,
                in_flight: worker.in_flight,
            }
        });
        let keys_version = secrets.resource_version;
        Ok(Registered { complete: listed.complete, workers: workers.collect(), waiting: open.waiting, keys_version, stale })
    }

    async fn cordon(&self, address: &str, secret: &BearerSecret, cordon: &Cordon<'_>) -> Result<u32, AdminError> {
        let mut client = RouterAdminClient::new(self.stub(address, secret)?);
        let request = router::CordonRequest {
            uid: cordon.worker.to_owned(),
            incarnation: cordon.incarnation.to_vec(),
            cordon_ms: u64::try_from(cordon.time.as_millis()).unwrap_or(u64::MAX),
        };
        Ok(answer(address, "Cordon", client.cordon(request).await)?.in_flight)
    }

    async fn metrics(&self, address: &str) -> Result<String, AdminError> {
        super::scrape::metrics(address).await
    }

    async fn drain(&self, address: &str, secret: &BearerSecret, deadline: Duration) -> Result<Drained, AdminError> {
        let mut client = WorkerClient::new(self.stub(address, secret)?);
        let request = worker::DrainRequest { deadline_ms: Some(u64::try_from(deadline.as_millis()).unwrap_or(u64::MAX)) };
        let drained = answer(address, "Drain", client.drain(request).await)?;
        Ok(Drained { in_flight: drained.in_flight })
    }

    async fn fetched(&self, address: &str) -> Result<Option<u32>, AdminError> {
        super::scrape::fetched(address).await
    }

    async fn describe(&self, address: &str, secret: &BearerSecret) -> Result<Described, AdminError> {
        let mut client = WorkerClient::new(self.stub(address, secret)?);
        let described = answer(address, "Describe", client.describe(worker::DescribeRequest {}).await)?;
        let Some(model) = described.models.into_iter().next() else { return Ok(Described::default()) };
        let components = model.components.unwrap_or_default();
        Ok(Described {
            model: model.name,
            weights: hex::encode(components.weights_digest),
            tokenizer: hex::encode(components.tokenizer_digest),
        })
    }
}
