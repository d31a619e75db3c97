//! The plan of one step and its result: the only words between engine and backend.
//!
//! Owns the meaning of a row. Refuses to know who made it (scheduler) and who computes it (backend). A backend executes a plan without
//! asking back; results carry the plan's epoch, and the engine drops stale ones.
//!
//! Invariants
//! 1. `tokens` of a row stand at absolute positions `start ..`; KV of all positions below `start` is valid in the row's blocks.
//! 2. The last `drafted` tokens of a row are provisional: their KV is written but never published before they are accepted.
//! 3. A row with a [`SampleRow`] yields one choice per verified position: `drafted + 1` of them.

use kvasir_core::{LogitBias, TokenId};
use std::sync::Arc;

/// Index of a block in a backend's KV pool.
pub type BlockId = u32;

/// Name of a sequence inside one engine.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct SequenceId(pub u64);

/// Work of one step.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    /// Number of the step; echoed in the result.
    pub epoch: u64,
    /// Block copies to make before the rows run (copy-on-write of a shared tail).
    pub copies: Vec<BlockCopy>,
    /// Rows, in any order; results come in the same order.
    pub rows: Vec<Row>,
}

/// Copies the first `slots` token slots of one device block into another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockCopy {
    /// Source.
    pub from: BlockId,
    /// Destination.
    pub to: BlockId,
    /// Token slots to copy.
    pub slots: u32,
}

/// The part of one sequence that takes part in a step.
#[derive(Clone, Debug)]
pub struct Row {
    /// Whose.
    pub sequence: SequenceId,
    /// Tokens to compute, at least one; the last `drafted` of them are provisional.
    pub tokens: Vec<TokenId>,
    /// Absolute position of the first of them.
    pub start: u32,
    /// How many of the last tokens are drafted (0 in prefill and plain decode).
    pub drafted: u32,
    /// Blocks of the sequence from position 0; covers `start + tokens.len()` positions.
    pub blocks: Arc<[BlockId]>,
    /// How to choose after the last verified positions; `None` for a prefill chunk that is not the last.
    pub sample: Option<SampleRow>,
    /// Report the log-probability of each of `tokens[1..]` and of the next token after an inner chunk, with this many alternatives
    /// (prompt log-probabilities); the target of position i is `tokens[i + 1]`, and `next_prompt_token` for the last position.
    pub score: Option<ScoreRow>,
}

/// Prompt log-probabilities asked of a row.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ScoreRow {
    /// Most likely tokens to report beside the prompt token itself.
    pub top: u32,
    /// The prompt token that follows the row's last one, if the prompt goes on.
    pub next_prompt_token: Option<TokenId>,
}

/// Everything that choosing a token needs; pure data, so that a device can sample by itself.
#[derive(Clone, Debug)]
pub struct SampleRow {
    /// What does not change during the request.
    pub params: Arc<SampleParams>,
    /// Which choice of the request.
    pub choice: u32,
    /// Absolute position that the first chosen token will have; the noise is keyed by it.
    pub position: u32,
    /// Output tokens of this choice so far with their counts (presence and frequency penalties).
    pub output_counts: Arc<TokenCounts>,
    /// Whether end tokens may be chosen at the first verified position (`min_tokens`); position i of a verify may iff
    /// `end_allowed_from <= i`.
    pub end_allowed_from: u32,
    /// Allowed tokens per verified position (structured output); empty means all.
    pub masks: Vec<Arc<TokenMask>>,
}

/// Sampling parameters of a request in the form that the pipeline reads.
#[derive(Clone, PartialEq, Debug)]
pub struct SampleParams {
    /// Seed of the noise.
    pub seed: u64,
    /// 0 is argmax.
    pub temperature: f32,
    /// 0 keeps all.
    pub top_k: u32,
    /// 1 keeps all.
    pub top_p: f32,
    /// 0 keeps all.
    pub min_p: f32,
    /// 1 is off; applies to prompt and output tokens.
    pub repetition_penalty: f32,
    /// 0 is off.
    pub presence_penalty: f32,
    /// 0 is off.
    pub frequency_penalty: f32,
    /// Added to these logits first.
    pub logit_bias: Vec<LogitBias>,
    /// Distinct prompt tokens, sorted (repetition penalty); empty when that penalty is off.
    pub prompt_tokens: Vec<TokenId>,
    /// Tokens that end the output; masked until `min_tokens` are out.
    pub end_tokens: Vec<TokenId>,
    /// Tokens of the vocabulary that are never chosen (unused and padding entries), sorted.
    pub never: Arc<[TokenId]>,
    /// `Some(n)`: report the n most likely tokens beside the chosen one.
    pub top_logprobs: Option<u32>,
    /// Whether the whole row of logits is wanted back (tests, rejection contract).
    pub want_logits: bool,
}

/// Occurrences of tokens, sorted by id.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct TokenCounts(pub Vec<(TokenId, u32)>);

/// A set of allowed tokens: bit `id % 32` of word `id / 32`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TokenMask(pub Vec<u32>);

/// Result of one step.
#[derive(Clone, Debug, Default)]
pub struct StepOutput {
    /// The plan's epoch.
    pub epoch: u64,
    /// One per row, in the plan's order.
    pub rows: Vec<RowOutput>,
}

/// Result of one row.
#[derive(Clone, Debug, Default)]
pub struct RowOutput {
    /// One per verified position, in order; empty for an inner prefill chunk.
    pub chosen: Vec<Chosen>,
    /// One per token of the row when scoring was asked: log-probability of the token that follows it (`None` for the last position of
    /// the prompt).
    pub scores: Vec<Option<Chosen>>,
}

/// A chosen (or scored) token.
#[derive(Clone, PartialEq, Debug)]
pub struct Chosen {
    /// The token.
    pub id: TokenId,
    /// Natural logarithm of its probability under the model's own distribution (softmax of the raw logits; no temperature, penalties,
    /// bias or truncation).
    pub logprob: f32,
    /// The most likely tokens of that same distribution, best first, ties by id.
    pub top: Vec<(TokenId, f32)>,
    /// The raw logits, if asked for.
    pub logits: Option<Vec<f32>>,
}

// === impl Row ===

impl Row {
    /// Positions whose KV is valid once this row has run, drafted ones included.
    pub fn end(&self) -> u32 {
        self.start + self.tokens.len() as u32
    }
}

// === impl Plan ===

impl Plan {
    /// Tokens computed by this step.
    pub fn tokens(&self) -> usize {
        self.rows.iter().map(|row| row.tokens.len()).sum()
    }
}

// === impl TokenMask ===

impl TokenMask {
    /// A mask that allows nothing, for a vocabulary of `vocab` tokens.
    pub fn none(vocab: usize) -> Self {
        Self(vec![0; vocab.div_ceil(32)])
    }

    /// Allows a token.
    pub fn allow(&mut self, id: TokenId) {
        if let Some(word) = self.0.get_mut(id as usize / 32) {
            *word |= 1 << (id % 32);
        }
    }

    /// Whether a token is allowed; tokens outside the mask are not.
    pub fn allows(&self, id: TokenId) -> bool {
        self.0.get(id as usize / 32).is_some_and(|word| word >> (id % 32) & 1 == 1)
    }
}

// === impl TokenCounts ===

impl TokenCounts {
    /// Counts one more occurrence.
    pub fn add(&mut self, id: TokenId) {
        match self.0.binary_search_by_key(&id, |(token, _)| *token) {
            Ok(index) => self.0[index].1 += 1,
            Err(index) => self.0.insert(index, (id, 1)),
        }
    }

    /// Takes one occurrence back (rollback after a rejected draft).
    pub fn remove(&mut self, id: TokenId) {
        if let Ok(index) = self.0.binary_search_by_key(&id, |(token, _)| *token) {
            self.0[index].1 -= 1;
            if self.0[index].1 == 0 {
                self.0.remove(index);
            }
        }
    }
}
