//! One request from its reading to its last chunk; the one road for gRPC and for a door in the same process.

use super::WorkerService;
use super::observe::Record;
use crate::drain;
use crate::engine::ChunkReceiver;
use futures::Stream;
use kvasir_core::{CacheMode, Chunk, Error, Reason, Request};
use std::pin::Pin;
use std::task::{Context, Poll};

/// Output of a request that has started; dropping it cancels the request.
pub struct Output {
    first: Option<Chunk>,
    receiver: ChunkReceiver,
    record: Record,
    ended: bool,
}

// === impl WorkerService ===

impl WorkerService {
    /// Hands a request to the engine and waits until it has started.
    ///
    /// # Errors
    /// Why it was refused or failed before it started: nothing was generated, and a retryable one may go elsewhere. A drain that begins
    /// while the request waits refuses it at once.
    pub async fn generate(&self, mut request: Request) -> Result<Output, Error> {
        if self.cache_mode() == CacheMode::Off {
            request.cache.mode = CacheMode::Off;
        }
        let mut record = Record::open(self, &request);
        match self.first_chunk(request).await {
            Ok((first, receiver)) => Ok(Output { first: Some(first), receiver, record, ended: false }),
            Err(error) => {
                record.refuse(&error);
                Err(error)
            }
        }
    }

    async fn first_chunk(&self, request: Request) -> Result<(Chunk, ChunkReceiver), Error> {
        if self.0.drain.is_draining() {
            return Err(drain::refusal());
        }
        let mut receiver = self.submit(request).await?;
        let first = tokio::select! {
            biased;
            first = receiver.recv() => first,
            () = self.0.drain.begun() => return Err(drain::refusal()),
        };
        match first {
            Some(chunk @ Chunk::Started(_)) => Ok((chunk, receiver)),
            Some(Chunk::Failed { error, .. }) => Err(error),
            Some(Chunk::Tokens(_) | Chunk::Finished(_)) | None => {
                Err(Error::new(Reason::Internal, "the engine answered without `Started`; this is a defect of the worker"))
            }
        }
    }

    async fn submit(&self, request: Request) -> Result<ChunkReceiver, Error> {
        if request.grammar.is_none() {
            return self.0.engine.submit(request);
        }
        // Compiling a grammar takes up to tens of milliseconds: not on a thread that serves streams.
        let engine = self.0.engine.clone();
        let task = tokio::task::spawn_blocking(move || engine.submit(request));
        task.await.map_err(|error| Error::new(Reason::Internal, format!("compiling the grammar died: {error}")))?
    }
}

// === impl Output ===

impl Stream for Output {
    type Item = Chunk;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Chunk>> {
        let this = self.get_mut();
        if this.ended {
            return Poll::Ready(None);
        }
        let next = match this.first.take() {
            Some(chunk) => Poll::Ready(Some(chunk)),
            None => Pin::new(&mut this.receiver).poll_next(context),
        };
        if let Poll::Ready(chunk) = &next {
            match chunk {
                Some(chunk) => {
                    this.record.see(chunk);
                    this.ended = matches!(chunk, Chunk::Finished(_) | Chunk::Failed { .. });
                }
                None => this.ended = true,
            }
        }
        next
    }
}
