//! A canonical `tokenizer.json` out of GGUF metadata.
//!
//! Owns the mapping of `tokenizer.ggml.*` keys. The truth is what the model's original `tokenizer.json` would do, not what another GGUF reader
//! does: Qwen2 text is normalised to NFC, byte symbols that a vocabulary lacks are dropped. Called by [`crate::Artifacts`]. One pass.
//!
//! Invariants
//! 1. The same metadata gives the same bytes: order is by id, nothing depends on a hash map.
//! 2. Unused tokens are in no list, so that their ids are masked.
//! 3. No merge can produce a control token.

use std::collections::HashMap;

use kvasir_core::TokenId;
use serde::ser::{Serialize, SerializeMap, SerializeSeq, Serializer};
use serde_json::{Value, json};

use super::TokenizerError;
use crate::gguf::{Gguf, ValueType};

/// The contractions are matched in any case; digits one at a time.
const QWEN2_SPLIT: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// As Qwen2's, but digits in groups of up to three.
const LLAMA3_SPLIT: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Control tokens that end a turn or a text in the families served here, whether or not the metadata says so.
pub(crate) const END_SPELLINGS: [&str; 5] = ["<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"];

/// Token kinds of the `tokenizer.ggml.token_type` array.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Normal,
    Control,
    UserDefined,
    Unused,
}

/// What the metadata says about single ids.
pub(crate) struct Specials {
    pub(crate) bos: Option<TokenId>,
    pub(crate) add_bos: bool,
    pub(crate) stop: Vec<TokenId>,
}

pub(crate) fn build(gguf: &Gguf, vocab: usize) -> Result<(Vec<u8>, Specials), TokenizerError> {
    match gguf.string("tokenizer.ggml.model")? {
        Some("gpt2") => {}
        Some(other) => {
            return Err(TokenizerError::Unsupported {
                key: "tokenizer.ggml.model",
                value: other.to_owned(),
                supported: "gpt2 (byte-level BPE)",
            });
        }
        None => return Err(inconsistent("tokenizer.ggml.model", "is missing, expected gpt2".to_owned())),
    }
    let pre = gguf.string("tokenizer.ggml.pre")?.unwrap_or("");
    let (normalizer, pre_tokenizer, ignore_merges) = pipeline(pre)?;
    let tokens = gguf.strings("tokenizer.ggml.tokens")?;
    if tokens.len() != vocab {
        return Err(inconsistent(
            "tokenizer.ggml.tokens",
            format!("has {} tokens, the model has {vocab} embedding rows", tokens.len()),
        ));
    }
    let kinds = kinds(gguf, tokens.len())?;
    check_scores(gguf, tokens.len())?;
    let ids = ids_by_spelling(&tokens, &kinds)?;
    let merges = merges(gguf, &ids, &kinds)?;
    let specials = specials(gguf, &tokens, &kinds)?;
    let added: Vec<Value> =
        tokens.iter().zip(&kinds).enumerate().filter_map(|(id, (token, kind))| added_token(id, token, *kind)).collect();
    let document = Document { normalizer, pre_tokenizer, ignore_merges, added, tokens: &tokens, kinds: &kinds, merges: &merges };
    let json = serde_json::to_vec(&document).map_err(|error| TokenizerError::Json(error.to_string()))?;
    Ok((json, specials))
}

fn inconsistent(key: &str, problem: String) -> TokenizerError {
    TokenizerError::Inconsistent { key: key.to_owned(), problem }
}

/// Normaliser, pre-tokeniser and `ignore_merges` of each known `tokenizer.ggml.pre`.
fn pipeline(pre: &str) -> Result<(Value, Value, bool), TokenizerError> {
    let byte_level =
        |regex: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": regex});
    let sequence = |first: Value, regex: bool| json!({"type": "Sequence", "pretokenizers": [first, byte_level(regex)]});
    let split = |pattern: &str| json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
    match pre {
        "smollm" => Ok((Value::Null, sequence(json!({"type": "Digits", "individual_digits": true}), true), false)),
        "qwen2" => Ok((json!({"type": "NFC"}), sequence(split(QWEN2_SPLIT), false), false)),
        "llama-bpe" | "llama3" | "llama-v3" => Ok((Value::Null, sequence(split(LLAMA3_SPLIT), false), true)),
        "gpt-2" | "gpt2" => Ok((Value::Null, byte_level(true), false)),
        other => Err(TokenizerError::Unsupported {
            key: "tokenizer.ggml.pre",
            value: format!("{other:?}"),
            supported: "smollm, qwen2, llama-bpe, gpt-2",
        }),
    }
}

fn kinds(gguf: &Gguf, len: usize) -> Result<Vec<Kind>, TokenizerError> {
    let key = "tokenizer.ggml.token_type";
    let raw = gguf.integers(key)?;
    if raw.len() != len {
        return Err(inconsistent(key, format!("has {} elements, tokenizer.ggml.tokens has {len}", raw.len())));
    }
    let kind = |(id, raw): (usize, &i32)| match raw {
        // A byte token's spelling is in the byte-level alphabet like any other's.
        1 | 6 => Ok(Kind::Normal),
        2 | 3 => Ok(Kind::Control),
        4 => Ok(Kind::UserDefined),
        5 => Ok(Kind::Unused),
        other => Err(inconsistent(key, format!("element {id} is {other}, known are 1 to 6"))),
    };
    raw.iter().enumerate().map(kind).collect()
}

/// Scores are not used by BPE, but an array that lies about itself means a broken file.
fn check_scores(gguf: &Gguf, len: usize) -> Result<(), TokenizerError> {
    let key = "tokenizer.ggml.scores";
    if gguf.value(key).is_none() {
        return Ok(());
    }
    let scores = gguf.array(key, "an array of f32")?;
    if scores.element != ValueType::F32 || scores.len != len {
        return Err(inconsistent(key, format!("has {} elements of {:?}, expected {len} of F32", scores.len, scores.element)));
    }
    Ok(())
}

fn ids_by_spelling<'a>(tokens: &[&'a str], kinds: &[Kind]) -> Result<HashMap<&'a str, usize>, TokenizerError> {
    let mut ids = HashMap::with_capacity(tokens.len());
    for (id, (token, kind)) in tokens.iter().zip(kinds).enumerate() {
        if *kind == Kind::Unused {
            continue;
        }
        if token.is_empty() {
            return Err(inconsistent("tokenizer.ggml.tokens", format!("token {id} is empty")));
        }
        if let Some(other) = ids.insert(*token, id) {
            return Err(inconsistent("tokenizer.ggml.tokens", format!("tokens {other} and {id} are both {token:?}")));
        }
    }
    Ok(ids)
}

fn merges<'a>(gguf: &'a Gguf, ids: &HashMap<&str, usize>, kinds: &[Kind]) -> Result<Vec<(&'a str, &'a str)>, TokenizerError> {
    let key = "tokenizer.ggml.merges";
    let mut pairs = Vec::new();
    for (rank, merge) in gguf.strings(key)?.into_iter().enumerate() {
        let Some((left, right)) =
            merge.split_once(' ').filter(|(left, right)| !left.is_empty() && !right.is_empty() && !right.contains(' '))
        else {
            return Err(inconsistent(key, format!("merge {rank} is {merge:?}, expected two tokens and one blank")));
        };
        let result = format!("{left}{right}");
        for part in [left, right, &result] {
            if !ids.contains_key(part) {
                return Err(inconsistent(key, format!("merge {rank} needs {part:?}, which is no token")));
            }
        }
        if ids.get(result.as_str()).is_some_and(|id| kinds[*id] == Kind::Control) {
            return Err(inconsistent(key, format!("merge {rank} produces the control token {result:?}")));
        }
        pairs.push((left, right));
    }
    Ok(pairs)
}

fn specials(gguf: &Gguf, tokens: &[&str], kinds: &[Kind]) -> Result<Specials, TokenizerError> {
    let id = |name: &str| -> Result<Option<TokenId>, TokenizerError> {
        let key = format!("tokenizer.ggml.{name}_token_id");
        match gguf.unsigned(&key)? {
            Some(id) if id >= tokens.len() as u64 => {
                Err(inconsistent(&key, format!("is {id}, the vocabulary has {} tokens", tokens.len())))
            }
            found => Ok(found.map(|id| id as TokenId)),
        }
    };
    for unused in ["unknown", "padding", "seperator", "separator", "cls", "mask"] {
        id(unused)?;
    }
    let mut stop: Vec<TokenId> = [id("eos")?, id("eot")?, id("eom")?].into_iter().flatten().collect();
    let spelled = tokens
        .iter()
        .zip(kinds)
        .enumerate()
        .filter(|(_, (token, kind))| **kind == Kind::Control && END_SPELLINGS.contains(token));
    stop.extend(spelled.map(|(id, _)| id as TokenId));
    stop.sort_unstable();
    stop.dedup();
    let add_bos = gguf.boolean("tokenizer.ggml.add_bos_token")?.unwrap_or(false);
    let bos = id("bos")?;
    if add_bos && bos.is_none() {
        return Err(inconsistent(
            "tokenizer.ggml.add_bos_token",
            "is true, but tokenizer.ggml.bos_token_id is missing".to_owned(),
        ));
    }
    Ok(Specials { bos, add_bos, stop })
}

fn added_token(id: usize, token: &str, kind: Kind) -> Option<Value> {
    let special = match kind {
        Kind::Control => true,
        Kind::UserDefined => false,
        Kind::Normal | Kind::Unused => return None,
    };
    Some(json!({
        "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": special,
    }))
}

// === the document, in a fixed order ===

struct Document<'a> {
    normalizer: Value,
    pre_tokenizer: Value,
    ignore_merges: bool,
    added: Vec<Value>,
    tokens: &'a [&'a str],
    kinds: &'a [Kind],
    merges: &'a [(&'a str, &'a str)],
}

struct Model<'a, 'b>(&'b Document<'a>);
struct Vocab<'a, 'b>(&'b Document<'a>);
struct Merges<'a, 'b>(&'b Document<'a>);

impl Serialize for Document<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(9))?;
        map.serialize_entry("version", "1.0")?;
        map.serialize_entry("truncation", &Value::Null)?;
        map.serialize_entry("padding", &Value::Null)?;
        map.serialize_entry("added_tokens", &self.added)?;
        map.serialize_entry("normalizer", &self.normalizer)?;
        map.serialize_entry("pre_tokenizer", &self.pre_tokenizer)?;
        map.serialize_entry("post_processor", &Value::Null)?;
        map.serialize_entry(
            "decoder",
            &json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}),
        )?;
        map.serialize_entry("model", &Model(self))?;
        map.end()
    }
}

impl Serialize for Model<'_, '_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(10))?;
        map.serialize_entry("type", "BPE")?;
        map.serialize_entry("dropout", &Value::Null)?;
        map.serialize_entry("unk_token", &Value::Null)?;
        map.serialize_entry("continuing_subword_prefix", &Value::Null)?;
        map.serialize_entry("end_of_word_suffix", &Value::Null)?;
        map.serialize_entry("fuse_unk", &false)?;
        map.serialize_entry("byte_fallback", &false)?;
        map.serialize_entry("ignore_merges", &self.0.ignore_merges)?;
        map.serialize_entry("vocab", &Vocab(self.0))?;
        map.serialize_entry("merges", &Merges(self.0))?;
        map.end()
    }
}

impl Serialize for Vocab<'_, '_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        for (id, (token, kind)) in self.0.tokens.iter().zip(self.0.kinds).enumerate() {
            if *kind != Kind::Unused {
                map.serialize_entry(token, &id)?;
            }
        }
        map.end()
    }
}

impl Serialize for Merges<'_, '_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut seq = serializer.serialize_seq(Some(self.0.merges.len()))?;
        for (left, right) in self.0.merges {
            seq.serialize_element(&[left, right])?;
        }
        seq.end()
    }
}
