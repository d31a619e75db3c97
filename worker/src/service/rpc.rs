//! The `Worker` service on the wire: reading, calling, writing; no decisions.

use super::WorkerService;
use futures::stream::BoxStream;
use futures::{Stream, StreamExt as _, stream};
use kvasir_core::{Error, Reason};
use kvasir_proto::convert::{
    artifact_kind_to_wire, chunk_to_wire, description_to_wire, digest_from_wire, error_to_pb, error_to_status, request_from_wire,
};
use kvasir_proto::worker as wire;
use kvasir_proto::worker::worker_server::Worker;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::OwnedSemaphorePermit;
use tonic::{Request, Response, Status};

/// Bytes of an artifact in one message: far below the 4 MiB that gRPC peers take by default.
const ARTIFACT_PIECE_BYTES: usize = 1 << 20;

type Answers<T> = BoxStream<'static, Result<T, Status>>;

#[tonic::async_trait]
impl Worker for WorkerService {
    type GenerateStream = Answers<wire::GenerateResponse>;
    type KvEventsStream = Answers<wire::KvEventsResponse>;
    type ArtifactsStream = Answers<wire::ArtifactsResponse>;
    type LoadStream = Answers<wire::LoadResponse>;
    type FetchBlocksStream = Answers<wire::FetchBlocksResponse>;

    async fn describe(&self, _: Request<wire::DescribeRequest>) -> Result<Response<wire::DescribeResponse>, Status> {
        Ok(Response::new(description_to_wire(self.served().description())))
    }

    async fn generate(&self, request: Request<wire::GenerateRequest>) -> Result<Response<Self::GenerateStream>, Status> {
        let header = |name: &str| request.metadata().get(name).and_then(|value| value.to_str().ok()).map(str::to_owned);
        let context = header("traceparent")
            .map(|traceparent| wire::TraceContext { traceparent, tracestate: header("tracestate").unwrap_or_default() });
        let mut message = request.into_inner();
        // The message wins: a proxy between may have replaced the headers by its own.
        message.trace = message.trace.or(context);
        let request = request_from_wire(message).map_err(|error| error_to_status(&error))?;
        let output = WorkerService::generate(self, request).await.map_err(|error| error_to_status(&error))?;
        Ok(Response::new(output.map(|chunk| Ok(chunk_to_wire(chunk))).boxed()))
    }

    async fn kv_events(&self, _: Request<wire::KvEventsRequest>) -> Result<Response<Self::KvEventsStream>, Status> {
        let permit = self.subscribe()?;
        let events = WorkerService::kv_events(self).await.map_err(|error| error_to_status(&error))?;
        Ok(Response::new(self.until_closing(events, permit)))
    }

    async fn artifacts(&self, request: Request<wire::ArtifactsRequest>) -> Result<Response<Self::ArtifactsStream>, Status> {
        let digest =
            digest_from_wire("digest", &request.into_inner().digest).map_err(|error| error_to_status(&error.into_invalid()))?;
        let Some(blob) = self.served().artifact(&digest) else {
            let message = format!("no artifact {digest} here; take a digest from Describe of this worker");
            return Err(error_to_status(&Error::new(Reason::NotFound, message).with_field("digest")));
        };
        let blob = blob.clone();
        let kind = artifact_kind_to_wire(blob.reference.kind) as i32;
        let size_bytes = blob.reference.size_bytes;
        // An empty file is one empty piece, so that its kind arrives.
        let pieces = blob.bytes.len().div_ceil(ARTIFACT_PIECE_BYTES).max(1);
        let messages = (0..pieces).map(move |index| {
            let offset = index * ARTIFACT_PIECE_BYTES;
            let end = blob.bytes.len().min(offset + ARTIFACT_PIECE_BYTES);
            Ok(wire::ArtifactsResponse { kind, size_bytes, offset: offset as u64, data: blob.bytes[offset..end].to_vec() })
        });
        Ok(Response::new(stream::iter(messages).boxed()))
    }

    async fn load(&self, _: Request<wire::LoadRequest>) -> Result<Response<Self::LoadStream>, Status> {
        let permit = self.subscribe()?;
        Ok(Response::new(self.until_closing(self.load_reports(), permit)))
    }

    async fn fetch_blocks(&self, _: Request<wire::FetchBlocksRequest>) -> Result<Response<Self::FetchBlocksStream>, Status> {
        let message = "FetchBlocks is reserved for moving blocks between workers and not built in this version";
        Err(error_to_status(&Error::new(Reason::Unimplemented, message)))
    }

    async fn probe(&self, _: Request<wire::ProbeRequest>) -> Result<Response<wire::ProbeResponse>, Status> {
        let reason = self.ready().err().as_ref().map(error_to_pb);
        Ok(Response::new(wire::ProbeResponse {
            worker_uid: self.uid().to_string(),
            incarnation: self.incarnation().0.to_vec(),
            ready: reason.is_none(),
            reason,
            in_flight: self.in_flight(),
        }))
    }

    async fn drain(&self, request: Request<wire::DrainRequest>) -> Result<Response<wire::DrainResponse>, Status> {
        let left = self.begin_drain(request.into_inner().deadline_ms.map(Duration::from_millis));
        Ok(Response::new(wire::DrainResponse {
            in_flight: self.in_flight(),
            deadline_ms: u64::try_from(left.as_millis()).unwrap_or(u64::MAX),
        }))
    }
}

// === impl WorkerService ===

impl WorkerService {
    /// A place among the subscribers.
    fn subscribe(&self) -> Result<OwnedSemaphorePermit, Status> {
        Arc::clone(&self.0.subscribers).try_acquire_owned().map_err(|_| {
            let most = self.0.limits.subscribers_max;
            let message = format!("{most} event and load streams are open, no more are served; close some");
            error_to_status(&Error::new(Reason::Overloaded, message).with_retry_after(Duration::from_secs(1)))
        })
    }

    /// An endless stream that ends when the worker leaves; holds its place until then.
    fn until_closing<T: Send + 'static>(
        &self,
        messages: impl Stream<Item = T> + Send + 'static,
        permit: OwnedSemaphorePermit,
    ) -> Answers<T> {
        let closing = self.0.closing.clone();
        messages
            .map(move |message| {
                let _place = &permit;
                Ok(message)
            })
            .take_until(async move { closing.cancelled().await })
            .boxed()
    }
}
