//! The one trait behind every door: a router's placement and a worker's engine both serve a [`Request`] as a stream of [`Chunk`]s.

use futures::future::BoxFuture;
use futures::stream::BoxStream;
use kvasir_core::{Chunk, Error, ModelIdentity, Request, StateTimes};
use kvasir_model::Text;
use std::sync::{Arc, OnceLock};

/// Output of one request; dropping it cancels the request everywhere.
pub type ChunkStream = BoxStream<'static, Chunk>;

/// A request with what the door already knows of its time.
#[derive(Debug)]
pub struct Prepared {
    /// The request.
    pub request: Request,
    /// Time that the door spent (`prepare`), for the state partition of the reply.
    pub states: StateTimes,
    /// Where a router writes why it chose the worker; stays empty where nothing was chosen.
    pub receipt: ReceiptSlot,
}

/// Written once by whoever places a request, read by the door when the client asked for a report.
pub type ReceiptSlot = Arc<OnceLock<Receipt>>;

/// Why a request was placed where it was.
#[derive(Clone, Debug, PartialEq)]
pub struct Receipt {
    /// Stable name of the chosen worker.
    pub worker_uid: String,
    /// Candidates that were compared.
    pub candidates: u32,
    /// Predicted cost of the chosen worker, in seconds.
    pub score_s: f64,
    /// Terms of the score in seconds (`wait`, `prefill`, `restore`, `decode`); they sum to `score_s`.
    pub terms: Vec<(String, f64)>,
    /// Attempts that were made, at least 1.
    pub attempts: u32,
    /// Prompt tokens that the router expected to be cached there.
    pub predicted_cached_tokens: u32,
}

/// What serves requests.
pub trait Serve: Send + Sync + 'static {
    /// Starts a request. An error means that nothing was started; after `Ok` the stream ends with `Finished` or `Failed`.
    fn serve(&self, prepared: Prepared) -> BoxFuture<'static, Result<ChunkStream, Error>>;

    /// The models that can be asked for right now, newest snapshot.
    fn catalog(&self) -> Arc<Catalog>;

    /// Whether requests can be served now; the error says what is missing.
    fn ready(&self) -> Result<(), Error>;
}

/// The models that a door offers.
#[derive(Clone, Default)]
pub struct Catalog {
    /// Served models, by name.
    pub models: Vec<ServedModel>,
}

/// One served model as a door needs it.
#[derive(Clone)]
pub struct ServedModel {
    /// Name that clients use.
    pub name: String,
    /// Identity of model and arithmetic.
    pub identity: ModelIdentity,
    /// Tokeniser and chat template.
    pub text: Arc<Text>,
    /// Tokens per block.
    pub block_size: u32,
    /// Longest prompt plus output, in tokens.
    pub context: u32,
    /// Entries of the logits (may exceed the tokeniser's).
    pub vocab: u32,
    /// Most tokens that one request can hold in the pool of the largest worker; a longer request can never be served.
    pub capacity: u32,
    /// Unix seconds since which the model is served.
    pub created: u64,
}

// === impl Catalog ===

impl Catalog {
    /// Finds a model by the name that a client wrote.
    pub fn find(&self, name: &str) -> Option<&ServedModel> {
        self.models.iter().find(|model| model.name == name)
    }
}
