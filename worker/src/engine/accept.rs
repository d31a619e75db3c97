//! From a row's result to what is kept of it: a pure function.
//!
//! The accepted part of a draft is its longest prefix that equals what the target chose; one token of the target's own follows it. KV of
//! rejected positions stays in the sequence's own blocks and is overwritten.

use crate::plan::{Chosen, Row, RowOutput};

/// What is kept of a row's result.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Kept {
    /// Positions whose KV belongs to committed tokens.
    pub(super) kv_valid: u32,
    /// Tokens to commit: accepted drafts, then the target's own.
    pub(super) tokens: Vec<Chosen>,
    /// How many of `tokens` were drafted.
    pub(super) accepted: u32,
    /// Drafts that differ from the target's choice (0 or 1).
    pub(super) rejected: u32,
    /// Drafts behind the first that differs.
    pub(super) unverified: u32,
    /// Prompt log-probabilities.
    pub(super) scores: Vec<Option<Chosen>>,
}

/// A result that does not fit its row; a defect of the backend.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("a row of {tokens} tokens ({drafted} drafted) came back with {chosen} choices and {scores} scores")]
pub(super) struct Misfit {
    tokens: usize,
    drafted: u32,
    chosen: usize,
    scores: usize,
}

/// Judges a row's result.
pub(super) fn accept(row: &Row, output: RowOutput) -> Result<Kept, Misfit> {
    let choices = if row.sample.is_some() { row.drafted as usize + 1 } else { 0 };
    let scores = if row.score.is_some() { row.tokens.len() } else { 0 };
    if output.chosen.len() != choices || output.scores.len() != scores {
        return Err(Misfit {
            tokens: row.tokens.len(),
            drafted: row.drafted,
            chosen: output.chosen.len(),
            scores: output.scores.len(),
        });
    }
    let drafts = &row.tokens[row.tokens.len() - row.drafted as usize..];
    let accepted = drafts.iter().zip(&output.chosen).take_while(|(draft, chosen)| **draft == chosen.id).count() as u32;
    let mut tokens = output.chosen;
    tokens.truncate(accepted as usize + 1);
    let rejected = u32::from(accepted < row.drafted);
    Ok(Kept {
        kv_valid: row.end() - row.drafted + accepted,
        tokens,
        accepted,
        rejected,
        unverified: row.drafted - accepted - rejected,
        scores: output.scores,
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests state their assumptions")]
    use super::*;
    use crate::plan::{SampleParams, SampleRow, SequenceId};
    use std::sync::Arc;

    fn row(tokens: &[u32], drafted: u32) -> Row {
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
            want_logits: false,
        };
        Row {
            sequence: SequenceId(1),
            tokens: tokens.to_vec(),
            start: 10,
            drafted,
            blocks: Arc::from([]),
            sample: Some(SampleRow {
                params: Arc::new(params),
                choice: 0,
                position: 10,
                output_counts: Arc::default(),
                end_allowed_from: 0,
                masks: Vec::new(),
            }),
            score: None,
        }
    }

    fn chosen(ids: &[u32]) -> RowOutput {
        let chosen = ids.iter().map(|&id| Chosen { id, logprob: 0.0, top: Vec::new(), logits: None }).collect();
        RowOutput { chosen, scores: Vec::new() }
    }

    fn kept(drafts: &[u32], target: &[u32]) -> (u32, usize, u32, u32, u32) {
        let tokens: Vec<u32> = std::iter::once(1).chain(drafts.iter().copied()).collect();
        let kept = accept(&row(&tokens, drafts.len() as u32), chosen(target)).unwrap();
        (kept.kv_valid, kept.tokens.len(), kept.accepted, kept.rejected, kept.unverified)
    }

    #[test]
    fn a_plain_row_keeps_its_one_choice() {
        assert_eq!(kept(&[], &[5]), (11, 1, 0, 0, 0));
    }

    #[test]
    fn drafts_are_kept_up_to_the_first_that_differs() {
        assert_eq!(kept(&[5, 6, 7], &[5, 6, 7, 8]), (14, 4, 3, 0, 0));
        assert_eq!(kept(&[5, 6, 7], &[5, 9, 7, 8]), (12, 2, 1, 1, 1));
        assert_eq!(kept(&[5, 6, 7], &[9, 6, 7, 8]), (11, 1, 0, 1, 2));
    }

    #[test]
    fn a_result_of_the_wrong_shape_is_refused() {
        assert!(accept(&row(&[1], 0), chosen(&[])).is_err());
        assert!(accept(&row(&[1], 0), chosen(&[1, 2])).is_err());
    }
}
