//! Prefill of stock candle beside ours: `cargo xtask bench candle`.
//!
//! The same file, the same 512 tokens, two threads each, in turns in one process; medians, and their ratio with its floor. Stock candle is
//! what a model written on `candle-core` runs: [`QMatMul`] for every product, plain tensor operations between them. The time of its
//! quantised products alone is given too: no way of writing the rest could be faster than that.
//!
//! Arguments: a file for the figures as JSON (optional).

#![expect(clippy::expect_used, reason = "a measurement: any failure should stop it")]

#[path = "../it/golden/numerics/measure.rs"]
#[expect(dead_code, reason = "the gate uses what this program does not")]
mod measure;

use candle_core::quantized::QMatMul;
use candle_core::quantized::gguf_file::{Content, Value};
use candle_core::{D, Device, Error, Module, Result, Tensor};
use kvasir_kernels::Isa;
use kvasir_model::ModelFile;
use kvasir_worker::backend::Backend;
use std::cell::Cell;
use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant};

/// Tokens of the prompt.
const TOKENS: usize = 512;
/// Timed turns of each, after one that is not timed.
const TURNS: usize = 7;
/// Ours must be at least this many times as fast.
const FLOOR: f64 = 3.0;

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let path = measure::smollm2();
    let file = ModelFile::open(&path)?;
    let tokens: Vec<u32> = measure::windows(&file).concat().into_iter().take(TOKENS).collect();
    let (mut backend, blocks) = measure::backend(&file, TOKENS);
    let plan = measure::prefill(&tokens, &blocks, 0, false);
    let stock = Stock::open(&path)?;
    let (mut ours, mut candle, mut products) = (Vec::new(), Vec::new(), Vec::new());
    for turn in 0..=TURNS {
        let begin = Instant::now();
        let chosen = backend.run(&plan)?.rows[0].chosen[0].id;
        let our_time = begin.elapsed();
        stock.products.set(Duration::ZERO);
        let begin = Instant::now();
        let theirs = stock.next_token(&tokens)?;
        let their_time = begin.elapsed();
        if chosen != theirs {
            return Err(format!("after the prompt we choose token {chosen} and candle {theirs}: not the same computation").into());
        }
        if turn > 0 {
            ours.push(rate(our_time));
            candle.push(rate(their_time));
            products.push(rate(stock.products.get()));
            println!("turn {turn}: ours {:.1}, candle {:.1} tokens/s", ours[turn - 1], candle[turn - 1]);
        }
    }
    let figures = figures(&ours, &candle, &products);
    println!("{figures:#}");
    if let Some(json) = std::env::args().nth(1) {
        std::fs::write(json, format!("{figures:#}\n"))?;
    }
    let ratio = median(&ours) / median(&candle);
    if ratio < FLOOR { Err(format!("prefill is {ratio:.2} times stock candle's, the floor is {FLOOR}").into()) } else { Ok(()) }
}

fn rate(time: Duration) -> f64 {
    TOKENS as f64 / time.as_secs_f64()
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

fn figures(ours: &[f64], candle: &[f64], products: &[f64]) -> serde_json::Value {
    let rounded = |values: &[f64]| -> Vec<f64> { values.iter().map(|value| (value * 10.0).round() / 10.0).collect() };
    let hundredths = |value: f64| (value * 100.0).round() / 100.0;
    serde_json::json!({
        "what": "prefill of 512 tokens, SmolLM2-135M-Instruct Q4_1, logits of the last position, tokens/s",
        "machine": machine(),
        "threads": measure::THREADS,
        "turns": TURNS,
        "kvasir": { "median": rounded(&[median(ours)])[0], "all": rounded(ours), "instruction_set": Isa::detect().name() },
        "candle": {
            "version": format!("candle-core {}", candle_version()),
            "build": candle_build(),
            "median": rounded(&[median(candle)])[0],
            "all": rounded(candle),
            "quantised_products_alone_median": rounded(&[median(products)])[0],
        },
        "ratio": hundredths(median(ours) / median(candle)),
        "ratio_to_quantised_products_alone": hundredths(median(ours) / median(products)),
        "floor": FLOOR,
        "command": "cargo xtask bench candle",
    })
}

/// As locked for this workspace.
fn candle_version() -> &'static str {
    let lock = include_str!("../../Cargo.lock");
    let entry = lock.split("[[package]]").find(|entry| entry.contains("\nname = \"candle-core\"\n"));
    entry.and_then(|entry| entry.split("version = \"").nth(1)?.split('"').next()).unwrap_or("unknown")
}

/// candle chooses some of its kernels when it is compiled.
fn candle_build() -> &'static str {
    if cfg!(target_feature = "avx2") { "for a CPU with AVX2 (target-cpu)" } else { "for any x86-64 (cargo's default)" }
}

fn machine() -> serde_json::Value {
    let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let of =
        |key: &str| cpu.lines().find(|line| line.starts_with(key)).and_then(|line| line.split(": ").nth(1)).unwrap_or("unknown");
    let wanted = ["avx2", "avx_vnni", "avx512f", "avx512_vnni"];
    let flags: Vec<&str> = of("flags").split_whitespace().filter(|flag| wanted.contains(flag)).collect();
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    serde_json::json!({
        "cpu": format!("{}, family {}, model {}", of("model name"), of("cpu family"), of("model\t")),
        "cores": std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
        "flags": flags,
        "load_1_min": load.split(' ').next().unwrap_or("unknown"),
    })
}

/// `llama` written on candle as its own quantised models are.
struct Stock {
    embedding: Tensor,
    layers: Vec<Layer>,
    output_norm: Tensor,
    output: QMatMul,
    heads: usize,
    kv_heads: usize,
    eps: f64,
    rope_base: f32,
    /// Time spent in quantised products since it was last set to zero.
    products: Cell<Duration>,
}

struct Layer {
    attn_norm: Tensor,
    q: QMatMul,
    k: QMatMul,
    v: QMatMul,
    attn_output: QMatMul,
    ffn_norm: Tensor,
    gate: QMatMul,
    up: QMatMul,
    down: QMatMul,
}

// === impl Stock ===

impl Stock {
    fn open(path: &Path) -> Result<Self> {
        let mut file = File::open(path)?;
        let content = Content::read(&mut file)?;
        let key = |name: &str| {
            content.metadata.get(&format!("llama.{name}")).ok_or_else(|| Error::Msg(format!("llama.{name} is missing")))
        };
        let count = |name: &str| key(name).and_then(Value::to_u32).map(|value| value as usize);
        let (heads, kv_heads, layers) =
            (count("attention.head_count")?, count("attention.head_count_kv")?, count("block_count")?);
        let (eps, rope_base) = (f64::from(key("attention.layer_norm_rms_epsilon")?.to_f32()?), key("rope.freq_base")?.to_f32()?);
        let mut quantised =
            |name: &str| QMatMul::from_qtensor(content.tensor(&mut file, &format!("{name}.weight"), &Device::Cpu)?);
        let mut file = File::open(path)?;
        let mut plain = |name: &str| -> Result<Tensor> {
            content.tensor(&mut file, &format!("{name}.weight"), &Device::Cpu)?.dequantize(&Device::Cpu)
        };
        let layers = (0..layers).map(|index| Layer::read(index, &mut quantised, &mut plain)).collect::<Result<_>>()?;
        let head = if content.tensor_infos.contains_key("output.weight") { "output" } else { "token_embd" };
        Ok(Self {
            embedding: plain("token_embd")?,
            layers,
            output_norm: plain("output_norm")?,
            output: quantised(head)?,
            heads,
            kv_heads,
            eps,
            rope_base,
            products: Cell::default(),
        })
    }

    /// The most likely token after a prompt.
    fn next_token(&self, tokens: &[u32]) -> Result<u32> {
        let len = tokens.len();
        let mut x = self.embedding.index_select(&Tensor::new(tokens, &Device::Cpu)?, 0)?;
        let width = self.embedding.dim(1)? / self.heads;
        let (cos, sin) = self.rope_tables(len, width)?;
        let mask = (0..len * len).map(|at| if at % len > at / len { f32::NEG_INFINITY } else { 0.0 }).collect();
        let mask = Tensor::from_vec(mask, (1, len, len), &Device::Cpu)?;
        for layer in &self.layers {
            let h = self.norm(&x, &layer.attn_norm)?;
            let q = rope(&split_heads(&self.product(&layer.q, &h)?, self.heads)?, &cos, &sin)?;
            let k = rope(&split_heads(&self.product(&layer.k, &h)?, self.kv_heads)?, &cos, &sin)?;
            let v = split_heads(&self.product(&layer.v, &h)?, self.kv_heads)?;
            let group = self.heads / self.kv_heads;
            let (k, v) = (repeat_heads(&k, group)?, repeat_heads(&v, group)?);
            let scores = (q.matmul(&k.t()?)? / (width as f64).sqrt())?.broadcast_add(&mask)?;
            let scores = scores.broadcast_sub(&scores.max_keepdim(D::Minus1)?)?.exp()?;
            let scores = scores.broadcast_div(&scores.sum_keepdim(D::Minus1)?)?;
            let mixed = scores.matmul(&v)?.transpose(0, 1)?.contiguous()?.reshape((len, self.heads * width))?;
            x = (x + self.product(&layer.attn_output, &mixed)?)?;
            let h = self.norm(&x, &layer.ffn_norm)?;
            let inner = (self.product(&layer.gate, &h)?.silu()? * self.product(&layer.up, &h)?)?;
            x = (x + self.product(&layer.down, &inner)?)?;
        }
        let last = self.norm(&x.narrow(0, len - 1, 1)?.contiguous()?, &self.output_norm)?;
        self.product(&self.output, &last)?.argmax(D::Minus1)?.squeeze(0)?.to_scalar()
    }

    fn product(&self, weights: &QMatMul, x: &Tensor) -> Result<Tensor> {
        let begin = Instant::now();
        let out = weights.forward(x)?;
        self.products.set(self.products.get() + begin.elapsed());
        Ok(out)
    }

    fn norm(&self, x: &Tensor, weights: &Tensor) -> Result<Tensor> {
        let mean_square = x.sqr()?.mean_keepdim(D::Minus1)?;
        x.broadcast_div(&(mean_square + self.eps)?.sqrt()?)?.broadcast_mul(weights)
    }

    fn rope_tables(&self, len: usize, width: usize) -> Result<(Tensor, Tensor)> {
        let half = width / 2;
        let angle = |at: usize| (at / half) as f32 * self.rope_base.powf(-((at % half * 2) as f32) / width as f32);
        let angles = Tensor::from_vec((0..len * half).map(angle).collect(), (1, len, half, 1), &Device::Cpu)?;
        Ok((angles.cos()?, angles.sin()?))
    }
}

// === impl Layer ===

impl Layer {
    fn read(
        index: usize,
        quantised: &mut impl FnMut(&str) -> Result<QMatMul>,
        plain: &mut impl FnMut(&str) -> Result<Tensor>,
    ) -> Result<Self> {
        let name = |part: &str| format!("blk.{index}.{part}");
        Ok(Self {
            attn_norm: plain(&name("attn_norm"))?,
            q: quantised(&name("attn_q"))?,
            k: quantised(&name("attn_k"))?,
            v: quantised(&name("attn_v"))?,
            attn_output: quantised(&name("attn_output"))?,
            ffn_norm: plain(&name("ffn_norm"))?,
            gate: quantised(&name("ffn_gate"))?,
            up: quantised(&name("ffn_up"))?,
            down: quantised(&name("ffn_down"))?,
        })
    }
}

/// `[tokens, heads · width]` to `[heads, tokens, width]`.
fn split_heads(x: &Tensor, heads: usize) -> Result<Tensor> {
    let (len, wide) = x.dims2()?;
    x.reshape((len, heads, wide / heads))?.transpose(0, 1)?.contiguous()
}

fn repeat_heads(x: &Tensor, group: usize) -> Result<Tensor> {
    let (heads, len, width) = x.dims3()?;
    x.unsqueeze(1)?.broadcast_as((heads, group, len, width))?.contiguous()?.reshape((heads * group, len, width))
}

/// Rotates neighbours, as files of this family store them.
fn rope(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    let (heads, len, width) = x.dims3()?;
    let pairs = x.reshape((heads, len, width / 2, 2))?;
    let (a, b) = (pairs.narrow(3, 0, 1)?, pairs.narrow(3, 1, 1)?);
    let first = (a.broadcast_mul(cos)? - b.broadcast_mul(sin)?)?;
    let second = (a.broadcast_mul(sin)? + b.broadcast_mul(cos)?)?;
    Tensor::cat(&[first, second], 3)?.reshape((heads, len, width))
}
