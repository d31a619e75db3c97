//! The model's chat template, rendered as the reference renders it.
//!
//! Owns the template environment: whitespace rules, Python's `json.dumps`, `raise_exception`, `strftime_now`, Python string methods. Refuses to
//! know tokens: it gives text in which guarded content still carries its marks. Called by [`crate::Text`]. Rendering costs a few microseconds
//! per message; compiling happens once.
//!
//! Invariants
//! 1. A template is data from a file: it runs on a fuel budget and a recursion limit, and its output is bounded.
//! 2. What a template refuses by `raise_exception` reaches the client as its own message.
//!
//! Caveat: `strftime_now` makes the prompt depend on the day, as the template asks; prefixes computed before midnight do not match after it.

mod python_json;
#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::fmt::Write as _;

use kvasir_core::Reason;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Value};
use minijinja::{AutoEscape, Environment, Error, ErrorKind};
use serde_json::Value as Json;

/// Longest template source in bytes; real ones have up to 20 KB.
pub const MAX_TEMPLATE_BYTES: usize = 1 << 20;
/// Instructions one rendering may take; a message takes about 50.
const FUEL: u64 = 20_000_000;
/// Nested blocks, macros and loops.
const RECURSION_LIMIT: usize = 128;
/// Deepest nesting of a client's JSON.
const MAX_JSON_DEPTH: usize = 64;
/// Longest rendered prompt in bytes.
const MAX_RENDERED_BYTES: usize = crate::tokenizer::MAX_TEXT_BYTES;
const NAME: &str = "chat_template";
/// The members of a request that hold what enters a template beside messages.
const TOOLS: &str = "tools";
const VARIABLES: &str = "chat_template_kwargs";
const PROBE: &str = "kvasirprobe";

/// A conversation to render.
#[derive(Clone, Copy, Debug)]
pub struct ChatInput<'a> {
    /// Message objects in the OpenAI shape: `role`, `content` (text, or an array of text parts), `name`, `tool_calls`, ….
    pub messages: &'a [Json],
    /// Tool descriptions, passed through.
    pub tools: Option<&'a Json>,
    /// Ends the prompt where the assistant's answer starts.
    pub add_generation_prompt: bool,
    /// Further template variables, such as `enable_thinking`.
    pub extra: Option<&'a serde_json::Map<String, Json>>,
}

/// Why a conversation was not rendered.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// The template does not compile.
    #[error("the chat template does not compile: {0}")]
    Compile(String),
    /// The template is longer than [`MAX_TEMPLATE_BYTES`].
    #[error("the chat template has {bytes} bytes, at most {MAX_TEMPLATE_BYTES} are compiled")]
    TooLong {
        /// Its length in bytes.
        bytes: usize,
    },
    /// The template called `raise_exception`.
    #[error("the model's chat template refuses this conversation: {0}")]
    Raised(String),
    /// The template failed on this input.
    #[error("the model's chat template fails on this conversation: {0}")]
    Failed(String),
    /// A message has no shape that templates know.
    #[error("messages[{index}]: {problem}")]
    Message {
        /// Which message.
        index: usize,
        /// What is wrong with it.
        problem: String,
    },
    /// Tools or variables have no shape that templates know.
    #[error("{field} {problem}")]
    Variable {
        /// Which.
        field: &'static str,
        /// What is wrong with it.
        problem: String,
    },
    /// Fuel or output ran out.
    #[error("the rendered conversation is over the limit: {0}")]
    Budget(String),
}

/// A compiled chat template.
pub struct ChatTemplate {
    env: Environment<'static>,
    takes_parts: bool,
}

/// Changes client text before it enters the template.
pub(crate) trait Guarding {
    /// The text as the template may see it.
    fn guard<'a>(&self, text: &'a str) -> Cow<'a, str>;
}

/// Special tokens by the names templates use.
#[derive(Clone, Debug, Default)]
pub(crate) struct SpecialTexts {
    pub(crate) bos: String,
    pub(crate) eos: String,
}

/// Leaves everything as it is.
struct Unguarded;

/// Marks errors that the template itself raised.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct RaisedByTemplate(String);

// === impl TemplateError ===

impl TemplateError {
    /// The public reason.
    pub const fn reason(&self) -> Reason {
        match self {
            Self::Compile(_) | Self::TooLong { .. } => Reason::ModelFile,
            Self::Raised(_) | Self::Failed(_) => Reason::TemplateRefused,
            Self::Message { .. } | Self::Variable { .. } => Reason::InvalidArgument,
            Self::Budget(_) => Reason::PayloadTooLarge,
        }
    }

    /// The member of the request at fault, where it is not the messages.
    pub const fn field(&self) -> Option<&'static str> {
        match self {
            Self::Variable { field, .. } => Some(field),
            Self::Compile(_)
            | Self::TooLong { .. }
            | Self::Raised(_)
            | Self::Failed(_)
            | Self::Message { .. }
            | Self::Budget(_) => None,
        }
    }
}

// === impl ChatTemplate ===

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChatTemplate").field("takes_parts", &self.takes_parts).finish_non_exhaustive()
    }
}

impl ChatTemplate {
    /// Compiles a template.
    ///
    /// # Errors
    /// [`TemplateError::Compile`] with the line, [`TemplateError::TooLong`].
    pub fn new(source: &str) -> Result<Self, TemplateError> {
        if source.len() > MAX_TEMPLATE_BYTES {
            return Err(TemplateError::TooLong { bytes: source.len() });
        }
        let mut env = environment().map_err(|error| TemplateError::Compile(describe(&error)))?;
        env.add_template_owned(NAME, source.to_owned()).map_err(|error| TemplateError::Compile(describe(&error)))?;
        let mut template = Self { env, takes_parts: false };
        template.takes_parts = template.probe_parts();
        Ok(template)
    }

    /// Whether the template reads an array of content parts itself; otherwise text parts are joined with line breaks before it.
    pub const fn takes_parts(&self) -> bool {
        self.takes_parts
    }

    pub(crate) fn render(
        &self,
        input: &ChatInput<'_>,
        specials: &SpecialTexts,
        guard: &dyn Guarding,
    ) -> Result<String, TemplateError> {
        let mut messages = Vec::with_capacity(input.messages.len());
        for (index, message) in input.messages.iter().enumerate() {
            let message = self.message(index, message)?;
            messages.push(value(&message, guard, 0).map_err(|problem| TemplateError::Message { index, problem })?);
        }
        let convert = |field, json: &Json| value(json, guard, 0).map_err(|problem| TemplateError::Variable { field, problem });
        let mut context = Vec::new();
        for (name, extra) in input.extra.into_iter().flatten() {
            context.push((name.clone(), convert(VARIABLES, extra)?));
        }
        context.push(("messages".to_owned(), Value::from(messages)));
        context.push(("add_generation_prompt".to_owned(), Value::from(input.add_generation_prompt)));
        context.push(("bos_token".to_owned(), Value::from(specials.bos.clone())));
        context.push(("eos_token".to_owned(), Value::from(specials.eos.clone())));
        context.push(("tools".to_owned(), input.tools.map_or(Ok(Value::from(())), |tools| convert(TOOLS, tools))?));
        let template = self.env.get_template(NAME).map_err(|error| failure(&error))?;
        let text = template.render(Value::from_pairs(context)).map_err(|error| failure(&error))?;
        if text.len() > MAX_RENDERED_BYTES {
            return Err(TemplateError::Budget(format!("{} bytes, at most {MAX_RENDERED_BYTES}", text.len())));
        }
        Ok(text)
    }

    /// Checks content parts, and joins them for a template that expects text.
    fn message<'a>(&self, index: usize, message: &'a Json) -> Result<Cow<'a, Json>, TemplateError> {
        let refused = |problem: &str| TemplateError::Message { index, problem: problem.to_owned() };
        let Json::Object(object) = message else { return Err(refused("is not an object")) };
        let Some(Json::Array(parts)) = object.get("content") else { return Ok(Cow::Borrowed(message)) };
        let mut texts = Vec::with_capacity(parts.len());
        for (part, content) in parts.iter().enumerate() {
            let kind = content.get("type").and_then(Json::as_str);
            match (kind, content.get("text").and_then(Json::as_str)) {
                (Some("text"), Some(text)) => texts.push(text),
                (Some("text"), None) => return Err(refused(&format!("content[{part}].text is missing or not a string"))),
                (Some(other), _) => return Err(refused(&format!("content[{part}] has type {other:?}, this model takes text"))),
                (None, _) => return Err(refused(&format!("content[{part}].type is missing"))),
            }
        }
        if self.takes_parts {
            return Ok(Cow::Borrowed(message));
        }
        let mut object = object.clone();
        object.insert("content".to_owned(), Json::String(texts.join("\n")));
        Ok(Cow::Owned(Json::Object(object)))
    }

    fn probe_parts(&self) -> bool {
        let message = serde_json::json!({"role": "user", "content": [{"type": "text", "text": PROBE}]});
        let mut probe = Self { env: self.env.clone(), takes_parts: true };
        probe.takes_parts = true;
        let input = ChatInput { messages: &[message], tools: None, add_generation_prompt: false, extra: None };
        let rendered = probe.render(&input, &SpecialTexts::default(), &Unguarded);
        // A template for plain text prints the array itself.
        rendered.is_ok_and(|text| text.contains(PROBE) && !text.contains("'type'") && !text.contains("\"type\""))
    }
}

fn environment() -> Result<Environment<'static>, Error> {
    let mut env = Environment::new();
    env.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    env.set_fuel(Some(FUEL));
    env.set_recursion_limit(RECURSION_LIMIT);
    env.add_filter("tojson", tojson);
    env.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(RaisedByTemplate(message)))
    });
    env.add_function("strftime_now", |format: String| -> Result<String, Error> {
        let mut text = String::new();
        // An unknown directive is an error of the formatter, not a panic, as long as nobody unwraps it.
        write!(text, "{}", chrono::Local::now().format(&format))
            .map_err(|_| Error::new(ErrorKind::InvalidOperation, format!("strftime_now: bad format {format:?}")))?;
        Ok(text)
    });
    Ok(env)
}

#[expect(clippy::needless_pass_by_value, reason = "the filter interface hands keyword arguments over by value")]
fn tojson(value: &Value, options: Kwargs) -> Result<Value, Error> {
    let separators: Option<Vec<String>> = options.get("separators")?;
    let separators = match separators.as_deref() {
        None => None,
        Some([item, key]) => Some((item.clone(), key.clone())),
        Some(_) => return Err(Error::new(ErrorKind::InvalidOperation, "tojson: separators are two strings")),
    };
    let style = python_json::Style {
        ensure_ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        indent: options.get::<Option<usize>>("indent")?,
        separators,
        sort_keys: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    options.assert_all_used()?;
    Ok(Value::from(python_json::dumps(value, &style)?))
}

// === conversions ===

impl Guarding for Unguarded {
    fn guard<'a>(&self, text: &'a str) -> Cow<'a, str> {
        Cow::Borrowed(text)
    }
}

/// Role names are part of the template's own vocabulary: a template may build a marker out of them.
const ROLES: [&str; 7] = ["system", "user", "assistant", "tool", "developer", "function", "ipython"];
/// Keys that templates look up by name; all other keys are the client's words.
const SCHEMA_KEYS: [&str; 20] = [
    "role",
    "content",
    "name",
    "type",
    "text",
    "function",
    "arguments",
    "tool_calls",
    "tool_call_id",
    "id",
    "parameters",
    "properties",
    "description",
    "required",
    "items",
    "enum",
    "title",
    "default",
    "reasoning_content",
    "strict",
];

/// Whether the template compares this value: roles, and the bare words of `type`.
fn is_own_word(key: &str, item: &Json) -> bool {
    let Some(text) = item.as_str() else { return false };
    match key {
        "role" => ROLES.contains(&text),
        "type" => text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_'),
        _ => false,
    }
}

fn value(json: &Json, guard: &dyn Guarding, depth: usize) -> Result<Value, String> {
    if depth > MAX_JSON_DEPTH {
        return Err(format!("is nested deeper than {MAX_JSON_DEPTH} levels"));
    }
    Ok(match json {
        Json::Null => Value::from(()),
        Json::Bool(flag) => Value::from(*flag),
        Json::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(signed), _) => Value::from(signed),
            (None, Some(unsigned)) => Value::from(unsigned),
            (None, None) => Value::from(number.as_f64().unwrap_or(f64::NAN)),
        },
        Json::String(text) => Value::from(guard.guard(text).as_ref()),
        Json::Array(items) => {
            let items: Result<Vec<Value>, String> = items.iter().map(|item| value(item, guard, depth + 1)).collect();
            Value::from(items?)
        }
        Json::Object(entries) => {
            let mut pairs = Vec::with_capacity(entries.len());
            for (key, item) in entries {
                let item =
                    if is_own_word(key, item) { value(item, &Unguarded, depth + 1)? } else { value(item, guard, depth + 1)? };
                let key = if SCHEMA_KEYS.contains(&key.as_str()) { key.clone() } else { guard.guard(key).into_owned() };
                pairs.push((key, item));
            }
            Value::from_pairs(pairs)
        }
    })
}

fn describe(error: &Error) -> String {
    let detail = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    error.line().map_or_else(|| detail.clone(), |line| format!("{detail} (line {line})"))
}

fn failure(error: &Error) -> TemplateError {
    if error.kind() == ErrorKind::OutOfFuel {
        return TemplateError::Budget("the template ran out of instructions".to_owned());
    }
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(cause) = source {
        if let Some(RaisedByTemplate(message)) = cause.downcast_ref() {
            return TemplateError::Raised(message.clone());
        }
        source = cause.source();
    }
    TemplateError::Failed(describe(error))
}
