//! Events → pieces of choices: what is sent for each index, in which order.
//!
//! Owns the state machine that OpenAI's clients rely on, for streamed and whole replies alike. Pure.
//!
//! Invariants, per index
//! 1. The opening comes first and once: the role of a chat, the echoed prompt of a completion.
//! 2. Then output of that index only, without empty pieces.
//! 3. Then exactly one piece with a finish reason, and nothing after it.

use crate::answer::{End, Head};
use kvasir_core::{FinishReason, TokenId, TokenLogprob, Tokens};
use kvasir_model::Text;
use std::sync::Arc;

/// A part of one choice.
#[derive(Debug, Default)]
pub(crate) struct Piece {
    pub(crate) index: u32,
    /// Whether the choice opens here.
    pub(crate) opens: bool,
    pub(crate) text: String,
    /// Tokens with their log-probabilities, when asked for; only the first prompt token has none.
    pub(crate) entries: Vec<(TokenId, Option<TokenLogprob>)>,
    pub(crate) finish: Option<FinishReason>,
}

/// Which route's shape is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    Chat,
    Text,
}

/// Makes pieces.
pub(crate) struct Pieces {
    shape: Shape,
    choices_per_prompt: usize,
    echoes: Vec<String>,
    prompts: Vec<Arc<[TokenId]>>,
    /// Log-probabilities of each prompt, once they came.
    prompt_entries: Vec<Vec<Option<TokenLogprob>>>,
    logprobs: bool,
    opened: Vec<bool>,
    text: Arc<Text>,
}

// === impl Pieces ===

impl Pieces {
    /// Starts for one answer.
    pub(crate) fn new(shape: Shape, head: Head) -> Self {
        let n = head.wishes.sampling.n as usize;
        Self {
            shape,
            choices_per_prompt: n.max(1),
            echoes: head.echoes,
            prompt_entries: vec![Vec::new(); head.prompts.len()],
            opened: vec![false; head.prompts.len() * n],
            prompts: head.prompts,
            logprobs: head.wishes.sampling.logprobs.is_some(),
            text: head.model.text,
        }
    }

    /// Whether log-probabilities were asked for.
    pub(crate) fn logprobs(&self) -> bool {
        self.logprobs
    }

    /// The shape that is printed.
    pub(crate) fn shape(&self) -> Shape {
        self.shape
    }

    /// How the model spells tokens.
    pub(crate) fn text(&self) -> &Text {
        &self.text
    }

    /// Number of choices over all prompts.
    pub(crate) fn choices(&self) -> usize {
        self.opened.len()
    }

    /// Pieces of one output.
    pub(crate) fn output(&mut self, tokens: Tokens) -> Vec<Piece> {
        let prompt = tokens.choice as usize / self.choices_per_prompt;
        if !tokens.prompt_logprobs.is_empty()
            && let Some(slot) = self.prompt_entries.get_mut(prompt)
        {
            *slot = tokens.prompt_logprobs;
        }
        let mut pieces = self.open(tokens.choice);
        let entries: Vec<_> =
            if self.logprobs { tokens.logprobs.into_iter().map(|entry| (entry.id, Some(entry))).collect() } else { Vec::new() };
        if !tokens.text.is_empty() || !entries.is_empty() {
            pieces.push(Piece { index: tokens.choice, text: tokens.text, entries, ..Piece::default() });
        }
        pieces
    }

    /// The last pieces: whatever never opened does, then each choice ends.
    pub(crate) fn finish(&mut self, end: &End) -> Vec<Piece> {
        let mut pieces = Vec::new();
        for (index, reason) in end.reasons.iter().enumerate() {
            let index = index as u32;
            pieces.append(&mut self.open(index));
            pieces.push(Piece { index, finish: Some(*reason), ..Piece::default() });
        }
        pieces
    }

    fn open(&mut self, index: u32) -> Vec<Piece> {
        match self.opened.get_mut(index as usize) {
            Some(opened) if !*opened => *opened = true,
            _ => return Vec::new(),
        }
        match self.shape {
            Shape::Chat => vec![Piece { index, opens: true, ..Piece::default() }],
            Shape::Text => self.echo(index).into_iter().collect(),
        }
    }

    fn echo(&self, index: u32) -> Option<Piece> {
        let prompt = index as usize / self.choices_per_prompt;
        let text = self.echoes.get(prompt)?.clone();
        let (ids, known) = (self.prompts.get(prompt)?, self.prompt_entries.get(prompt)?);
        let entries =
            if known.len() == ids.len() { ids.iter().copied().zip(known.iter().cloned()).collect() } else { Vec::new() };
        Some(Piece { index, opens: true, text, entries, finish: None })
    }
}
