//! Pieces → JSON: chunks of a stream or one whole reply.
//!
//! Both are made from the same pieces, so a streamed answer joined is the whole answer.

use super::pieces::{Piece, Pieces, Shape};
use super::reply::{
    ChatChoice, ChatDelta, ChatLogprobs, ChatMessage, ChatTokenLogprob, Delta, Envelope, Reply, TextChoice, TextLogprobs,
    UsageMember, report, unix_seconds,
};
use crate::answer::{End, Head};
use kvasir_core::{Error, FinishReason, Reason, TokenId, TokenLogprob, Tokens};
use serde::Serialize;

/// The last line of a stream that went well.
pub(crate) const DONE: &str = "data: [DONE]\n\n";
/// A line that every reader of a stream skips; it keeps idle connections open.
pub(crate) const COMMENT: &str = ": keep-alive\n\n";

/// Prints a stream.
pub(crate) struct ChunkPrinter {
    envelope: Envelope,
    pieces: Pieces,
    include_usage: bool,
    offsets: Vec<usize>,
}

/// Gathers a whole reply.
pub(crate) struct WholePrinter {
    envelope: Envelope,
    pieces: Pieces,
    choices: Vec<Gathered>,
}

#[derive(Default)]
struct Gathered {
    text: String,
    entries: Vec<(TokenId, Option<TokenLogprob>)>,
    finish: Option<FinishReason>,
}

/// One event of a stream.
pub(crate) fn frame(json: &str) -> String {
    format!("data: {json}\n\n")
}

fn envelope(shape: Shape, streamed: bool, head: &Head) -> Envelope {
    let (prefix, object) = match (shape, streamed) {
        (Shape::Chat, true) => ("chatcmpl", "chat.completion.chunk"),
        (Shape::Chat, false) => ("chatcmpl", "chat.completion"),
        (Shape::Text, _) => ("cmpl", "text_completion"),
    };
    let identity = head.model.identity.0.to_hex();
    Envelope {
        id: format!("{prefix}-{}", head.id),
        object,
        created: unix_seconds(),
        model: head.model.name.clone(),
        // Same fingerprint, same bits: it names model and arithmetic.
        system_fingerprint: format!("fp_{}", &identity[..12]),
    }
}

fn json(value: &impl Serialize) -> Result<String, Error> {
    serde_json::to_string(value).map_err(|error| Error::new(Reason::Internal, format!("the reply could not be written: {error}")))
}

// === impl ChunkPrinter ===

impl ChunkPrinter {
    /// Starts a stream.
    pub(crate) fn new(shape: Shape, head: Head, include_usage: bool) -> Self {
        let envelope = envelope(shape, true, &head);
        let pieces = Pieces::new(shape, head);
        Self { envelope, offsets: vec![0; pieces.choices()], pieces, include_usage }
    }

    /// Events of one output; may be empty.
    pub(crate) fn output(&mut self, tokens: Tokens) -> Result<String, Error> {
        let mut out = String::new();
        for piece in self.pieces.output(tokens) {
            self.piece(piece, None, &mut out)?;
        }
        Ok(out)
    }

    /// The last events, up to and with `[DONE]`.
    pub(crate) fn finish(&mut self, end: &End) -> Result<String, Error> {
        let mut out = String::new();
        let mut report = end.report.as_ref().map(report);
        let pieces = self.pieces.finish(end);
        let last = pieces.len().saturating_sub(1);
        for (position, piece) in pieces.into_iter().enumerate() {
            // Where no chunk for usage follows, the report rides on the last one: clients expect each chunk to have a choice.
            let member = if position == last && !self.include_usage { report.take() } else { None };
            self.piece(piece, member, &mut out)?;
        }
        if self.include_usage {
            let usage = Some(UsageMember::Of(end.usage));
            let chunk: Reply<'_, ChatDelta> = Reply { envelope: &self.envelope, choices: Vec::new(), usage, kvasir: report };
            out.push_str(&frame(&json(&chunk)?));
        }
        out.push_str(DONE);
        Ok(out)
    }

    fn piece(&mut self, piece: Piece, kvasir: Option<serde_json::Value>, out: &mut String) -> Result<(), Error> {
        let usage = self.include_usage.then_some(UsageMember::Null);
        let envelope = &self.envelope;
        let text = match self.pieces.shape() {
            Shape::Chat => json(&Reply { envelope, choices: vec![chat_delta(&self.pieces, piece)], usage, kvasir }),
            Shape::Text => {
                let mut start = 0;
                let offset = self.offsets.get_mut(piece.index as usize).unwrap_or(&mut start);
                json(&Reply { envelope, choices: vec![text_choice(&self.pieces, piece, offset)], usage, kvasir })
            }
        };
        out.push_str(&frame(&text?));
        Ok(())
    }
}

fn chat_delta(pieces: &Pieces, piece: Piece) -> ChatDelta {
    let content = (piece.opens || !piece.text.is_empty() || !piece.entries.is_empty()).then_some(piece.text);
    ChatDelta {
        index: piece.index,
        delta: Delta { role: piece.opens.then_some("assistant"), content },
        logprobs: (!piece.entries.is_empty()).then(|| chat_logprobs(pieces, &piece.entries)),
        finish_reason: piece.finish.map(FinishReason::name),
    }
}

fn chat_logprobs(pieces: &Pieces, entries: &[(TokenId, Option<TokenLogprob>)]) -> ChatLogprobs {
    let content = entries.iter().filter_map(|(_, entry)| entry.as_ref());
    ChatLogprobs { content: content.map(|entry| ChatTokenLogprob::new(pieces.text(), entry)).collect(), refusal: None }
}

fn text_choice(pieces: &Pieces, piece: Piece, offset: &mut usize) -> TextChoice {
    let logprobs = (!piece.entries.is_empty()).then(|| {
        let mut lists = TextLogprobs::default();
        for (id, entry) in &piece.entries {
            lists.push(pieces.text(), *id, entry.as_ref(), offset);
        }
        lists
    });
    TextChoice { index: piece.index, text: piece.text, logprobs, finish_reason: piece.finish.map(FinishReason::name) }
}

// === impl WholePrinter ===

impl WholePrinter {
    /// Starts a reply.
    pub(crate) fn new(shape: Shape, head: Head) -> Self {
        let envelope = envelope(shape, false, &head);
        let pieces = Pieces::new(shape, head);
        let choices = (0..pieces.choices()).map(|_| Gathered::default()).collect();
        Self { envelope, pieces, choices }
    }

    /// Adds one output.
    pub(crate) fn output(&mut self, tokens: Tokens) {
        for piece in self.pieces.output(tokens) {
            self.add(piece);
        }
    }

    /// The reply.
    pub(crate) fn finish(mut self, end: &End) -> Result<String, Error> {
        for piece in self.pieces.finish(end) {
            self.add(piece);
        }
        let usage = Some(UsageMember::Of(end.usage));
        let kvasir = end.report.as_ref().map(report);
        let (envelope, pieces) = (&self.envelope, &self.pieces);
        let choices = std::mem::take(&mut self.choices).into_iter().enumerate();
        match pieces.shape() {
            Shape::Chat => {
                let choices = choices.map(|(index, choice)| choice.into_chat(pieces, index as u32)).collect();
                json(&Reply { envelope, choices, usage, kvasir })
            }
            Shape::Text => {
                let choices = choices.map(|(index, choice)| choice.into_text(pieces, index as u32)).collect();
                json(&Reply { envelope, choices, usage, kvasir })
            }
        }
    }

    fn add(&mut self, mut piece: Piece) {
        if let Some(choice) = self.choices.get_mut(piece.index as usize) {
            choice.text.push_str(&piece.text);
            choice.entries.append(&mut piece.entries);
            choice.finish = choice.finish.or(piece.finish);
        }
    }
}

// === impl Gathered ===

impl Gathered {
    fn into_chat(self, pieces: &Pieces, index: u32) -> ChatChoice {
        ChatChoice {
            index,
            message: ChatMessage { role: "assistant", content: self.text, refusal: None },
            logprobs: pieces.logprobs().then(|| chat_logprobs(pieces, &self.entries)),
            finish_reason: self.finish.map(FinishReason::name),
        }
    }

    fn into_text(self, pieces: &Pieces, index: u32) -> TextChoice {
        let piece = Piece { index, opens: false, text: self.text, entries: self.entries, finish: self.finish };
        text_choice(pieces, piece, &mut 0)
    }
}
