//! A plain forward pass of `llama` over dequantised weights in f32, on nothing of ours: candle reads the file, dequantises and multiplies.
//!
//! Owns what is true. Refuses to know blocks, caches and quantised products: it sees a whole window at once, layer by layer, and holds the
//! weights of one matrix at a time. Its own rounding is some thousand times smaller than what it measures.

use candle_core::quantized::gguf_file::{Content, Value};
use candle_core::{D, DType, Device, Error, Result, Tensor};
use std::fs::File;
use std::path::Path;

/// A defect that a gate must notice.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Defect {
    /// Queries and keys of one layer are not rotated.
    NoRope {
        /// Which.
        layer: usize,
    },
    /// Attention of one layer is softer: its scores are divided by this.
    ScoresDividedBy {
        /// Which.
        layer: usize,
        /// 1 is right.
        divisor: f64,
    },
    /// The down projection of one layer is rounded to this many steps of its largest weight.
    CoarseDown {
        /// Which.
        layer: usize,
        /// Steps on either side of zero.
        steps: f64,
    },
}

/// An open file of the family `llama`.
pub struct Reference {
    file: File,
    content: Content,
    heads: usize,
    kv_heads: usize,
    layers: usize,
    eps: f64,
    rope_base: f64,
}

// === impl Reference ===

impl Reference {
    /// Reads the header.
    pub fn open(path: &Path) -> Result<Self> {
        let mut file = File::open(path)?;
        let content = Content::read(&mut file)?;
        let key = |name: &str| {
            content.metadata.get(&format!("llama.{name}")).ok_or_else(|| Error::Msg(format!("llama.{name} is missing")))
        };
        let count = |name: &str| key(name).and_then(Value::to_u32).map(|value| value as usize);
        let (heads, kv_heads, layers) =
            (count("attention.head_count")?, count("attention.head_count_kv")?, count("block_count")?);
        let eps = f64::from(key("attention.layer_norm_rms_epsilon")?.to_f32()?);
        let rope_base = f64::from(key("rope.freq_base")?.to_f32()?);
        Ok(Self { file, content, heads, kv_heads, layers, eps, rope_base })
    }

    /// Logits after each token, a row per token.
    pub fn logits(&mut self, tokens: &[u32], defect: Option<Defect>) -> Result<Vec<Vec<f32>>> {
        let embedding = self.weights("token_embd.weight")?;
        let mut x = embedding.index_select(&Tensor::new(tokens, &Device::Cpu)?, 0)?;
        for layer in 0..self.layers {
            x = (&x + self.attention(layer, &x, defect)?)?;
            x = (&x + self.feed_forward(layer, &x, defect)?)?;
        }
        let h = self.norm(&x, "output_norm")?;
        // Without a head of its own the model uses the embedding.
        let head =
            if self.content.tensor_infos.contains_key("output.weight") { self.weights("output.weight")? } else { embedding };
        h.matmul(&head.t()?)?.to_vec2()
    }

    fn attention(&mut self, layer: usize, x: &Tensor, defect: Option<Defect>) -> Result<Tensor> {
        let h = self.norm(x, &format!("blk.{layer}.attn_norm"))?;
        let q = split_heads(&self.linear(layer, "attn_q", &h)?, self.heads)?;
        let k = split_heads(&self.linear(layer, "attn_k", &h)?, self.kv_heads)?;
        let v = split_heads(&self.linear(layer, "attn_v", &h)?, self.kv_heads)?;
        let (q, k) = match defect {
            Some(Defect::NoRope { layer: wrong }) if wrong == layer => (q, k),
            _ => (self.rope(&q)?, self.rope(&k)?),
        };
        let group = self.heads / self.kv_heads;
        let (k, v) = (repeat_heads(&k, group)?, repeat_heads(&v, group)?);
        let (_, len, width) = q.dims3()?;
        let divisor = match defect {
            Some(Defect::ScoresDividedBy { layer: wrong, divisor }) if wrong == layer => divisor,
            _ => 1.0,
        };
        let scores = (q.matmul(&k.t()?)? / ((width as f64).sqrt() * divisor))?;
        let scores = scores.broadcast_add(&causal(len)?)?;
        let scores = scores.broadcast_sub(&scores.max_keepdim(D::Minus1)?)?.exp()?;
        let weights = scores.broadcast_div(&scores.sum_keepdim(D::Minus1)?)?;
        let out = weights.matmul(&v)?.transpose(0, 1)?.contiguous()?.reshape((len, self.heads * width))?;
        self.linear(layer, "attn_output", &out)
    }

    fn feed_forward(&mut self, layer: usize, x: &Tensor, defect: Option<Defect>) -> Result<Tensor> {
        let h = self.norm(x, &format!("blk.{layer}.ffn_norm"))?;
        let gate = self.linear(layer, "ffn_gate", &h)?;
        let gate = (&gate / (gate.neg()?.exp()? + 1.0)?)?;
        let inner = (gate * self.linear(layer, "ffn_up", &h)?)?;
        match defect {
            Some(Defect::CoarseDown { layer: wrong, steps }) if wrong == layer => {
                let down = self.weights(&format!("blk.{layer}.ffn_down.weight"))?;
                let step = down.abs()?.max_all()?.to_scalar::<f32>()? / steps as f32;
                inner.matmul(&((down / f64::from(step))?.round()? * f64::from(step))?.t()?)
            }
            _ => self.linear(layer, "ffn_down", &inner),
        }
    }

    fn linear(&mut self, layer: usize, name: &str, x: &Tensor) -> Result<Tensor> {
        x.matmul(&self.weights(&format!("blk.{layer}.{name}.weight"))?.t()?)
    }

    fn norm(&mut self, x: &Tensor, name: &str) -> Result<Tensor> {
        let mean_square = x.sqr()?.mean_keepdim(D::Minus1)?;
        x.broadcast_div(&(mean_square + self.eps)?.sqrt()?)?.broadcast_mul(&self.weights(&format!("{name}.weight"))?)
    }

    /// Rotates neighbours (elements 2i and 2i + 1) of `[heads, tokens, width]`, token t by its position t.
    fn rope(&self, x: &Tensor) -> Result<Tensor> {
        let (heads, len, width) = x.dims3()?;
        let angle = |at: usize| (at / (width / 2)) as f64 * self.rope_base.powf(-((at % (width / 2) * 2) as f64) / width as f64);
        let angles: Vec<f64> = (0..len * width / 2).map(angle).collect();
        let angles = Tensor::from_vec(angles, (1, len, width / 2, 1), &Device::Cpu)?;
        let (cos, sin) = (angles.cos()?.to_dtype(DType::F32)?, angles.sin()?.to_dtype(DType::F32)?);
        let pairs = x.reshape((heads, len, width / 2, 2))?;
        let (a, b) = (pairs.narrow(3, 0, 1)?, pairs.narrow(3, 1, 1)?);
        let first = (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?;
        let second = (a.broadcast_mul(&sin)? + b.broadcast_mul(&cos)?)?;
        Tensor::cat(&[first, second], 3)?.reshape((heads, len, width))
    }

    fn weights(&mut self, name: &str) -> Result<Tensor> {
        self.content.tensor(&mut self.file, name, &Device::Cpu)?.dequantize(&Device::Cpu)
    }
}

/// `[tokens, heads · width]` to `[heads, tokens, width]`.
fn split_heads(x: &Tensor, heads: usize) -> Result<Tensor> {
    let (len, wide) = x.dims2()?;
    x.reshape((len, heads, wide / heads))?.transpose(0, 1)?.contiguous()
}

/// Each head `group` times in a row, so that query head h meets key head h / group.
fn repeat_heads(x: &Tensor, group: usize) -> Result<Tensor> {
    let (heads, len, width) = x.dims3()?;
    x.unsqueeze(1)?.broadcast_as((heads, group, len, width))?.contiguous()?.reshape((heads * group, len, width))
}

/// 0 where a token may look, minus infinity where it may not.
fn causal(len: usize) -> Result<Tensor> {
    let cells = (0..len * len).map(|at| if at % len > at / len { f32::NEG_INFINITY } else { 0.0 });
    Tensor::from_vec(cells.collect(), (1, len, len), &Device::Cpu)
}
