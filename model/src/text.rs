//! From messages or text to token ids: template, guard, segments, start token.
//!
//! Owns the rule that content never becomes control. Refuses to know requests and tenants: the caller brings the cache partition. Called by
//! doors (from [`Artifacts`]) and by the worker (from its file). Costs: a rendering, a scan, and one encode per segment the cache lacks.
//!
//! Invariants
//! 1. A control token in the result comes from the template's own text, never from a message, a name, a tool or a part boundary.
//! 2. Cutting a prompt into segments never changes an id: cuts are at added tokens only, where the reference cuts as well.
//! 3. A prompt starts with at most one start token that we added, and none when the template brought its own.
//!
//! How content is guarded: before rendering, a mark (a Unicode noncharacter that the input does not use) is put into every spelling of a control
//! token in client text, and at the ends of a text that could complete one together with its neighbours. Marked text cannot match when
//! the rendered prompt is cut at control tokens; the marks then go, and what is left is encoded as plain text.
//! Role names, bare words under `type` and the keys of the message schema are the template's own vocabulary and stay unmarked.

mod cache;
mod guard;
#[cfg(test)]
mod tests;

use kvasir_core::{Digest, Reason, TokenId};

use crate::artifacts::{Artifacts, TextSettings};
use crate::file::sha256;
use crate::template::{ChatInput, ChatTemplate, SpecialTexts, TemplateError};
use crate::tokenizer::{MAX_TEXT_BYTES, Piece, Tokenizer, TokenizerError};
pub use cache::SegmentCache;
use guard::Guard;

/// A piece of a prompt.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Segment {
    /// Plain text: whatever it spells, it is encoded without control tokens.
    Text(String),
    /// An added token from the template, or the start token.
    Token(TokenId),
}

/// Why a prompt was not made.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// Tokenizer broken, or text too long.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// Template broken, or it refused.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// The model has no template.
    #[error("the model has no chat template: send a plain prompt to the completions route")]
    NoTemplate,
    /// A setting that does not fit the tokenizer.
    #[error("{key} is {id}, the model has {vocab} embedding rows")]
    SpecialId {
        /// Which setting.
        key: &'static str,
        /// The id.
        id: TokenId,
        /// The bound.
        vocab: usize,
    },
    /// The input uses all 32 noncharacters that could serve as mark.
    #[error("the messages contain every unicode noncharacter from U+FDD0 to U+FDEF; leave at least one out")]
    NoMark,
}

/// Tokenizer, template and their settings: everything a door needs to know about a model's text.
#[derive(Debug)]
pub struct Text {
    tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
    settings: TextSettings,
    specials: SpecialTexts,
    masked: Vec<TokenId>,
    tokenizer_digest: Digest,
    template_digest: Digest,
}

// === impl TextError ===

impl TextError {
    /// The public reason.
    pub const fn reason(&self) -> Reason {
        match self {
            Self::Tokenizer(error) => error.reason(),
            Self::Template(error) => error.reason(),
            Self::NoTemplate => Reason::UnsupportedCombination,
            Self::SpecialId { .. } => Reason::ModelFile,
            Self::NoMark => Reason::InvalidArgument,
        }
    }

    /// The member of the request at fault, where it is neither messages nor prompt.
    pub const fn field(&self) -> Option<&'static str> {
        match self {
            Self::Template(error) => error.field(),
            Self::Tokenizer(_) | Self::NoTemplate | Self::SpecialId { .. } | Self::NoMark => None,
        }
    }
}

// === impl Text ===

impl Text {
    /// Builds tokenizer and template. Takes about 0.3 s for a vocabulary of 150,000.
    ///
    /// # Errors
    /// A tokenizer or template that is broken or unsupported.
    pub fn from_artifacts(artifacts: &Artifacts) -> Result<Self, TextError> {
        let settings = artifacts.settings.clone();
        let vocab = settings.vocab as usize;
        let tokenizer = Tokenizer::from_json(&artifacts.tokenizer_json, vocab)?;
        let check = |key, id: TokenId| if (id as usize) < vocab { Ok(()) } else { Err(TextError::SpecialId { key, id, vocab }) };
        settings.bos.map_or(Ok(()), |id| check("bos", id))?;
        for id in &settings.stop_ids {
            check("stop id", *id)?;
        }
        let template = artifacts.chat_template.as_deref().map(ChatTemplate::new).transpose()?;
        let spelled = |id: Option<TokenId>| {
            id.map(|id| String::from_utf8_lossy(tokenizer.token_bytes(id)).into_owned()).unwrap_or_default()
        };
        let specials = SpecialTexts { bos: spelled(settings.bos), eos: spelled(settings.eos) };
        let masked = tokenizer.masked_ids();
        Ok(Self {
            template,
            specials,
            masked,
            settings,
            tokenizer_digest: sha256(&artifacts.tokenizer_json),
            template_digest: sha256(artifacts.chat_template.as_deref().unwrap_or_default().as_bytes()),
            tokenizer,
        })
    }

    /// The tokenizer.
    pub const fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The chat template, if the model has one.
    pub const fn chat_template(&self) -> Option<&ChatTemplate> {
        self.template.as_ref()
    }

    /// Ids and sizes that came with the model.
    pub const fn settings(&self) -> &TextSettings {
        &self.settings
    }

    /// Ids that end an answer, ascending.
    pub fn stop_ids(&self) -> &[TokenId] {
        &self.settings.stop_ids
    }

    /// Ids below the vocabulary size that stand for no token and must never be sampled, ascending.
    pub fn masked_ids(&self) -> &[TokenId] {
        &self.masked
    }

    /// SHA-256 of the canonical tokenizer.json.
    pub const fn tokenizer_digest(&self) -> Digest {
        self.tokenizer_digest
    }

    /// SHA-256 of the template's source; of nothing when there is none.
    pub const fn chat_template_digest(&self) -> Digest {
        self.template_digest
    }

    /// Renders a conversation into segments, with the start token as the model's settings and template ask.
    ///
    /// # Errors
    /// [`TextError::NoTemplate`], what the template refuses, or a length over the limit.
    pub fn render_chat(&self, input: &ChatInput<'_>) -> Result<Vec<Segment>, TextError> {
        let template = self.template.as_ref().ok_or(TextError::NoTemplate)?;
        let guard = Guard::for_input(self.tokenizer.added(), input).ok_or(TextError::NoMark)?;
        let rendered = template.render(input, &self.specials, &guard)?;
        let mut segments = Vec::new();
        for piece in self.tokenizer.added().split(&rendered) {
            match piece {
                Piece::Token(id) => segments.push(Segment::Token(id)),
                Piece::Text(text) => {
                    let text = guard.unmark(text);
                    if !text.is_empty() {
                        segments.push(Segment::Text(text));
                    }
                }
            }
        }
        self.start(&mut segments);
        Ok(segments)
    }

    /// Cuts a raw prompt into segments; with `allow_special` the spellings of control tokens are control tokens.
    ///
    /// # Errors
    /// [`TokenizerError::TooLong`].
    pub fn prompt(&self, text: &str, allow_special: bool) -> Result<Vec<Segment>, TextError> {
        if text.len() > MAX_TEXT_BYTES {
            return Err(TokenizerError::TooLong { bytes: text.len() }.into());
        }
        let mut segments = Vec::new();
        if allow_special {
            segments.extend(self.tokenizer.added().split(text).into_iter().map(|piece| match piece {
                Piece::Token(id) => Segment::Token(id),
                Piece::Text(text) => Segment::Text(text.to_owned()),
            }));
        } else if !text.is_empty() {
            segments.push(Segment::Text(text.to_owned()));
        }
        self.start(&mut segments);
        Ok(segments)
    }

    /// Encodes segments, each by itself; long ones go through `cache` under the caller's partition.
    ///
    /// # Errors
    /// What the tokenizer reports.
    pub fn encode_segments(
        &self,
        segments: &[Segment],
        cache: Option<(&SegmentCache, &[u8; 32])>,
    ) -> Result<Vec<TokenId>, TextError> {
        let mut ids = Vec::new();
        for segment in segments {
            match (segment, cache) {
                (Segment::Token(id), _) => ids.push(*id),
                (Segment::Text(text), Some((cache, partition))) if text.len() >= cache::MIN_SEGMENT_BYTES => {
                    let key = cache::key(partition, &self.tokenizer_digest, text);
                    if let Some(known) = cache.get(&key) {
                        ids.extend_from_slice(&known);
                    } else {
                        let fresh = self.tokenizer.encode_plain(text)?;
                        ids.extend_from_slice(&fresh);
                        cache.put(key, fresh);
                    }
                }
                (Segment::Text(text), _) => ids.extend(self.tokenizer.encode_plain(text)?),
            }
        }
        Ok(ids)
    }

    /// Renders and encodes a conversation.
    ///
    /// # Errors
    /// As [`Text::render_chat`] and [`Text::encode_segments`].
    pub fn encode_chat(
        &self,
        input: &ChatInput<'_>,
        cache: Option<(&SegmentCache, &[u8; 32])>,
    ) -> Result<Vec<TokenId>, TextError> {
        self.encode_segments(&self.render_chat(input)?, cache)
    }

    /// Encodes a raw prompt, with a start token if the model asks for one.
    ///
    /// # Errors
    /// As [`Text::prompt`] and [`Text::encode_segments`].
    pub fn encode_prompt(
        &self,
        text: &str,
        allow_special: bool,
        cache: Option<(&SegmentCache, &[u8; 32])>,
    ) -> Result<Vec<TokenId>, TextError> {
        self.encode_segments(&self.prompt(text, allow_special)?, cache)
    }

    fn start(&self, segments: &mut Vec<Segment>) {
        if let Some(bos) = self.settings.bos.filter(|_| self.settings.add_bos)
            && segments.first() != Some(&Segment::Token(bos))
        {
            segments.insert(0, Segment::Token(bos));
        }
    }
}
