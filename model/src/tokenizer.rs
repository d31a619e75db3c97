//! Text to token ids and back, by the semantics of a Hugging Face `tokenizer.json`.
//!
//! Owns the tokenizer proper: plain encoding, added tokens, the id → bytes table. Refuses to know messages and templates ([`crate::Text`] does)
//! and where the JSON came from. Called by [`crate::Text`]. Encoding costs about 1 µs per token on one core; `token_bytes` is a table lookup.
//!
//! Invariants
//! 1. [`Tokenizer::encode_plain`] never yields a control id, whatever the text spells.
//! 2. No input panics: length is capped, and a panic inside the library becomes an error.
//! 3. Only byte-level vocabularies are accepted, so that every id has fixed bytes and text joins without context.

mod added;
mod byte_level;
pub(crate) mod from_gguf;
#[cfg(test)]
mod tests;

use std::panic::{AssertUnwindSafe, catch_unwind};

use kvasir_core::{Reason, TokenId};

use crate::config::MAX_VOCAB;
use crate::gguf::GgufError;
pub(crate) use added::{AddedScanner, Piece};
pub(crate) use byte_level::symbols as byte_level_symbols;

/// Longest text that one call encodes, in bytes; a context of 1 M tokens is about this long.
pub const MAX_TEXT_BYTES: usize = 4 << 20;

/// Why a tokenizer was refused or a text not encoded.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// The container refused a key.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// `tokenizer.json` does not parse.
    #[error("tokenizer.json: {0}")]
    Json(String),
    /// A kind of tokenizer that is not built.
    #[error("{key} is {value}, which is not supported; supported: {supported}")]
    Unsupported {
        /// The key.
        key: &'static str,
        /// What the file says.
        value: String,
        /// What would be accepted.
        supported: &'static str,
    },
    /// Arrays of different length, ids out of range, tokens twice.
    #[error("{key}: {problem}")]
    Inconsistent {
        /// The key.
        key: String,
        /// What does not fit.
        problem: String,
    },
    /// The text is longer than [`MAX_TEXT_BYTES`].
    #[error("the text has {bytes} bytes, at most {MAX_TEXT_BYTES} are tokenised")]
    TooLong {
        /// Its length in bytes.
        bytes: usize,
    },
    /// The library failed on this text.
    #[error("the text could not be tokenised: {0}")]
    Encode(String),
}

/// A byte-level BPE tokenizer with its added tokens and its id → bytes table.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    added: AddedScanner,
    table: ByteTable,
    kinds: Vec<Kind>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    /// No token has this id.
    Absent,
    Normal,
    /// Matches whole, stays visible.
    UserDefined,
    /// Never from text, hidden from text.
    Control,
}

/// Bytes of every id, one after the other.
struct ByteTable {
    bytes: Vec<u8>,
    ends: Vec<u32>,
}

// === impl TokenizerError ===

impl TokenizerError {
    /// The public reason.
    pub const fn reason(&self) -> Reason {
        match self {
            Self::Gguf(error) => error.reason(),
            Self::Json(_) | Self::Unsupported { .. } | Self::Inconsistent { .. } => Reason::ModelFile,
            Self::TooLong { .. } => Reason::PayloadTooLarge,
            Self::Encode(_) => Reason::InvalidArgument,
        }
    }
}

// === impl Tokenizer ===

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer").field("tokens", &self.kinds.len()).finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Builds out of a `tokenizer.json` for a model with `vocab` embedding rows.
    ///
    /// # Errors
    /// A file that does not parse, is not byte-level BPE, or has ids past `vocab`.
    pub fn from_json(json: &[u8], vocab: usize) -> Result<Self, TokenizerError> {
        let parsed = catch_unwind(AssertUnwindSafe(|| tokenizers::Tokenizer::from_bytes(json)));
        let mut inner = match parsed {
            Ok(Ok(inner)) => inner,
            Ok(Err(error)) => return Err(TokenizerError::Json(error.to_string())),
            Err(_) => return Err(TokenizerError::Json("the library panicked on it".to_owned())),
        };
        byte_level::require(&inner)?;
        // Spellings of control tokens in plain text are text; user-defined tokens still match whole.
        inner.set_encode_special_tokens(true);
        // The library's word cache is shared by everybody who encodes: it would let one tenant time another's words.
        let mut model = inner.get_model().clone();
        model.resize_cache(0);
        inner.with_model(model);
        let added = AddedScanner::new(&inner)?;
        let (table, kinds) = tables(&inner, vocab)?;
        Ok(Self { inner, added, table, kinds })
    }

    /// Embedding rows, which is one more than the largest id that can be fed.
    pub fn vocab(&self) -> usize {
        self.kinds.len()
    }

    /// Encodes text in which nothing is special: what spells a control token stays text; user-defined tokens match whole.
    ///
    /// # Errors
    /// [`TokenizerError::TooLong`], or what the library reports.
    pub fn encode_plain(&self, text: &str) -> Result<Vec<TokenId>, TokenizerError> {
        if text.len() > MAX_TEXT_BYTES {
            return Err(TokenizerError::TooLong { bytes: text.len() });
        }
        if text.is_empty() {
            return Ok(Vec::new());
        }
        match catch_unwind(AssertUnwindSafe(|| self.inner.encode_fast(text, false))) {
            Ok(Ok(encoding)) => Ok(encoding.get_ids().to_vec()),
            Ok(Err(error)) => Err(TokenizerError::Encode(error.to_string())),
            Err(_) => Err(TokenizerError::Encode("the library panicked".to_owned())),
        }
    }

    /// Encodes text; with `allow_special` a control token's spelling becomes that token. Adds no start token.
    ///
    /// # Errors
    /// As [`Tokenizer::encode_plain`].
    pub fn encode(&self, text: &str, allow_special: bool) -> Result<Vec<TokenId>, TokenizerError> {
        if !allow_special {
            return self.encode_plain(text);
        }
        if text.len() > MAX_TEXT_BYTES {
            return Err(TokenizerError::TooLong { bytes: text.len() });
        }
        let mut ids = Vec::new();
        for piece in self.added.split(text) {
            match piece {
                Piece::Token(id) => ids.push(id),
                Piece::Text(text) => ids.extend(self.encode_plain(text)?),
            }
        }
        Ok(ids)
    }

    /// The bytes a token adds to the output: empty for control tokens and for ids without a token. Not always whole characters.
    pub fn decode_bytes(&self, id: TokenId) -> &[u8] {
        match self.kinds.get(id as usize) {
            Some(Kind::Normal | Kind::UserDefined) => self.table.get(id),
            Some(Kind::Control | Kind::Absent) | None => &[],
        }
    }

    /// The bytes a token is spelled with, control tokens included, as log-probability lists show them.
    pub fn token_bytes(&self, id: TokenId) -> &[u8] {
        self.table.get(id)
    }

    /// The whole text of ids; bytes that are no UTF-8 become replacement characters. Control tokens are hidden unless `show_control`.
    pub fn decode(&self, ids: &[TokenId], show_control: bool) -> String {
        let mut bytes = Vec::new();
        for id in ids {
            bytes.extend_from_slice(if show_control { self.token_bytes(*id) } else { self.decode_bytes(*id) });
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Whether the id is a control token.
    pub fn is_control(&self, id: TokenId) -> bool {
        self.kinds.get(id as usize) == Some(&Kind::Control)
    }

    /// The id whose spelling is exactly `text`, added or not.
    pub fn token_id(&self, text: &str) -> Option<TokenId> {
        self.inner.token_to_id(text)
    }

    /// Ids below `vocab` that stand for no token and must never be sampled, ascending.
    pub fn masked_ids(&self) -> Vec<TokenId> {
        (0..).zip(&self.kinds).filter(|(_, kind)| **kind == Kind::Absent).map(|(id, _)| id).collect()
    }

    /// Ids of control tokens, ascending.
    pub fn control_ids(&self) -> Vec<TokenId> {
        (0..).zip(&self.kinds).filter(|(_, kind)| **kind == Kind::Control).map(|(id, _)| id).collect()
    }

    pub(crate) const fn added(&self) -> &AddedScanner {
        &self.added
    }

    /// What the file's own post-processor puts around an empty text, such as a start token.
    pub(crate) fn around_nothing(&self) -> Vec<TokenId> {
        let around = catch_unwind(AssertUnwindSafe(|| self.inner.encode_fast("", true)));
        around.ok().and_then(Result::ok).map(|encoding| encoding.get_ids().to_vec()).unwrap_or_default()
    }
}

// === tables ===

fn tables(inner: &tokenizers::Tokenizer, vocab: usize) -> Result<(ByteTable, Vec<Kind>), TokenizerError> {
    let inconsistent = |problem: String| TokenizerError::Inconsistent { key: "tokenizer.json".to_owned(), problem };
    if vocab as u64 > MAX_VOCAB {
        return Err(inconsistent(format!("the model has {vocab} embedding rows, at most {MAX_VOCAB} are supported")));
    }
    let mut spellings: Vec<Option<String>> = vec![None; vocab];
    let mut kinds = vec![Kind::Absent; vocab];
    let outside =
        |token: &str, id: u32| inconsistent(format!("token {token:?} has id {id}, the model has {vocab} embedding rows"));
    for (token, id) in inner.get_vocab(false) {
        let slot = spellings.get_mut(id as usize).ok_or_else(|| outside(&token, id))?;
        if let Some(other) = slot {
            return Err(inconsistent(format!("id {id} belongs to both {other:?} and {token:?}")));
        }
        kinds[id as usize] = Kind::Normal;
        *slot = Some(token);
    }
    let mut spelled_raw = vec![false; vocab];
    for (id, token) in inner.get_added_tokens_decoder() {
        let slot = spellings.get_mut(id as usize).ok_or_else(|| outside(&token.content, id))?;
        kinds[id as usize] = if token.special { Kind::Control } else { Kind::UserDefined };
        spelled_raw[id as usize] = true;
        *slot = Some(token.content);
    }
    let mut table = ByteTable { bytes: Vec::new(), ends: Vec::with_capacity(vocab) };
    let alphabet = byte_level::Alphabet::new();
    for (spelling, raw) in spellings.iter().zip(spelled_raw) {
        if let Some(spelling) = spelling {
            table.push(spelling, if raw { None } else { Some(&alphabet) });
        }
        let end =
            u32::try_from(table.bytes.len()).map_err(|_| inconsistent("the tokens together are longer than 4 GiB".to_owned()))?;
        table.ends.push(end);
    }
    Ok((table, kinds))
}

// === impl ByteTable ===

impl ByteTable {
    fn push(&mut self, spelling: &str, alphabet: Option<&byte_level::Alphabet>) {
        let start = self.bytes.len();
        let Some(alphabet) = alphabet else {
            self.bytes.extend_from_slice(spelling.as_bytes());
            return;
        };
        for symbol in spelling.chars() {
            let Some(byte) = alphabet.byte(symbol) else {
                // A spelling outside the alphabet stands for itself, as the reference decoder does.
                self.bytes.truncate(start);
                self.bytes.extend_from_slice(spelling.as_bytes());
                return;
            };
            self.bytes.push(byte);
        }
    }

    fn get(&self, id: TokenId) -> &[u8] {
        let index = id as usize;
        let Some(end) = self.ends.get(index) else { return &[] };
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        &self.bytes[start as usize..*end as usize]
    }
}
