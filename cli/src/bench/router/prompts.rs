//! The prompts: four families that share 1.5 KiB each, with 0.5 KiB that no other prompt has.
//!
//! Owns the text and its JSON. The n-th prompt is a function of n, so every peer gets the same sequence.

use super::RouterBenchError;
use bytes::Bytes;
use kvasir_model::{ChatInput, Segment, SegmentCache, Text, TextError};
use serde_json::json;
use std::fmt::Write as _;
use std::fs;
use std::time::Duration;

/// Bytes that the prompts of a family begin with.
pub const SHARED_BYTES: usize = 1536;
/// Bytes that only one prompt has.
pub const FRESH_BYTES: usize = 512;
/// Prompts that come again, where a bench asks for that; a warm-up sends each of them.
pub const SEEN: u64 = 256;
/// Families.
pub const FAMILIES: usize = 4;
/// Output tokens, each a chunk of its own.
pub const CHUNKS: usize = 16;
/// The name of the served model.
pub const MODEL: &str = "mock";

/// Ordinary words, so that a tokeniser meets what it was made for.
const WORDS: &str = "the river runs past an old mill where people once ground wheat and rye before the town had power from the dam \
    every spring water rises above the lower meadow which keeps it green until late summer when children build small boats of bark \
    some years later a company bought most houses near the bridge painted them white opened shops for visitors who came by train \
    although few locals found work there many stayed because their families had always lived between these hills and knew each path \
    engineers measured how quickly the current changed after heavy rain then wrote reports that nobody read except one careful clerk \
    who noticed an error in table seven corrected twelve numbers by hand and sent the pages back with a polite letter about methods";

/// In which form a prompt is sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Form {
    /// A conversation: the shared part as system message, the fresh part as user message.
    Chat,
    /// The same, out of [`SEEN`] prompts that come again and again: a door has them in its cache of segments.
    Seen,
    /// Token ids, as many as the conversation has; nothing is left to tokenise.
    Ids,
}

/// Makes prompts.
pub struct Prompts {
    families: Vec<String>,
    family_ids: Vec<Vec<u32>>,
    fresh_ids: usize,
}

/// What tokenising costs on one core, without templating.
#[derive(Clone, Copy, Debug)]
pub struct Tokenising {
    /// Per prompt, with the cache of segments that a door has, in µs of CPU.
    pub cached_us: f64,
    /// Per KiB of text without any cache.
    pub uncached_us_per_kib: f64,
}

/// A small generator of random numbers (SplitMix64).
struct Random(u64);

// === impl Prompts ===

impl Prompts {
    /// Prompts whose token ids are those of `text`.
    pub fn new(text: &Text) -> Result<Self, TextError> {
        let families: Vec<String> = (0..FAMILIES).map(|family| words(&mut Random(!(family as u64)), SHARED_BYTES)).collect();
        let mut prompts = Self { families, family_ids: Vec::new(), fresh_ids: 0 };
        let whole = text.encode_segments(&prompts.segments(text, 0)?, None)?.len();
        let family_ids: Result<Vec<_>, TextError> =
            prompts.families.iter().map(|family| text.encode_prompt(family, false, None)).collect();
        prompts.family_ids = family_ids?;
        prompts.fresh_ids = whole - prompts.family_ids[family_of(0)].len();
        Ok(prompts)
    }

    /// Tokens of a prompt, about.
    pub fn tokens(&self) -> usize {
        self.family_ids[family_of(0)].len() + self.fresh_ids
    }

    /// Where prompts of this form are sent.
    pub const fn path(form: Form) -> &'static str {
        match form {
            Form::Chat | Form::Seen => "/v1/chat/completions",
            Form::Ids => "/v1/completions",
        }
    }

    /// The JSON of a streaming request; with `report` the reply tells its states.
    pub fn body(&self, form: Form, number: u64, report: bool) -> Bytes {
        let mut body = String::with_capacity(4 << 10);
        let _infallible = write!(body, r#"{{"model":"{MODEL}","stream":true,"max_tokens":{CHUNKS},"temperature":0,"#);
        if report {
            body.push_str(r#""kvasir":{"report":true},"#);
        }
        let number = if form == Form::Seen { number % SEEN } else { number };
        match form {
            Form::Chat | Form::Seen => {
                // The words are plain ASCII letters and spaces: nothing to escape.
                let (shared, fresh) = (&self.families[family_of(number)], fresh(number));
                let _infallible = write!(
                    body,
                    r#""messages":[{{"role":"system","content":"{shared}"}},{{"role":"user","content":"{fresh}"}}]}}"#
                );
            }
            Form::Ids => {
                let mut random = Random(number);
                let fresh = (0..self.fresh_ids).map(|_| 1_000 + (random.next() % 30_000) as u32);
                body.push_str(r#""prompt":["#);
                for (at, id) in self.family_ids[family_of(number)].iter().copied().chain(fresh).enumerate() {
                    let _infallible = write!(body, "{}{id}", if at == 0 { "" } else { "," });
                }
                body.push_str("]}");
            }
        }
        body.into()
    }

    /// Tokenises `count` prompts in this thread, once as a door does (cache of segments) and once without a cache.
    pub fn tokenising(&self, text: &Text, count: u64) -> Result<Tokenising, RouterBenchError> {
        let cache = SegmentCache::new(64 << 20);
        let partition = [7; 32];
        // The families are in the cache, as they are after the first requests of each.
        for number in 0..64 {
            text.encode_segments(&self.segments(text, number)?, Some((&cache, &partition)))?;
        }
        let rendered: Result<Vec<_>, TextError> = (64..64 + count).map(|number| self.segments(text, number)).collect();
        let rendered = rendered?;
        let mut times = [0.0; 2];
        for (time, cache) in times.iter_mut().zip([Some((&cache, &partition)), None]) {
            let began = thread_cpu()?;
            for segments in &rendered {
                std::hint::black_box(text.encode_segments(segments, cache)?);
            }
            *time = thread_cpu()?.saturating_sub(began).as_secs_f64() * 1e6 / count as f64;
        }
        let kib = (SHARED_BYTES + FRESH_BYTES) as f64 / 1024.0;
        Ok(Tokenising { cached_us: times[0], uncached_us_per_kib: times[1] / kib })
    }

    fn segments(&self, text: &Text, number: u64) -> Result<Vec<Segment>, TextError> {
        let messages = [
            json!({"role": "system", "content": self.families[family_of(number)]}),
            json!({"role": "user", "content": fresh(number)}),
        ];
        text.render_chat(&ChatInput { messages: &messages, tools: None, add_generation_prompt: true, extra: None })
    }
}

// === impl Random ===

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }
}

fn family_of(number: u64) -> usize {
    (Random(number ^ 0xfa).next() % FAMILIES as u64) as usize
}

fn fresh(number: u64) -> String {
    words(&mut Random(number), FRESH_BYTES)
}

fn words(random: &mut Random, bytes: usize) -> String {
    let known: Vec<&str> = WORDS.split_whitespace().collect();
    let mut text = String::with_capacity(bytes + 16);
    while text.len() < bytes {
        text.push_str(known[(random.next() % known.len() as u64) as usize]);
        text.push(' ');
    }
    text.truncate(bytes);
    text
}

/// CPU time of this thread.
fn thread_cpu() -> Result<Duration, RouterBenchError> {
    let path = "/proc/thread-self/schedstat";
    let text = fs::read_to_string(path).map_err(|source| RouterBenchError::Proc { path: path.to_owned(), source })?;
    let nanos = text.split_whitespace().next().and_then(|word| word.parse().ok());
    nanos.map(Duration::from_nanos).ok_or_else(|| RouterBenchError::Format { path: path.to_owned(), text })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_have_their_sizes_share_only_the_family_and_repeat_by_number() {
        let shared: Vec<String> = (0..FAMILIES).map(|family| words(&mut Random(!(family as u64)), SHARED_BYTES)).collect();
        assert!(shared.iter().all(|text| text.len() == SHARED_BYTES));
        assert!((1..FAMILIES).all(|other| shared[other][..64] != shared[0][..64]), "families differ from their start on");
        let texts: std::collections::HashSet<String> = (0..1000).map(fresh).collect();
        assert_eq!(texts.len(), 1000);
        assert!(
            texts
                .iter()
                .all(|text| text.len() == FRESH_BYTES && text.bytes().all(|byte| byte == b' ' || byte.is_ascii_lowercase()))
        );
        assert_eq!(fresh(17), fresh(17));
        let mut seen = [0; FAMILIES];
        (0..1000).for_each(|number| seen[family_of(number)] += 1);
        assert!(seen.iter().all(|count| *count > 150), "{seen:?}");
    }
}
