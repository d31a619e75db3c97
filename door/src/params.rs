//! What a client may ask for, whichever door it came through: one set of names, ranges and limits.
//!
//! Owns every range of a generation parameter. Refuses to know JSON or protobuf (the doors fill [`Knobs`]) and the model (`prepare` checks
//! what depends on the vocabulary). Each refusal names the field as the client wrote it, the value, and what to do.

use kvasir_core::{
    CacheMode, CachePolicy, Contract, Error, Grammar, LogitBias, Reason, Sampling, Speculation, SpeculationMode, Stop, TokenId,
};
use std::fmt::Display;
use std::time::Duration;

/// Most choices of one prompt: what a worker takes as one request.
pub const CHOICES_PER_PROMPT_MAX: u32 = kvasir_core::CHOICES_PER_REQUEST_MAX;
/// Most choices over all prompts of one request.
pub const CHOICES_MAX: u32 = 128;
/// Most stop strings (OpenAI).
pub const STOP_STRINGS_MAX: usize = 4;
/// Longest stop string, in bytes.
pub const STOP_STRING_BYTES_MAX: usize = 4096;
/// Most stop tokens.
pub const STOP_TOKENS_MAX: usize = 64;
/// Most entries of `logit_bias`.
pub const LOGIT_BIAS_MAX: usize = 1024;
/// Most log-probabilities per token (OpenAI).
pub const LOGPROBS_MAX: i64 = 20;
/// What workers call the member that constrains the output; a client may have written another one.
pub(crate) const GRAMMAR_FIELD: &str = "response_format";

/// Longest grammar, schema or regular expression, in bytes.
pub const GRAMMAR_BYTES_MAX: usize = 256 << 10;
/// Longest `cache_salt`, in bytes.
pub const CACHE_SALT_BYTES_MAX: usize = 256;
/// Largest priority, up and down.
pub const PRIORITY_MAX: i32 = 100;
/// Longest deadline and longest time to live of cached blocks: one day.
pub const DURATION_MAX: Duration = Duration::from_hours(24);
/// Most drafted tokens per step that can be asked for.
pub const DRAFT_TOKENS_MAX: i64 = 64;
/// Temperatures below this are greedy: at 0.001 a token that is 0.1 less likely in log-probability has odds of e^-100.
pub const TEMPERATURE_MIN: f64 = 0.001;

/// Most digits of a number in a message; any `i64` fits.
const NUMBER_SHOWN_MAX: usize = 24;

/// Parameters as a door read them: typed, not yet checked. Absent means the default.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Knobs {
    pub(crate) temperature: Option<f64>,
    pub(crate) top_p: Option<f64>,
    pub(crate) top_k: Option<i64>,
    pub(crate) min_p: Option<f64>,
    pub(crate) n: Option<i64>,
    pub(crate) max_tokens: Option<i64>,
    /// How the client wrote `max_tokens`.
    pub(crate) max_tokens_name: Option<&'static str>,
    pub(crate) min_tokens: Option<i64>,
    pub(crate) seed: Option<u64>,
    pub(crate) presence_penalty: Option<f64>,
    pub(crate) frequency_penalty: Option<f64>,
    pub(crate) repetition_penalty: Option<f64>,
    pub(crate) logit_bias: Vec<(i64, f64)>,
    pub(crate) logprobs: Option<i64>,
    /// How the client wrote `logprobs`.
    pub(crate) logprobs_name: Option<&'static str>,
    pub(crate) prompt_logprobs: Option<i64>,
    pub(crate) echo: bool,
    pub(crate) stop: Vec<String>,
    pub(crate) stop_token_ids: Vec<i64>,
    pub(crate) ignore_eos: bool,
    pub(crate) grammar: Option<Grammar>,
    /// How the client wrote `response_format`.
    pub(crate) grammar_name: Option<&'static str>,
    pub(crate) cache_salt: Option<String>,
    pub(crate) extension: Extension,
}

/// The `kvasir` member as a door read it.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Extension {
    pub(crate) report: bool,
    pub(crate) cache_mode: Option<CacheMode>,
    pub(crate) cache_ttl_s: Option<i64>,
    pub(crate) cache_pin: bool,
    pub(crate) speculation_mode: Option<SpeculationMode>,
    pub(crate) max_draft_tokens: Option<i64>,
    pub(crate) contract: Option<Contract>,
    pub(crate) priority: Option<i64>,
    pub(crate) deadline_ms: Option<i64>,
}

/// Parameters that hold for any model.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Wishes {
    pub(crate) sampling: Sampling,
    /// `max_tokens` holds what was asked for, or [`u32::MAX`] where the context decides.
    pub(crate) stop: Stop,
    pub(crate) grammar: Option<Grammar>,
    /// How the client wrote [`GRAMMAR_FIELD`].
    pub(crate) grammar_name: &'static str,
    pub(crate) cache_salt: Option<String>,
    pub(crate) cache: CachePolicy,
    pub(crate) speculation: Speculation,
    pub(crate) contract: Contract,
    pub(crate) priority: i32,
    pub(crate) deadline: Option<Duration>,
    pub(crate) report: bool,
    pub(crate) echo: bool,
}

/// Reads a word of the extension.
pub(crate) fn cache_mode(field: &str, word: &str) -> Result<CacheMode, Error> {
    one_of(field, word, &[("auto", CacheMode::Auto), ("on", CacheMode::On), ("off", CacheMode::Off)])
}

/// Reads a word of the extension.
pub(crate) fn speculation_mode(field: &str, word: &str) -> Result<SpeculationMode, Error> {
    let words = [("auto", SpeculationMode::Auto), ("fixed", SpeculationMode::Fixed), ("off", SpeculationMode::Off)];
    one_of(field, word, &words)
}

/// Reads a word of the extension.
pub(crate) fn contract(field: &str, word: &str) -> Result<Contract, Error> {
    one_of(field, word, &[("coupled", Contract::Coupled), ("rejection", Contract::Rejection)])
}

/// Checks that a value lies between two bounds, both included.
pub(crate) fn in_range<T: PartialOrd + Display + Copy>(field: &str, value: T, min: T, max: T) -> Result<T, Error> {
    // Written so that NaN is out of range.
    if value >= min && value <= max {
        Ok(value)
    } else {
        // A number near the end of its type's range has hundreds of digits.
        let shown: String = value.to_string();
        let shown = if shown.len() > NUMBER_SHOWN_MAX { format!("{}…", &shown[..NUMBER_SHOWN_MAX]) } else { shown };
        Err(Error::invalid(field, format!("`{field}` = {shown} is out of range; give a value between {min} and {max}")))
    }
}

/// Shortens what a client wrote so that it can be part of a message.
pub(crate) fn quoted(text: &str) -> String {
    const SHOWN_MAX: usize = 80;
    if text.chars().count() <= SHOWN_MAX {
        return format!("{text:?}");
    }
    let head: String = text.chars().take(SHOWN_MAX).collect();
    format!("{head:?}… ({} bytes)", text.len())
}

fn one_of<T: Copy>(field: &str, word: &str, words: &[(&str, T)]) -> Result<T, Error> {
    words.iter().find(|(known, _)| *known == word).map(|(_, value)| *value).ok_or_else(|| {
        let known: Vec<_> = words.iter().map(|(known, _)| format!("\"{known}\"")).collect();
        Error::invalid(field, format!("`{field}` = {} is unknown; use one of {}", quoted(word), known.join(", ")))
    })
}

// === impl Knobs ===

impl Knobs {
    /// Checks everything that does not depend on the model. `random_seed` serves when the client gave no seed.
    pub(crate) fn check(self, random_seed: u64) -> Result<Wishes, Error> {
        let sampling = self.sampling(random_seed)?;
        let stop = self.stop()?;
        let grammar_name = self.grammar_name.unwrap_or(GRAMMAR_FIELD);
        let grammar = checked_grammar(grammar_name, self.grammar)?;
        let cache_salt = checked_salt(self.cache_salt)?;
        let Extension { report, priority, deadline_ms, contract, .. } = self.extension;
        let bound = i64::from(PRIORITY_MAX);
        let day_ms = DURATION_MAX.as_millis() as i64;
        Ok(Wishes {
            sampling,
            stop,
            grammar,
            grammar_name,
            cache_salt,
            cache: self.extension.cache()?,
            speculation: self.extension.speculation()?,
            contract: contract.unwrap_or_default(),
            priority: priority.map_or(Ok(0), |value| in_range("kvasir.priority", value, -bound, bound))? as i32,
            deadline: deadline_ms
                .map(|value| in_range("kvasir.deadline_ms", value, 1, day_ms))
                .transpose()?
                .map(|value| Duration::from_millis(value as u64)),
            report,
            echo: self.echo,
        })
    }

    fn sampling(&self, random_seed: u64) -> Result<Sampling, Error> {
        let real = |field, value: Option<f64>, default: f64, min, max| {
            value.map_or(Ok(default), |value| in_range(field, value, min, max)).map(|value| value as f32)
        };
        let temperature = real("temperature", self.temperature, 1.0, 0.0, 2.0)?;
        let top_p = real("top_p", self.top_p, 1.0, 0.0, 1.0)?;
        // vLLM writes "all" as -1.
        let top_k = in_range("top_k", self.top_k.unwrap_or(0), -1, i64::from(i32::MAX))?.max(0) as u32;
        let repetition_penalty = real("repetition_penalty", self.repetition_penalty, 1.0, 0.01, 10.0)?;
        let n = in_range("n", self.n.unwrap_or(1), 1, i64::from(CHOICES_PER_PROMPT_MAX))? as u32;
        let logprobs_name = self.logprobs_name.unwrap_or("logprobs");
        let logprobs = self.logprobs.map(|value| in_range(logprobs_name, value, 0, LOGPROBS_MAX)).transpose()?;
        let logprobs = logprobs.map(|value| value as u32);
        let prompt_logprobs =
            self.prompt_logprobs.map(|value| in_range("prompt_logprobs", value, 0, LOGPROBS_MAX)).transpose()?;
        let prompt_logprobs = prompt_logprobs.map(|value| value as u32);
        Ok(Sampling {
            seed: self.seed.unwrap_or(random_seed),
            n,
            temperature: if f64::from(temperature) < TEMPERATURE_MIN { 0.0 } else { temperature },
            // The smallest non-empty set for a mass of 0 is the most likely token.
            top_k: if top_p == 0.0 { 1 } else { top_k },
            top_p: if top_p == 0.0 { 1.0 } else { top_p },
            min_p: real("min_p", self.min_p, 0.0, 0.0, 1.0)?,
            repetition_penalty,
            presence_penalty: real("presence_penalty", self.presence_penalty, 0.0, -2.0, 2.0)?,
            frequency_penalty: real("frequency_penalty", self.frequency_penalty, 0.0, -2.0, 2.0)?,
            logit_bias: self.checked_bias()?,
            logprobs,
            prompt_logprobs,
        })
    }

    fn checked_bias(&self) -> Result<Vec<LogitBias>, Error> {
        let field = "logit_bias";
        let count = self.logit_bias.len();
        if count > LOGIT_BIAS_MAX {
            return Err(Error::invalid(field, format!("`{field}` has {count} entries; give at most {LOGIT_BIAS_MAX}")));
        }
        let mut entries = Vec::with_capacity(count);
        for (token, bias) in &self.logit_bias {
            let token = token_id(field, *token)?;
            let bias = in_range(&format!("{field}.{token}"), *bias, -100.0, 100.0)? as f32;
            entries.push(LogitBias { token, bias });
        }
        entries.sort_unstable_by_key(|entry| entry.token);
        if entries.windows(2).any(|pair| pair[0].token == pair[1].token) {
            return Err(Error::invalid(field, format!("`{field}` names a token twice; give each token once")));
        }
        Ok(entries)
    }

    fn stop(&self) -> Result<Stop, Error> {
        if self.stop.len() > STOP_STRINGS_MAX {
            let count = self.stop.len();
            return Err(Error::invalid("stop", format!("`stop` has {count} strings; give at most {STOP_STRINGS_MAX}")));
        }
        for text in &self.stop {
            if text.is_empty() {
                return Err(Error::invalid(
                    "stop",
                    "`stop` holds an empty string, which would end the output at once; remove it",
                ));
            }
            if text.len() > STOP_STRING_BYTES_MAX {
                let len = text.len();
                let message = format!("`stop` holds a string of {len} bytes; at most {STOP_STRING_BYTES_MAX} are allowed");
                return Err(Error::invalid("stop", message));
            }
        }
        if self.stop_token_ids.len() > STOP_TOKENS_MAX {
            let count = self.stop_token_ids.len();
            let message = format!("`stop_token_ids` has {count} entries; give at most {STOP_TOKENS_MAX}");
            return Err(Error::invalid("stop_token_ids", message));
        }
        let tokens = self.stop_token_ids.iter().map(|id| token_id("stop_token_ids", *id)).collect::<Result<_, _>>()?;
        let name = self.max_tokens_name.unwrap_or("max_tokens");
        let most = i64::from(u32::MAX - 1);
        let max_tokens = self.max_tokens.map(|value| in_range(name, value, 1, most)).transpose()?;
        let max_tokens = max_tokens.map_or(u32::MAX, |value| value as u32);
        let min_tokens = in_range("min_tokens", self.min_tokens.unwrap_or(0), 0, most)? as u32;
        if min_tokens > max_tokens {
            let message = format!("`min_tokens` = {min_tokens} is more than `{name}` = {max_tokens}; lower it");
            return Err(Error::invalid("min_tokens", message));
        }
        Ok(Stop { strings: self.stop.clone(), tokens, ignore_eos: self.ignore_eos, min_tokens, max_tokens })
    }
}

/// Reads a token id; whether the model has it is checked in `prepare`.
pub(crate) fn token_id(field: &str, id: i64) -> Result<TokenId, Error> {
    TokenId::try_from(id).map_err(|_| {
        Error::invalid(
            field,
            format!("`{field}` holds the token id {id}; ids are 0 or more and smaller than the model's vocabulary"),
        )
    })
}

fn checked_grammar(field: &str, grammar: Option<Grammar>) -> Result<Option<Grammar>, Error> {
    let len = match &grammar {
        None | Some(Grammar::JsonObject) => 0,
        Some(Grammar::JsonSchema(text) | Grammar::Regex(text) | Grammar::Lark(text)) => text.len(),
    };
    if len > GRAMMAR_BYTES_MAX {
        let message = format!("`{field}` is {len} bytes long; at most {GRAMMAR_BYTES_MAX} are allowed");
        return Err(Error::invalid(field, message));
    }
    Ok(grammar)
}

fn checked_salt(salt: Option<String>) -> Result<Option<String>, Error> {
    let Some(salt) = salt else { return Ok(None) };
    if salt.is_empty() {
        return Err(Error::invalid("cache_salt", "`cache_salt` is empty; leave it out, or give a string that is yours alone"));
    }
    if salt.len() > CACHE_SALT_BYTES_MAX {
        // The salt itself is a capability: it is not repeated.
        let len = salt.len();
        let message = format!("`cache_salt` is {len} bytes long; at most {CACHE_SALT_BYTES_MAX} are allowed");
        return Err(Error::invalid("cache_salt", message));
    }
    Ok(Some(salt))
}

// === impl Extension ===

impl Extension {
    fn cache(&self) -> Result<CachePolicy, Error> {
        let mode = self.cache_mode.unwrap_or_default();
        let most = DURATION_MAX.as_secs() as i64;
        let ttl = self.cache_ttl_s.map(|value| in_range("kvasir.cache.ttl_s", value, 1, most)).transpose()?;
        if mode == CacheMode::Off && (self.cache_pin || ttl.is_some()) {
            let field = if self.cache_pin { "kvasir.cache.pin" } else { "kvasir.cache.ttl_s" };
            let message = format!("`{field}` needs the cache, and `kvasir.cache.mode` is \"off\"; remove one of them");
            return Err(Error::new(Reason::UnsupportedCombination, message).with_field(field));
        }
        Ok(CachePolicy { mode, ttl: ttl.map(|seconds| Duration::from_secs(seconds as u64)), pin: self.cache_pin })
    }

    fn speculation(&self) -> Result<Speculation, Error> {
        let field = "kvasir.speculation.max_draft_tokens";
        let mode = self.speculation_mode.unwrap_or_default();
        let max_draft_tokens = self.max_draft_tokens.map(|value| in_range(field, value, 0, DRAFT_TOKENS_MAX)).transpose()?;
        if mode == SpeculationMode::Fixed && max_draft_tokens.is_none_or(|tokens| tokens == 0) {
            let message = format!("`kvasir.speculation.mode` is \"fixed\" and needs `{field}` between 1 and {DRAFT_TOKENS_MAX}");
            return Err(Error::invalid(field, message));
        }
        Ok(Speculation { mode, max_draft_tokens: max_draft_tokens.map(|tokens| tokens as u32) })
    }
}

#[cfg(test)]
mod tests;
