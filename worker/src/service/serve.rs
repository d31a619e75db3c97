//! A door in the same process: [`kvasir_door::Serve`] over the engine, without a wire between.

use super::WorkerService;
use futures::future::BoxFuture;
use futures::{FutureExt as _, StreamExt as _};
use kvasir_core::{Chunk, Error, StateTimes};
use kvasir_door::{Catalog, ChunkStream, Prepared, Serve};
use std::sync::Arc;

/// What a worker's own door is put in front of.
#[derive(Clone)]
pub struct EngineServe(WorkerService);

// === impl EngineServe ===

impl EngineServe {
    /// Serves a worker's engine.
    pub fn new(service: WorkerService) -> Self {
        Self(service)
    }
}

impl Serve for EngineServe {
    fn serve(&self, prepared: Prepared) -> BoxFuture<'static, Result<ChunkStream, Error>> {
        let service = self.0.clone();
        async move {
            let Prepared { request, states, .. } = prepared;
            let output = service.generate(request).await?;
            Ok(output.map(move |chunk| add_states(chunk, &states)).boxed())
        }
        .boxed()
    }

    fn catalog(&self) -> Arc<Catalog> {
        self.0.served().catalog()
    }

    fn ready(&self) -> Result<(), Error> {
        self.0.ready()
    }
}

/// Adds the door's time to the last chunk.
fn add_states(mut chunk: Chunk, prepared: &StateTimes) -> Chunk {
    match &mut chunk {
        Chunk::Finished(finished) => finished.states.merge(prepared),
        Chunk::Failed { states, .. } => states.merge(prepared),
        Chunk::Started(_) | Chunk::Tokens(_) => {}
    }
    chunk
}
