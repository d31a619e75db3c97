//! What the OpenAI routes answer: one serialisable type per shape, and how core words become them.
//!
//! Fields stand in the order in which OpenAI sends them. `null` members are sent where the SDK's types have them, left out where they are ours.

use crate::answer::Report;
use crate::serve::Receipt;
use kvasir_core::{TokenLogprob, Usage};
use kvasir_model::Text;
use serde::{Serialize, Serializer};
use serde_json::{Map, Value, json};

/// OpenAI's stand-in for a log-probability that JSON cannot hold.
const LOGPROB_NEVER: f32 = -9999.0;

/// Members that each reply and chunk of a stream begin with.
#[derive(Clone, Serialize)]
pub(crate) struct Envelope {
    pub(crate) id: String,
    pub(crate) object: &'static str,
    pub(crate) created: u64,
    pub(crate) model: String,
    pub(crate) system_fingerprint: String,
}

/// A reply or a chunk.
#[derive(Serialize)]
pub(crate) struct Reply<'a, C> {
    #[serde(flatten)]
    pub(crate) envelope: &'a Envelope,
    pub(crate) choices: Vec<C>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) usage: Option<UsageMember>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) kvasir: Option<Value>,
}

/// `usage` of a reply, or its null in the chunks before the last of a stream that reports it.
#[derive(Clone, Copy)]
pub(crate) enum UsageMember {
    Null,
    Of(Usage),
}

#[derive(Serialize)]
struct UsageObject {
    prompt_tokens: u32,
    completion_tokens: u32,
    total_tokens: u64,
    prompt_tokens_details: PromptDetails,
}

#[derive(Serialize)]
struct PromptDetails {
    cached_tokens: u32,
}

/// One choice of a whole chat reply.
#[derive(Serialize)]
pub(crate) struct ChatChoice {
    pub(crate) index: u32,
    pub(crate) message: ChatMessage,
    pub(crate) logprobs: Option<ChatLogprobs>,
    pub(crate) finish_reason: Option<&'static str>,
}

#[derive(Serialize)]
pub(crate) struct ChatMessage {
    pub(crate) role: &'static str,
    pub(crate) content: String,
    pub(crate) refusal: Option<&'static str>,
}

/// One choice of a chat chunk.
#[derive(Serialize)]
pub(crate) struct ChatDelta {
    pub(crate) index: u32,
    pub(crate) delta: Delta,
    pub(crate) logprobs: Option<ChatLogprobs>,
    pub(crate) finish_reason: Option<&'static str>,
}

#[derive(Default, Serialize)]
pub(crate) struct Delta {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) content: Option<String>,
}

/// One choice of a completion, whole or chunk.
#[derive(Serialize)]
pub(crate) struct TextChoice {
    pub(crate) index: u32,
    pub(crate) text: String,
    pub(crate) logprobs: Option<TextLogprobs>,
    pub(crate) finish_reason: Option<&'static str>,
}

#[derive(Default, Serialize)]
pub(crate) struct ChatLogprobs {
    pub(crate) content: Vec<ChatTokenLogprob>,
    pub(crate) refusal: Option<Vec<ChatTokenLogprob>>,
}

#[derive(Serialize)]
pub(crate) struct ChatTokenLogprob {
    #[serde(flatten)]
    token: ChatTop,
    top_logprobs: Vec<ChatTop>,
}

#[derive(Serialize)]
struct ChatTop {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
}

/// Log-probabilities of a completion, one entry per token in each list.
#[derive(Default, Serialize)]
pub(crate) struct TextLogprobs {
    text_offset: Vec<usize>,
    token_logprobs: Vec<Option<f32>>,
    tokens: Vec<String>,
    top_logprobs: Vec<Option<TopByText>>,
}

/// Token texts with their log-probability, best first; one entry per text.
struct TopByText(Vec<(String, f32)>);

/// Seconds since 1970 for `created`.
pub(crate) fn unix_seconds() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default().as_secs()
}

fn finite(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob } else { LOGPROB_NEVER }
}

/// A token as text; bytes that are no whole character are written as OpenAI writes them.
fn spelled(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => bytes.iter().fold("bytes:".to_owned(), |mut text, byte| {
            // Writing into a String cannot fail.
            let _infallible = write!(text, "\\x{byte:02x}");
            text
        }),
    }
}

/// The `kvasir` member of a reply.
pub(crate) fn report(report: &Report) -> Value {
    let hits: Map<String, Value> = report.hits.iter().map(|hit| (hit.tier.name().to_owned(), json!(hit.tokens))).collect();
    let states: Map<String, Value> =
        report.states.iter().map(|(state, time)| (state.name().to_owned(), json!(time.as_secs_f64() * 1e3))).collect();
    let mut member = json!({
        "hits": hits,
        "computed": report.computed,
        "miss_reason": report.miss_reason.map(kvasir_core::MissReason::name),
        "contract": report.contract.name(),
        "drafted": report.counters.proposed,
        "accepted": report.counters.accepted,
        "seed": report.seed,
        "states_ms": states,
    });
    if let (Some(receipt), Some(members)) = (&report.receipt, member.as_object_mut()) {
        members.insert("placement".to_owned(), placement(receipt));
    }
    member
}

fn placement(receipt: &Receipt) -> Value {
    let terms: Vec<Value> = receipt.terms.iter().map(|(name, seconds)| json!({ "name": name, "seconds": seconds })).collect();
    json!({
        "worker_uid": receipt.worker_uid,
        "candidates": receipt.candidates,
        "score_s": receipt.score_s,
        "terms": terms,
        "attempts": receipt.attempts,
        "predicted_cached_tokens": receipt.predicted_cached_tokens,
    })
}

// === impl UsageMember ===

impl Serialize for UsageMember {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Null => serializer.serialize_none(),
            Self::Of(usage) => UsageObject {
                prompt_tokens: usage.prompt_tokens,
                completion_tokens: usage.completion_tokens,
                total_tokens: u64::from(usage.prompt_tokens) + u64::from(usage.completion_tokens),
                prompt_tokens_details: PromptDetails { cached_tokens: usage.cached_tokens },
            }
            .serialize(serializer),
        }
    }
}

// === impl ChatTokenLogprob ===

impl ChatTokenLogprob {
    /// Shows one token and its rivals.
    pub(crate) fn new(text: &Text, entry: &TokenLogprob) -> Self {
        let top = |id, logprob| {
            let bytes = text.tokenizer().token_bytes(id);
            ChatTop { token: spelled(bytes), logprob: finite(logprob), bytes: bytes.to_vec() }
        };
        Self {
            token: top(entry.id, entry.logprob),
            top_logprobs: entry.top.iter().map(|(id, logprob)| top(*id, *logprob)).collect(),
        }
    }
}

// === impl TextLogprobs ===

impl TextLogprobs {
    /// Adds a token; `offset` is where its text starts, in characters, and moves past it. The first prompt token has no entry.
    pub(crate) fn push(&mut self, text: &Text, id: u32, entry: Option<&TokenLogprob>, offset: &mut usize) {
        let bytes = text.tokenizer().token_bytes(id);
        self.text_offset.push(*offset);
        // A character counts where its first byte is; the others are continuation bytes.
        *offset += bytes.iter().filter(|byte| **byte & 0xc0 != 0x80).count();
        self.token_logprobs.push(entry.map(|entry| finite(entry.logprob)));
        self.top_logprobs.push(entry.map(|entry| TopByText::new(text, entry)));
        self.tokens.push(spelled(bytes));
    }
}

// === impl TopByText ===

impl TopByText {
    fn new(text: &Text, entry: &TokenLogprob) -> Self {
        let mut top: Vec<(String, f32)> = Vec::with_capacity(entry.top.len() + 1);
        for (id, logprob) in entry.top.iter().copied().chain([(entry.id, entry.logprob)]) {
            let token = spelled(text.tokenizer().token_bytes(id));
            if top.iter().all(|(known, _)| *known != token) {
                top.push((token, finite(logprob)));
            }
        }
        Self(top)
    }
}

impl Serialize for TopByText {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(token, logprob)| (token, logprob)))
    }
}
