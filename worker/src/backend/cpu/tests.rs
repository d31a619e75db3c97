#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]
//! The CPU backend alone: against an independent f64 forward pass, and against itself cut in every way.

mod exactness;
mod golden;
mod plans;
mod reference;
mod smollm2;

use super::*;
use crate::plan::{Chosen, Row, SampleParams, SampleRow, ScoreRow, SequenceId, TokenCounts};
use kvasir_model::synth::{TinyModel, WeightTypes};
use kvasir_model::{Arch, TensorType};

/// Blocks of every test's pool.
const BLOCKS: u32 = 64;

/// Models of both families with every way of storing weights that changes a code path.
fn tiny_models() -> Vec<(&'static str, TinyModel)> {
    let base = TinyModel::default();
    let wide = TinyModel { hidden: 256, ffn: 256, vocab: 512, ..base.clone() };
    let mixed = |attention, ffn, embedding, output| WeightTypes { attention, ffn, embedding, output };
    vec![
        ("llama f32 tied", base.clone()),
        (
            "llama q4_1 untied",
            TinyModel {
                types: mixed(TensorType::Q4_1, TensorType::Q4_1, TensorType::Q8_0, TensorType::Q8_0),
                tied: false,
                layers: 3,
                ..base.clone()
            },
        ),
        (
            "qwen2 f16 untied",
            TinyModel { arch: Arch::Qwen2, types: WeightTypes::all(TensorType::F16), tied: false, seed: 5, ..base.clone() },
        ),
        (
            "qwen2 k-quants tied",
            TinyModel {
                arch: Arch::Qwen2,
                types: mixed(TensorType::Q4K, TensorType::Q6K, TensorType::Q6K, TensorType::Q6K),
                heads: 4,
                kv_heads: 1,
                seed: 9,
                ..wide.clone()
            },
        ),
        (
            "llama q5 group of 1",
            TinyModel {
                types: mixed(TensorType::Q5_0, TensorType::Q5_1, TensorType::Bf16, TensorType::Q4_0),
                heads: 2,
                kv_heads: 2,
                hidden: 160,
                ffn: 96,
                ..base
            },
        ),
    ]
}

fn open(model: &TinyModel) -> ModelFile {
    ModelFile::from_gguf_bytes("tiny.gguf", model.to_gguf().unwrap()).unwrap()
}

fn load(model: &TinyModel) -> Arc<CpuModel> {
    Arc::new(CpuModel::load(&open(model), &Pool::new(1)).unwrap())
}

fn tokens(len: usize, vocab: usize, seed: u32) -> Vec<u32> {
    (0..len as u32).map(|i| (i + 1).wrapping_mul(seed.wrapping_mul(2_654_435_761) | 1) % vocab as u32).collect()
}

/// A backend with a poisoned pool.
fn backend(model: &Arc<CpuModel>, isa: Isa, threads: usize, block_size: u32) -> CpuBackend {
    let options = CpuOptions { isa: Some(isa), block_size, ..CpuOptions::new(Arc::new(Pool::new(threads))) };
    let mut backend = CpuBackend::new(Arc::clone(model), options).unwrap();
    backend.allocate(BLOCKS).unwrap();
    backend.poison(&(0..BLOCKS).collect::<Vec<_>>());
    backend
}

fn params(temperature: f32) -> Arc<SampleParams> {
    Arc::new(SampleParams {
        seed: 0xfeed_beef_0123,
        temperature,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        repetition_penalty: 1.0,
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
        logit_bias: Vec::new(),
        prompt_tokens: Vec::new(),
        end_tokens: Vec::new(),
        never: Arc::from([]),
        top_logprobs: Some(3),
        want_logits: false,
    })
}

/// A row that chooses after its last `drafted + 1` tokens.
fn row(tokens: &[u32], start: u32, drafted: u32, blocks: &[u32], params: &Arc<SampleParams>) -> Row {
    let position = start + tokens.len() as u32 - drafted;
    Row {
        sequence: SequenceId(1),
        tokens: tokens.to_vec(),
        start,
        drafted,
        blocks: Arc::from(blocks),
        sample: Some(SampleRow {
            params: Arc::clone(params),
            choice: 0,
            position,
            output_counts: Arc::new(TokenCounts::default()),
            end_allowed_from: 0,
            masks: Vec::new(),
        }),
        score: None,
    }
}

fn plan(rows: Vec<Row>) -> Plan {
    Plan { epoch: 1, copies: Vec::new(), rows }
}
