//! The only request: what a door makes once and every later stage reads.
//!
//! Owns the meaning of each field. Refuses to validate ranges (doors parse) and to know the model's text. Called by doors, router, worker.

use crate::TokenId;
use crate::block::Prefix;
use crate::frame::Digest;
use crate::identity::{Adapter, ModelIdentity, ReuseDomain, SharedDomain};
use crate::secret::SecretEpoch;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Names one request in logs, traces and admin calls: 16 random bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub [u8; 16]);

/// Opaque name of a tenant for quotas, floors and metrics; never the key to anything.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct TenantTag(pub Arc<str>);

/// One generation request in its only form.
#[derive(Clone, Debug)]
pub struct Request {
    /// Random name.
    pub id: RequestId,
    /// The identity that the caller expects; a worker with another refuses before any lookup.
    pub identity: ModelIdentity,
    /// The selected adapter, part of `identity`.
    pub adapter: Option<Adapter>,
    /// Prompt tokens, at least one.
    pub prompt: Arc<[TokenId]>,
    /// The tenant's reuse domain.
    pub domain: ReuseDomain,
    /// The pool's shared domain and how many leading tokens are a registered shared prefix.
    pub shared: Option<(SharedDomain, u32)>,
    /// Epoch of the secret that `domain` was derived under.
    pub secret_epoch: SecretEpoch,
    /// For quotas, floors and metrics.
    pub tenant: TenantTag,
    /// What the cache may do for this request.
    pub cache: CachePolicy,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// When generation ends.
    pub stop: Stop,
    /// Structured output.
    pub grammar: Option<Grammar>,
    /// Acceptance contract of speculation.
    pub contract: Contract,
    /// Speculation wishes.
    pub speculation: Speculation,
    /// Larger is served first; 0 is normal.
    pub priority: i32,
    /// Time left when the request was handed over.
    pub deadline: Option<Duration>,
    /// Trace that this request belongs to.
    pub trace: Option<TraceContext>,
}

/// What the prefix cache may do.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CachePolicy {
    /// Whether to look up and to publish.
    pub mode: CacheMode,
    /// How long published blocks are wanted.
    pub ttl: Option<Duration>,
    /// Whether published blocks are held within the tenant's quota.
    pub pin: bool,
}

/// Prefix cache mode of a pool or request.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum CacheMode {
    /// The engine decides from measured cost.
    #[default]
    Auto,
    /// Look up and publish.
    On,
    /// Neither look up nor publish.
    Off,
}

/// Most choices of one request: half of the sequences that a worker steps at once by default, so that one request never fills it.
///
/// Doors refuse more by name; workers hold to the same number.
pub const CHOICES_PER_REQUEST_MAX: u32 = 32;

/// How tokens are chosen; ranges were checked at the door.
#[derive(Clone, PartialEq, Debug)]
pub struct Sampling {
    /// Seed of the noise; always present (a door draws one when the client gives none).
    pub seed: u64,
    /// Number of independent choices, at least 1.
    pub n: u32,
    /// 0 is argmax.
    pub temperature: f32,
    /// Keep the k most likely tokens; 0 keeps all.
    pub top_k: u32,
    /// Keep the smallest set with at least this mass; 1 keeps all.
    pub top_p: f32,
    /// Keep tokens with at least this share of the most likely token's probability; 0 keeps all.
    pub min_p: f32,
    /// Divides (positive) or multiplies (negative) logits of tokens in prompt or output; 1 is off (Keskar et al. 2019).
    pub repetition_penalty: f32,
    /// Subtracted once from logits of tokens in the output (OpenAI).
    pub presence_penalty: f32,
    /// Subtracted per occurrence from logits of tokens in the output (OpenAI).
    pub frequency_penalty: f32,
    /// Added to the logits of these tokens before anything else.
    pub logit_bias: Vec<LogitBias>,
    /// Log-probabilities to report per token: `None` none, `Some(n)` the chosen token's and the n most likely.
    pub logprobs: Option<u32>,
    /// The same for prompt tokens (completions with `echo`).
    pub prompt_logprobs: Option<u32>,
}

/// One entry of `logit_bias`.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct LogitBias {
    /// Token.
    pub token: TokenId,
    /// Added to its logit, −100 to 100.
    pub bias: f32,
}

/// When generation ends.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Stop {
    /// Strings that end the output and are not part of it.
    pub strings: Vec<String>,
    /// Tokens that end the output, beside the model's own.
    pub tokens: Vec<TokenId>,
    /// Whether the model's own end tokens are ignored.
    pub ignore_eos: bool,
    /// Tokens that must be generated before an end token may be chosen.
    pub min_tokens: u32,
    /// Most tokens to generate per choice.
    pub max_tokens: u32,
}

/// A constraint on the output's form.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Grammar {
    /// Any JSON object.
    JsonObject,
    /// JSON that the schema accepts.
    JsonSchema(String),
    /// Text that the regular expression matches whole.
    Regex(String),
    /// A context-free grammar in Lark's notation.
    Lark(String),
}

/// Which promise speculation keeps; every reply names it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Contract {
    /// The same tokens and bits with speculation on, off or changing depth.
    #[default]
    Coupled,
    /// The target's distribution is preserved.
    Rejection,
}

/// Speculation mode.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum SpeculationMode {
    /// The controller decides.
    #[default]
    Auto,
    /// Always draft the asked depth.
    Fixed,
    /// Never draft.
    Off,
}

/// Speculation wishes of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Speculation {
    /// Mode.
    pub mode: SpeculationMode,
    /// Most tokens to draft per step.
    pub max_draft_tokens: Option<u32>,
}

/// W3C trace context as received.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TraceContext {
    /// The `traceparent` header.
    pub traceparent: String,
    /// The `tracestate` header.
    pub tracestate: Option<String>,
}

// === impl RequestId ===

impl fmt::Debug for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

// === impl Request ===

impl Request {
    /// The roots that this request's block keys start from.
    pub fn prefix(&self) -> Prefix {
        Prefix::new(&self.identity, &self.domain, self.shared.as_ref().map(|(domain, tokens)| (domain, *tokens)))
    }

    /// Digest that partitions the caches of things derived from this request's text (grammars, segments).
    pub fn partition(&self) -> Digest {
        *self.domain.digest()
    }
}

// === impl Sampling ===

impl Default for Sampling {
    fn default() -> Self {
        Self {
            seed: 0,
            n: 1,
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            logprobs: None,
            prompt_logprobs: None,
        }
    }
}

// === impl Contract ===

impl Contract {
    /// The word in replies, metrics and the CRD.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Coupled => "coupled",
            Self::Rejection => "rejection",
        }
    }
}
