//! Last part of a step: from committed tokens to what the reader sees.
//!
//! Owns the order of the checks that end a choice: end token, stop string, length.

use super::request::{Job, logprob};
use super::sequence::Sequence;
use super::settings::EngineSettings;
use crate::backend::TokenBytes;
use crate::plan::{Chosen, SampleParams};
use crate::text::Piece;
use kvasir_core::{Error, FinishReason, Request, Tokens};
use std::sync::Arc;

/// What committing some tokens says.
pub(super) struct Said {
    pub(super) tokens: Tokens,
    pub(super) finish: Option<FinishReason>,
    pub(super) committed: u64,
    pub(super) accepted: u64,
    pub(super) trimmed: u64,
}

/// Commits tokens to a sequence one by one until something ends the choice; the rest of them is dropped. The first `drafted` of them were
/// drafted. With `tokens_max` tokens, prompt included, a sequence has met the context or the pool's size.
pub(super) fn say(
    job: &mut Job,
    sequence: &mut Sequence,
    chosen: Vec<Chosen>,
    drafted: u32,
    tokens_max: u32,
    bytes: &dyn TokenBytes,
) -> Result<Said, Error> {
    let mut said = Said::new(sequence.choice);
    if sequence.choice == 0 && sequence.output.tokens == 0 && !chosen.is_empty() && job.request.sampling.prompt_logprobs.is_some()
    {
        said.tokens.prompt_logprobs = job.prompt_logprobs();
    }
    for (index, chosen) in chosen.into_iter().enumerate() {
        let was_drafted = (index as u32) < drafted;
        if said.finish.is_some() {
            job.ledger.counters.discarded += u64::from(was_drafted);
            continue;
        }
        let id = chosen.id;
        sequence.tokens.push(id);
        sequence.lengths.tokens_committed += 1;
        sequence.output.tokens += 1;
        said.committed += 1;
        said.accepted += u64::from(was_drafted);
        if job.is_end(id) {
            said.trimmed += 1;
            said.finish = Some(FinishReason::Stop);
            said.close(job, sequence);
            continue;
        }
        if let Some(constraint) = &mut sequence.output.constraint {
            constraint.commit(id)?;
        }
        Arc::make_mut(&mut sequence.output.counts).add(id);
        sequence.output.held.push_back((logprob(chosen), was_drafted));
        let piece = sequence.output.text.push_id(bytes, id);
        let stopped = piece.stop.is_some();
        said.add(job, sequence, &piece);
        if stopped {
            said.finish = Some(FinishReason::Stop);
            said.trimmed += sequence.output.text.trimmed() as u64;
        } else if sequence.output.tokens >= job.request.stop.max_tokens || sequence.lengths.tokens_committed >= tokens_max {
            said.finish = Some(FinishReason::Length);
        }
    }
    if said.finish == Some(FinishReason::Length) {
        said.close(job, sequence);
    }
    let counters = &mut job.ledger.counters;
    counters.accepted += said.accepted;
    counters.sampled += said.committed - said.accepted;
    counters.trimmed += said.trimmed;
    Ok(said)
}

/// Sampling parameters in the form that the pipeline reads.
pub(super) fn sample_params(request: &Request, settings: &EngineSettings) -> SampleParams {
    let sampling = &request.sampling;
    let sorted = |mut ids: Vec<u32>| {
        ids.sort_unstable();
        ids.dedup();
        ids
    };
    let mut end_tokens = request.stop.tokens.clone();
    if !request.stop.ignore_eos {
        end_tokens.extend(&settings.end_tokens);
    }
    SampleParams {
        seed: sampling.seed,
        temperature: sampling.temperature,
        top_k: sampling.top_k,
        top_p: sampling.top_p,
        min_p: sampling.min_p,
        repetition_penalty: sampling.repetition_penalty,
        presence_penalty: sampling.presence_penalty,
        frequency_penalty: sampling.frequency_penalty,
        logit_bias: sampling.logit_bias.clone(),
        prompt_tokens: if sampling.repetition_penalty == 1.0 { Vec::new() } else { sorted(request.prompt.to_vec()) },
        end_tokens: sorted(end_tokens),
        never: Arc::clone(&settings.never),
        top_logprobs: sampling.logprobs,
        want_logits: false,
    }
}

// === impl Said ===

impl Said {
    fn new(choice: u32) -> Self {
        Self { tokens: Tokens { choice, ..Tokens::default() }, finish: None, committed: 0, accepted: 0, trimmed: 0 }
    }

    /// What is left to say when a choice ends without a token of its own.
    pub(super) fn last(job: &mut Job, sequence: &mut Sequence) -> Self {
        let mut said = Self::new(sequence.choice);
        said.close(job, sequence);
        said
    }

    /// Gives out everything that was held back.
    fn close(&mut self, job: &mut Job, sequence: &mut Sequence) {
        let piece = sequence.output.text.finish();
        self.add(job, sequence, &piece);
    }

    fn add(&mut self, job: &mut Job, sequence: &mut Sequence, piece: &Piece) {
        self.tokens.text.push_str(&piece.text);
        for (token, drafted) in sequence.output.held.drain(..piece.visible) {
            self.tokens.ids.push(token.id);
            self.tokens.accepted_from_draft += u32::from(drafted);
            sequence.output.visible += 1;
            job.ledger.usage.completion_tokens += 1;
            if job.request.sampling.logprobs.is_some() {
                self.tokens.logprobs.push(token);
            }
        }
    }
}
