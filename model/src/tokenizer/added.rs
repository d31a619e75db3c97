//! Added tokens: finding them in text, and knowing where their spelling could arise.
//!
//! Owns the split of a text at added tokens, leftmost and longest first as the reference does. Called by [`super::Tokenizer`] and by the
//! guard in [`crate::text`]. A scan costs one table lookup per byte.

use kvasir_core::TokenId;

use super::TokenizerError;

/// Most added tokens of one tokenizer.
const MAX_ADDED: usize = 65_536;

/// A piece of text between added tokens, or one of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Piece<'a> {
    Text(&'a str),
    Token(TokenId),
}

/// All added tokens, by first byte, longest first.
pub(crate) struct AddedScanner {
    by_first: Vec<Vec<Added>>,
    control: Vec<String>,
}

struct Added {
    spelling: String,
    id: TokenId,
    control: bool,
}

impl AddedScanner {
    pub(super) fn new(inner: &tokenizers::Tokenizer) -> Result<Self, TokenizerError> {
        let tokens = inner.get_added_tokens_decoder();
        if tokens.len() > MAX_ADDED {
            return Err(refused(
                "tokenizer.json added_tokens",
                format!("{} tokens, at most {MAX_ADDED} are supported", tokens.len()),
            ));
        }
        let mut scanner = Self { by_first: (0..256).map(|_| Vec::new()).collect(), control: Vec::new() };
        for (id, token) in tokens {
            let spelling = token.content;
            let key = format!("added token {spelling:?}");
            if token.lstrip || token.rstrip || token.single_word {
                return Err(refused(&key, "uses lstrip, rstrip or single_word, which is not supported".to_owned()));
            }
            if token.special && spelling.chars().count() < 2 {
                return Err(refused(&key, "a control token of one character cannot be told from text".to_owned()));
            }
            let Some(first) = spelling.bytes().next() else {
                return Err(refused(&key, "is empty".to_owned()));
            };
            if token.special {
                scanner.control.push(spelling.clone());
            }
            scanner.by_first[usize::from(first)].push(Added { spelling, id, control: token.special });
        }
        for bucket in &mut scanner.by_first {
            bucket.sort_by(|a, b| b.spelling.len().cmp(&a.spelling.len()).then_with(|| a.spelling.cmp(&b.spelling)));
        }
        scanner.control.sort_unstable();
        Ok(scanner)
    }

    /// Cuts a text at every added token.
    pub(crate) fn split<'a>(&self, text: &'a str) -> Vec<Piece<'a>> {
        let mut pieces = Vec::new();
        let (mut start, mut at) = (0, 0);
        while at < text.len() {
            let Some(token) = self.longest_at(&text.as_bytes()[at..], |_| true) else {
                at += 1;
                continue;
            };
            // A spelling is valid UTF-8, so a match starts and ends at character boundaries.
            if start < at {
                pieces.push(Piece::Text(&text[start..at]));
            }
            pieces.push(Piece::Token(token.id));
            at += token.spelling.len();
            start = at;
        }
        if start < text.len() {
            pieces.push(Piece::Text(&text[start..]));
        }
        pieces
    }

    /// Whether a control token's spelling starts here.
    pub(crate) fn control_starts(&self, rest: &[u8]) -> bool {
        self.longest_at(rest, |token| token.control).is_some()
    }

    /// Spellings of all control tokens.
    pub(crate) fn control_spellings(&self) -> &[String] {
        &self.control
    }

    fn longest_at(&self, rest: &[u8], wanted: impl Fn(&Added) -> bool) -> Option<&Added> {
        let first = rest.first()?;
        let bucket = &self.by_first[usize::from(*first)];
        bucket.iter().find(|token| wanted(token) && rest.starts_with(token.spelling.as_bytes()))
    }
}

fn refused(key: &str, problem: String) -> TokenizerError {
    TokenizerError::Inconsistent { key: key.to_owned(), problem }
}
