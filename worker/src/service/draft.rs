//! The `Draft` service of a worker with role Target: each method says that it does not draft, so that a wrong address is found at once.

use super::WorkerService;
use futures::stream::BoxStream;
use kvasir_core::{Error, Reason};
use kvasir_proto::convert::error_to_status;
use kvasir_proto::worker as wire;
use kvasir_proto::worker::draft_server::Draft;
use tonic::{Request, Response, Status, Streaming};

#[tonic::async_trait]
impl Draft for WorkerService {
    type SpeakStream = BoxStream<'static, Result<wire::DraftSpeakResponse, Status>>;

    async fn open(&self, _: Request<wire::DraftOpenRequest>) -> Result<Response<wire::DraftOpenResponse>, Status> {
        Err(no_draft())
    }

    async fn speak(&self, _: Request<Streaming<wire::DraftSpeakRequest>>) -> Result<Response<Self::SpeakStream>, Status> {
        Err(no_draft())
    }

    async fn close(&self, _: Request<wire::DraftCloseRequest>) -> Result<Response<wire::DraftCloseResponse>, Status> {
        Err(no_draft())
    }
}

fn no_draft() -> Status {
    let message = "this worker has the role ROLE_TARGET and does not draft; call a worker with ROLE_DRAFT";
    error_to_status(&Error::new(Reason::Unimplemented, message))
}
