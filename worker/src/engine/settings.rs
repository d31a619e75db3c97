//! What an engine is given at start: limits with their reasons, and the parts it is made of.

use super::clock::Clock;
use super::constraint::ConstraintFactory;
use crate::backend::{Backend, TokenBytes};
use crate::kv::KeyMap;
use kvasir_core::{CHOICES_PER_REQUEST_MAX, CacheMode, Incarnation, ModelIdentity, TokenId};
use std::sync::Arc;
use std::time::Duration;

/// Settings of one engine.
#[derive(Clone, Debug)]
pub struct EngineSettings {
    /// This life of the worker.
    pub incarnation: Incarnation,
    /// Identities served: the base model's, and one per adapter.
    pub identities: Vec<ModelIdentity>,
    /// The model's own end tokens.
    pub end_tokens: Vec<TokenId>,
    /// Vocabulary entries that are never chosen, sorted.
    pub never: Arc<[TokenId]>,
    /// Blocks of the KV pool.
    pub blocks: u32,
    /// Prefix cache of the pool; `Off` wins over a request's wish.
    pub cache: CacheMode,
    /// Limits of a step.
    pub step: StepLimits,
    /// Limits of queues.
    pub queue: QueueLimits,
    /// Fill freed blocks with poison (tests).
    pub poison: bool,
    /// Count every law anew after each step (tests; O(pool) per step).
    pub check_laws: bool,
    /// Replaces block keys (tests of collisions).
    pub key_map: KeyMap,
}

/// Limits of a step.
#[derive(Clone, Copy, Debug)]
pub struct StepLimits {
    /// Most sequences that hold blocks, and most rows of a step.
    pub rows_max: usize,
    /// Most tokens of a step.
    pub tokens_max: u32,
    /// Fewest prefill tokens that a step offers, so that prefill gets on under any load.
    pub chunk_min: u32,
    /// Longest step while others decode: what their inter-token latency may grow to.
    pub time_mixed: Duration,
    /// Longest step of prefill alone: bounds how long a cancellation waits.
    pub time_alone: Duration,
}

/// Limits of queues.
#[derive(Clone, Copy, Debug)]
pub struct QueueLimits {
    /// Most choices that wait for their first step.
    pub sequences_max: u32,
    /// Most prompt tokens that wait for their first step.
    pub tokens_max: u64,
    /// Most choices of one request.
    pub choices_max: u32,
    /// Chunks that a reader may be behind.
    pub chunks_max: usize,
    /// Longest time that a reader may be behind before it is cut off.
    pub stall_max: Duration,
    /// Cache events that a subscriber may be behind.
    pub events_max: usize,
}

/// The parts of an engine.
pub struct EngineParts {
    /// What computes.
    pub backend: Box<dyn Backend>,
    /// Token to bytes.
    pub bytes: Arc<dyn TokenBytes>,
    /// Structured output, if it is served.
    pub constraints: Option<Arc<dyn ConstraintFactory>>,
    /// Time.
    pub clock: Arc<dyn Clock>,
}

// === impl EngineSettings ===

impl EngineSettings {
    /// Defaults for a pool of `blocks` blocks that serves one identity.
    pub fn new(incarnation: Incarnation, identity: ModelIdentity, blocks: u32) -> Self {
        Self {
            incarnation,
            identities: vec![identity],
            end_tokens: Vec::new(),
            never: Arc::from([]),
            blocks,
            cache: CacheMode::Auto,
            step: StepLimits::default(),
            queue: QueueLimits::default(),
            poison: false,
            check_laws: false,
            key_map: |key| key,
        }
    }
}

// === impl StepLimits ===

impl Default for StepLimits {
    fn default() -> Self {
        Self {
            rows_max: 64,
            tokens_max: 2048,
            chunk_min: 16,
            time_mixed: Duration::from_millis(60),
            time_alone: Duration::from_millis(250),
        }
    }
}

// === impl QueueLimits ===

impl Default for QueueLimits {
    fn default() -> Self {
        Self {
            sequences_max: 1024,
            tokens_max: 1 << 20,
            choices_max: CHOICES_PER_REQUEST_MAX,
            chunks_max: 256,
            stall_max: Duration::from_secs(30),
            events_max: 1 << 16,
        }
    }
}
