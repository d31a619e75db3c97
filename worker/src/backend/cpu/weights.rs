//! Weights in the form that the kernels read, made once from a model file.
//!
//! Owns packed matrices and f32 vectors. Refuses to know about steps. Embedding rows are expanded from the mapped file when they are needed,
//! so the largest table of a small model is not held twice unless it is also the output.

use super::CpuError;
use kvasir_core::TokenId;
use kvasir_kernels::{KernelError, Pool, WeightType, Weights, dequantize};
use kvasir_model::{ModelConfig, ModelFile, TensorType, TensorView};

/// A model ready to compute, without state: any number of backends may share it.
pub struct CpuModel {
    file: ModelFile,
    pub(super) layers: Vec<Layer>,
    pub(super) output_norm: Vec<f32>,
    pub(super) output: Weights,
}

/// One transformer block.
pub(super) struct Layer {
    pub(super) attn_norm: Vec<f32>,
    pub(super) q: Linear,
    pub(super) k: Linear,
    pub(super) v: Linear,
    pub(super) attn_output: Weights,
    pub(super) ffn_norm: Vec<f32>,
    pub(super) gate: Weights,
    pub(super) up: Weights,
    pub(super) down: Weights,
}

/// A matrix and the bias that some families add.
pub(super) struct Linear {
    pub(super) weights: Weights,
    pub(super) bias: Option<Vec<f32>>,
}

// === impl CpuModel ===

impl CpuModel {
    /// Reads and packs all weights on the pool's threads: about a second per GB.
    pub fn load(file: &ModelFile, pool: &Pool) -> Result<Self, CpuError> {
        let reader = Reader { file, pool };
        Ok(Self {
            layers: (0..file.config().layers).map(|index| reader.layer(index)).collect::<Result<_, _>>()?,
            output_norm: reader.vector("output_norm.weight")?,
            output: reader.matrix("output.weight")?,
            file: file.clone(),
        })
    }

    /// The model's shape.
    pub fn config(&self) -> &ModelConfig {
        self.file.config()
    }

    /// Bytes of packed weights that a step reads.
    pub fn bytes(&self) -> u64 {
        let layers = self.layers.iter().flat_map(|layer| {
            [&layer.q.weights, &layer.k.weights, &layer.v.weights, &layer.attn_output, &layer.gate, &layer.up, &layer.down]
        });
        layers.chain([&self.output]).map(|weights| weights.bytes() as u64).sum()
    }

    /// Expands the embedding of a token.
    pub(super) fn embed(&self, token: TokenId, out: &mut [f32]) -> Result<(), KernelError> {
        let Some(table) = self.file.tensor("token_embd.weight") else {
            return Err(KernelError::Length { field: "token_embd.weight", got: 0, want: 1 });
        };
        let ty = weight_type(table.ty);
        let bytes = ty.row_bytes(table.cols);
        let row = (token as usize).checked_mul(bytes).and_then(|at| table.bytes.get(at..at + bytes));
        row.map_or(Err(KernelError::Index { field: "token", got: token as usize, count: table.rows }), |row| {
            dequantize(ty, row, out)
        })
    }
}

/// Takes tensors out of a file by their canonical names.
struct Reader<'a> {
    file: &'a ModelFile,
    pool: &'a Pool,
}

impl Reader<'_> {
    fn layer(&self, index: usize) -> Result<Layer, CpuError> {
        let name = |part: &str| format!("blk.{index}.{part}.weight");
        Ok(Layer {
            attn_norm: self.vector(&name("attn_norm"))?,
            q: self.linear(index, "attn_q")?,
            k: self.linear(index, "attn_k")?,
            v: self.linear(index, "attn_v")?,
            attn_output: self.matrix(&name("attn_output"))?,
            ffn_norm: self.vector(&name("ffn_norm"))?,
            gate: self.matrix(&name("ffn_gate"))?,
            up: self.matrix(&name("ffn_up"))?,
            down: self.matrix(&name("ffn_down"))?,
        })
    }

    fn linear(&self, index: usize, part: &str) -> Result<Linear, CpuError> {
        let weights = self.matrix(&format!("blk.{index}.{part}.weight"))?;
        let biased = self.file.config().qkv_bias;
        let bias = biased.then(|| self.vector(&format!("blk.{index}.{part}.bias"))).transpose()?;
        Ok(Linear { weights, bias })
    }

    fn matrix(&self, name: &str) -> Result<Weights, CpuError> {
        let view = self.tensor(name)?;
        Weights::pack_on(self.pool, weight_type(view.ty), view.rows, view.cols, view.bytes).map_err(|source| broken(name, source))
    }

    fn vector(&self, name: &str) -> Result<Vec<f32>, CpuError> {
        let view = self.tensor(name)?;
        let mut out = vec![0.0; view.cols];
        dequantize(weight_type(view.ty), view.bytes, &mut out).map_err(|source| broken(name, source))?;
        Ok(out)
    }

    fn tensor(&self, name: &str) -> Result<TensorView<'_>, CpuError> {
        self.file.tensor(name).ok_or_else(|| CpuError::MissingTensor { name: name.to_owned() })
    }
}

fn broken(name: &str, source: KernelError) -> CpuError {
    CpuError::Tensor { name: name.to_owned(), source }
}

fn weight_type(ty: TensorType) -> WeightType {
    match ty {
        TensorType::F32 => WeightType::F32,
        TensorType::F16 => WeightType::F16,
        TensorType::Bf16 => WeightType::BF16,
        TensorType::Q4_0 => WeightType::Q4_0,
        TensorType::Q4_1 => WeightType::Q4_1,
        TensorType::Q5_0 => WeightType::Q5_0,
        TensorType::Q5_1 => WeightType::Q5_1,
        TensorType::Q8_0 => WeightType::Q8_0,
        TensorType::Q4K => WeightType::Q4K,
        TensorType::Q5K => WeightType::Q5K,
        TensorType::Q6K => WeightType::Q6K,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_and_kernels_agree_on_the_size_of_a_block() {
        for ty in TensorType::ALL {
            let kernel = weight_type(ty);
            assert_eq!((ty.block_len(), ty.block_bytes()), (kernel.block_len(), kernel.block_bytes()), "{ty:?}");
        }
    }
}
