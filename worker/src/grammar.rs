//! Structured output: grammars as masks over the vocabulary.
//!
//! Owns compiled grammars, their limits and their cache. Refuses to know logits, end conditions of requests and tokenisation: a grammar
//! constrains bytes, so every spelling of an allowed text is allowed. [`GrammarFactory::compile`] is called where a request is prepared, never on the
//! engine thread; a [`GrammarState`] belongs to one choice and lives on the engine thread.
//!
//! Invariants
//! 1. What a request may write depends on its own grammar text alone, never on what was compiled before: states share no lexer.
//! 2. A compiled grammar is reused only inside the partition that compiled it.
//! 3. The cache key keeps the order of JSON members: the order of `properties` is the order of the output.
//! 4. Special tokens, tokens that are never chosen and tokens without bytes are in no mask; end tokens are in it exactly where the
//!    grammar may end.
//!
//! Costs: compiling takes 0.1 to 50 ms and is bounded by fuel; a mask takes tens of microseconds, at most about 20 ms at its fuel limit;
//! rollback is linear in the tokens taken back.

mod cache;
mod error;
mod state;
mod vocabulary;

use crate::backend::TokenBytes;
use cache::Cache;
use kvasir_core::{Digest, Framer, Grammar, TokenId};
use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::{Matcher, ParserFactory};
use std::sync::{Arc, Mutex, PoisonError};
use vocabulary::Vocabulary;

pub use error::GrammarError;
pub use state::{GrammarState, VerifyMasks};

/// Longest JSON schema; generated schemas of large interfaces stay below.
pub const MAX_SCHEMA_BYTES: usize = 256 * 1024;

/// Longest regular expression or Lark grammar.
pub const MAX_GRAMMAR_BYTES: usize = 64 * 1024;

/// Compiled grammars kept, over all partitions.
pub const CACHED_GRAMMARS: usize = 64;

/// Stack of the thread that compiles: parsers of nested notations recurse once per level, and a level takes at least a byte of text.
const COMPILE_STACK_BYTES: usize = 512 * 1024 * 1024;

/// Compiles grammars for one vocabulary.
pub struct GrammarFactory {
    parsers: ParserFactory,
    vocabulary: Arc<Vocabulary>,
    cache: Mutex<Cache<Arc<Matcher>>>,
}

// === impl GrammarFactory ===

impl GrammarFactory {
    /// Prepares a vocabulary of `vocab` tokens: `end` are the model's end tokens, `never` those that are never chosen.
    /// Takes about 0.1 s for 150,000 tokens.
    pub fn new(vocab: usize, end: &[TokenId], never: &[TokenId], table: &dyn TokenBytes) -> Result<Self, GrammarError> {
        let vocabulary = Arc::new(Vocabulary::new(vocab, end, never, table)?);
        let environment = vocabulary.environment();
        let mut parsers = ParserFactory::new_simple(&environment).map_err(|error| GrammarError::vocabulary(&error))?;
        parsers.quiet();
        *parsers.limits_mut() = limits();
        Ok(Self { parsers, vocabulary, cache: Mutex::new(Cache::new(CACHED_GRAMMARS)) })
    }

    /// A fresh state of the grammar. `partition` separates tenants ([`kvasir_core::Request::partition`]). Blocks for the time of
    /// compiling.
    pub fn compile(&self, partition: Digest, grammar: &Grammar) -> Result<GrammarState, GrammarError> {
        let source = Source::parse(grammar)?;
        let key = source.key(partition);
        let cached = self.cache.lock().unwrap_or_else(PoisonError::into_inner).get(&key);
        let template = if let Some(template) = cached {
            template
        } else {
            let template = Arc::new(self.build(source)?);
            self.cache.lock().unwrap_or_else(PoisonError::into_inner).insert(key, template.clone());
            template
        };
        Ok(GrammarState::new(template, self.vocabulary.clone()))
    }

    /// Compiled grammars in the cache.
    pub fn cached(&self) -> usize {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Compiles on a thread of its own, whose stack is large enough for the deepest nesting that the size limits let in.
    fn build(&self, source: Source) -> Result<Matcher, GrammarError> {
        let field = source.field;
        let compile = || Matcher::new(self.parsers.create_parser(source.grammar));
        let mut matcher = std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("grammar".into()).stack_size(COMPILE_STACK_BYTES);
            let running =
                thread.spawn_scoped(scope, compile).map_err(|error| GrammarError::Broken { cause: error.to_string() })?;
            running.join().map_err(|_| GrammarError::Broken { cause: "the compiler panicked".into() })
        })?;
        match matcher.get_error() {
            Some(cause) => Err(GrammarError::Invalid { field, cause: error::brief(&cause) }),
            None => match matcher.grammar_warnings() {
                warnings if warnings.is_empty() => Ok(matcher),
                warnings => Err(GrammarError::Invalid { field, cause: warnings.join("; ") }),
            },
        }
    }
}

/// A grammar in the library's form, with what its cache key is made of.
struct Source {
    field: &'static str,
    kind: &'static str,
    text: String,
    grammar: TopLevelGrammar,
}

// === impl Source ===

impl Source {
    fn parse(grammar: &Grammar) -> Result<Self, GrammarError> {
        match grammar {
            Grammar::JsonObject => {
                let schema = serde_json::json!({ "type": "object" });
                let text = schema.to_string();
                Ok(Self { field: "response_format", kind: "json", text, grammar: TopLevelGrammar::from_json_schema(schema) })
            }
            Grammar::JsonSchema(schema) => {
                let field = "response_format";
                bounded(field, schema, MAX_SCHEMA_BYTES)?;
                let invalid =
                    |error: serde_json::Error| GrammarError::Invalid { field, cause: format!("the schema is not JSON: {error}") };
                let schema: serde_json::Value = serde_json::from_str(schema).map_err(invalid)?;
                Ok(Self { field, kind: "json", text: schema.to_string(), grammar: TopLevelGrammar::from_json_schema(schema) })
            }
            Grammar::Regex(text) => {
                bounded("grammar", text, MAX_GRAMMAR_BYTES)?;
                Ok(Self { field: "grammar", kind: "regex", text: text.clone(), grammar: TopLevelGrammar::from_regex(text) })
            }
            Grammar::Lark(text) => {
                bounded("grammar", text, MAX_GRAMMAR_BYTES)?;
                Ok(Self { field: "grammar", kind: "lark", text: text.clone(), grammar: TopLevelGrammar::from_lark(text.clone()) })
            }
        }
    }

    fn key(&self, partition: Digest) -> Digest {
        let mut framer = Framer::new("kvasir.grammar.v1");
        framer.bytes(partition.as_bytes()).bytes(self.kind.as_bytes()).bytes(self.text.as_bytes());
        framer.finish()
    }
}

fn bounded(field: &'static str, text: &str, limit: usize) -> Result<(), GrammarError> {
    if text.len() > limit {
        return Err(GrammarError::TooLong { field, bytes: text.len(), limit });
    }
    Ok(())
}

/// The library's limits, in its own units (fuel, items, states, symbols).
fn limits() -> ParserLimits {
    ParserLimits {
        // About 1.5 KB each; one state cannot take more than about 60 MB.
        max_lexer_states: 40_000,
        // Walking the whole vocabulary for large lexemes ahead would not be covered by fuel.
        precompute_large_lexemes: false,
        // Errors go to clients: the cause, not a dump of the parser.
        verbose_errors: false,
        ..ParserLimits::default()
    }
}

#[cfg(test)]
mod tests;
