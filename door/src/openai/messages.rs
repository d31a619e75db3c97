//! Chat messages: which shapes exist, checked before a template sees them.
//!
//! `developer` is OpenAI's later word for `system` and is rendered as `system`, the word that templates know.

use super::fields::{Fields, kind, wrong};
use crate::params::quoted;
use kvasir_core::Error;
use serde_json::{Map, Value};

const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];

/// Members of replies that clients send back as they got them; they say nothing to a template.
const ECHOED: [&str; 4] = ["refusal", "annotations", "audio", "function_call"];

/// Reads and checks `messages`.
pub(crate) fn read(value: Option<Value>) -> Result<Vec<Value>, Error> {
    let items = match value {
        None => return Err(Error::invalid("messages", "`messages` is missing; give an array of messages")),
        Some(Value::Array(items)) => items,
        Some(other) => return Err(wrong("messages", &other, "an array of messages")),
    };
    if items.is_empty() {
        return Err(Error::invalid("messages", "`messages` is empty; give at least one message"));
    }
    items.into_iter().enumerate().map(|(index, item)| message(&format!("messages[{index}]"), item)).collect()
}

fn message(path: &str, value: Value) -> Result<Value, Error> {
    let mut fields = Fields::new(path, value)?;
    let role = fields.string("role")?.unwrap_or_default();
    if !ROLES.contains(&role.as_str()) {
        let field = format!("{path}.role");
        let known = ROLES.map(|role| format!("\"{role}\"")).join(", ");
        let message = format!("`{field}` = {} is unknown; use one of {known}", quoted(&role));
        return Err(Error::invalid(field, message));
    }
    let mut out = Map::new();
    out.insert("role".to_owned(), Value::from(if role == "developer" { "system" } else { role.as_str() }));
    let content = fields.take("content");
    let calls = fields.array("tool_calls")?.unwrap_or_default();
    if !calls.is_empty() && role != "assistant" {
        let field = format!("{path}.tool_calls");
        return Err(Error::invalid(&field, format!("`{field}` belongs to the assistant's messages only; remove it")));
    }
    let content = match content {
        // A call without words; an empty text is what templates can print.
        None if !calls.is_empty() => Value::from(""),
        None => return Err(Error::invalid(format!("{path}.content"), format!("`{path}.content` is missing; give a string"))),
        Some(content) => self::content(path, content)?,
    };
    out.insert("content".to_owned(), content);
    if let Some(name) = fields.string("name")? {
        out.insert("name".to_owned(), Value::from(name));
    }
    if let Some(id) = fields.string("tool_call_id")? {
        out.insert("tool_call_id".to_owned(), Value::from(id));
    }
    if !calls.is_empty() {
        let read = |(index, call)| tool_call(&format!("{path}.tool_calls[{index}]"), call);
        out.insert("tool_calls".to_owned(), calls.into_iter().enumerate().map(read).collect::<Result<_, _>>()?);
    }
    for member in ECHOED {
        if let Some(value) = fields.take(member)
            && value.as_array().is_none_or(|items| !items.is_empty())
        {
            let field = format!("{path}.{member}");
            return Err(Error::invalid(&field, format!("`{field}` is {}, which is not supported; remove it", kind(&value))));
        }
    }
    fields.finish()?;
    Ok(Value::Object(out))
}

fn content(path: &str, content: Value) -> Result<Value, Error> {
    let field = format!("{path}.content");
    let parts = match content {
        Value::String(text) => return Ok(Value::String(text)),
        Value::Array(parts) => parts,
        other => return Err(wrong(&field, &other, "a string or an array of text parts")),
    };
    if parts.is_empty() {
        return Err(Error::invalid(&field, format!("`{field}` is an empty array; give a string or text parts")));
    }
    let part = |(index, value)| {
        let path = format!("{field}[{index}]");
        let mut fields = Fields::new(&path, value)?;
        let kind = fields.string("type")?.unwrap_or_default();
        if kind != "text" {
            let shown = crate::params::quoted(&kind);
            let message = format!("`{path}.type` is {shown}; only \"text\" parts are served");
            return Err(Error::invalid(format!("{path}.type"), message));
        }
        let missing = || Error::invalid(format!("{path}.text"), format!("`{path}.text` is missing; give a string"));
        let text = fields.string("text")?.ok_or_else(missing)?;
        fields.finish()?;
        Ok(serde_json::json!({ "type": "text", "text": text }))
    };
    Ok(Value::Array(parts.into_iter().enumerate().map(part).collect::<Result<_, Error>>()?))
}

/// Checks a call and gives the template its arguments as an object, which is what templates print.
fn tool_call(path: &str, call: Value) -> Result<Value, Error> {
    let mut fields = Fields::new(path, call)?;
    let id = fields.string("id")?.unwrap_or_default();
    let kind = fields.string("type")?.unwrap_or_else(|| "function".to_owned());
    if kind != "function" {
        return Err(Error::invalid(format!("{path}.type"), format!("`{path}.type` has to be \"function\"")));
    }
    let missing = |member: &str| Error::invalid(format!("{path}.{member}"), format!("`{path}.{member}` is missing; give it"));
    let mut function = fields.object("function")?.ok_or_else(|| missing("function"))?;
    let name = function.string("name")?.ok_or_else(|| missing("function.name"))?;
    let arguments = match function.take("arguments") {
        Some(Value::String(text)) => {
            serde_json::from_str::<Value>(&text).ok().filter(Value::is_object).unwrap_or(Value::String(text))
        }
        Some(other) => other,
        None => Value::Object(Map::new()),
    };
    function.finish()?;
    fields.ignore(&["index"]);
    fields.finish()?;
    Ok(serde_json::json!({ "id": id, "type": "function", "function": { "name": name, "arguments": arguments } }))
}
