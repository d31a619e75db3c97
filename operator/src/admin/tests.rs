#![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]
//! The client against a router's admin service on the wire.

use super::*;
use kvasir_core::Reason;
use kvasir_proto::auth::{Access, Guard};
use kvasir_proto::router as wire;
use kvasir_proto::router::router_admin_server::{RouterAdmin, RouterAdminServer};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use tokio::net::TcpListener;
use tonic::service::interceptor::InterceptedService;
use tonic::{Request, Response, Status};

/// A router that knows one worker that drains and one that does not.
#[derive(Clone, Default)]
struct Router {
    cordons: Arc<Mutex<Vec<wire::CordonRequest>>>,
}

fn worker(uid: &str, state: wire::WorkerState, reason: Option<Reason>) -> wire::RegisteredWorker {
    wire::RegisteredWorker {
        uid: uid.to_owned(),
        incarnation: vec![1; 8],
        address: "http://10.0.0.1:7401".to_owned(),
        state: state.into(),
        reason: reason.map(|reason| kvasir_proto::convert::error_to_pb(&kvasir_core::Error::new(reason, "for a while"))),
        in_flight: 4,
        ..wire::RegisteredWorker::default()
    }
}

#[tonic::async_trait]
impl RouterAdmin for Router {
    async fn workers(&self, _request: Request<wire::WorkersRequest>) -> Result<Response<wire::WorkersResponse>, Status> {
        let workers = vec![
            worker("p-0", wire::WorkerState::Ready, None),
            worker("p-1", wire::WorkerState::Draining, Some(Reason::Draining)),
            worker("p-2", wire::WorkerState::Lost, None),
        ];
        Ok(Response::new(wire::WorkersResponse { workers, complete: true, listed: true, stale: None }))
    }

    async fn in_flight(&self, _request: Request<wire::InFlightRequest>) -> Result<Response<wire::InFlightResponse>, Status> {
        Ok(Response::new(wire::InFlightResponse { waiting: 5, ..wire::InFlightResponse::default() }))
    }

    async fn secrets(&self, _request: Request<wire::SecretsRequest>) -> Result<Response<wire::SecretsResponse>, Status> {
        Ok(Response::new(wire::SecretsResponse { resource_version: "42".to_owned(), ..wire::SecretsResponse::default() }))
    }

    async fn activate(&self, _request: Request<wire::ActivateRequest>) -> Result<Response<wire::ActivateResponse>, Status> {
        Err(Status::failed_precondition("not loaded"))
    }

    async fn cordon(&self, request: Request<wire::CordonRequest>) -> Result<Response<wire::CordonResponse>, Status> {
        self.cordons.lock().unwrap().push(request.into_inner());
        Ok(Response::new(wire::CordonResponse { in_flight: 3 }))
    }
}

fn secret(text: &str) -> BearerSecret {
    BearerSecret::new(text).unwrap()
}

async fn serve(router: Router) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let guard = Guard::new(Access::Bearer(secret("0123456789abcdef")));
    let service = InterceptedService::new(RouterAdminServer::new(router), guard);
    let routes = tonic::service::Routes::new(service);
    let metrics = axum::Router::new().route("/metrics", axum::routing::get(async || "kvasir_x 1\n"));
    tokio::spawn(async move { axum::serve(listener, routes.into_axum_router().merge(metrics)).await });
    address
}

#[tokio::test]
async fn what_a_router_says_and_is_told_crosses_the_wire() {
    let router = Router::default();
    let address = serve(router.clone()).await.to_string();
    let (admin, secret) = (GrpcAdmin::default(), secret("0123456789abcdef"));
    let registered = admin.workers(&address, &secret).await.unwrap();
    assert_eq!((registered.complete, registered.waiting, registered.keys_version.as_str()), (true, 5, "42"));
    let refusals: Vec<Option<&str>> = registered.workers.iter().map(|worker| worker.refusal.as_deref()).collect();
    assert_eq!(refusals[0], None);
    assert!(refusals[1].unwrap().contains("for a while") && refusals[2] == Some("lost"), "{refusals:?}");
    assert_eq!((registered.workers[0].uid.as_str(), registered.workers[0].in_flight), ("p-0", 4));
    let cordon = Cordon { worker: "p-0", incarnation: &[1; 8], time: Duration::from_secs(90) };
    assert_eq!(admin.cordon(&address, &secret, &cordon).await.unwrap(), 3);
    let told = router.cordons.lock().unwrap().clone();
    assert_eq!(told, [wire::CordonRequest { uid: "p-0".to_owned(), incarnation: vec![1; 8], cordon_ms: 90_000 }]);
    assert_eq!(admin.metrics(&address).await.unwrap(), "kvasir_x 1\n");
}

#[tokio::test]
async fn what_cannot_be_asked_says_whom_and_why() {
    let address = serve(Router::default()).await.to_string();
    let admin = GrpcAdmin::default();
    let refused = admin.workers(&address, &secret("another-secret-16")).await.unwrap_err().to_string();
    assert!(refused.contains(&address) && refused.contains("Workers"), "{refused}");
    // A port that nobody listens on any more.
    let gone = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().to_string();
    let silent = admin.workers(&gone, &secret("0123456789abcdef")).await.unwrap_err().to_string();
    assert!(silent.contains(&gone), "{silent}");
    assert!(admin.metrics(&gone).await.is_err());
    assert!(matches!(admin.workers("no address", &secret("0123456789abcdef")).await, Err(AdminError::Address { .. })));
}
