//! `/tokenize` and `/detokenize`, in vLLM's shape.

use super::ask::{template, token_ids, tools};
use super::fields::Fields;
use super::messages;
use crate::ask::{Conversation, Input};
use crate::auth::Tenant;
use crate::door::Door;
use crate::prepare::find_model;
use kvasir_core::{Error, TokenId};
use kvasir_model::Text;
use serde_json::{Value, json};

/// Text or a conversation → token ids, exactly as a completion or a chat would use them.
pub(crate) async fn tokenize(door: &Door, tenant: &Tenant, body: Value) -> Result<(String, Value), Error> {
    let mut fields = Fields::new("", body)?;
    let catalog = door.serve().catalog();
    let model = find_model(&catalog, fields.string("model")?.as_deref())?;
    let special = fields.boolean("add_special_tokens")?.unwrap_or(true);
    let with_texts = fields.boolean("return_token_strs")?.unwrap_or(false);
    let input = match (fields.take("messages"), fields.string("prompt")?) {
        (Some(messages), None) => {
            let messages = messages::read(Some(messages))?;
            let tools = tools(&mut fields)?;
            Input::Chat(Conversation { messages, tools, ..template(&mut fields)? })
        }
        (None, Some(prompt)) => Input::Text(vec![prompt]),
        (None, None) => return Err(Error::invalid("prompt", "`prompt` is missing; give a text, or `messages`")),
        (Some(_), Some(_)) => return Err(Error::invalid("prompt", "`prompt` and `messages` were both given; give one of them")),
    };
    fields.finish()?;
    // What a template puts in front is part of the conversation.
    let plain = matches!(input, Input::Text(_));
    let mut tokens = door.preparer().encode(&model.text, input, tenant.domain(None)).await?.pop().unwrap_or_default();
    if !special && plain {
        without_start(&model.text, &mut tokens);
    }
    let mut reply = json!({ "count": tokens.len(), "max_model_len": model.context, "tokens": tokens });
    if with_texts && let Some(members) = reply.as_object_mut() {
        let spelled = |id: &u32| String::from_utf8_lossy(model.text.tokenizer().token_bytes(*id)).into_owned();
        members.insert("token_strs".to_owned(), tokens.iter().map(spelled).collect());
    }
    Ok((model.name.clone(), reply))
}

/// Takes the start token off that the model's settings put in front.
pub(crate) fn without_start(text: &Text, tokens: &mut Vec<TokenId>) {
    let settings = text.settings();
    if settings.add_bos && settings.bos.is_some() && tokens.first() == settings.bos.as_ref() {
        tokens.remove(0);
    }
}

/// Token ids → text, with control tokens spelled out.
pub(crate) fn detokenize(door: &Door, body: Value) -> Result<(String, Value), Error> {
    let mut fields = Fields::new("", body)?;
    let catalog = door.serve().catalog();
    let model = find_model(&catalog, fields.string("model")?.as_deref())?;
    let missing = || Error::invalid("tokens", "`tokens` is missing; give an array of token ids");
    let items = fields.array("tokens")?.ok_or_else(missing)?;
    fields.finish()?;
    let ids = token_ids("tokens", &items)?;
    if let Some(id) = ids.iter().find(|id| **id >= model.vocab) {
        let message = format!("`tokens` names the token {id}; the model has the tokens 0 to {}", model.vocab.saturating_sub(1));
        return Err(Error::invalid("tokens", message));
    }
    Ok((model.name.clone(), json!({ "prompt": model.text.tokenizer().decode(&ids, true) })))
}
