//! `worker.proto` over the simulated engine.

use super::engine::{Engine, Fault, artifact_of};
use futures::StreamExt as _;
use futures::stream::{self, BoxStream};
use kvasir_core::{Chunk, Contract, Error, Reason, Tier};
use kvasir_proto::worker as wire;
use kvasir_proto::worker::worker_server::Worker;
use kvasir_proto::{ArtifactKind, ArtifactRef, BuildInfo, Description, ModelDescription, Phase, Role, TierCapacity, convert};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::mpsc;
use tokio_stream::wrappers::{IntervalStream, ReceiverStream};
use tonic::{Request, Response, Status};

/// The service.
pub(super) struct Service(Arc<Engine>);

type Answers<T> = BoxStream<'static, Result<T, Status>>;

/// Chunks that wait for a slow reader.
const OUT_MAX: usize = 16;
/// Time between two load reports.
const LOAD_EVERY: Duration = Duration::from_millis(50);

// === impl Service ===

impl Service {
    pub(super) fn new(engine: Arc<Engine>) -> Self {
        Self(engine)
    }

    fn description(&self) -> Description {
        let settings = self.0.settings();
        let (digest, bytes) = artifact_of(self.0.artifacts());
        let model = ModelDescription {
            name: settings.model.clone(),
            parts: self.0.parts().clone(),
            numerics: self.0.numerics().clone(),
            context: settings.context,
            vocab: self.0.artifacts().settings.vocab,
            capacity: settings.blocks.saturating_mul(settings.block_size),
            created: 0,
            artifacts: vec![ArtifactRef { kind: ArtifactKind::Text, digest, size_bytes: bytes.len() as u64 }],
        };
        Description {
            uid: self.0.uid(),
            incarnation: self.0.incarnation(),
            role: Role::Target,
            models: vec![model],
            block_size: settings.block_size,
            tiers: vec![TierCapacity { tier: Tier::Device, blocks: settings.blocks, block_bytes: 0 }],
            drafters: Vec::new(),
            contracts: vec![Contract::Coupled],
            phases: vec![Phase::Unified],
            build: BuildInfo {
                version: env!("CARGO_PKG_VERSION").to_owned(),
                backend: "fake".to_owned(),
                ..BuildInfo::default()
            },
            request_bytes_max: 64 << 20,
        }
    }
}

fn status(reason: Reason, message: &str) -> Status {
    convert::error_to_status(&Error::new(reason, message))
}

#[tonic::async_trait]
impl Worker for Service {
    type GenerateStream = Answers<wire::GenerateResponse>;
    type KvEventsStream = Answers<wire::KvEventsResponse>;
    type ArtifactsStream = Answers<wire::ArtifactsResponse>;
    type LoadStream = Answers<wire::LoadResponse>;
    type FetchBlocksStream = Answers<wire::FetchBlocksResponse>;

    async fn describe(&self, _request: Request<wire::DescribeRequest>) -> Result<Response<wire::DescribeResponse>, Status> {
        Ok(Response::new(convert::description_to_wire(&self.description())))
    }

    async fn generate(&self, request: Request<wire::GenerateRequest>) -> Result<Response<Self::GenerateStream>, Status> {
        let request = convert::request_from_wire(request.into_inner()).map_err(|error| convert::error_to_status(&error))?;
        let fault = self.0.take(&request).map_err(|error| convert::error_to_status(&error))?;
        if fault == Fault::CloseBeforeFirst {
            // As a proxy or a broken connection shows itself: no details.
            return Err(Status::unavailable("connection closed before the first byte"));
        }
        let (out, chunks) = mpsc::channel::<Chunk>(OUT_MAX);
        let engine = Arc::clone(&self.0);
        tokio::spawn(async move { engine.run(&request, fault, &out).await });
        let answers = ReceiverStream::new(chunks).map(|chunk| Ok(convert::chunk_to_wire(chunk)));
        Ok(Response::new(answers.boxed()))
    }

    async fn kv_events(&self, _request: Request<wire::KvEventsRequest>) -> Result<Response<Self::KvEventsStream>, Status> {
        let (snapshot, live) = self.0.subscribe();
        let engine = Arc::clone(&self.0);
        let first = stream::iter(convert::events_to_wire(&snapshot));
        let later = stream::unfold((engine, live), |(engine, mut live)| async move {
            let batch = match live.recv().await {
                Ok(batch) => batch,
                Err(RecvError::Closed) => return None,
                Err(RecvError::Lagged(_)) => {
                    let (snapshot, renewed) = engine.subscribe();
                    live = renewed;
                    Arc::new(snapshot)
                }
            };
            Some((stream::iter(convert::events_to_wire(&batch)), (engine, live)))
        });
        Ok(Response::new(first.chain(later.flatten()).map(Ok).boxed()))
    }

    async fn artifacts(&self, request: Request<wire::ArtifactsRequest>) -> Result<Response<Self::ArtifactsStream>, Status> {
        const PIECE_BYTES: usize = 64 << 10;
        let (digest, bytes) = artifact_of(self.0.artifacts());
        if request.into_inner().digest != digest.as_bytes() {
            return Err(status(Reason::NotFound, "no such artifact"));
        }
        let size_bytes = bytes.len() as u64;
        let pieces: Vec<_> = bytes
            .chunks(PIECE_BYTES)
            .enumerate()
            .map(|(number, piece)| {
                let offset = (number * PIECE_BYTES) as u64;
                Ok(wire::ArtifactsResponse { kind: wire::ArtifactKind::Text.into(), size_bytes, offset, data: piece.to_vec() })
            })
            .collect();
        Ok(Response::new(stream::iter(pieces).boxed()))
    }

    async fn load(&self, _request: Request<wire::LoadRequest>) -> Result<Response<Self::LoadStream>, Status> {
        let engine = Arc::clone(&self.0);
        let reports = IntervalStream::new(tokio::time::interval(LOAD_EVERY))
            .map(move |_| Ok(convert::load_to_wire(&engine.load(), Duration::ZERO)));
        Ok(Response::new(reports.boxed()))
    }

    async fn fetch_blocks(
        &self,
        _request: Request<wire::FetchBlocksRequest>,
    ) -> Result<Response<Self::FetchBlocksStream>, Status> {
        Err(status(Reason::Unimplemented, "a mock worker has no blocks to fetch"))
    }

    async fn probe(&self, _request: Request<wire::ProbeRequest>) -> Result<Response<wire::ProbeResponse>, Status> {
        let refusal = self.0.refusal();
        Ok(Response::new(wire::ProbeResponse {
            worker_uid: self.0.uid().to_string(),
            incarnation: self.0.incarnation().0.to_vec(),
            ready: refusal.is_none(),
            reason: refusal.as_ref().map(convert::error_to_pb),
            in_flight: self.0.levels().open as u32,
        }))
    }

    async fn drain(&self, _request: Request<wire::DrainRequest>) -> Result<Response<wire::DrainResponse>, Status> {
        self.0.set_refusal(Some(Error::new(Reason::Draining, "the mock worker is draining")));
        Ok(Response::new(wire::DrainResponse { in_flight: self.0.levels().open as u32, ..Default::default() }))
    }
}
