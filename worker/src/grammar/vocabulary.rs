//! The vocabulary as the matcher sees it: a trie of token bytes.

use super::GrammarError;
use crate::backend::TokenBytes;
use crate::plan::TokenMask;
use kvasir_core::TokenId;
use std::sync::Arc;
use toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};

/// Longest token that may be part of a constrained text; the trie packs depths into ten bits.
const MAX_TOKEN_BYTES: usize = 1000;

/// Most tokens; the trie packs ids into 24 bits.
const MAX_VOCAB: usize = (1 << 24) - 1;

/// Token bytes of constrained texts, end tokens and the mask of each.
pub(super) struct Vocabulary {
    trie: TokTrie,
    /// Tokens that can write bytes.
    writers: TokenMask,
    /// End tokens.
    ends: Arc<TokenMask>,
}

// === impl Vocabulary ===

impl Vocabulary {
    pub(super) fn new(vocab: usize, end: &[TokenId], never: &[TokenId], table: &dyn TokenBytes) -> Result<Self, GrammarError> {
        if vocab == 0 || vocab > MAX_VOCAB {
            return Err(GrammarError::vocabulary(&format!("{vocab} tokens, 1 to {MAX_VOCAB} are supported")));
        }
        let end: Vec<TokenId> = end.iter().copied().filter(|id| (*id as usize) < vocab).collect();
        let Some(first) = end.first() else {
            return Err(GrammarError::vocabulary(&"the model has no end token"));
        };
        let mut ends = TokenMask::none(vocab);
        for id in &end {
            ends.allow(*id);
        }
        let mut unused = TokenMask::none(vocab);
        for id in never {
            unused.allow(*id);
        }
        let mut writers = TokenMask::none(vocab);
        let mut words = Vec::with_capacity(vocab);
        for id in 0..vocab as TokenId {
            let bytes = table.bytes(id);
            // 0xFF never occurs in UTF-8 and marks special tokens in the trie.
            let usable = !ends.allows(id) && !unused.allows(id) && bytes.len() <= MAX_TOKEN_BYTES && !bytes.contains(&0xFF);
            if usable && !bytes.is_empty() {
                writers.allow(id);
                words.push(bytes.to_vec());
            } else {
                words.push(Vec::new());
            }
        }
        let trie = TokTrie::from(&TokRxInfo::new(vocab as u32, *first), &words).with_eos_tokens(&end);
        Ok(Self { trie, writers, ends: Arc::new(ends) })
    }

    /// The trie with greedy, non-canonical tokenisation, so that the matcher never forces tokens.
    pub(super) fn environment(&self) -> TokEnv {
        Arc::new(ApproximateTokEnv::new(self.trie.clone()))
    }

    /// Whether a token ends the output.
    pub(super) fn ends_with(&self, id: TokenId) -> bool {
        self.ends.allows(id)
    }

    /// Whether a token can write bytes.
    pub(super) fn writes(&self, id: TokenId) -> bool {
        self.writers.allows(id)
    }

    /// The mask where nothing but the end may follow.
    pub(super) fn end_mask(&self) -> Arc<TokenMask> {
        self.ends.clone()
    }

    /// A mask out of the matcher's bits, without tokens that write nothing; `None` if it is empty.
    pub(super) fn mask(&self, bits: &[u32]) -> Option<TokenMask> {
        let words = self.writers.0.iter().zip(&self.ends.0).enumerate();
        let mask: Vec<u32> =
            words.map(|(index, (writers, ends))| bits.get(index).copied().unwrap_or(0) & (writers | ends)).collect();
        mask.iter().any(|word| *word != 0).then_some(TokenMask(mask))
    }
}
