//! A request as a door understood it, before it meets a model.

use crate::params::Knobs;
use kvasir_core::{Error, TokenId};
use serde_json::{Map, Value};

/// Variables that every rendering sets itself.
const TEMPLATE_WORDS: [&str; 5] = ["messages", "tools", "add_generation_prompt", "bos_token", "eos_token"];

/// What a client wants.
#[derive(Debug)]
pub(crate) struct Ask {
    /// Name of the model as the client wrote it; `None` when it wrote none.
    pub(crate) model: Option<String>,
    pub(crate) input: Input,
    pub(crate) knobs: Knobs,
}

/// What to condition on.
#[derive(Debug)]
pub(crate) enum Input {
    /// A conversation for the model's template.
    Chat(Conversation),
    /// Raw prompts.
    Text(Vec<String>),
    /// Prompts as tokens.
    Tokens(Vec<Vec<TokenId>>),
}

/// A conversation and how the template is to render it.
#[derive(Debug, Default)]
pub(crate) struct Conversation {
    /// Checked message objects.
    pub(crate) messages: Vec<Value>,
    /// Tool descriptions; none is not the same as an empty list to a template.
    pub(crate) tools: Vec<Value>,
    /// Whether the prompt ends where the assistant's answer starts.
    pub(crate) add_generation_prompt: bool,
    /// Further template variables.
    pub(crate) variables: Option<Map<String, Value>>,
}

// === impl Input ===

impl Input {
    /// Number of prompts.
    pub(crate) fn count(&self) -> usize {
        match self {
            Self::Chat(_) => 1,
            Self::Text(prompts) => prompts.len(),
            Self::Tokens(prompts) => prompts.len(),
        }
    }

    /// Bytes of text that have to be tokenised, roughly.
    pub(crate) fn text_bytes(&self) -> usize {
        match self {
            Self::Chat(chat) => {
                let variables = chat.variables.iter().flatten().map(|(name, value)| name.len() + json_bytes(value));
                let texts = chat.messages.iter().chain(&chat.tools).map(json_bytes);
                texts.chain(variables).sum()
            }
            Self::Text(prompts) => prompts.iter().map(String::len).sum(),
            Self::Tokens(_) => 0,
        }
    }

    /// The member that holds it, for messages.
    pub(crate) fn field(&self) -> &'static str {
        match self {
            Self::Chat(_) => "messages",
            Self::Text(_) | Self::Tokens(_) => "prompt",
        }
    }
}

fn json_bytes(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len(),
        Value::Array(items) => items.iter().map(json_bytes).sum(),
        Value::Object(members) => members.iter().map(|(name, value)| name.len() + json_bytes(value)).sum(),
        Value::Null | Value::Bool(_) | Value::Number(_) => 1,
    }
}

// === impl Conversation ===

impl Conversation {
    /// An empty conversation with checked template variables.
    pub(crate) fn with_variables(add_generation_prompt: bool, variables: Option<Map<String, Value>>) -> Result<Self, Error> {
        let reserved = |variables: &Map<String, Value>| TEMPLATE_WORDS.into_iter().find(|word| variables.contains_key(*word));
        if let Some(word) = variables.as_ref().and_then(reserved) {
            let field = format!("chat_template_kwargs.{word}");
            return Err(Error::invalid(&field, format!("`{field}` is set by the server; remove it")));
        }
        Ok(Self { add_generation_prompt, variables, ..Self::default() })
    }
}
