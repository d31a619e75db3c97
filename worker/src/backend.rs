//! What a backend owes the engine.
//!
//! A backend owns weights and the KV pool's memory. Refuses to know about requests, prefix keys, tenants and time budgets. Called only by
//! the engine thread, one step at a time.
//!
//! Implementations: `cpu` (own kernels), `fake` (a deterministic hash-model on a virtual clock, for simulation), later `cuda`.

pub mod cpu;
pub mod fake;

use crate::plan::{BlockId, Plan, StepOutput};
use kvasir_core::{NumericsParts, Reason, TokenId};

/// What a backend is, fixed after start.
#[derive(Clone, Debug)]
pub struct BackendSpec {
    /// `cpu`, `cuda` or `fake`.
    pub name: &'static str,
    /// Instruction set or compute capability, for `Describe`.
    pub device: String,
    /// Entries of the logits.
    pub vocab: u32,
    /// Longest sequence, in tokens.
    pub context: u32,
    /// Tokens per block.
    pub block_size: u32,
    /// Bytes of KV per block.
    pub block_bytes: u64,
    /// Arithmetic and layout, part of the served identity.
    pub numerics: NumericsParts,
}

/// Why a backend could not do a step.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum BackendError {
    /// Memory for the pool or a workspace is missing.
    #[error("out of memory: {what} needs {bytes} bytes")]
    OutOfMemory {
        /// What was being allocated.
        what: String,
        /// How much.
        bytes: u64,
    },
    /// The plan breaks the contract; a defect of the engine.
    #[error("invalid plan: {0}")]
    InvalidPlan(String),
    /// The device is gone.
    #[error("device lost: {0}")]
    DeviceLost(String),
}

/// A device that computes steps.
pub trait Backend: Send {
    /// What this backend is.
    fn spec(&self) -> &BackendSpec;

    /// Allocates the KV pool: blocks `0 .. blocks`. Called once before the first step.
    fn allocate(&mut self, blocks: u32) -> Result<(), BackendError>;

    /// Executes the plan: block copies, then for each row writes KV of its tokens and chooses after its verified positions.
    fn run(&mut self, plan: &Plan) -> Result<StepOutput, BackendError>;

    /// Fills blocks with NaN, so that a read of freed or reserved memory shows. Called when poisoning is on (tests).
    fn poison(&mut self, blocks: &[BlockId]);

    /// Digest of a block's stored KV for tests; equal content gives equal digests.
    fn fingerprint(&self, block: BlockId, slots: u32) -> u64;
}

/// Resolves a token to the bytes it stands for; the engine's text side needs nothing else of a tokenizer.
pub trait TokenBytes: Send + Sync {
    /// Bytes of the token; empty for special and unknown tokens.
    fn bytes(&self, id: TokenId) -> &[u8];
}

// === impl BackendError ===

impl BackendError {
    /// The public word for this failure.
    pub fn reason(&self) -> Reason {
        match self {
            Self::OutOfMemory { .. } => Reason::OutOfMemory,
            Self::InvalidPlan(_) => Reason::Internal,
            Self::DeviceLost(_) => Reason::DeviceLost,
        }
    }
}
