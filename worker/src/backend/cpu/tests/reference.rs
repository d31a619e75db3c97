//! The decoder written once more, plainly, in f64 and without cache, blocks or kernels.

use super::*;
use kvasir_kernels::{WeightType, dequantize};
use kvasir_model::TensorView;

struct Matrix {
    rows: usize,
    cols: usize,
    values: Vec<f64>,
}

fn matrix(file: &ModelFile, name: &str) -> Matrix {
    let TensorView { ty, rows, cols, bytes } = file.tensor(name).unwrap_or_else(|| panic!("{name}"));
    let ty = WeightType::ALL.into_iter().find(|weight| weight.name() == ty.name()).unwrap();
    let mut values = vec![0.0_f32; rows * cols];
    dequantize(ty, bytes, &mut values).unwrap();
    Matrix { rows, cols, values: values.into_iter().map(f64::from).collect() }
}

impl Matrix {
    fn times(&self, x: &[f64]) -> Vec<f64> {
        assert_eq!(x.len(), self.cols);
        (0..self.rows).map(|row| self.values[row * self.cols..][..self.cols].iter().zip(x).map(|(w, x)| w * x).sum()).collect()
    }
}

fn norm(x: &[f64], weight: &Matrix, eps: f64) -> Vec<f64> {
    let scale = (x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64 + eps).sqrt().recip();
    x.iter().zip(&weight.values).map(|(x, w)| x * scale * w).collect()
}

fn add(x: &mut [f64], y: &[f64]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}

/// Logits of every position.
fn logits(file: &ModelFile, tokens: &[u32]) -> Vec<Vec<f64>> {
    let config = file.config();
    let (d, group, eps) = (config.head_dim, config.heads / config.kv_heads, f64::from(config.rms_eps));
    let embedding = matrix(file, "token_embd.weight");
    let mut xs: Vec<Vec<f64>> =
        tokens.iter().map(|token| embedding.values[*token as usize * config.hidden..][..config.hidden].to_vec()).collect();
    let linear = |layer: usize, part: &str, x: &[f64]| {
        let mut y = matrix(file, &format!("blk.{layer}.{part}.weight")).times(x);
        if file.tensor(&format!("blk.{layer}.{part}.bias")).is_some() {
            add(&mut y, &matrix(file, &format!("blk.{layer}.{part}.bias")).values);
        }
        y
    };
    let rope = |x: &mut [f64], position: usize| {
        for head in x.chunks_mut(d) {
            for i in 0..d / 2 {
                let angle = position as f64 * f64::from(config.rope.base).powf(-2.0 * i as f64 / d as f64);
                let (a, b) = if config.rope.style == RopeStyle::Interleaved { (2 * i, 2 * i + 1) } else { (i, i + d / 2) };
                (head[a], head[b]) =
                    (head[a] * angle.cos() - head[b] * angle.sin(), head[a] * angle.sin() + head[b] * angle.cos());
            }
        }
    };
    for layer in 0..config.layers {
        let name = |part: &str| format!("blk.{layer}.{part}.weight");
        let attn_norm = matrix(file, &name("attn_norm"));
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        for (position, x) in xs.iter_mut().enumerate() {
            let h = norm(x, &attn_norm, eps);
            let (mut q, mut k) = (linear(layer, "attn_q", &h), linear(layer, "attn_k", &h));
            rope(&mut q, position);
            rope(&mut k, position);
            keys.push(k);
            values.push(linear(layer, "attn_v", &h));
            let mut out = vec![0.0; q.len()];
            for head in 0..config.heads {
                let (own, shared) = (head * d, head / group * d);
                let scores =
                    keys.iter().map(|k: &Vec<f64>| (0..d).map(|i| q[own + i] * k[shared + i]).sum::<f64>() / (d as f64).sqrt());
                let weights: Vec<f64> = scores.map(f64::exp).collect();
                let total: f64 = weights.iter().sum();
                for (weight, v) in weights.iter().zip(&values) {
                    (0..d).for_each(|i| out[own + i] += weight / total * v[shared + i]);
                }
            }
            add(x, &linear(layer, "attn_output", &out));
        }
        let ffn_norm = matrix(file, &name("ffn_norm"));
        for x in &mut xs {
            let h = norm(x, &ffn_norm, eps);
            let (gate, up) = (linear(layer, "ffn_gate", &h), linear(layer, "ffn_up", &h));
            let act: Vec<f64> = gate.iter().zip(&up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
            add(x, &linear(layer, "ffn_down", &act));
        }
    }
    let (output_norm, output) = (matrix(file, "output_norm.weight"), matrix(file, "output.weight"));
    xs.iter().map(|x| output.times(&norm(x, &output_norm, eps))).collect()
}

fn spread(x: impl Iterator<Item = f64> + Clone) -> f64 {
    let count = x.clone().count() as f64;
    let mean = x.clone().sum::<f64>() / count;
    (x.map(|v| (v - mean).powi(2)).sum::<f64>() / count).sqrt()
}

#[test]
fn logits_of_every_position_agree_with_a_plain_f64_forward_pass() {
    for (name, model) in tiny_models() {
        let file = open(&model);
        let tokens = tokens(40, model.vocab, 7);
        let want = logits(&file, &tokens);
        let mut backend = backend(&load(&model), Isa::detect(), 2, 16);
        let asked = Arc::new(SampleParams { want_logits: true, ..(*params(0.0)).clone() });
        // All but the first token count as drafted, so logits come back for every position.
        let row = row(&tokens, 0, tokens.len() as u32 - 1, &[5, 1, 60], &asked);
        let chosen = backend.run(&plan(vec![row])).unwrap().rows.remove(0).chosen;
        assert_eq!(chosen.len(), tokens.len());
        let exact_weights =
            [model.types.attention, model.types.ffn].iter().all(|ty| matches!(ty, TensorType::F32 | TensorType::F16));
        // Products with quantised weights also round activations to 8 bits.
        let limit = if exact_weights { 2e-6 } else { 0.06 };
        for (position, (chosen, want)) in chosen.iter().zip(&want).enumerate() {
            let got = chosen.logits.as_ref().unwrap();
            let error = spread(got.iter().zip(want).map(|(got, want)| f64::from(*got) - want)) / spread(want.iter().copied());
            assert!(error < limit, "{name}, position {position}: relative error {error:e}");
            let total = want.iter().map(|logit| logit.exp()).sum::<f64>().ln();
            let logprob = want[chosen.id as usize] - total;
            assert!((f64::from(chosen.logprob) - logprob).abs() < limit * 10.0, "{name}, position {position}");
        }
    }
}

#[test]
fn prompt_scores_are_log_probabilities_of_the_prompt_itself() {
    let (_, model) = tiny_models().remove(0);
    let file = open(&model);
    let tokens = tokens(50, model.vocab, 3);
    let want = logits(&file, &tokens);
    let mut backend = backend(&load(&model), Isa::detect(), 2, 16);
    let mut row = row(&tokens[..40], 0, 0, &[5, 1, 60], &params(0.0));
    row.sample = None;
    row.score = Some(ScoreRow { top: 2, next_prompt_token: Some(tokens[40]) });
    let out = backend.run(&plan(vec![row.clone()])).unwrap().rows.remove(0);
    assert!(out.chosen.is_empty());
    assert_eq!(out.scores.len(), 40);
    for (position, score) in out.scores.iter().enumerate() {
        let Chosen { id, logprob, top, .. } = score.as_ref().unwrap();
        assert_eq!(*id, tokens[position + 1]);
        let total = want[position].iter().map(|logit| logit.exp()).sum::<f64>().ln();
        assert!((f64::from(*logprob) - (want[position][*id as usize] - total)).abs() < 2e-5);
        assert_eq!(top.len(), 2);
    }
    row.score = Some(ScoreRow { top: 0, next_prompt_token: None });
    let out = backend.run(&plan(vec![row])).unwrap().rows.remove(0);
    assert_eq!(out.scores.iter().filter(|score| score.is_none()).count(), 1);
    assert_eq!(out.scores.last(), Some(&None), "nothing follows the last token of a prompt");
}
