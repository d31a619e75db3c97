//! Marks in client text that keep it from completing a control token.
//!
//! Owns where marks go. Called by [`crate::Text::render_chat`]. One scan per text.
//!
//! Flow: (1) after the first character of every control spelling in the text; (2) before a text that starts with the tail of a control
//! spelling, and after one that ends with the head of one, blanks aside, because its neighbours could bring the rest; (3) before a text that
//! is a middle of one; a bare identifier counts when it is all of one but the brackets, since templates compare the others. Marks sit next to
//! visible characters only, so trimming and splitting in a template work as without them.

use std::borrow::Cow;

use serde_json::Value as Json;

use crate::template::{ChatInput, Guarding};
use crate::tokenizer::AddedScanner;

/// Noncharacters: meant for the inside of programs, in no well-formed interchange text.
const MARKS: std::ops::RangeInclusive<char> = '\u{fdd0}'..='\u{fdef}';

pub(super) struct Guard<'a> {
    added: &'a AddedScanner,
    mark: char,
}

impl<'a> Guard<'a> {
    /// Picks a mark that the input does not use; `None` when it uses all of them.
    pub(super) fn for_input(added: &'a AddedScanner, input: &ChatInput<'_>) -> Option<Self> {
        let mut used = [false; 32];
        for message in input.messages {
            note_marks(message, &mut used, 0);
        }
        if let Some(tools) = input.tools {
            note_marks(tools, &mut used, 0);
        }
        for (key, value) in input.extra.into_iter().flatten() {
            note_text(key, &mut used);
            note_marks(value, &mut used, 0);
        }
        let mark = MARKS.zip(used).find(|(_, used)| !used).map(|(mark, _)| mark)?;
        Some(Self { added, mark })
    }

    /// Takes the marks out again.
    pub(super) fn unmark(&self, text: &str) -> String {
        if text.contains(self.mark) { text.replace(self.mark, "") } else { text.to_owned() }
    }

    fn needs_mark_before(&self, text: &str) -> bool {
        let identifier = text.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-'));
        self.added.control_spellings().iter().any(|control| {
            let tail = control.char_indices().skip(1).any(|(at, _)| text.starts_with(&control[at..]));
            let middle = if identifier {
                control.trim_matches(|symbol: char| !symbol.is_alphanumeric()) == text
            } else {
                control.len() > text.len() && control.contains(text)
            };
            tail || middle
        })
    }

    fn needs_mark_after(&self, text: &str) -> bool {
        let heads = |control: &String| control.char_indices().skip(1).any(|(at, _)| text.ends_with(&control[..at]));
        self.added.control_spellings().iter().any(heads)
    }
}

impl Guarding for Guard<'_> {
    fn guard<'t>(&self, text: &'t str) -> Cow<'t, str> {
        let core = text.trim();
        if core.is_empty() {
            return Cow::Borrowed(text);
        }
        let (before, after) = (self.needs_mark_before(core), self.needs_mark_after(core));
        let bytes = core.as_bytes();
        let inside: Vec<usize> =
            core.char_indices().map(|(at, _)| at).filter(|at| self.added.control_starts(&bytes[*at..])).collect();
        if !before && !after && inside.is_empty() {
            return Cow::Borrowed(text);
        }
        let lead = text.len() - text.trim_start().len();
        let mut marked = String::with_capacity(text.len() + inside.len() * 3 + 6);
        marked.push_str(&text[..lead]);
        if before {
            marked.push(self.mark);
        }
        let mut starts = inside.into_iter().peekable();
        for (at, symbol) in core.char_indices() {
            marked.push(symbol);
            if starts.next_if_eq(&at).is_some() {
                marked.push(self.mark);
            }
        }
        if after {
            marked.push(self.mark);
        }
        marked.push_str(&text[lead + core.len()..]);
        Cow::Owned(marked)
    }
}

fn note_marks(json: &Json, used: &mut [bool; 32], depth: usize) {
    // Deeper input is refused when it is converted.
    if depth > 128 {
        return;
    }
    match json {
        Json::String(text) => note_text(text, used),
        Json::Array(items) => items.iter().for_each(|item| note_marks(item, used, depth + 1)),
        Json::Object(entries) => {
            for (key, value) in entries {
                note_text(key, used);
                note_marks(value, used, depth + 1);
            }
        }
        Json::Null | Json::Bool(_) | Json::Number(_) => {}
    }
}

fn note_text(text: &str, used: &mut [bool; 32]) {
    // U+FDD0 to U+FDEF are EF B7 90 to EF B7 AF.
    for window in text.as_bytes().windows(3) {
        if let [0xef, 0xb7, last @ 0x90..=0xaf] = window {
            used[usize::from(last - 0x90)] = true;
        }
    }
}
