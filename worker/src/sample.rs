//! Logits to a token: one pipeline for every verified position.
//!
//! Owns the order and meaning of all sampling options. Refuses to know who drafts, what a grammar is (it sees masks) and when an output
//! ends. Called by backends for targets and drafts alike, with one [`Sampler`] per thread.
//!
//! Order
//! 1. `logit_bias` is added (OpenAI).
//! 2. What may not be chosen leaves: `never`, the grammar's mask, end tokens before `min_tokens`.
//! 3. Penalties, in the order of vLLM: repetition (prompt and output, Keskar et al. 2019), frequency, presence (output only). Output
//!    includes the drafted tokens before the position.
//! 4. Temperature. At 0 the largest logit is chosen here and what follows is not used.
//! 5. Truncation, in the order of Hugging Face transformers: `top_k`, `top_p` over what `top_k` kept, `min_p`.
//! 6. Gumbel-max over the survivors: `argmax(logit / temperature + noise(seed, choice, position, token))`, an exact sample of the softmax.
//!
//! Invariants
//! 1. A choice is a function of logits, row and drafted tokens alone; the noise is keyed by token id and absolute position, so the same
//!    logits give the same token whoever asks, in whatever order and batch (coupled speculation rests on it).
//! 2. Equal logits are ordered by id, lowest first, at every stage.
//! 3. Log-probabilities are those of the raw logits. A NaN among them makes them NaN, so that a defect below shows; a NaN logit is
//!    itself never chosen while another can be.
//! 4. If a mask and `min_tokens` together leave nothing, the mask wins: a complete structured output may end. If masks, or the logits,
//!    leave nothing at all, the lowest id that the mask allows is chosen, else an end token, else 0. Nothing panics.
//!
//! Costs: one copy of the logits and a log-sum-exp per position; top-k and top-p select before they sort. At temperature > 0 noise is drawn
//! only for tokens that can still win. No allocation once the buffers have grown, except for what is returned.

mod adjust;
mod report;
mod truncate;

use crate::plan::{Chosen, SampleRow, TokenCounts};
use kvasir_core::TokenId;
use kvasir_kernels::noise::{self, NoiseKey};
use kvasir_kernels::{Isa, reduce};

pub use report::score;

/// Stream of the noise that chooses tokens; other purposes (acceptance, residual) get their own numbers.
pub const CHOICE_NOISE: u32 = 0;

/// No noise is larger: it is −ln(−ln u) with u ≤ 1 − 2⁻⁵⁴ ([`kvasir_kernels::noise`]).
const MOST_NOISE: f32 = 37.5;

/// Candidates whose noise is drawn together: long enough for full vectors, short enough that the best so far soon spares others theirs.
const NOISE_BATCH: usize = 512;

/// Working memory of one sampling thread.
#[derive(Debug, Default)]
pub struct Sampler {
    /// Logits after stages 1 to 3; `-inf` is out.
    adjusted: Vec<f32>,
    /// Output tokens with the drafted ones before the position.
    counts: TokenCounts,
    /// Logits of end tokens that `min_tokens` took out.
    withheld: Vec<(TokenId, f32)>,
    candidates: Vec<Candidate>,
    /// `(logit − largest) / temperature`, in the order of what is being scaled.
    scaled: Vec<f32>,
    noise: NoiseBuffer,
}

/// One batch of candidates whose noise is drawn together.
#[derive(Debug, Default)]
struct NoiseBuffer {
    ids: Vec<TokenId>,
    scaled: Vec<f32>,
    noise: Vec<f32>,
}

/// A token that may be chosen, with its logit after stage 3.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Candidate {
    id: TokenId,
    logit: f32,
}

/// Chooses the token of one verified position with buffers of its own; see [`Sampler::choose`].
pub fn choose(logits: &[f32], row: &SampleRow, ahead: &[TokenId]) -> Chosen {
    Sampler::default().choose(logits, row, ahead)
}

// === impl Sampler ===

impl Sampler {
    /// Chooses the token of verified position `ahead.len()`, where `ahead` are the drafted tokens of the row before it. Positions do not
    /// depend on each other otherwise, so rejecting a draft needs no undoing here.
    pub fn choose(&mut self, logits: &[f32], row: &SampleRow, ahead: &[TokenId]) -> Chosen {
        self.adjust(logits, row, ahead);
        let id = self.pick(row, ahead.len()).unwrap_or_else(|| last_resort(row, ahead.len(), logits.len()));
        let params = &row.params;
        let mut chosen = report::score(logits, id, params.top_logprobs.unwrap_or(0));
        chosen.logits = params.want_logits.then(|| logits.to_vec());
        chosen
    }

    /// Stages 4 to 6; `None` if nothing can be chosen.
    fn pick(&mut self, row: &SampleRow, index: usize) -> Option<TokenId> {
        let params = &row.params;
        let greedy = params.temperature <= 0.0 || params.temperature.is_nan();
        if greedy || params.top_k == 1 {
            return argmax(&self.adjusted);
        }
        self.candidates.clear();
        let finite = |(id, &logit): (usize, &f32)| (logit > f32::NEG_INFINITY).then_some(Candidate { id: id as TokenId, logit });
        self.candidates.extend(self.adjusted.iter().enumerate().filter_map(finite));
        truncate::truncate(&mut self.candidates, &mut self.scaled, params);
        let position = row.position + index as u32;
        let key = NoiseKey { seed: params.seed, choice: row.choice, position, purpose: CHOICE_NOISE };
        self.noise.draw(&self.candidates, params.temperature, key)
    }
}

// === impl Candidate ===

impl Candidate {
    /// Whether it stands before `other`: larger logit first, then lower id.
    fn before(self, other: Self) -> bool {
        self.logit > other.logit || (self.logit == other.logit && self.id < other.id)
    }

    /// That order as a number, for sorting: the smallest stands first. Candidates are never NaN.
    fn rank(self) -> u64 {
        // Adding 0 makes −0 and 0 one. Flipping the sign bit of positive and all bits of negative numbers makes their order that of
        // unsigned integers; the complement turns it round.
        let bits = (self.logit + 0.0).to_bits();
        let ascending = if bits >> 31 == 0 { bits | 1 << 31 } else { !bits };
        u64::from(!ascending) << 32 | u64::from(self.id)
    }
}

/// The largest logit, lowest id first; `-inf` does not count.
fn argmax(logits: &[f32]) -> Option<TokenId> {
    reduce::argmax(logits).filter(|id| logits[*id] > f32::NEG_INFINITY).map(|id| id as TokenId)
}

// === impl NoiseBuffer ===

impl NoiseBuffer {
    /// The candidate with the largest `scaled logit + noise`, lowest id first.
    fn draw(&mut self, candidates: &[Candidate], temperature: f32, key: NoiseKey) -> Option<TokenId> {
        let largest =
            candidates.iter().fold(f32::NEG_INFINITY, |largest, next| if next.logit > largest { next.logit } else { largest });
        let isa = Isa::detect();
        let mut best: Option<Candidate> = None;
        for batch in candidates.chunks(NOISE_BATCH) {
            self.ids.clear();
            self.scaled.clear();
            for candidate in batch {
                let scaled = scale(candidate.logit, largest, temperature);
                // Exact: rounding is monotone, so even the largest noise could not lift it to the best so far.
                if best.is_none_or(|best| scaled + MOST_NOISE >= best.logit) {
                    self.ids.push(candidate.id);
                    self.scaled.push(scaled);
                }
            }
            self.noise.resize(self.ids.len(), 0.0);
            noise::gumbel_into(isa, key, &self.ids, &mut self.noise);
            for ((&id, &scaled), &noise) in self.ids.iter().zip(&self.scaled).zip(&self.noise) {
                let next = Candidate { id, logit: scaled + noise };
                if best.is_none_or(|best| next.before(best)) {
                    best = Some(next);
                }
            }
        }
        best.map(|best| best.id)
    }
}

/// `(logit − largest) / temperature`: at most 0 and never NaN, however small the temperature.
fn scale(logit: f32, largest: f32, temperature: f32) -> f32 {
    // Also for an infinite largest logit, where the difference would be NaN.
    if logit == largest { 0.0 } else { (logit - largest) / temperature }
}

/// What to choose when nothing can be: deterministic, inside the mask if possible, inside the vocabulary always.
fn last_resort(row: &SampleRow, index: usize, vocab: usize) -> TokenId {
    let params = &row.params;
    let usable = |id: &TokenId| params.never.binary_search(id).is_err();
    let allowed = |id: &TokenId| row.masks.is_empty() || row.masks.get(index).is_some_and(|mask| mask.allows(*id));
    let end = || params.end_tokens.iter().copied().find(|id| (*id as usize) < vocab);
    (0..vocab as TokenId).find(|id| usable(id) && allowed(id)).or_else(end).unwrap_or(0)
}

#[cfg(test)]
mod tests;
