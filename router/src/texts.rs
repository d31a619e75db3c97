//! What a model's text looks like, learned from its workers: tokenizer and template by digest.
//!
//! Owns the cache of built [`Text`]s, one per pair of digests whatever the number of workers. Refuses to trust a worker: what it sends must have the
//! digests that are part of the identity it describes. Called by the fleet when a worker describes itself.
//!
//! Costs: one download and about 0.3 s of building per new digest; then a lookup.

use crate::worker_client::{CallError, WorkerClient};
use kvasir_core::{Digest, Error, Reason};
use kvasir_model::{Artifacts, Text};
use kvasir_proto::{ArtifactKind, ModelDescription};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::OnceCell;

/// Built texts by what they were built from.
#[derive(Clone, Debug, Default)]
pub struct Texts(Arc<Mutex<HashMap<Key, Cell>>>);

/// A text that is there or is being fetched by one of those who wait for it.
type Cell = Arc<OnceCell<Arc<Text>>>;

/// Digests of tokenizer and template as the identity names them, and of the artifact.
type Key = (Digest, Digest, Option<Digest>);

/// Most texts kept; a router serves few models, and each rollout brings at most one more.
const TEXTS_MAX: usize = 64;

// === impl Texts ===

impl Texts {
    /// The text of a described model, from the cache or from the worker.
    pub async fn get(&self, client: &WorkerClient, model: &ModelDescription) -> Result<Arc<Text>, CallError> {
        let artifact = model.artifact(ArtifactKind::Text).map(|artifact| artifact.digest);
        let cell = self.cell((model.parts.tokenizer, model.parts.chat_template, artifact));
        // Workers that describe the same model at once wait for one download; if it fails the next one tries.
        cell.get_or_try_init(|| fetch(client, model)).await.cloned()
    }

    fn cell(&self, key: Key) -> Cell {
        let mut texts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if texts.len() >= TEXTS_MAX && !texts.contains_key(&key) {
            // Whoever still serves one of these holds it by its own handle.
            texts.clear();
        }
        Arc::clone(texts.entry(key).or_default())
    }
}

async fn fetch(client: &WorkerClient, model: &ModelDescription) -> Result<Arc<Text>, CallError> {
    let artifact = model
        .artifact(ArtifactKind::Text)
        .ok_or_else(|| refuse(model, "none of kind `text` is announced; upgrade the worker"))?;
    let bytes = client.artifact(&artifact.digest).await?;
    if bytes.len() as u64 != artifact.size_bytes {
        return Err(refuse(model, &format!("{} bytes came where {} were announced", bytes.len(), artifact.size_bytes)));
    }
    let digest = artifact.digest;
    let built = tokio::task::spawn_blocking(move || build(&bytes, digest)).await;
    let text = match built {
        Ok(text) => text.map_err(|error| refuse(model, &error))?,
        Err(error) => return Err(refuse(model, &error.to_string())),
    };
    if text.tokenizer_digest() != model.parts.tokenizer {
        return Err(refuse(model, "the tokenizer is not the one that the identity names"));
    }
    if text.chat_template_digest() != model.parts.chat_template {
        return Err(refuse(model, "the chat template is not the one that the identity names"));
    }
    Ok(Arc::new(text))
}

/// Takes about 0.3 s for a vocabulary of 150,000.
fn build(bytes: &[u8], digest: Digest) -> Result<Text, String> {
    let artifacts = Artifacts::decode(bytes).map_err(|error| error.to_string())?;
    if artifacts.digest() != digest {
        return Err("their digest is not the one that was asked for".to_owned());
    }
    Text::from_artifacts(&artifacts).map_err(|error| error.to_string())
}

fn refuse(model: &ModelDescription, problem: &str) -> CallError {
    let message = format!("the artifacts of model {} cannot be used: {problem}", model.name);
    CallError { error: Error::new(Reason::ModelFile, message), answered: true }
}
