//! The generation request.
//!
//! What this version cannot do (disaggregated phases, foreign KV, resume, multimodal content) is refused by name, never ignored.

use super::words::{
    cache_mode_from_wire, cache_mode_to_wire, contract_from_wire, contract_to_wire, speculation_mode_from_wire,
    speculation_mode_to_wire,
};
use super::{Malformed, bytes_from_wire, digest_from_wire, finite, in_range, required};
use crate::worker as wire;
use crate::worker::grammar::Kind;
use kvasir_core::{
    Adapter, CachePolicy, Error, Grammar, LogitBias, ModelIdentity, Reason, Request, RequestId, ReuseDomain, Sampling,
    SecretEpoch, SharedDomain, Speculation, Stop, TenantTag, TraceContext,
};
use std::time::Duration;

/// Most choices per request.
pub const CHOICES_MAX: u32 = 128;

/// Most alternatives reported per token.
pub const LOGPROBS_MAX: u32 = 128;

/// Most prompt tokens in a message; no served context is longer.
pub const PROMPT_TOKENS_MAX: usize = 1 << 24;

/// Largest bias on a logit, as OpenAI's.
const BIAS_MAX: f32 = 100.0;

/// Writes a request.
pub fn request_to_wire(request: &Request) -> wire::GenerateRequest {
    wire::GenerateRequest {
        request_id: request.id.0.to_vec(),
        expected_identity: request.identity.0.as_bytes().to_vec(),
        adapter: request.adapter.as_ref().map(adapter_to_wire),
        prompt_tokens: request.prompt.to_vec(),
        domain_id: request.domain.digest().as_bytes().to_vec(),
        shared_prefix: request.shared.as_ref().map(|(domain, tokens)| wire::SharedPrefix {
            shared_domain_id: domain.digest().as_bytes().to_vec(),
            tokens: *tokens,
        }),
        secret_epoch: request.secret_epoch.0.to_vec(),
        tenant_tag: request.tenant.0.to_string(),
        cache: Some(wire::CachePolicy {
            mode: cache_mode_to_wire(request.cache.mode) as i32,
            ttl_ms: request.cache.ttl.map(|ttl| u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX)),
            pin: request.cache.pin,
        }),
        sampling: Some(sampling_to_wire(&request.sampling)),
        stop: Some(wire::Stop {
            strings: request.stop.strings.clone(),
            tokens: request.stop.tokens.clone(),
            ignore_eos: request.stop.ignore_eos,
            min_tokens: request.stop.min_tokens,
            max_tokens: request.stop.max_tokens,
        }),
        grammar: request.grammar.as_ref().map(grammar_to_wire),
        contract: contract_to_wire(request.contract) as i32,
        speculation: Some(wire::Speculation {
            mode: speculation_mode_to_wire(request.speculation.mode) as i32,
            max_draft_tokens: request.speculation.max_draft_tokens,
        }),
        priority: request.priority,
        deadline_us: request.deadline.map(|left| u64::try_from(left.as_micros()).unwrap_or(u64::MAX)),
        phase: wire::Phase::Unified as i32,
        kv_source: None,
        resume: Vec::new(),
        trace: request.trace.as_ref().map(|trace| wire::TraceContext {
            traceparent: trace.traceparent.clone(),
            tracestate: trace.tracestate.clone().unwrap_or_default(),
        }),
        contents: Vec::new(),
    }
}

/// Reads a request.
pub fn request_from_wire(request: wire::GenerateRequest) -> Result<Request, Error> {
    refuse_unbuilt(&request)?;
    read(request).map_err(Malformed::into_invalid)
}

/// Parts of the protocol that no worker of this version can do.
fn refuse_unbuilt(request: &wire::GenerateRequest) -> Result<(), Error> {
    let field = match wire::Phase::try_from(request.phase) {
        Ok(wire::Phase::Prefill | wire::Phase::Decode) => "phase",
        _ if request.kv_source.is_some() => "kv_source",
        _ if !request.resume.is_empty() => "resume",
        _ if !request.contents.is_empty() => "contents",
        _ => return Ok(()),
    };
    Err(Error::new(Reason::Unimplemented, format!("{field} is reserved and not built in this version; leave it out"))
        .with_field(field))
}

fn read(request: wire::GenerateRequest) -> Result<Request, Malformed> {
    if wire::Phase::try_from(request.phase) != Ok(wire::Phase::Unified) {
        return Err(Malformed::new("phase", format!("must be PHASE_UNIFIED, not {}", request.phase)));
    }
    let prompt = request.prompt_tokens;
    if prompt.is_empty() {
        return Err(Malformed::new("prompt_tokens", "must have at least one token"));
    }
    if prompt.len() > PROMPT_TOKENS_MAX {
        return Err(Malformed::new(
            "prompt_tokens",
            format!("has {} tokens, at most {PROMPT_TOKENS_MAX} are taken", prompt.len()),
        ));
    }
    if request.tenant_tag.is_empty() {
        return Err(Malformed::missing("tenant_tag"));
    }
    let cache = required("cache", request.cache)?;
    let speculation = required("speculation", request.speculation)?;
    Ok(Request {
        id: RequestId(bytes_from_wire("request_id", &request.request_id)?),
        identity: ModelIdentity(digest_from_wire("expected_identity", &request.expected_identity)?),
        adapter: request.adapter.as_ref().map(|adapter| adapter_from_wire("adapter", adapter)).transpose()?,
        domain: ReuseDomain::from_digest(digest_from_wire("domain_id", &request.domain_id)?),
        shared: request.shared_prefix.map(|shared| shared_from_wire(&shared, prompt.len())).transpose()?,
        secret_epoch: SecretEpoch(bytes_from_wire("secret_epoch", &request.secret_epoch)?),
        tenant: TenantTag(request.tenant_tag.into()),
        cache: CachePolicy {
            mode: cache_mode_from_wire("cache.mode", cache.mode)?,
            ttl: cache.ttl_ms.map(Duration::from_millis),
            pin: cache.pin,
        },
        sampling: sampling_from_wire(required("sampling", request.sampling)?)?,
        stop: stop_from_wire(required("stop", request.stop)?)?,
        grammar: request.grammar.map(grammar_from_wire).transpose()?,
        contract: contract_from_wire("contract", request.contract)?,
        speculation: Speculation {
            mode: speculation_mode_from_wire("speculation.mode", speculation.mode)?,
            max_draft_tokens: speculation.max_draft_tokens,
        },
        priority: request.priority,
        deadline: request.deadline_us.map(Duration::from_micros),
        trace: request.trace.map(|trace| TraceContext {
            traceparent: trace.traceparent,
            tracestate: Some(trace.tracestate).filter(|state| !state.is_empty()),
        }),
        prompt: prompt.into(),
    })
}

fn shared_from_wire(shared: &wire::SharedPrefix, prompt_len: usize) -> Result<(SharedDomain, u32), Malformed> {
    if shared.tokens as usize > prompt_len {
        let problem = format!("is {} but the prompt has {prompt_len} tokens", shared.tokens);
        return Err(Malformed::new("shared_prefix.tokens", problem));
    }
    let domain = SharedDomain::from_digest(digest_from_wire("shared_prefix.shared_domain_id", &shared.shared_domain_id)?);
    Ok((domain, shared.tokens))
}

pub(super) fn adapter_to_wire(adapter: &Adapter) -> wire::Adapter {
    wire::Adapter { content_digest: adapter.content.as_bytes().to_vec(), scale: adapter.scale }
}

pub(super) fn adapter_from_wire(field: &str, adapter: &wire::Adapter) -> Result<Adapter, Malformed> {
    Ok(Adapter {
        content: digest_from_wire(&format!("{field}.content_digest"), &adapter.content_digest)?,
        scale: finite(&format!("{field}.scale"), adapter.scale)?,
    })
}

fn sampling_to_wire(sampling: &Sampling) -> wire::Sampling {
    wire::Sampling {
        seed: sampling.seed,
        n: sampling.n,
        temperature: sampling.temperature,
        top_k: sampling.top_k,
        top_p: sampling.top_p,
        min_p: sampling.min_p,
        repetition_penalty: sampling.repetition_penalty,
        presence_penalty: sampling.presence_penalty,
        frequency_penalty: sampling.frequency_penalty,
        logit_bias: sampling.logit_bias.iter().map(|entry| wire::LogitBias { token: entry.token, bias: entry.bias }).collect(),
        logprobs: sampling.logprobs,
        prompt_logprobs: sampling.prompt_logprobs,
    }
}

fn sampling_from_wire(sampling: wire::Sampling) -> Result<Sampling, Malformed> {
    if !(1..=CHOICES_MAX).contains(&sampling.n) {
        return Err(Malformed::new("sampling.n", format!("must be from 1 to {CHOICES_MAX}, not {}", sampling.n)));
    }
    Ok(Sampling {
        seed: sampling.seed,
        n: sampling.n,
        temperature: in_range("sampling.temperature", sampling.temperature, 0.0..=f32::MAX)?,
        top_k: sampling.top_k,
        top_p: in_range("sampling.top_p", sampling.top_p, f32::MIN_POSITIVE..=1.0)?,
        min_p: in_range("sampling.min_p", sampling.min_p, 0.0..=1.0)?,
        repetition_penalty: in_range("sampling.repetition_penalty", sampling.repetition_penalty, f32::MIN_POSITIVE..=f32::MAX)?,
        presence_penalty: finite("sampling.presence_penalty", sampling.presence_penalty)?,
        frequency_penalty: finite("sampling.frequency_penalty", sampling.frequency_penalty)?,
        logit_bias: sampling
            .logit_bias
            .into_iter()
            .map(|entry| {
                let bias = in_range("sampling.logit_bias.bias", entry.bias, -BIAS_MAX..=BIAS_MAX)?;
                Ok(LogitBias { token: entry.token, bias })
            })
            .collect::<Result<_, Malformed>>()?,
        logprobs: logprobs_from_wire("sampling.logprobs", sampling.logprobs)?,
        prompt_logprobs: logprobs_from_wire("sampling.prompt_logprobs", sampling.prompt_logprobs)?,
    })
}

fn logprobs_from_wire(field: &str, value: Option<u32>) -> Result<Option<u32>, Malformed> {
    match value {
        Some(top) if top > LOGPROBS_MAX => Err(Malformed::new(field, format!("must be at most {LOGPROBS_MAX}, not {top}"))),
        value => Ok(value),
    }
}

fn stop_from_wire(stop: wire::Stop) -> Result<Stop, Malformed> {
    if stop.strings.iter().any(String::is_empty) {
        return Err(Malformed::new("stop.strings", "must not hold an empty string"));
    }
    Ok(Stop {
        strings: stop.strings,
        tokens: stop.tokens,
        ignore_eos: stop.ignore_eos,
        min_tokens: stop.min_tokens,
        max_tokens: stop.max_tokens,
    })
}

fn grammar_to_wire(grammar: &Grammar) -> wire::Grammar {
    let kind = match grammar {
        Grammar::JsonObject => Kind::JsonObject(true),
        Grammar::JsonSchema(schema) => Kind::JsonSchema(schema.clone()),
        Grammar::Regex(regex) => Kind::Regex(regex.clone()),
        Grammar::Lark(lark) => Kind::Lark(lark.clone()),
    };
    wire::Grammar { kind: Some(kind) }
}

fn grammar_from_wire(grammar: wire::Grammar) -> Result<Grammar, Malformed> {
    match required("grammar.kind", grammar.kind)? {
        Kind::JsonObject(true) => Ok(Grammar::JsonObject),
        Kind::JsonObject(false) => Err(Malformed::new("grammar.json_object", "must be true; leave grammar out for free text")),
        Kind::JsonSchema(schema) => Ok(Grammar::JsonSchema(schema)),
        Kind::Regex(regex) => Ok(Grammar::Regex(regex)),
        Kind::Lark(lark) => Ok(Grammar::Lark(lark)),
    }
}
