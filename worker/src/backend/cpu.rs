//! The CPU backend: own forward passes over own kernels, in one arithmetic on every machine.
//!
//! Owns the packed weights ([`CpuModel`], shared by the workers of one process), the KV pool's memory and all buffers of a step. Refuses to
//! know requests, prefix keys and time budgets. Called by the engine thread with one plan at a time; a step takes the whole thread pool.
//!
//! Flow of a step: check the plan → copy blocks → gather the tokens of all rows into one matrix ([`batch`]) → layers ([`decoder`]) → logits of
//! the positions that are chosen or scored, and the choices ([`head`]).
//!
//! Invariants
//! 1. What a row gets does not depend on its neighbours, on how its tokens were cut into steps, on its block numbers, on threads or on the
//!    instruction set: equal tokens give equal choices, log-probability bits and KV bits. The kernels hold this one by one.
//! 2. Slots outside of a sequence's valid positions are never read: they may hold NaN.
//! 3. Nothing is allocated in a step whose shape was seen before, except for what is returned.
//!
//! Costs: all weights are read once per step; head rows are computed only where a token is chosen or scored.

mod batch;
mod decoder;
mod head;
mod weights;

use crate::backend::{Backend, BackendError, BackendSpec};
use crate::plan::{BlockId, Plan, StepOutput};
use batch::{Batch, Limits};
use decoder::{Activations, Decoder};
use head::Head;
use kvasir_core::{NumericsMode, NumericsParts, Reason};
use kvasir_kernels::attention::{KvDtype, KvPool, KvShape};
use kvasir_kernels::rope::{RopePairs, RopeParams, RopeTable};
use kvasir_kernels::{Isa, KernelError, Pool};
use kvasir_model::{ModelFile, RopeScaling, RopeStyle};
use std::sync::Arc;

pub use weights::CpuModel;

/// Version of the arithmetic; a component of every served identity.
///
/// The rule: any change that could alter a bit of a logit or of stored KV raises it: an order of operations here, or anything in the kernels
/// (a polynomial, a rounding, a layout). The golden digests in `cpu/tests` are pinned per revision, so such a change turns them red.
pub const NUMERICS_REVISION: u32 = kvasir_kernels::NUMERICS_REVISION;

/// Tokens per block unless set otherwise: what vLLM uses, and the least that the kernels take.
pub const DEFAULT_BLOCK_SIZE: u32 = 16;

/// Rope tables grow by this many positions.
const ROPE_STEP: u32 = 1_024;

/// Settings of a CPU backend.
#[derive(Clone, Debug)]
pub struct CpuOptions {
    /// The compute threads; shared by all backends of a process.
    pub pool: Arc<Pool>,
    /// Instruction set; `None` takes the machine's fastest. It changes speed only.
    pub isa: Option<Isa>,
    /// Tokens per block: 16, 32, 64, 128 or 256.
    pub block_size: u32,
    /// Longest sequence in tokens; `None` is the model's own.
    pub context: Option<u32>,
}

/// Why a backend could not be made.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum CpuError {
    /// The model lacks a tensor that the forward pass reads.
    #[error("tensor {name} is missing from the model")]
    MissingTensor {
        /// Its canonical name.
        name: String,
    },
    /// A tensor's bytes cannot be used.
    #[error("tensor {name}: {source}")]
    Tensor {
        /// Its canonical name.
        name: String,
        /// Why.
        source: KernelError,
    },
    /// The model's heads or the block size do not fit the KV store.
    #[error("kv store: {0}")]
    KvShape(KernelError),
    /// The model's rope cannot be computed.
    #[error("rope: {0}")]
    Rope(KernelError),
    /// The instruction set is not available on this machine.
    #[error("instruction set {0} is not available on this machine; leave it unset for the fastest one")]
    Isa(Isa),
}

/// A device that is this machine's CPU.
pub struct CpuBackend {
    spec: BackendSpec,
    model: Arc<CpuModel>,
    pool: Arc<Pool>,
    isa: Isa,
    shape: KvShape,
    /// `None` before [`Backend::allocate`].
    kv: Option<KvPool>,
    rope: RopeTable,
    batch: Batch,
    activations: Activations,
    head: Head,
}

// === impl CpuOptions ===

impl CpuOptions {
    /// The defaults on these threads.
    pub fn new(pool: Arc<Pool>) -> Self {
        Self { pool, isa: None, block_size: DEFAULT_BLOCK_SIZE, context: None }
    }
}

// === impl CpuError ===

impl CpuError {
    /// The public word for this failure.
    pub fn reason(&self) -> Reason {
        match self {
            Self::Tensor { source: KernelError::Memory { .. }, .. } => Reason::OutOfMemory,
            Self::MissingTensor { .. } | Self::Tensor { .. } | Self::Rope(_) => Reason::ModelFile,
            Self::KvShape(_) | Self::Isa(_) => Reason::InvalidArgument,
        }
    }
}

// === impl CpuBackend ===

impl CpuBackend {
    /// Packs the weights of a model and makes a backend for it.
    pub fn load(file: &ModelFile, options: CpuOptions) -> Result<Self, CpuError> {
        let model = CpuModel::load(file, &options.pool)?;
        Self::new(Arc::new(model), options)
    }

    /// A backend over weights that others may share.
    pub fn new(model: Arc<CpuModel>, options: CpuOptions) -> Result<Self, CpuError> {
        let config = model.config();
        let isa = options.isa.unwrap_or_else(Isa::detect);
        if !isa.is_available() {
            return Err(CpuError::Isa(isa));
        }
        let shape = KvShape {
            layers: config.layers,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
            block_size: options.block_size as usize,
            dtype: KvDtype::F32,
        };
        shape.check().map_err(CpuError::KvShape)?;
        let rope = RopeTable::new(&rope_params(&model)).map_err(CpuError::Rope)?;
        let longest = u32::try_from(config.context_len).unwrap_or(u32::MAX);
        let spec = BackendSpec {
            name: "cpu",
            device: isa.name().to_owned(),
            vocab: config.vocab as u32,
            context: options.context.map_or(longest, |context| context.min(longest)),
            block_size: options.block_size,
            block_bytes: shape.block_bytes(),
            numerics: NumericsParts {
                mode: NumericsMode::Cpu,
                revision: NUMERICS_REVISION,
                kv_dtype: shape.dtype.name().to_owned(),
                kv_layout: KvShape::LAYOUT.to_owned(),
                parallel_degree: 1,
                block_size: options.block_size,
            },
        };
        let head = Head::new(options.pool.threads());
        Ok(Self {
            spec,
            model,
            pool: options.pool,
            isa,
            shape,
            kv: None,
            rope,
            batch: Batch::default(),
            activations: Activations::default(),
            head,
        })
    }

    /// The weights, to share them.
    pub fn model(&self) -> &Arc<CpuModel> {
        &self.model
    }
}

impl Backend for CpuBackend {
    fn spec(&self) -> &BackendSpec {
        &self.spec
    }

    fn allocate(&mut self, blocks: u32) -> Result<(), BackendError> {
        self.kv = None;
        self.kv = Some(KvPool::new(self.shape, blocks as usize).map_err(refused)?);
        Ok(())
    }

    fn run(&mut self, plan: &Plan) -> Result<StepOutput, BackendError> {
        let Some(kv) = &mut self.kv else {
            return Err(BackendError::InvalidPlan("the KV pool was not allocated".to_owned()));
        };
        let limits = Limits {
            blocks: kv.blocks() as u32,
            block_size: self.spec.block_size,
            vocab: self.spec.vocab,
            context: self.spec.context,
        };
        self.batch.gather(plan, limits)?;
        for copy in &plan.copies {
            kv.copy_slots(copy.from, copy.to, copy.slots).map_err(refused)?;
        }
        reserve_positions(&mut self.rope, self.batch.longest(), self.spec.context).map_err(refused)?;
        let mut decoder = Decoder { model: &self.model, pool: &self.pool, isa: self.isa, rope: &self.rope, kv };
        self.activations.run(&mut decoder, &self.batch).map_err(refused)?;
        let rows = self.head.run(&decoder, &self.activations, &self.batch, plan).map_err(refused)?;
        Ok(StepOutput { epoch: plan.epoch, rows })
    }

    fn poison(&mut self, blocks: &[BlockId]) {
        if let Some(kv) = &mut self.kv {
            for block in blocks {
                // A block that does not exist cannot be read either.
                let _ = kv.poison(*block);
            }
        }
    }

    fn fingerprint(&self, block: BlockId, slots: u32) -> u64 {
        self.kv.as_ref().and_then(|kv| kv.fingerprint(block, slots).ok()).unwrap_or(0)
    }
}

/// Makes the rope entries up to position `end`, in large steps.
fn reserve_positions(rope: &mut RopeTable, end: u32, context: u32) -> Result<(), KernelError> {
    if end as usize > rope.positions() {
        rope.reserve(end.next_multiple_of(ROPE_STEP).min(context).max(end) as usize)?;
    }
    Ok(())
}

fn rope_params(model: &CpuModel) -> RopeParams {
    let config = model.config();
    RopeParams {
        dims: config.head_dim,
        base: f64::from(config.rope.base),
        linear_scale: match config.rope.scaling {
            RopeScaling::None => 1.0,
            RopeScaling::Linear { factor } => f64::from(factor),
        },
        factors: config.rope.freq_factors.clone(),
        pairs: match config.rope.style {
            RopeStyle::Interleaved => RopePairs::Interleaved,
            RopeStyle::HalfSplit => RopePairs::HalfSplit,
        },
    }
}

/// A kernel refuses what the plan's checks should have caught, or has no memory.
fn refused(error: KernelError) -> BackendError {
    match error {
        KernelError::Memory { field, bytes } => BackendError::OutOfMemory { what: field.to_owned(), bytes: bytes as u64 },
        other => BackendError::InvalidPlan(other.to_string()),
    }
}

#[cfg(test)]
mod tests;
