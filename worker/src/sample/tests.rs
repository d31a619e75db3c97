#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]

mod distribution;
mod pipeline;
mod reference;

use crate::plan::{SampleParams, SampleRow, TokenMask};
use kvasir_core::TokenId;
use std::sync::Arc;

/// Parameters that change nothing: temperature 1 over the whole vocabulary.
fn params() -> SampleParams {
    SampleParams {
        seed: 1,
        temperature: 1.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        repetition_penalty: 1.0,
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
        logit_bias: Vec::new(),
        prompt_tokens: Vec::new(),
        end_tokens: Vec::new(),
        never: Arc::new([]),
        top_logprobs: None,
        want_logits: false,
    }
}

fn row(params: SampleParams) -> SampleRow {
    SampleRow {
        params: Arc::new(params),
        choice: 0,
        position: 0,
        output_counts: Arc::default(),
        end_allowed_from: 0,
        masks: Vec::new(),
    }
}

fn mask(vocab: usize, ids: &[TokenId]) -> Arc<TokenMask> {
    let mut mask = TokenMask::none(vocab);
    for id in ids {
        mask.allow(*id);
    }
    Arc::new(mask)
}

/// Numbers that look random and are the same on every run.
fn scramble(words: &[u64]) -> u64 {
    words.iter().fold(0x9e37_79b9_7f4a_7c15, |state, word| {
        let mut z = (state ^ word).wrapping_add(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    })
}
