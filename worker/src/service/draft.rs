//! The `Draft` service while no worker drafts: each method says so, and on a worker with the role Target that the address is wrong.

use super::WorkerService;
use futures::stream::BoxStream;
use kvasir_core::{Error, Reason};
use kvasir_proto::Role;
use kvasir_proto::convert::error_to_status;
use kvasir_proto::worker as wire;
use kvasir_proto::worker::draft_server::Draft;
use tonic::{Request, Response, Status, Streaming};

#[tonic::async_trait]
impl Draft for WorkerService {
    type SpeakStream = BoxStream<'static, Result<wire::DraftSpeakResponse, Status>>;

    async fn open(&self, _: Request<wire::DraftOpenRequest>) -> Result<Response<wire::DraftOpenResponse>, Status> {
        Err(no_draft(self))
    }

    async fn speak(&self, _: Request<Streaming<wire::DraftSpeakRequest>>) -> Result<Response<Self::SpeakStream>, Status> {
        Err(no_draft(self))
    }

    async fn close(&self, _: Request<wire::DraftCloseRequest>) -> Result<Response<wire::DraftCloseResponse>, Status> {
        Err(no_draft(self))
    }
}

fn no_draft(service: &WorkerService) -> Status {
    let message = match service.served().description().role {
        Role::Target => "this worker has the role ROLE_TARGET and does not draft; call a worker with ROLE_DRAFT",
        Role::Draft => "this worker has the role ROLE_DRAFT, but drafting is not supported yet; go on without drafts",
    };
    error_to_status(&Error::new(Reason::Unimplemented, message))
}
