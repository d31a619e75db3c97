//! `grpc.health.v1`: follows readiness, so that probes and load balancers that know nothing else see it.

use super::WorkerService;
use kvasir_proto::worker::worker_server::WorkerServer;
use std::time::Duration;
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

/// Readiness is looked at this often beside the moment at which a drain begins.
const EVERY: Duration = Duration::from_millis(500);

/// Keeps the health service in step with readiness until the worker closes.
pub(super) async fn follow(service: WorkerService, reporter: HealthReporter) {
    loop {
        let status = if service.ready().is_ok() { ServingStatus::Serving } else { ServingStatus::NotServing };
        reporter.set_service_status("", status).await;
        reporter.set_service_status(<WorkerServer<WorkerService> as tonic::server::NamedService>::NAME, status).await;
        let draining = service.drain().is_draining();
        tokio::select! {
            () = service.0.closing.cancelled() => return,
            () = service.drain().begun(), if !draining => {}
            () = tokio::time::sleep(EVERY) => {}
        }
    }
}
