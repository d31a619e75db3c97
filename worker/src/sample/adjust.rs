//! Stages 1 to 3: bias, masks, penalties, written into a working copy of the logits.

use super::Sampler;
use crate::plan::{SampleParams, SampleRow, TokenCounts, TokenMask};
use kvasir_core::TokenId;

// === impl Sampler ===

impl Sampler {
    /// Fills `adjusted` for the position after `ahead`.
    pub(super) fn adjust(&mut self, logits: &[f32], row: &SampleRow, ahead: &[TokenId]) {
        let params = &row.params;
        self.adjusted.clear();
        self.adjusted.extend_from_slice(logits);
        for entry in &params.logit_bias {
            if let Some(logit) = self.adjusted.get_mut(entry.token as usize) {
                *logit += entry.bias;
            }
        }
        exclude(&mut self.adjusted, row, ahead.len());
        self.withhold_ends(row, ahead.len());
        if penalised(params) {
            self.counts.0.clone_from(&row.output_counts.0);
            for id in ahead {
                self.counts.add(*id);
            }
            penalise(&mut self.adjusted, params, &self.counts);
        }
    }

    /// Takes end tokens out while `min_tokens` asks for more, unless nothing else is left.
    fn withhold_ends(&mut self, row: &SampleRow, index: usize) {
        self.withheld.clear();
        if row.end_allowed_from as usize <= index {
            return;
        }
        for &id in &row.params.end_tokens {
            if let Some(logit) = self.adjusted.get_mut(id as usize) {
                self.withheld.push((id, *logit));
                *logit = f32::NEG_INFINITY;
            }
        }
        if !self.adjusted.iter().any(|logit| *logit > f32::NEG_INFINITY) {
            // In reverse, so that an id listed twice gets its first value back.
            for &(id, logit) in self.withheld.iter().rev() {
                self.adjusted[id as usize] = logit;
            }
        }
    }
}

/// Takes out what is never chosen, what the mask does not allow, and NaN.
fn exclude(adjusted: &mut [f32], row: &SampleRow, index: usize) {
    for &id in row.params.never.iter() {
        if let Some(logit) = adjusted.get_mut(id as usize) {
            *logit = f32::NEG_INFINITY;
        }
    }
    for logit in adjusted.iter_mut().filter(|logit| logit.is_nan()) {
        *logit = f32::NEG_INFINITY;
    }
    if row.masks.is_empty() {
        return;
    }
    match row.masks.get(index) {
        Some(mask) => apply_mask(adjusted, mask),
        // A constrained row is never free where its mask is missing.
        None => adjusted.fill(f32::NEG_INFINITY),
    }
}

fn apply_mask(adjusted: &mut [f32], mask: &TokenMask) {
    for (index, chunk) in adjusted.chunks_mut(32).enumerate() {
        let word = mask.0.get(index).copied().unwrap_or(0);
        if word == u32::MAX {
            continue;
        }
        for (bit, logit) in chunk.iter_mut().enumerate() {
            if word >> bit & 1 == 0 {
                *logit = f32::NEG_INFINITY;
            }
        }
    }
}

fn penalised(params: &SampleParams) -> bool {
    params.repetition_penalty != 1.0 || params.presence_penalty != 0.0 || params.frequency_penalty != 0.0
}

fn penalise(adjusted: &mut [f32], params: &SampleParams, output: &TokenCounts) {
    let repetition = params.repetition_penalty;
    for &(id, count) in &output.0 {
        if let Some(logit) = adjusted.get_mut(id as usize) {
            *logit = repeated(*logit, repetition) - params.frequency_penalty * count as f32 - params.presence_penalty;
        }
    }
    if repetition == 1.0 {
        return;
    }
    let mut seen = output.0.iter().map(|(id, _)| *id).peekable();
    for &id in &params.prompt_tokens {
        while seen.next_if(|other| *other < id).is_some() {}
        if seen.peek() == Some(&id) {
            continue;
        }
        if let Some(logit) = adjusted.get_mut(id as usize) {
            *logit = repeated(*logit, repetition);
        }
    }
}

fn repeated(logit: f32, penalty: f32) -> f32 {
    if logit > 0.0 { logit / penalty } else { logit * penalty }
}
