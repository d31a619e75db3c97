//! One connection to one worker, in the words of core.
//!
//! Owns the channel and its time limits. Refuses to know placement and what a failure means for a request. Called by the fleet (describe,
//! probe, streams, artifacts) and by attempts (generate).
//!
//! A silent peer is found by HTTP/2 pings, not by time limits on answers: a long queue on a worker is no fault of the connection.

use kvasir_core::{Chunk, Digest, Error, EventBatch, Incarnation, Reason, Request, WorkerLoad};
use kvasir_proto::auth::Credentials;
use kvasir_proto::worker as wire;
use kvasir_proto::worker::worker_client::WorkerClient as Stub;
use kvasir_proto::{Description, convert};
use std::time::Duration;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Channel, Endpoint};
use tonic::{Status, Streaming};

/// A worker that can be called; cheap to clone, clones share one connection.
#[derive(Clone, Debug)]
pub struct WorkerClient {
    stub: Stub<InterceptedService<Channel, Attach>>,
}

/// Attaches the pool's secret, if the pool has one.
#[derive(Clone, Debug)]
pub struct Attach(Option<Credentials>);

/// What a worker answered to a probe.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Probed {
    /// Which life answered.
    pub incarnation: Incarnation,
    /// Why it takes no new work; `None` when it does.
    pub refusal: Option<Error>,
}

/// A failed call: what to tell, and whether the worker answered at all.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CallError {
    /// What happened.
    pub error: Error,
    /// True when the worker itself said so; false when the way to it failed.
    pub answered: bool,
}

/// Longest time to build up a connection: 1 s, several round trips even between regions.
pub const CONNECT_MAX: Duration = Duration::from_secs(1);
/// Longest time for a short answer (describe, probe): 2 s.
pub const ANSWER_MAX: Duration = Duration::from_secs(2);
/// Silence after which a ping is sent.
const PING_EVERY: Duration = Duration::from_secs(3);
/// Longest wait for the answer to a ping.
const PING_WAIT: Duration = Duration::from_secs(3);
/// Largest message from a worker: a snapshot part or a prompt's log-probabilities.
const MESSAGE_BYTES_MAX: usize = 64 << 20;
/// Largest artifact, as the model crate's limit.
const ARTIFACT_BYTES_MAX: u64 = 256 << 20;

// === impl Attach ===

impl tonic::service::Interceptor for Attach {
    fn call(&mut self, request: tonic::Request<()>) -> Result<tonic::Request<()>, Status> {
        match &mut self.0 {
            Some(credentials) => credentials.call(request),
            None => Ok(request),
        }
    }
}

// === impl CallError ===

impl CallError {
    /// Reads a status.
    pub fn from_status(status: &Status) -> Self {
        // Only a worker attaches details; a status without them was made by the transport, a proxy or tonic itself.
        let answered = !status.details().is_empty();
        let mut error = convert::error_from_status(status);
        if !answered && matches!(error.reason, Reason::Internal | Reason::Cancelled | Reason::DeadlineExceeded) {
            // A reset stream or a broken connection: nothing is known of the work but that its answer does not come.
            error.reason = Reason::WorkerLost;
        }
        Self { error, answered }
    }

    fn lost(message: impl Into<String>) -> Self {
        Self { error: Error::new(Reason::WorkerLost, message), answered: false }
    }
}

// === impl WorkerClient ===

impl WorkerClient {
    /// Connects.
    pub async fn connect(uri: &str, credentials: Option<Credentials>) -> Result<Self, CallError> {
        let endpoint = Endpoint::from_shared(uri.to_owned())
            .map_err(|error| CallError::lost(format!("worker address {uri} is invalid: {error}")))?
            .connect_timeout(CONNECT_MAX)
            .tcp_nodelay(true)
            .http2_keep_alive_interval(PING_EVERY)
            .keep_alive_timeout(PING_WAIT)
            .keep_alive_while_idle(true);
        let connecting = tokio::time::timeout(CONNECT_MAX * 2, endpoint.connect());
        let channel = match connecting.await {
            Ok(Ok(channel)) => channel,
            Ok(Err(error)) => return Err(CallError::lost(format!("no connection to worker {uri}: {}", root(&error)))),
            Err(_elapsed) => {
                return Err(CallError::lost(format!("no connection to worker {uri} within {} s", 2 * CONNECT_MAX.as_secs())));
            }
        };
        let stub = Stub::with_interceptor(channel, Attach(credentials))
            .max_decoding_message_size(MESSAGE_BYTES_MAX)
            .max_encoding_message_size(MESSAGE_BYTES_MAX);
        Ok(Self { stub })
    }

    /// What the worker is.
    pub async fn describe(&self) -> Result<Description, CallError> {
        let mut stub = self.stub.clone();
        let response = short("Describe", stub.describe(wire::DescribeRequest {})).await?;
        convert::description_from_wire(response).map_err(|error| CallError { error, answered: true })
    }

    /// Whether it takes new work.
    pub async fn probe(&self) -> Result<Probed, CallError> {
        let mut stub = self.stub.clone();
        let response = short("Probe", stub.probe(wire::ProbeRequest {})).await?;
        let malformed = |error: convert::Malformed| CallError { error: error.into_internal(), answered: true };
        let incarnation = Incarnation(convert::bytes_from_wire("incarnation", &response.incarnation).map_err(malformed)?);
        let refusal = match (response.ready, response.reason) {
            (true, _) => None,
            (false, Some(reason)) => Some(convert::error_from_pb(reason)),
            (false, None) => Some(Error::new(Reason::NotReady, "the worker says that it is not ready, and not why")),
        };
        Ok(Probed { incarnation, refusal })
    }

    /// One artifact, whole.
    pub async fn artifact(&self, digest: &Digest) -> Result<Vec<u8>, CallError> {
        let mut stub = self.stub.clone();
        let request = wire::ArtifactsRequest { digest: digest.as_bytes().to_vec() };
        let mut pieces = stub.artifacts(request).await.map_err(|status| CallError::from_status(&status))?.into_inner();
        let mut bytes: Vec<u8> = Vec::new();
        while let Some(piece) = pieces.message().await.map_err(|status| CallError::from_status(&status))? {
            if piece.offset != bytes.len() as u64 || piece.size_bytes > ARTIFACT_BYTES_MAX {
                let message = format!(
                    "artifact {digest} came with a piece at {} of {} after {} bytes",
                    piece.offset,
                    piece.size_bytes,
                    bytes.len()
                );
                return Err(CallError { error: Error::new(Reason::Internal, message), answered: true });
            }
            bytes.extend_from_slice(&piece.data);
            if bytes.len() as u64 > piece.size_bytes {
                let message = format!("artifact {digest} is longer than the {} bytes that were announced", piece.size_bytes);
                return Err(CallError { error: Error::new(Reason::Internal, message), answered: true });
            }
        }
        Ok(bytes)
    }

    /// Load reports.
    pub async fn load(&self) -> Result<LoadStream, CallError> {
        let mut stub = self.stub.clone();
        let stream = short("Load", stub.load(wire::LoadRequest {})).await?;
        Ok(LoadStream(stream))
    }

    /// Cache events.
    pub async fn events(&self) -> Result<EventStream, CallError> {
        let mut stub = self.stub.clone();
        let stream = short("KvEvents", stub.kv_events(wire::KvEventsRequest {})).await?;
        Ok(EventStream { stream, reader: convert::EventReader::default() })
    }

    /// Starts a request. Dropping the stream cancels it.
    pub async fn generate(&self, request: &Request) -> Result<GenerateStream, CallError> {
        let mut stub = self.stub.clone();
        let response =
            stub.generate(convert::request_to_wire(request)).await.map_err(|status| CallError::from_status(&status))?;
        Ok(GenerateStream(response.into_inner()))
    }
}

/// Load reports of one worker.
#[derive(Debug)]
pub struct LoadStream(Streaming<wire::LoadResponse>);

/// Cache events of one worker.
#[derive(Debug)]
pub struct EventStream {
    stream: Streaming<wire::KvEventsResponse>,
    reader: convert::EventReader,
}

/// Output of one request.
#[derive(Debug)]
pub struct GenerateStream(Streaming<wire::GenerateResponse>);

impl LoadStream {
    /// The next report and its age on arrival; `None` at the end.
    pub async fn next(&mut self) -> Result<Option<(WorkerLoad, Duration)>, CallError> {
        match self.0.message().await {
            Ok(Some(report)) => convert::load_from_wire(report).map(Some).map_err(|error| CallError { error, answered: true }),
            Ok(None) => Ok(None),
            Err(status) => Err(CallError::from_status(&status)),
        }
    }
}

impl EventStream {
    /// The next batch; `None` at the end.
    pub async fn next(&mut self) -> Result<Option<EventBatch>, CallError> {
        loop {
            match self.stream.message().await {
                Ok(Some(message)) => {
                    let batch = self.reader.push(message).map_err(|error| CallError { error, answered: true })?;
                    if batch.is_some() {
                        return Ok(batch);
                    }
                }
                Ok(None) => return Ok(None),
                Err(status) => return Err(CallError::from_status(&status)),
            }
        }
    }
}

impl GenerateStream {
    /// The next chunk; an end without `Finished` or `Failed` is a lost worker.
    pub async fn next(&mut self) -> Result<Chunk, CallError> {
        match self.0.message().await {
            Ok(Some(message)) => convert::chunk_from_wire(message).map_err(|error| CallError { error, answered: true }),
            Ok(None) => Err(CallError::lost("the worker closed the stream before its end")),
            Err(status) => Err(CallError::from_status(&status)),
        }
    }
}

/// Waits for a short answer.
async fn short<T>(what: &str, call: impl Future<Output = Result<tonic::Response<T>, Status>>) -> Result<T, CallError> {
    match tokio::time::timeout(ANSWER_MAX, call).await {
        Ok(Ok(response)) => Ok(response.into_inner()),
        Ok(Err(status)) => Err(CallError::from_status(&status)),
        Err(_elapsed) => Err(CallError::lost(format!("the worker did not answer {what} within {} s", ANSWER_MAX.as_secs()))),
    }
}

/// The innermost cause: the outer ones only say "transport error".
fn root(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}
