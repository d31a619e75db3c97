//! The forward pass of `llama` and `qwen2`: the same decoder, whose differences (biases, pairing of the rope) are data.
//!
//! ```text
//! x = embedding
//! each layer:  h = norm(x);  q, k, v = h·Wq + bq, h·Wk + bk, h·Wv + bv;  rope(q, k);  store k, v
//!              x += attention(q)·Wo
//!              h = norm(x);  x += (silu(h·Wgate) · (h·Wup))·Wdown
//! ```
//!
//! Owns the order of kernels and the buffers between them. Each residual is added by the norm that follows it; the last one is left to the
//! head, which needs few rows.

use super::batch::Batch;
use super::weights::{CpuModel, Layer, Linear};
use kvasir_kernels::attention::{AttentionScratch, KvPool, attend};
use kvasir_kernels::rope::RopeTable;
use kvasir_kernels::{Isa, KernelError, Pool, Product, Scratch, matmul, matmul_group, norm};
use kvasir_model::ModelConfig;

/// What a pass runs on.
pub(super) struct Decoder<'a> {
    pub(super) model: &'a CpuModel,
    pub(super) pool: &'a Pool,
    pub(super) isa: Isa,
    pub(super) rope: &'a RopeTable,
    pub(super) kv: &'a mut KvPool,
}

/// Buffers of a pass, a row per token; each as long as the largest step so far needed.
#[derive(Default)]
pub(super) struct Activations {
    /// Residual stream.
    x: Vec<f32>,
    /// What the last product adds to it.
    delta: Vec<f32>,
    /// Normalised.
    h: Vec<f32>,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    attention: Vec<f32>,
    gate: Vec<f32>,
    up: Vec<f32>,
    pub(super) matmul: Scratch,
    attend: AttentionScratch,
}

// === impl Activations ===

impl Activations {
    /// Computes all layers for the tokens of a batch and stores their keys and values. Afterwards the residual stream is `x + delta`.
    pub(super) fn run(&mut self, decoder: &mut Decoder<'_>, batch: &Batch) -> Result<(), KernelError> {
        let model = decoder.model;
        let config = model.config();
        self.reserve(batch.tokens.len(), config)?;
        if batch.tokens.is_empty() {
            return Ok(());
        }
        for (token, row) in batch.tokens.iter().zip(self.x.chunks_exact_mut(config.hidden)) {
            model.embed(*token, row)?;
        }
        for (index, layer) in model.layers.iter().enumerate() {
            self.attention(decoder, batch, index, layer)?;
            self.feed_forward(decoder, batch.tokens.len(), layer)?;
        }
        Ok(())
    }

    /// The residual stream of a token, in two summands.
    pub(super) fn residual(&self, at: usize, hidden: usize) -> (&[f32], &[f32]) {
        let row = at * hidden..(at + 1) * hidden;
        (&self.x[row.clone()], &self.delta[row])
    }

    fn attention(&mut self, decoder: &mut Decoder<'_>, batch: &Batch, index: usize, layer: &Layer) -> Result<(), KernelError> {
        let (pool, isa, config) = (decoder.pool, decoder.isa, decoder.model.config());
        let m = batch.tokens.len();
        let hidden = m * config.hidden;
        let (q_len, kv_len) = (m * config.q_width(), m * config.kv_width());
        let (x, h, delta) = (&mut self.x[..hidden], &mut self.h[..hidden], &mut self.delta[..hidden]);
        if index == 0 {
            norm::rms_norm(pool, isa, x, &layer.attn_norm, config.rms_eps, h)?;
        } else {
            norm::add_rms_norm(pool, isa, x, delta, &layer.attn_norm, config.rms_eps, h)?;
        }
        let (q, k, v) = (&mut self.q[..q_len], &mut self.k[..kv_len], &mut self.v[..kv_len]);
        let mut products = [
            Product { weights: &layer.q.weights, out: &mut *q },
            Product { weights: &layer.k.weights, out: &mut *k },
            Product { weights: &layer.v.weights, out: &mut *v },
        ];
        matmul_group(pool, isa, h, m, &mut self.matmul, &mut products)?;
        add_bias(isa, &layer.q, q)?;
        add_bias(isa, &layer.k, k)?;
        add_bias(isa, &layer.v, v)?;
        decoder.rope.apply(pool, isa, &batch.positions, config.head_dim, q)?;
        decoder.rope.apply(pool, isa, &batch.positions, config.head_dim, k)?;
        decoder.kv.write(pool, index, &batch.slots, k, v)?;
        let out = &mut self.attention[..q_len];
        attend(pool, isa, decoder.kv, index, &batch.rows, &batch.tables, q, config.heads, &mut self.attend, out)?;
        matmul(pool, isa, &layer.attn_output, out, m, &mut self.matmul, delta)
    }

    fn feed_forward(&mut self, decoder: &Decoder<'_>, m: usize, layer: &Layer) -> Result<(), KernelError> {
        let (pool, isa, config) = (decoder.pool, decoder.isa, decoder.model.config());
        let hidden = m * config.hidden;
        let (x, h, delta) = (&mut self.x[..hidden], &mut self.h[..hidden], &mut self.delta[..hidden]);
        norm::add_rms_norm(pool, isa, x, delta, &layer.ffn_norm, config.rms_eps, h)?;
        let (gate, up) = (&mut self.gate[..m * config.ffn], &mut self.up[..m * config.ffn]);
        let mut products = [Product { weights: &layer.gate, out: &mut *gate }, Product { weights: &layer.up, out: &mut *up }];
        matmul_group(pool, isa, h, m, &mut self.matmul, &mut products)?;
        norm::silu_mul(pool, isa, gate, up)?;
        matmul(pool, isa, &layer.down, gate, m, &mut self.matmul, delta)
    }

    fn reserve(&mut self, m: usize, config: &ModelConfig) -> Result<(), KernelError> {
        for (buffer, width) in [
            (&mut self.x, config.hidden),
            (&mut self.delta, config.hidden),
            (&mut self.h, config.hidden),
            (&mut self.q, config.q_width()),
            (&mut self.k, config.kv_width()),
            (&mut self.v, config.kv_width()),
            (&mut self.attention, config.q_width()),
            (&mut self.gate, config.ffn),
            (&mut self.up, config.ffn),
        ] {
            grow(buffer, m * width)?;
        }
        Ok(())
    }
}

/// Lengthens a buffer to at least `len`.
pub(super) fn grow(buffer: &mut Vec<f32>, len: usize) -> Result<(), KernelError> {
    if buffer.len() < len {
        let refused = KernelError::Memory { field: "activations", bytes: len * size_of::<f32>() };
        buffer.try_reserve_exact(len - buffer.len()).map_err(|_| refused)?;
        buffer.resize(len, 0.0);
    }
    Ok(())
}

fn add_bias(isa: Isa, linear: &Linear, x: &mut [f32]) -> Result<(), KernelError> {
    linear.bias.as_ref().map_or(Ok(()), |bias| norm::add_bias(isa, x, bias))
}
