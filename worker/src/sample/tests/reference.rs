//! The pipeline once more, naively: f64, full sorts, one pass per rule.

use crate::plan::SampleRow;
use kvasir_core::TokenId;
use std::collections::BTreeMap;

/// Logits after bias, masks and penalties.
pub(super) fn adjusted(logits: &[f32], row: &SampleRow, ahead: &[TokenId]) -> Vec<f64> {
    let params = &row.params;
    let mut output: BTreeMap<TokenId, f64> = row.output_counts.0.iter().map(|(id, count)| (*id, f64::from(*count))).collect();
    for id in ahead {
        *output.entry(*id).or_default() += 1.0;
    }
    let one = |(id, logit): (usize, &f32)| {
        let id = id as TokenId;
        let bias: f32 = params.logit_bias.iter().filter(|entry| entry.token == id).map(|entry| entry.bias).sum();
        let mut x = f64::from(*logit) + f64::from(bias);
        let masked = row.masks.get(ahead.len()).is_some_and(|mask| !mask.allows(id));
        let early_end = params.end_tokens.contains(&id) && ahead.len() < row.end_allowed_from as usize;
        if params.never.contains(&id) || masked || early_end {
            return f64::NEG_INFINITY;
        }
        if output.contains_key(&id) || params.prompt_tokens.contains(&id) {
            let penalty = f64::from(params.repetition_penalty);
            x = if x > 0.0 { x / penalty } else { x * penalty };
        }
        if let Some(count) = output.get(&id) {
            x -= f64::from(params.presence_penalty) + f64::from(params.frequency_penalty) * count;
        }
        x
    };
    logits.iter().enumerate().map(one).collect()
}

/// Probability of each token, and how close a cut came to deciding otherwise.
pub(super) fn distribution(logits: &[f32], row: &SampleRow, ahead: &[TokenId]) -> (Vec<f64>, f64) {
    let params = &row.params;
    let adjusted = adjusted(logits, row, ahead);
    let mut order: Vec<usize> = (0..logits.len()).filter(|id| adjusted[*id].is_finite()).collect();
    order.sort_by(|a, b| adjusted[*b].total_cmp(&adjusted[*a]).then(a.cmp(b)));
    if params.top_k > 0 {
        order.truncate(params.top_k as usize);
    }
    let largest = adjusted[order[0]];
    let weight = |id: usize| ((adjusted[id] - largest) / f64::from(params.temperature)).exp();
    let mut margin = f64::INFINITY;
    if params.top_p < 1.0 {
        let total: f64 = order.iter().map(|id| weight(*id)).sum();
        let (mut mass, mut kept) = (0.0, 0);
        for id in &order {
            mass += weight(*id) / total;
            kept += 1;
            margin = f64::min(margin, (mass - f64::from(params.top_p)).abs());
            if mass >= f64::from(params.top_p) {
                break;
            }
        }
        order.truncate(kept);
    }
    if params.min_p > 0.0 {
        margin = order.iter().map(|id| (weight(*id) - f64::from(params.min_p)).abs()).fold(margin, f64::min);
        order.retain(|id| weight(*id) >= f64::from(params.min_p));
    }
    let total: f64 = order.iter().map(|id| weight(*id)).sum();
    let mut probabilities = vec![0.0; logits.len()];
    for id in &order {
        probabilities[*id] = weight(*id) / total;
    }
    (probabilities, margin)
}
