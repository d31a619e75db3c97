//! The byte-level alphabet, and the check that a tokenizer uses it.
//!
//! Owns the mapping of bytes to printable symbols that GPT-2 introduced. Called by [`super::Tokenizer`].

use std::collections::HashMap;

use tokenizers::{DecoderWrapper, ModelWrapper, PreTokenizerWrapper};

use super::TokenizerError;

/// Symbol → byte.
pub(crate) struct Alphabet(HashMap<char, u8>);

impl Alphabet {
    pub(crate) fn new() -> Self {
        Self(symbols().into_iter().zip(0..=u8::MAX).collect())
    }

    pub(crate) fn byte(&self, symbol: char) -> Option<u8> {
        self.0.get(&symbol).copied()
    }
}

/// The symbol of each byte: printable Latin-1 stands for itself, the other bytes take U+0100 onwards in order.
pub(crate) fn symbols() -> [char; 256] {
    let mut next = 0x100;
    std::array::from_fn(|byte| {
        let itself = matches!(byte as u8, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
        let code = if itself {
            byte as u32
        } else {
            next += 1;
            next - 1
        };
        char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER)
    })
}

/// Refuses whatever is not byte-level BPE.
pub(super) fn require(inner: &tokenizers::Tokenizer) -> Result<(), TokenizerError> {
    let refused = |key, value: &str, supported| Err(TokenizerError::Unsupported { key, value: value.to_owned(), supported });
    match inner.get_model() {
        ModelWrapper::BPE(_) => {}
        ModelWrapper::WordPiece(_) => return refused("tokenizer.json model.type", "WordPiece", "BPE"),
        ModelWrapper::WordLevel(_) => return refused("tokenizer.json model.type", "WordLevel", "BPE"),
        ModelWrapper::Unigram(_) => return refused("tokenizer.json model.type", "Unigram", "BPE"),
    }
    if !matches!(inner.get_decoder(), Some(DecoderWrapper::ByteLevel(_))) {
        return refused("tokenizer.json decoder", "not ByteLevel", "ByteLevel");
    }
    match inner.get_pre_tokenizer() {
        Some(pre) if is_byte_level(pre) => Ok(()),
        _ => refused(
            "tokenizer.json pre_tokenizer",
            "without a final ByteLevel, or with a prefix space",
            "ByteLevel without prefix space",
        ),
    }
}

/// A prefix space would depend on where a text was cut.
fn is_byte_level(pre: &PreTokenizerWrapper) -> bool {
    match pre {
        PreTokenizerWrapper::ByteLevel(byte_level) => !byte_level.add_prefix_space,
        PreTokenizerWrapper::Sequence(sequence) => sequence.as_ref().last().is_some_and(is_byte_level),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_alphabet_is_a_bijection_with_the_known_symbols() {
        let alphabet = Alphabet::new();
        assert_eq!(alphabet.0.len(), 256);
        assert_eq!(alphabet.byte('Ġ'), Some(b' '));
        assert_eq!(alphabet.byte('Ċ'), Some(b'\n'));
        assert_eq!(alphabet.byte('A'), Some(b'A'));
        assert_eq!(alphabet.byte(' '), None);
    }
}
