//! OpenAI request bodies → [`Ask`].
//!
//! Owns which members of `/v1/chat/completions` and `/v1/completions` exist here, which are harmless, and which are refused by name.
//! Ranges are [`params`](crate::params)' business.
//!
//! Beside OpenAI's members these are read, named as vLLM names them: `top_k`, `min_p`, `repetition_penalty`, `min_tokens`,
//! `stop_token_ids`, `ignore_eos`, `cache_salt`, `guided_json`, `guided_regex`, `guided_choice`, `guided_grammar` (Lark), and ours: `kvasir`.

use super::fields::{Fields, integer, kind, wrong};
use super::messages;
use crate::ask::{Ask, Conversation, Input};
use crate::params::{self, Extension, Knobs};
use kvasir_core::{Error, Grammar, Reason, TokenId};
use serde_json::Value;

/// Most prompts in one completions request.
const PROMPTS_MAX: usize = params::CHOICES_MAX as usize;

/// OpenAI's default of `max_tokens` for completions; a chat may go on to the end of the context.
const MAX_TOKENS_DEFAULT: i64 = 16;

/// A parsed body: what to generate and how to answer.
#[derive(Debug)]
pub(crate) struct Body {
    pub(crate) ask: Ask,
    pub(crate) stream: bool,
    pub(crate) include_usage: bool,
}

/// Members that change nothing in the output; accepted from clients that always send them.
const HARMLESS: [&str; 8] = [
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prompt_cache_options",
];

const UNSUPPORTED_CHAT: [(&str, &str); 7] = [
    ("functions", "send `tools`, which the chat template shows to the model"),
    ("function_call", "send `tools`, which the chat template shows to the model"),
    ("audio", "only text is generated"),
    ("reasoning_effort", "leave it out"),
    ("verbosity", "leave it out, or ask for it in a message"),
    ("web_search_options", "the server has no access to the web"),
    ("moderation", "leave it out"),
];

/// Reads a chat body.
pub(crate) fn chat(value: Value) -> Result<Body, Error> {
    let mut fields = Fields::new("", value)?;
    let model = fields.string("model")?;
    let messages = messages::read(fields.take("messages"))?;
    let tools = tools(&mut fields)?;
    let template = template(&mut fields)?;
    let mut knobs = common(&mut fields)?;
    let limit = fields.integer("max_completion_tokens")?;
    if let Some(limit) = limit {
        if knobs.max_tokens.is_some_and(|other| other != limit) {
            let message = "`max_completion_tokens` and `max_tokens` differ; give one of them";
            return Err(Error::invalid("max_completion_tokens", message));
        }
        knobs.max_tokens = Some(limit);
        knobs.max_tokens_name = Some("max_completion_tokens");
    }
    let top = fields.integer("top_logprobs")?;
    match (fields.boolean("logprobs")?.unwrap_or(false), top) {
        (false, None) => {}
        (false, Some(_)) => return Err(Error::invalid("top_logprobs", "`top_logprobs` needs `logprobs`: true; set it")),
        (true, top) => knobs.logprobs = Some(top.unwrap_or(0)),
    }
    knobs.logprobs_name = Some("top_logprobs");
    if fields.take("modalities").is_some_and(|modalities| modalities != serde_json::json!(["text"])) {
        return Err(Error::invalid("modalities", "`modalities` has to be [\"text\"]; only text is generated"));
    }
    // A prediction speeds up and never changes what is generated.
    fields.ignore(&["prediction"]);
    fields.refuse(&UNSUPPORTED_CHAT)?;
    let (stream, include_usage) = streaming(&mut fields)?;
    fields.ignore(&HARMLESS);
    fields.finish()?;
    Ok(Body {
        ask: Ask { model, input: Input::Chat(Conversation { messages, tools, ..template }), knobs },
        stream,
        include_usage,
    })
}

/// Reads a completions body.
pub(crate) fn completions(value: Value) -> Result<Body, Error> {
    let mut fields = Fields::new("", value)?;
    let model = fields.string("model")?;
    let input = prompts(fields.take("prompt"))?;
    let mut knobs = common(&mut fields)?;
    knobs.max_tokens = knobs.max_tokens.or(Some(MAX_TOKENS_DEFAULT.max(knobs.min_tokens.unwrap_or(0))));
    knobs.logprobs = fields.integer("logprobs")?;
    knobs.echo = fields.boolean("echo")?.unwrap_or(false);
    knobs.prompt_logprobs = knobs.logprobs.filter(|_| knobs.echo);
    if let Some(best_of) = fields.integer("best_of")?.filter(|best_of| *best_of != knobs.n.unwrap_or(1)) {
        return Err(Error::invalid("best_of", format!("`best_of` = {best_of} has to equal `n`; leave it out")));
    }
    let (stream, include_usage) = streaming(&mut fields)?;
    fields.refuse(&[("suffix", "put the text after the gap into `prompt`, in the form that the model was trained on")])?;
    fields.ignore(&HARMLESS);
    fields.finish()?;
    Ok(Body { ask: Ask { model, input, knobs }, stream, include_usage })
}

/// Reads how the template is to be used; messages and tools stay empty.
pub(crate) fn template(fields: &mut Fields) -> Result<Conversation, Error> {
    let add_generation_prompt = fields.boolean("add_generation_prompt")?.unwrap_or(true);
    if fields.boolean("continue_final_message")? == Some(true) {
        let message = "`continue_final_message` is not supported; send the rendered text to the completions route";
        return Err(Error::invalid("continue_final_message", message));
    }
    let variables = match fields.take("chat_template_kwargs") {
        None => None,
        Some(Value::Object(variables)) => Some(variables),
        Some(other) => return Err(wrong("chat_template_kwargs", &other, "an object")),
    };
    Conversation::with_variables(add_generation_prompt, variables)
}

fn streaming(fields: &mut Fields) -> Result<(bool, bool), Error> {
    let stream = fields.boolean("stream")?.unwrap_or(false);
    let Some(mut options) = fields.object("stream_options")? else { return Ok((stream, false)) };
    if !stream {
        return Err(Error::invalid("stream_options", "`stream_options` needs `stream`: true; set it, or leave the options out"));
    }
    let include_usage = options.boolean("include_usage")?.unwrap_or(false);
    options.ignore(&["include_obfuscation"]);
    options.finish()?;
    Ok((stream, include_usage))
}

fn common(fields: &mut Fields) -> Result<Knobs, Error> {
    let (grammar_name, grammar) = grammar(fields)?.unzip();
    Ok(Knobs {
        temperature: fields.number("temperature")?,
        top_p: fields.number("top_p")?,
        top_k: fields.integer("top_k")?,
        min_p: fields.number("min_p")?,
        n: fields.integer("n")?,
        max_tokens: fields.integer("max_tokens")?,
        min_tokens: fields.integer("min_tokens")?,
        seed: seed(fields)?,
        presence_penalty: fields.number("presence_penalty")?,
        frequency_penalty: fields.number("frequency_penalty")?,
        repetition_penalty: fields.number("repetition_penalty")?,
        logit_bias: logit_bias(fields)?,
        stop: stop(fields)?,
        stop_token_ids: stop_token_ids(fields)?,
        ignore_eos: fields.boolean("ignore_eos")?.unwrap_or(false),
        grammar,
        grammar_name,
        cache_salt: fields.string("cache_salt")?,
        extension: extension(fields)?,
        ..Knobs::default()
    })
}

fn seed(fields: &mut Fields) -> Result<Option<u64>, Error> {
    let Some(value) = fields.take("seed") else { return Ok(None) };
    // Every 64-bit integer is a seed; a negative one counts by its bits.
    let bits = value.as_u64().or_else(|| value.as_i64().map(|seed| seed as u64));
    bits.map_or_else(|| integer("seed", &value).map(|seed| Some(seed as u64)), |seed| Ok(Some(seed)))
}

fn stop(fields: &mut Fields) -> Result<Vec<String>, Error> {
    let wanted = "a string or an array of strings";
    match fields.take("stop") {
        None => Ok(Vec::new()),
        Some(Value::String(text)) => Ok(vec![text]),
        Some(Value::Array(items)) => items
            .into_iter()
            .map(|item| match item {
                Value::String(text) => Ok(text),
                other => Err(Error::invalid("stop", format!("`stop` holds {}; give {wanted}", kind(&other)))),
            })
            .collect(),
        Some(other) => Err(wrong("stop", &other, wanted)),
    }
}

fn stop_token_ids(fields: &mut Fields) -> Result<Vec<i64>, Error> {
    let items = fields.array("stop_token_ids")?.unwrap_or_default();
    items.iter().map(|item| integer("stop_token_ids", item)).collect()
}

fn logit_bias(fields: &mut Fields) -> Result<Vec<(i64, f64)>, Error> {
    let members = match fields.take("logit_bias") {
        None => return Ok(Vec::new()),
        Some(Value::Object(members)) => members,
        Some(other) => return Err(wrong("logit_bias", &other, "an object from token ids to numbers")),
    };
    if members.len() > params::LOGIT_BIAS_MAX {
        let (count, most) = (members.len(), params::LOGIT_BIAS_MAX);
        return Err(Error::invalid("logit_bias", format!("`logit_bias` has {count} entries; give at most {most}")));
    }
    let entry = |(key, value): (&String, &Value)| {
        let id = key.parse::<i64>().ok().filter(|id| id.to_string() == *key).ok_or_else(|| {
            let shown = params::quoted(key);
            Error::invalid("logit_bias", format!("`logit_bias` has the key {shown}, which is no token id; use plain decimal ids"))
        })?;
        let bias = value.as_f64().ok_or_else(|| {
            let found = kind(value);
            Error::invalid("logit_bias", format!("`logit_bias` gives {found} for token {id}; give a number from -100 to 100"))
        })?;
        Ok((id, bias))
    };
    members.iter().map(entry).collect()
}

pub(crate) fn tools(fields: &mut Fields) -> Result<Vec<Value>, Error> {
    const TOOLS_MAX: usize = 128;
    let tools = fields.array("tools")?.unwrap_or_default();
    if tools.len() > TOOLS_MAX {
        return Err(Error::invalid("tools", format!("`tools` has {} entries; give at most {TOOLS_MAX}", tools.len())));
    }
    if let Some(other) = tools.iter().find(|tool| !tool.is_object()) {
        return Err(Error::invalid("tools", format!("`tools` holds {}; give an array of objects", kind(other))));
    }
    let choice = fields.take("tool_choice");
    if fields.boolean("parallel_tool_calls")? == Some(false) && !tools.is_empty() {
        let message = "`parallel_tool_calls`: false cannot be enforced; leave it out";
        return Err(Error::new(Reason::UnsupportedCombination, message).with_field("parallel_tool_calls"));
    }
    match choice.as_ref() {
        None => Ok(tools),
        Some(Value::String(word)) if word == "none" => Ok(Vec::new()),
        Some(Value::String(word)) if word == "auto" => Ok(tools),
        Some(_) => {
            let message =
                "`tool_choice` has to be \"auto\" or \"none\": a call cannot be forced; use `response_format` to force a form";
            Err(Error::invalid("tool_choice", message))
        }
    }
}

fn prompts(value: Option<Value>) -> Result<Input, Error> {
    let wanted = "a string, an array of strings, an array of token ids, or an array of arrays of token ids";
    let items = match value {
        None => return Err(Error::invalid("prompt", format!("`prompt` is missing; give {wanted}"))),
        Some(Value::String(text)) => return Ok(Input::Text(vec![text])),
        Some(Value::Array(items)) => items,
        Some(other) => return Err(wrong("prompt", &other, wanted)),
    };
    let many = |count: usize| {
        let message = format!("`prompt` holds {count} prompts; give at most {PROMPTS_MAX}");
        if count > PROMPTS_MAX { Err(Error::invalid("prompt", message)) } else { Ok(()) }
    };
    let mixed = |other: &Value| Error::invalid("prompt", format!("`prompt` holds {}; give {wanted}", kind(other)));
    match items.first() {
        None => Err(Error::invalid("prompt", format!("`prompt` is an empty array; give {wanted}"))),
        Some(Value::String(_)) => {
            many(items.len())?;
            let text = |item| match item {
                Value::String(text) => Ok(text),
                other => Err(mixed(&other)),
            };
            Ok(Input::Text(items.into_iter().map(text).collect::<Result<_, _>>()?))
        }
        Some(Value::Array(_)) => {
            many(items.len())?;
            let ids = |item: Value| match item {
                Value::Array(ids) => token_ids("prompt", &ids),
                other => Err(mixed(&other)),
            };
            Ok(Input::Tokens(items.into_iter().map(ids).collect::<Result<_, _>>()?))
        }
        Some(Value::Number(_)) => Ok(Input::Tokens(vec![token_ids("prompt", &items)?])),
        Some(other) => Err(mixed(other)),
    }
}

/// Reads token ids; whether the model has them is checked in `prepare`.
pub(crate) fn token_ids(field: &str, items: &[Value]) -> Result<Vec<TokenId>, Error> {
    items.iter().map(|item| integer(field, item).and_then(|id| params::token_id(field, id))).collect()
}

/// The member that constrains the output, and what it says.
fn grammar(fields: &mut Fields) -> Result<Option<(&'static str, Grammar)>, Error> {
    let mut found: Vec<(&'static str, Grammar)> = Vec::new();
    if let Some(format) = fields.object("response_format")? {
        found.extend(response_format(format)?.map(|grammar| ("response_format", grammar)));
    }
    match fields.take("guided_json") {
        None => {}
        Some(Value::String(text)) => {
            let schema: Value = serde_json::from_str(&text).map_err(|error| {
                Error::invalid("guided_json", format!("`guided_json` is a string that holds no JSON: {error}"))
            })?;
            found.push(("guided_json", json_schema("guided_json", &schema)?));
        }
        Some(schema) => found.push(("guided_json", json_schema("guided_json", &schema)?)),
    }
    if let Some(regex) = fields.string("guided_regex")? {
        found.push(("guided_regex", Grammar::Regex(regex)));
    }
    if let Some(choices) = fields.array("guided_choice")? {
        found.push(("guided_choice", alternatives(&choices)?));
    }
    if let Some(text) = fields.string("guided_grammar")? {
        found.push(("guided_grammar", Grammar::Lark(text)));
    }
    if let [(first, _), (second, _), ..] = found.as_slice() {
        let message = format!("`{first}` and `{second}` both constrain the output; give one of them");
        return Err(Error::new(Reason::UnsupportedCombination, message).with_field(*second));
    }
    Ok(found.pop())
}

fn response_format(mut format: Fields) -> Result<Option<Grammar>, Error> {
    let kind = format.string("type")?;
    let grammar = match kind.as_deref() {
        Some("text") => None,
        Some("json_object") => Some(Grammar::JsonObject),
        Some("json_schema") => {
            let missing =
                || Error::invalid("response_format.json_schema", "`response_format.json_schema` is missing; give {name, schema}");
            let mut member = format.object("json_schema")?.ok_or_else(missing)?;
            let field = "response_format.json_schema.schema";
            let schema =
                member.take("schema").ok_or_else(|| Error::invalid(field, format!("`{field}` is missing; give a schema")))?;
            // The schema is always kept to; `strict` can only ask for that.
            member.ignore(&["name", "description", "strict"]);
            member.finish()?;
            Some(json_schema(field, &schema)?)
        }
        other => {
            let found = other.map_or_else(|| "is missing".to_owned(), |word| format!("= {} is unknown", params::quoted(word)));
            let message = format!("`response_format.type` {found}; give \"text\", \"json_object\" or \"json_schema\"");
            return Err(Error::invalid("response_format.type", message));
        }
    };
    format.finish()?;
    Ok(grammar)
}

fn json_schema(field: &str, schema: &Value) -> Result<Grammar, Error> {
    if schema.is_object() {
        Ok(Grammar::JsonSchema(schema.to_string()))
    } else {
        Err(wrong(field, schema, "a JSON schema object"))
    }
}

fn alternatives(choices: &[Value]) -> Result<Grammar, Error> {
    let field = "guided_choice";
    if choices.is_empty() {
        return Err(Error::invalid(field, "`guided_choice` is empty; give at least one string"));
    }
    let escaped = |choice: &Value| choice.as_str().map(escape).ok_or_else(|| wrong(field, choice, "strings"));
    let parts = choices.iter().map(escaped).collect::<Result<Vec<_>, _>>()?;
    Ok(Grammar::Regex(format!("({})", parts.join("|"))))
}

fn escape(text: &str) -> String {
    const META: &str = r"\.+*?()|[]{}^$#&-~";
    text.chars().fold(String::with_capacity(text.len()), |mut out, letter| {
        if META.contains(letter) {
            out.push('\\');
        }
        out.push(letter);
        out
    })
}

fn extension(fields: &mut Fields) -> Result<Extension, Error> {
    let Some(mut member) = fields.object("kvasir")? else { return Ok(Extension::default()) };
    let mut extension = Extension {
        report: member.boolean("report")?.unwrap_or(false),
        contract: member.string("contract")?.map(|word| params::contract("kvasir.contract", &word)).transpose()?,
        priority: member.integer("priority")?,
        deadline_ms: member.integer("deadline_ms")?,
        ..Extension::default()
    };
    if let Some(mut cache) = member.object("cache")? {
        let mode = cache.string("mode")?;
        extension.cache_mode = mode.map(|word| params::cache_mode("kvasir.cache.mode", &word)).transpose()?;
        extension.cache_ttl_s = cache.integer("ttl_s")?;
        extension.cache_pin = cache.boolean("pin")?.unwrap_or(false);
        cache.finish()?;
    }
    if let Some(mut speculation) = member.object("speculation")? {
        let mode = speculation.string("mode")?;
        let field = "kvasir.speculation.mode";
        extension.speculation_mode = mode.map(|word| params::speculation_mode(field, &word)).transpose()?;
        extension.max_draft_tokens = speculation.integer("max_draft_tokens")?;
        speculation.finish()?;
    }
    member.finish()?;
    Ok(extension)
}
