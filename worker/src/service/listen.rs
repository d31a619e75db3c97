//! The gRPC port of a worker: services, gate, limits, and an orderly end.

use super::guard::{Gate, gate};
use super::{WorkerService, health};
use axum::middleware::from_fn_with_state;
use kvasir_core::Reason;
use kvasir_proto::FILE_DESCRIPTOR_SET;
use kvasir_proto::auth::{Access, Guard};
use kvasir_proto::worker::draft_server::DraftServer;
use kvasir_proto::worker::worker_admin_server::WorkerAdminServer;
use kvasir_proto::worker::worker_server::WorkerServer;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;

/// A peer that answers no ping for this long is gone, and its requests are cancelled.
const KEEPALIVE: (Duration, Duration) = (Duration::from_secs(20), Duration::from_secs(10));

/// How long connections may take to close after the last stream; then they are cut.
const CLOSE_MAX: Duration = Duration::from_secs(1);

/// A running gRPC port.
pub struct GrpcServer {
    address: SocketAddr,
    closing: CancellationToken,
    task: JoinHandle<Result<(), tonic::transport::Error>>,
}

/// Why the port cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// The address cannot be bound.
    #[error("cannot listen on {address}: {source}")]
    Bind {
        /// As given.
        address: SocketAddr,
        /// Why.
        source: io::Error,
    },
    /// The descriptors that reflection serves are broken.
    #[error("reflection: {0}")]
    Reflection(#[from] tonic_reflection::server::Error),
    /// Serving ended in an error.
    #[error("the gRPC server failed: {0}")]
    Transport(#[from] tonic::transport::Error),
    /// The server's task died.
    #[error("the gRPC server died: {0}")]
    Died(#[from] tokio::task::JoinError),
}

/// Requests of one connection that may be given up before they were looked at. Past it HTTP/2 closes the connection, and with it the streams of
/// every other client of the router; the usual limit of 20 is for peers that nobody knows. 16,384 × about 1 KiB.
const PENDING_RESETS_MAX: usize = 1 << 14;

// === impl ListenError ===

impl ListenError {
    /// The public word for this failure.
    pub fn reason(&self) -> Reason {
        match self {
            Self::Bind { .. } => Reason::InvalidArgument,
            Self::Reflection(_) | Self::Transport(_) | Self::Died(_) => Reason::Internal,
        }
    }
}

// === impl GrpcServer ===

impl GrpcServer {
    /// Binds and serves.
    pub async fn start(service: &WorkerService, address: SocketAddr, access: Access) -> Result<Self, ListenError> {
        let bind = |source| ListenError::Bind { address, source };
        let listener = TcpListener::bind(address).await.map_err(bind)?;
        let bound = listener.local_addr().map_err(bind)?;
        let routes = routes(service, access)?;
        let closing = CancellationToken::new();
        let server = Server::builder()
            .tcp_nodelay(true)
            .max_concurrent_streams(service.0.limits.streams_per_connection_max)
            .http2_max_pending_accept_reset_streams(Some(PENDING_RESETS_MAX))
            .http2_keepalive_interval(Some(KEEPALIVE.0))
            .http2_keepalive_timeout(Some(KEEPALIVE.1))
            .add_routes(routes)
            .serve_with_incoming_shutdown(
                TcpIncoming::from(listener).with_nodelay(Some(true)),
                closing.clone().cancelled_owned(),
            );
        Ok(Self { address: bound, closing, task: tokio::spawn(server) })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Stops accepting, lets open streams end, and cuts what is left after a second.
    pub async fn close(mut self, service: &WorkerService) -> Result<(), ListenError> {
        service.close_subscriptions();
        self.closing.cancel();
        if let Ok(ended) = tokio::time::timeout(CLOSE_MAX, &mut self.task).await {
            return Ok(ended??);
        }
        self.task.abort();
        Ok(())
    }

    /// Waits until serving ends by itself, which is an error.
    pub async fn failed(&mut self) -> ListenError {
        match (&mut self.task).await {
            Ok(Ok(())) => ListenError::Bind { address: self.address, source: io::ErrorKind::ConnectionAborted.into() },
            Ok(Err(error)) => error.into(),
            Err(error) => error.into(),
        }
    }
}

fn routes(service: &WorkerService, access: Access) -> Result<Routes, ListenError> {
    let limit = service.0.limits.request_bytes_max;
    let (reporter, health_service) = tonic_health::server::health_reporter();
    tokio::spawn(health::follow(service.clone(), reporter));
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            .with_service_name("kvasir.worker.v1.Worker")
            .with_service_name("kvasir.worker.v1.Draft")
            .with_service_name("kvasir.worker.v1.WorkerAdmin")
            .with_service_name("grpc.health.v1.Health")
    };
    let mut routes = Routes::builder();
    routes
        .add_service(WorkerServer::new(service.clone()).max_decoding_message_size(limit))
        .add_service(DraftServer::new(service.clone()).max_decoding_message_size(limit))
        .add_service(WorkerAdminServer::new(service.clone()).max_decoding_message_size(limit))
        .add_service(health_service)
        .add_service(reflection().build_v1()?)
        .add_service(reflection().build_v1alpha()?);
    let gate_state = Gate { guard: Guard::new(access), request_bytes_max: limit };
    Ok(Routes::from(routes.routes().into_axum_router().layer(from_fn_with_state(gate_state, gate))))
}
