//! Protobuf requests → [`Ask`].

use crate::ask::{Ask, Conversation, Input};
use crate::openai::{Fields, read_messages, template, tools};
use crate::params::{Extension, Knobs};
use kvasir_core::{Error, Grammar};
use kvasir_proto::convert::{cache_mode_from_wire, contract_from_wire, speculation_mode_from_wire};
use kvasir_proto::inference as wire;
use kvasir_proto::inference::generate_request::Prompt;
use kvasir_proto::inference::response_format::Kind;
use serde_json::{Map, Value, json};

/// Reads a `Generate` request.
pub(crate) fn generate(request: wire::GenerateRequest) -> Result<Ask, Error> {
    let input = match request.prompt {
        None => return Err(Error::invalid("prompt", "`prompt` is missing; set `text` or `tokens`")),
        Some(Prompt::Text(text)) => Input::Text(vec![text]),
        Some(Prompt::Tokens(tokens)) => Input::Tokens(vec![tokens.ids]),
    };
    let mut knobs = knobs(request.parameters.unwrap_or_default(), request.kvasir, request.cache_salt)?;
    knobs.echo = request.echo;
    Ok(Ask { model: present(request.model), input, knobs })
}

/// Reads a `Chat` request.
pub(crate) fn chat(request: wire::ChatRequest) -> Result<Ask, Error> {
    let knobs = knobs(request.parameters.clone().unwrap_or_default(), request.kvasir, request.cache_salt.clone())?;
    let model = present(request.model.clone());
    Ok(Ask { model, input: Input::Chat(conversation(request)?), knobs })
}

/// Reads what the template needs. It goes through the same checks as JSON, in the same shape.
pub(crate) fn conversation(request: wire::ChatRequest) -> Result<Conversation, Error> {
    let messages: Vec<Value> = request.messages.into_iter().map(message).collect();
    let messages = read_messages(Some(Value::Array(messages)))?;
    let mut members = Map::new();
    let tool = |(index, text): (usize, &String)| parse(&format!("tools_json[{index}]"), text);
    let listed = request.tools_json.iter().enumerate().map(tool).collect::<Result<Vec<_>, _>>()?;
    members.insert("tools".to_owned(), Value::Array(listed));
    members.insert("add_generation_prompt".to_owned(), json!(request.add_generation_prompt.unwrap_or(true)));
    members.insert("continue_final_message".to_owned(), json!(request.continue_final_message));
    if !request.chat_template_kwargs_json.is_empty() {
        let variables = parse("chat_template_kwargs_json", &request.chat_template_kwargs_json)?;
        members.insert("chat_template_kwargs".to_owned(), variables);
    }
    let mut fields = Fields::new("", Value::Object(members))?;
    let tools = tools(&mut fields)?;
    Ok(Conversation { messages, tools, ..template(&mut fields)? })
}

fn parse(field: &str, text: &str) -> Result<Value, Error> {
    serde_json::from_str(text).map_err(|error| Error::invalid(field, format!("`{field}` is not valid JSON: {error}")))
}

fn message(message: wire::Message) -> Value {
    let mut members = Map::new();
    members.insert("role".to_owned(), Value::from(message.role));
    members.insert("content".to_owned(), Value::from(message.content));
    if !message.name.is_empty() {
        members.insert("name".to_owned(), Value::from(message.name));
    }
    if !message.tool_call_id.is_empty() {
        members.insert("tool_call_id".to_owned(), Value::from(message.tool_call_id));
    }
    if !message.tool_calls.is_empty() {
        let call = |call: wire::ToolCall| json!({ "id": call.id, "type": "function", "function": { "name": call.name, "arguments": call.arguments_json } });
        members.insert("tool_calls".to_owned(), message.tool_calls.into_iter().map(call).collect());
    }
    Value::Object(members)
}

fn present(text: String) -> Option<String> {
    Some(text).filter(|text| !text.is_empty())
}

fn knobs(wire: wire::Parameters, extensions: Option<wire::Extensions>, cache_salt: String) -> Result<Knobs, Error> {
    Ok(Knobs {
        temperature: wire.temperature.map(widened),
        top_p: wire.top_p.map(widened),
        top_k: wire.top_k.map(i64::from),
        min_p: wire.min_p.map(widened),
        n: wire.n.map(i64::from),
        max_tokens: wire.max_tokens.map(i64::from),
        max_tokens_name: None,
        min_tokens: Some(i64::from(wire.min_tokens)),
        seed: wire.seed.map(|seed| seed as u64),
        presence_penalty: wire.presence_penalty.map(widened),
        frequency_penalty: wire.frequency_penalty.map(widened),
        repetition_penalty: wire.repetition_penalty.map(widened),
        logit_bias: wire.logit_bias.into_iter().map(|(id, bias)| (i64::from(id), widened(bias))).collect(),
        logprobs: wire.top_logprobs.map(i64::from),
        logprobs_name: Some("top_logprobs"),
        prompt_logprobs: wire.prompt_logprobs.map(i64::from),
        echo: false,
        stop: wire.stop,
        stop_token_ids: wire.stop_token_ids.into_iter().map(i64::from).collect(),
        ignore_eos: wire.ignore_eos,
        grammar: wire.response_format.map(grammar).transpose()?,
        grammar_name: None,
        cache_salt: present(cache_salt),
        extension: extensions.map_or_else(|| Ok(Extension::default()), extension)?,
    })
}

/// The decimal that a client wrote: 0.3 as a float is 0.3, not 0.30000001192…, in range checks and messages.
fn widened(value: f32) -> f64 {
    value.to_string().parse().unwrap_or(f64::from(value))
}

fn grammar(format: wire::ResponseFormat) -> Result<Grammar, Error> {
    match format.kind {
        Some(Kind::JsonObject(true)) => Ok(Grammar::JsonObject),
        Some(Kind::JsonObject(false)) => Err(Error::invalid(
            "response_format.json_object",
            "`response_format.json_object` has to be true; leave `response_format` out",
        )),
        Some(Kind::JsonSchema(schema)) => {
            let field = "response_format.json_schema";
            if parse(field, &schema)?.is_object() {
                Ok(Grammar::JsonSchema(schema))
            } else {
                Err(Error::invalid(field, format!("`{field}` is not a JSON object; give a JSON schema object")))
            }
        }
        Some(Kind::Regex(regex)) => Ok(Grammar::Regex(regex)),
        Some(Kind::Grammar(text)) => Ok(Grammar::Lark(text)),
        None => Err(Error::invalid("response_format", "`response_format` has no kind; set one, or leave it out")),
    }
}

fn extension(wire: wire::Extensions) -> Result<Extension, Error> {
    let cache = wire.cache.unwrap_or_default();
    let speculation = wire.speculation.unwrap_or_default();
    // Unspecified is 0 in each enumeration.
    let stated = |value: i32| (value != 0).then_some(value);
    let number = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
    Ok(Extension {
        report: wire.report,
        cache_mode: word(stated(cache.mode), |value| cache_mode_from_wire("kvasir.cache.mode", value))?,
        cache_ttl_s: cache.ttl_s.map(number),
        cache_pin: cache.pin,
        speculation_mode: word(stated(speculation.mode), |value| speculation_mode_from_wire("kvasir.speculation.mode", value))?,
        max_draft_tokens: speculation.max_draft_tokens.map(i64::from),
        contract: word(stated(wire.contract), |value| contract_from_wire("kvasir.contract", value))?,
        priority: Some(i64::from(wire.priority)),
        deadline_ms: wire.deadline_ms.map(number),
    })
}

fn word<T>(
    value: Option<i32>,
    read: impl FnOnce(i32) -> Result<T, kvasir_proto::convert::Malformed>,
) -> Result<Option<T>, Error> {
    value.map(read).transpose().map_err(kvasir_proto::convert::Malformed::into_invalid)
}
