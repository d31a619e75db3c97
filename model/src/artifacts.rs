//! What a router needs to know about a model's text: tokenizer, template, settings; content-addressed.
//!
//! Owns the byte format that workers send and the reading of both file formats into it. Refuses to know transport. Called by
//! [`crate::ModelFile::artifacts`], the worker's `Artifacts` service and the router. Building costs one pass over the vocabulary.
//!
//! Invariants
//! 1. `decode(encode(a)) == a`, and equal artifacts have equal bytes and digests on every machine.
//! 2. Decoding hostile bytes allocates no more than their length.

#[cfg(test)]
mod tests;

use kvasir_core::{Digest, Framer, Reason, TokenId};
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

use crate::config::ModelConfig;
use crate::file::{TextFiles, sha256};
use crate::gguf::{Gguf, GgufError};
use crate::tokenizer::{Tokenizer, TokenizerError, from_gguf};

/// Largest encoded artifacts in bytes.
pub const MAX_ARTIFACTS_BYTES: usize = 256 << 20;
const MAGIC: &[u8] = b"kvasir/artifacts/v1\n";

/// Tokenizer, template and settings of one model.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Artifacts {
    /// Canonical `tokenizer.json`: as built from GGUF metadata, or the folder's file as it is.
    pub tokenizer_json: Vec<u8>,
    /// Jinja source of the chat template.
    pub chat_template: Option<String>,
    /// `generation_config.json`: the folder's file as it is; for GGUF its stop and start ids.
    pub generation_config_json: Vec<u8>,
    /// Ids and sizes that tokenizer and template need.
    pub settings: TextSettings,
}

/// Ids and sizes that come with a model's text.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TextSettings {
    /// Embedding rows, in tokens; ids are below.
    pub vocab: u32,
    /// Longest sequence the model was made for, in tokens.
    pub context_len: u32,
    /// Start token.
    pub bos: Option<TokenId>,
    /// Whether prompts start with it.
    pub add_bos: bool,
    /// The end token that templates call `eos_token`.
    pub eos: Option<TokenId>,
    /// Ids that end an answer, ascending.
    pub stop_ids: Vec<TokenId>,
}

/// Why artifacts could not be built or read.
#[derive(Debug, thiserror::Error)]
pub enum ArtifactsError {
    /// The container refused a key.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// The tokenizer is broken or unsupported.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// A JSON file of the folder is not what it should be.
    #[error("{file}: {problem}")]
    Json {
        /// Which file.
        file: &'static str,
        /// What is wrong with it.
        problem: String,
    },
    /// The bytes are no artifacts of this version.
    #[error("artifacts: {0}")]
    Format(&'static str),
}

// === impl ArtifactsError ===

impl ArtifactsError {
    /// The public reason.
    pub const fn reason(&self) -> Reason {
        match self {
            Self::Gguf(error) => error.reason(),
            Self::Tokenizer(error) => error.reason(),
            Self::Json { .. } | Self::Format(_) => Reason::ModelFile,
        }
    }
}

// === impl Artifacts ===

impl Artifacts {
    /// Builds out of GGUF metadata.
    ///
    /// # Errors
    /// The key that is missing, inconsistent or unsupported.
    pub fn from_gguf(gguf: &Gguf, config: &ModelConfig) -> Result<Self, ArtifactsError> {
        let (tokenizer_json, specials) = from_gguf::build(gguf, config.vocab)?;
        let eos = gguf.unsigned("tokenizer.ggml.eos_token_id")?.map(|id| id as TokenId);
        let generation = serde_json::json!({"bos_token_id": specials.bos, "eos_token_id": &specials.stop});
        Ok(Self {
            tokenizer_json,
            chat_template: gguf.string("tokenizer.chat_template")?.map(str::to_owned),
            generation_config_json: generation.to_string().into_bytes(),
            settings: TextSettings {
                vocab: config.vocab as u32,
                context_len: config.context_len as u32,
                bos: specials.bos,
                add_bos: specials.add_bos,
                eos,
                stop_ids: specials.stop,
            },
        })
    }

    pub(crate) fn from_folder(files: &TextFiles, config: &ModelConfig) -> Result<Self, ArtifactsError> {
        let tokenizer = Tokenizer::from_json(&files.tokenizer, config.vocab)?;
        let tokenizer_config = parse("tokenizer_config.json", files.tokenizer_config.as_deref())?;
        let generation = parse("generation_config.json", files.generation_config.as_deref())?;
        let model = parse("config.json", Some(&files.model_config))?;
        let by_name = |key: &str| token_spelling(&tokenizer_config, key).and_then(|text| tokenizer.token_id(&text));
        let bos = by_name("bos_token").or_else(|| ids(&generation, "bos_token_id").first().copied());
        let eos = by_name("eos_token").or_else(|| ids(&generation, "eos_token_id").first().copied());
        let mut stop_ids: Vec<TokenId> = ids(&generation, "eos_token_id");
        if stop_ids.is_empty() {
            stop_ids = ids(&model, "eos_token_id");
        }
        stop_ids.extend(eos);
        stop_ids.extend(
            from_gguf::END_SPELLINGS.iter().filter_map(|text| tokenizer.token_id(text)).filter(|id| tokenizer.is_control(*id)),
        );
        stop_ids.sort_unstable();
        stop_ids.dedup();
        let settings = TextSettings {
            vocab: config.vocab as u32,
            context_len: config.context_len as u32,
            bos,
            add_bos: bos.is_some() && adds_bos(&tokenizer, &tokenizer_config, bos),
            eos,
            stop_ids,
        };
        let chat_template = match &files.chat_template {
            Some(bytes) => Some(utf8("chat_template.jinja", bytes)?),
            None => template_of(&tokenizer_config),
        };
        let generation_config_json = files.generation_config.clone().unwrap_or_else(|| b"{}".to_vec());
        Ok(Self { tokenizer_json: files.tokenizer.clone(), chat_template, generation_config_json, settings })
    }

    /// The digest that names these artifacts: over the SHA-256 of the tokenizer and all other parts.
    pub fn digest(&self) -> Digest {
        let mut framer = Framer::new("kvasir/artifacts/v1");
        framer.bytes(sha256(&self.tokenizer_json).as_bytes());
        framer.option(self.chat_template.as_deref().map(str::as_bytes));
        framer.bytes(&self.generation_config_json).bytes(&self.settings_json());
        framer.finish()
    }

    /// The bytes to send: a magic line and four sections, each a u64-LE length and its bytes; a missing template is the length `u64::MAX`.
    pub fn encode(&self) -> Vec<u8> {
        let settings = self.settings_json();
        let mut out = MAGIC.to_vec();
        let mut section = |bytes: Option<&[u8]>| {
            out.extend_from_slice(&bytes.map_or(u64::MAX, |bytes| bytes.len() as u64).to_le_bytes());
            out.extend_from_slice(bytes.unwrap_or_default());
        };
        section(Some(&self.tokenizer_json));
        section(self.chat_template.as_deref().map(str::as_bytes));
        section(Some(&self.generation_config_json));
        section(Some(&settings));
        out
    }

    /// Reads what [`Artifacts::encode`] wrote.
    ///
    /// # Errors
    /// [`ArtifactsError::Format`] for anything else.
    pub fn decode(bytes: &[u8]) -> Result<Self, ArtifactsError> {
        let short = ArtifactsError::Format("the bytes end inside a section");
        if bytes.len() > MAX_ARTIFACTS_BYTES {
            return Err(ArtifactsError::Format("longer than the limit"));
        }
        let mut rest = bytes.strip_prefix(MAGIC).ok_or(ArtifactsError::Format("unknown magic or version"))?;
        let mut sections = [None; 4];
        for section in &mut sections {
            let Some((len, tail)) = rest.split_first_chunk::<8>() else { return Err(short) };
            let len = u64::from_le_bytes(*len);
            if len == u64::MAX {
                rest = tail;
                continue;
            }
            let Some((body, tail)) = usize::try_from(len).ok().and_then(|len| tail.split_at_checked(len)) else {
                return Err(short);
            };
            *section = Some(body);
            rest = tail;
        }
        if !rest.is_empty() {
            return Err(ArtifactsError::Format("bytes follow the last section"));
        }
        let [Some(tokenizer), template, Some(generation), Some(settings)] = sections else {
            return Err(ArtifactsError::Format("a required section is missing"));
        };
        let settings = serde_json::from_slice(settings).map_err(|_| ArtifactsError::Format("the settings are not readable"))?;
        let chat_template = template.map(|bytes| utf8("chat template", bytes)).transpose()?;
        Ok(Self { tokenizer_json: tokenizer.to_vec(), chat_template, generation_config_json: generation.to_vec(), settings })
    }

    fn settings_json(&self) -> Vec<u8> {
        // Field order is that of the struct; integers, booleans and lists cannot fail to serialise.
        serde_json::to_vec(&self.settings).unwrap_or_default()
    }
}

// === files of a folder ===

fn parse(file: &'static str, bytes: Option<&[u8]>) -> Result<Json, ArtifactsError> {
    let Some(bytes) = bytes else { return Ok(Json::Null) };
    serde_json::from_slice(bytes).map_err(|error| ArtifactsError::Json { file, problem: error.to_string() })
}

fn utf8(file: &'static str, bytes: &[u8]) -> Result<String, ArtifactsError> {
    String::from_utf8(bytes.to_vec()).map_err(|_| ArtifactsError::Json { file, problem: "is not valid utf-8".to_owned() })
}

/// One id or a list of ids.
fn ids(json: &Json, key: &str) -> Vec<TokenId> {
    let id = |value: &Json| value.as_u64().and_then(|id| TokenId::try_from(id).ok());
    match json.get(key) {
        Some(Json::Array(list)) => list.iter().filter_map(id).collect(),
        Some(single) => id(single).into_iter().collect(),
        None => Vec::new(),
    }
}

/// A token is written as text or as an object with `content`.
fn token_spelling(json: &Json, key: &str) -> Option<String> {
    let value = json.get(key)?;
    value.as_str().or_else(|| value.get("content")?.as_str()).map(str::to_owned)
}

/// The flag if it is there; otherwise what the tokenizer's own post-processor does.
fn adds_bos(tokenizer: &Tokenizer, config: &Json, bos: Option<TokenId>) -> bool {
    match config.get("add_bos_token").and_then(Json::as_bool) {
        Some(flag) => flag,
        None => bos.is_some() && tokenizer.around_nothing().first().copied() == bos,
    }
}

/// The template, or the one named `default` of several.
fn template_of(config: &Json) -> Option<String> {
    match config.get("chat_template")? {
        Json::String(source) => Some(source.clone()),
        Json::Array(named) => named
            .iter()
            .find(|entry| entry.get("name").and_then(Json::as_str) == Some("default"))
            .and_then(|entry| entry.get("template")?.as_str())
            .map(str::to_owned),
        _ => None,
    }
}
