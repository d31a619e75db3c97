//! Files of a model: GGUF and safetensors, tokeniser, chat template, and their digests.
//!
//! Owns everything between bytes on disk and (tensors, token ids, text). Refuses to know arithmetic, requests and networks. The worker opens a
//! [`ModelFile`]; doors rebuild [`Text`] from the [`Artifacts`] that workers send.
//!
//! Glossary
//! - *tensor view*: rows of stored weights inside the mapped file ([`TensorView`]).
//! - *artifacts*: canonical tokenizer.json, template and generation settings, content-addressed ([`Artifacts`]).
//! - *control token*: an id that only the template or the model may produce; hidden from text.
//! - *guard*: what keeps a control token's spelling inside a message from becoming that token.
//! - *segment*: a piece of a rendered prompt between added tokens; the unit of the encode cache.

mod artifacts;
mod config;
mod fetch;
mod file;
mod gguf;
mod mmap;
pub mod synth;
mod template;
mod tensor;
mod text;
mod tokenizer;

pub use artifacts::{Artifacts, ArtifactsError, TextSettings};
pub use config::{Arch, ConfigError, ModelConfig, RopeConfig, RopeScaling, RopeStyle};
pub use fetch::{FetchError, HUB, KNOWN_MODELS, KnownModel, Progress, Wanted, default_name, fetch, fetch_wanted, find_known};
pub use file::{DigestCache, FileError, ModelFile, required_tensors};
pub use gguf::{ArrayView, Gguf, GgufError, Value, ValueType};
pub use mmap::Mapping;
pub use template::{ChatInput, ChatTemplate, TemplateError};
pub use tensor::{TensorType, TensorView};
pub use text::{Segment, SegmentCache, Text, TextError};
pub use tokenizer::{MAX_TEXT_BYTES, Tokenizer, TokenizerError};
