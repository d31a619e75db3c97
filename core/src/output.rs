//! What comes back: one stream of [`Chunk`]s per request, ended by exactly one `Finished` or `Failed`.
//!
//! Owns the accounting words of `contracts` §4: hits, states, counters. Refuses to know how they are shown.
//!
//! Invariants
//! 1. `Started` comes once and first; `Tokens` follow per choice in order; the last chunk is `Finished` or `Failed`, once.
//! 2. `Usage.prompt_tokens = Σ Started.hits + Started.computed`; recompute after preemption is counted apart.
//! 3. The states partition the time from receipt to hand-over exactly.

use crate::TokenId;
use crate::error::Error;
use crate::event::Tier;
use crate::request::Contract;
use std::time::Duration;

/// Index of a choice of one request, 0 to n − 1.
pub type Choice = u32;

/// One message of a request's output stream.
#[derive(Clone, PartialEq, Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "`Failed` is the large one and ends a stream: boxing it would cost the common chunks nothing and callers a dereference"
)]
pub enum Chunk {
    /// The request was admitted to the engine.
    Started(Started),
    /// Output of one choice.
    Tokens(Tokens),
    /// The stream ended well; nothing follows.
    Finished(Box<Finished>),
    /// The stream ended in a failure; nothing follows.
    Failed {
        /// Why.
        error: Error,
        /// What was used until then.
        usage: Usage,
        /// Where the time went until then.
        states: StateTimes,
    },
}

/// What the cache did for this request at first admission.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Started {
    /// Prompt tokens reused, by tier.
    pub hits: Vec<TierHit>,
    /// Prompt tokens to compute.
    pub computed: u32,
    /// Why not more was reused; `None` only if all but the last token was.
    pub miss_reason: Option<MissReason>,
}

/// Tokens reused from one tier.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TierHit {
    /// Where they were.
    pub tier: Tier,
    /// How many.
    pub tokens: u32,
}

/// Why a prompt was not reused further than it was; from the tenant's own history only.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub enum MissReason {
    /// Nothing of this domain began like this.
    Cold,
    /// It was stored and had to leave.
    Evicted,
    /// The prompt departs from what is stored.
    Diverged,
    /// Only the incomplete last block, or the last token, was left to compute.
    PartialBlock,
    /// Another request is computing it right now.
    Pending,
    /// The request asked for something that needs recomputation (prompt log-probabilities).
    Bypass,
    /// Caching is off for the request or the pool.
    Disabled,
}

/// New output of one choice.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Tokens {
    /// Which choice.
    pub choice: Choice,
    /// Committed ids, in order.
    pub ids: Vec<TokenId>,
    /// Text that became final with them; may lag behind the ids (split characters, stop prefixes).
    pub text: String,
    /// One per id when asked for.
    pub logprobs: Vec<TokenLogprob>,
    /// How many of `ids` were drafted and accepted.
    pub accepted_from_draft: u32,
    /// Log-probabilities of the prompt (first chunk of choice 0, when asked for); the first token has none.
    pub prompt_logprobs: Vec<Option<TokenLogprob>>,
}

/// Log-probability of a token and of the most likely ones at its position.
#[derive(Clone, PartialEq, Debug)]
pub struct TokenLogprob {
    /// The token.
    pub id: TokenId,
    /// Natural logarithm of its probability under the model after temperature 1 (before truncation).
    pub logprob: f32,
    /// The most likely tokens, best first.
    pub top: Vec<(TokenId, f32)>,
}

/// Why a choice ended.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum FinishReason {
    /// An end token or a stop string.
    Stop,
    /// `max_tokens`, the context or the pool's capacity.
    Length,
}

/// The end of a stream that went well.
#[derive(Clone, PartialEq, Debug)]
pub struct Finished {
    /// One per choice, by index.
    pub reasons: Vec<FinishReason>,
    /// Totals over all choices.
    pub usage: Usage,
    /// Where the time went.
    pub states: StateTimes,
    /// What speculation did.
    pub counters: Counters,
    /// The contract that held.
    pub contract: Contract,
}

/// Token totals of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Usage {
    /// Prompt tokens.
    pub prompt_tokens: u32,
    /// Prompt tokens that were reused.
    pub cached_tokens: u32,
    /// Visible output tokens over all choices.
    pub completion_tokens: u32,
    /// Tokens recomputed after preemption.
    pub recomputed_tokens: u32,
}

/// Token accounting under speculation (`contracts` §4).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    /// Target steps that this request took part in.
    pub steps: u64,
    /// Drafted tokens.
    pub proposed: u64,
    /// Drafted tokens that the target accepted.
    pub accepted: u64,
    /// First mismatches.
    pub rejected: u64,
    /// Drafted tokens after a mismatch.
    pub unverified: u64,
    /// Drafted tokens dropped for another reason.
    pub discarded: u64,
    /// Tokens that the target sampled itself.
    pub sampled: u64,
    /// Committed tokens that a stop trimmed from the visible output.
    pub trimmed: u64,
}

/// The exclusive states of a request's wall time (`contracts` §4).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub enum State {
    /// Waiting at the router's admission.
    AdmitWait,
    /// Template, tokenise, keys.
    Prepare,
    /// Choosing a worker, with failed attempts and back-off.
    Route,
    /// The gap between the router's and the worker's clock.
    Transfer,
    /// Waiting in the engine.
    EngineWait,
    /// Looking up the prefix.
    Lookup,
    /// Waiting for blocks from a lower tier.
    RestoreWait,
    /// Computing the prompt.
    Prefill,
    /// From the end of prefill to the first output.
    FirstOutput,
    /// Waiting for a draft.
    Draft,
    /// Verifying drafted tokens.
    Verify,
    /// Plain decoding.
    DecodePlain,
    /// Correcting after a rejection.
    Correction,
    /// Scheduler and cache work between steps.
    Scheduler,
    /// Preempted, waiting to run again.
    Preempted,
    /// Waiting for the reader.
    EmitWait,
}

/// Time spent in each state.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StateTimes([Duration; State::ALL.len()]);

// === impl MissReason ===

impl MissReason {
    /// Every reason.
    pub const ALL: [Self; 7] =
        [Self::Cold, Self::Evicted, Self::Diverged, Self::PartialBlock, Self::Pending, Self::Bypass, Self::Disabled];

    /// The word in metrics and reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cold => "cold",
            Self::Evicted => "evicted",
            Self::Diverged => "diverged",
            Self::PartialBlock => "partial_block",
            Self::Pending => "pending",
            Self::Bypass => "bypass",
            Self::Disabled => "disabled",
        }
    }
}

// === impl FinishReason ===

impl FinishReason {
    /// The OpenAI word.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
        }
    }
}

// === impl Started ===

impl Started {
    /// Prompt tokens reused from all tiers.
    pub fn cached(&self) -> u32 {
        self.hits.iter().map(|hit| hit.tokens).sum()
    }
}

// === impl State ===

impl State {
    /// Every state, in the order of a request's life.
    pub const ALL: [Self; 16] = [
        Self::AdmitWait,
        Self::Prepare,
        Self::Route,
        Self::Transfer,
        Self::EngineWait,
        Self::Lookup,
        Self::RestoreWait,
        Self::Prefill,
        Self::FirstOutput,
        Self::Draft,
        Self::Verify,
        Self::DecodePlain,
        Self::Correction,
        Self::Scheduler,
        Self::Preempted,
        Self::EmitWait,
    ];

    /// The word in reports, spans and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::AdmitWait => "admit_wait",
            Self::Prepare => "prepare",
            Self::Route => "route",
            Self::Transfer => "transfer",
            Self::EngineWait => "engine_wait",
            Self::Lookup => "lookup",
            Self::RestoreWait => "restore_wait",
            Self::Prefill => "prefill",
            Self::FirstOutput => "first_output",
            Self::Draft => "draft",
            Self::Verify => "verify",
            Self::DecodePlain => "decode_plain",
            Self::Correction => "correction",
            Self::Scheduler => "scheduler",
            Self::Preempted => "preempted",
            Self::EmitWait => "emit_wait",
        }
    }

    /// Reads a word back.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|state| state.name() == name)
    }
}

// === impl StateTimes ===

impl StateTimes {
    /// Adds time to one state.
    pub fn add(&mut self, state: State, time: Duration) {
        self.0[state as usize] += time;
    }

    /// Time spent in one state.
    pub fn get(&self, state: State) -> Duration {
        self.0[state as usize]
    }

    /// Sum over all states.
    pub fn total(&self) -> Duration {
        self.0.iter().sum()
    }

    /// Each state that time was spent in.
    pub fn iter(&self) -> impl Iterator<Item = (State, Duration)> + '_ {
        State::ALL.into_iter().map(|state| (state, self.get(state))).filter(|(_, time)| !time.is_zero())
    }

    /// Adds all times of `other`.
    pub fn merge(&mut self, other: &Self) {
        for (mine, theirs) in self.0.iter_mut().zip(other.0) {
            *mine += theirs;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_are_listed_in_the_order_of_their_indexes() {
        for (index, state) in State::ALL.into_iter().enumerate() {
            assert_eq!(state as usize, index);
            assert_eq!(State::from_name(state.name()), Some(state));
        }
    }

    #[test]
    fn times_add_up_to_their_total() {
        let mut times = StateTimes::default();
        times.add(State::Prefill, Duration::from_millis(3));
        times.add(State::DecodePlain, Duration::from_millis(4));
        times.add(State::Prefill, Duration::from_millis(1));
        assert_eq!(times.get(State::Prefill), Duration::from_millis(4));
        assert_eq!(times.total(), Duration::from_millis(8));
        assert_eq!(times.iter().count(), 2);
    }
}
