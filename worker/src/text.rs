//! Token bytes to text: incremental UTF-8 and stop strings.
//!
//! Owns what of an output is visible: text, and how many of its tokens. Refuses to know tokens' ids beyond their bytes, end tokens, and
//! lengths. Called by the engine for committed tokens only, so nothing here is ever rolled back.
//!
//! Invariants
//! 1. The pieces joined are the same for every split of the bytes into tokens: the lossy UTF-8 reading of all bytes before the stop.
//! 2. A byte is held back only while it is the beginning of a character, or while it belongs to the longest suffix that is a proper prefix
//!    of a stop string.
//! 3. Nothing at or after a stop string is ever given out. The match that completes first wins; of several that complete with the same
//!    byte, the longest.
//! 4. `visible + trimmed + waiting = pushed` tokens. A token is visible if it holds a byte before the stop, or no byte and stands before the
//!    first trimmed token. Tokens pushed after the end are trimmed.
//!
//! Costs: amortised one table step per byte and stop string; one allocation per piece that has text.
//!
//! Stop strings are matched on bytes, not on the lossy text: both agree for every stop string without U+FFFD, because UTF-8 characters
//! start only with bytes that never continue one. A U+FFFD in a stop string matches only one that the model wrote.

mod stops;

use crate::backend::TokenBytes;
use kvasir_core::TokenId;
use std::collections::VecDeque;
use std::sync::Arc;

pub use stops::{MAX_STOP_BYTES, MAX_STOP_STRINGS, StopError, Stops};

/// The text of one choice as it grows.
#[derive(Clone, Debug)]
pub struct Text {
    stops: Arc<Stops>,
    /// Per stop string: bytes of it that the output ends with.
    progress: Vec<usize>,
    /// Bytes not given out yet.
    held: Vec<u8>,
    /// Bytes pushed, the ones after a stop not counted.
    length: u64,
    /// Tokens that wait for their verdict.
    waiting: VecDeque<Waiting>,
    trimmed: usize,
    state: TextState,
}

/// What became final.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Piece {
    /// New visible text; may be empty.
    pub text: String,
    /// How many more tokens, in the order they were pushed, are known to be visible.
    pub visible: usize,
    /// Index of the stop string that ended the output, in the piece that found it.
    pub stop: Option<usize>,
}

/// A pushed token whose bytes are not all decided.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    start: u64,
    empty: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum TextState {
    Open,
    Stopped,
    Finished,
}

// === impl Text ===

impl Text {
    /// An empty output that ends at any of `stops`.
    pub fn new(stops: Arc<Stops>) -> Self {
        let progress = vec![0; stops.len()];
        Self { stops, progress, held: Vec::new(), length: 0, waiting: VecDeque::new(), trimmed: 0, state: TextState::Open }
    }

    /// Appends one committed token.
    pub fn push_id(&mut self, table: &dyn TokenBytes, id: TokenId) -> Piece {
        self.push(table.bytes(id))
    }

    /// Appends the bytes of one committed token; after the end it only counts as trimmed.
    pub fn push(&mut self, bytes: &[u8]) -> Piece {
        if self.state != TextState::Open {
            self.trimmed += 1;
            return Piece::default();
        }
        self.waiting.push_back(Waiting { start: self.length, empty: bytes.is_empty() });
        for &byte in bytes {
            self.held.push(byte);
            self.length += 1;
            if let Some(stop) = self.stops.advance(&mut self.progress, byte) {
                return self.cut(stop);
            }
        }
        let prefix = self.progress.iter().copied().max().unwrap_or(0);
        let settled = self.held.len() - prefix;
        let mut piece = Piece { visible: self.settle(self.length - prefix as u64), ..Piece::default() };
        // What follows the settled bytes is the first byte of a stop string, which never continues a character.
        let taken = decode(&self.held[..settled], prefix > 0, &mut piece.text);
        self.held.drain(..taken);
        piece
    }

    /// Ends the output without a stop string: all that was held back becomes visible.
    pub fn finish(&mut self) -> Piece {
        let mut piece = Piece::default();
        if self.state == TextState::Open {
            self.state = TextState::Finished;
            decode(&self.held, true, &mut piece.text);
            self.held = Vec::new();
            piece.visible = self.waiting.len();
            self.waiting = VecDeque::new();
        }
        piece
    }

    /// Whether a stop string ended the output.
    pub fn stopped(&self) -> bool {
        self.state == TextState::Stopped
    }

    /// Pushed tokens that are not part of the visible output.
    pub fn trimmed(&self) -> usize {
        self.trimmed
    }

    /// Pushed tokens whose visibility is still open.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    fn cut(&mut self, stop: usize) -> Piece {
        self.state = TextState::Stopped;
        let matched = self.stops.bytes(stop).len();
        let mut piece = Piece { visible: self.settle(self.length - matched as u64), stop: Some(stop), ..Piece::default() };
        let kept = self.held.len() - matched;
        decode(&self.held[..kept], true, &mut piece.text);
        self.held = Vec::new();
        self.trimmed += self.waiting.len();
        self.waiting = VecDeque::new();
        piece
    }

    /// Releases the leading tokens that have a byte before `end`, or none at all.
    fn settle(&mut self, end: u64) -> usize {
        let mut visible = 0;
        while self.waiting.front().is_some_and(|token| token.empty || token.start < end) {
            self.waiting.pop_front();
            visible += 1;
        }
        visible
    }
}

/// Appends the lossy reading of `bytes`; unless `complete`, stops before an unfinished last character. Returns how many bytes were read.
fn decode(bytes: &[u8], complete: bool, text: &mut String) -> usize {
    let mut taken = 0;
    for chunk in bytes.utf8_chunks() {
        text.push_str(chunk.valid());
        taken += chunk.valid().len();
        let broken = chunk.invalid();
        if broken.is_empty() {
            continue;
        }
        let unfinished =
            taken + broken.len() == bytes.len() && str::from_utf8(broken).is_err_and(|error| error.error_len().is_none());
        if unfinished && !complete {
            break;
        }
        text.push(char::REPLACEMENT_CHARACTER);
        taken += broken.len();
    }
    taken
}

#[cfg(test)]
mod tests;
