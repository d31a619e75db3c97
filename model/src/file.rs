//! One opened model: a GGUF file, or a folder with safetensors, `config.json` and `tokenizer.json`.
//!
//! Owns the canonical tensor names and the check that every tensor the configuration asks for is there with the right shape. Refuses to
//! know arithmetic or text. Called by the worker's loader and `kvasir model inspect`. Opening maps files and reads headers; weights are not
//! touched. Clones share the mapping.
//!
//! Canonical names (those of GGUF; `i` is the layer):
//!
//! | canonical | safetensors | rows × cols |
//! | --- | --- | --- |
//! | `token_embd.weight` | `model.embed_tokens.weight` | vocab × hidden |
//! | `output.weight` | `lm_head.weight` (tied: the embedding) | vocab × hidden |
//! | `output_norm.weight` | `model.norm.weight` | 1 × hidden |
//! | `blk.i.attn_norm.weight` | `model.layers.i.input_layernorm.weight` | 1 × hidden |
//! | `blk.i.attn_q.weight`, `.bias` | `model.layers.i.self_attn.q_proj` | q_width × hidden, 1 × q_width |
//! | `blk.i.attn_k.weight`, `.bias` | `model.layers.i.self_attn.k_proj` | kv_width × hidden, 1 × kv_width |
//! | `blk.i.attn_v.weight`, `.bias` | `model.layers.i.self_attn.v_proj` | kv_width × hidden, 1 × kv_width |
//! | `blk.i.attn_output.weight` | `model.layers.i.self_attn.o_proj.weight` | hidden × q_width |
//! | `blk.i.ffn_norm.weight` | `model.layers.i.post_attention_layernorm.weight` | 1 × hidden |
//! | `blk.i.ffn_gate.weight` | `model.layers.i.mlp.gate_proj.weight` | ffn × hidden |
//! | `blk.i.ffn_up.weight` | `model.layers.i.mlp.up_proj.weight` | ffn × hidden |
//! | `blk.i.ffn_down.weight` | `model.layers.i.mlp.down_proj.weight` | hidden × ffn |
//!
//! Invariants
//! 1. After opening, [`ModelFile::tensor`] answers every name of the table for the configuration, with that shape.
//! 2. Rows of query and key are in the order that `config().rope.style` needs.

mod digest;
mod safetensors;
#[cfg(test)]
mod tests;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use kvasir_core::{Digest, Reason};

use crate::artifacts::{Artifacts, ArtifactsError};
use crate::config::{ConfigError, ModelConfig};
use crate::gguf::{Gguf, GgufError};
use crate::mmap::Mapping;
use crate::tensor::TensorView;
use crate::text::{Text, TextError};
pub use digest::DigestCache;
pub(crate) use digest::sha256;
use safetensors::Shards;

/// First bytes of a Git-LFS pointer text.
pub(crate) const LFS_POINTER_PREFIX: &[u8] = b"version https://git-lfs";
/// Largest JSON file beside the weights, in bytes; Qwen's tokenizer.json has 7 MB.
pub const MAX_SIDE_FILE_BYTES: u64 = 256 << 20;

/// An opened model. Cheap to clone; clones share the mapping.
#[derive(Clone, Debug)]
pub struct ModelFile(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    path: PathBuf,
    weights: Weights,
    config: ModelConfig,
    digest_cache: Option<DigestCache>,
    digest: OnceLock<Digest>,
}

#[derive(Debug)]
enum Weights {
    Gguf(Gguf),
    Folder(Shards),
}

/// Why a model could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The operating system refused.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A broken GGUF file.
    #[error("{path}: {source}")]
    Gguf {
        /// The file.
        path: PathBuf,
        /// Why.
        source: GgufError,
    },
    /// A broken safetensors file.
    #[error("{path}: {problem}")]
    Safetensors {
        /// The file.
        path: PathBuf,
        /// Why.
        problem: String,
    },
    /// A configuration that is broken or unsupported.
    #[error("{path}: {source}")]
    Config {
        /// The file.
        path: PathBuf,
        /// Why.
        source: ConfigError,
    },
    /// Neither a GGUF file nor a folder with the expected files.
    #[error("{path}: {problem}")]
    Layout {
        /// The path as given.
        path: PathBuf,
        /// What is missing or unexpected.
        problem: String,
    },
    /// A tensor the configuration asks for is absent.
    #[error("{path}: tensor {name} is missing")]
    MissingTensor {
        /// The file or folder.
        path: PathBuf,
        /// Canonical name.
        name: String,
    },
    /// A tensor has another shape than the configuration says.
    #[error("{path}: tensor {name} is {rows} x {cols}, expected {want_rows} x {want_cols}")]
    TensorShape {
        /// The file or folder.
        path: PathBuf,
        /// Canonical name.
        name: String,
        /// Rows found.
        rows: usize,
        /// Columns found.
        cols: usize,
        /// Rows expected.
        want_rows: usize,
        /// Columns expected.
        want_cols: usize,
    },
    /// Tokenizer or template cannot be built.
    #[error("{path}: {source}")]
    Text {
        /// The file or folder.
        path: PathBuf,
        /// Why.
        source: Box<TextError>,
    },
    /// What goes to the routers cannot be built.
    #[error("{path}: {source}")]
    Artifacts {
        /// The file or folder.
        path: PathBuf,
        /// Why.
        source: Box<ArtifactsError>,
    },
}

// === impl FileError ===

impl FileError {
    /// The public reason.
    pub fn reason(&self) -> Reason {
        match self {
            Self::Io { source, .. } if source.kind() == io::ErrorKind::NotFound => Reason::ModelNotFound,
            Self::Io { .. }
            | Self::Gguf { .. }
            | Self::Safetensors { .. }
            | Self::Layout { .. }
            | Self::MissingTensor { .. }
            | Self::TensorShape { .. } => Reason::ModelFile,
            Self::Config { source, .. } => source.reason(),
            Self::Text { source, .. } => source.reason(),
            Self::Artifacts { source, .. } => source.reason(),
        }
    }
}

// === impl ModelFile ===

impl ModelFile {
    /// Opens a `.gguf` file or a folder.
    ///
    /// # Errors
    /// The first file or field that is wrong.
    pub fn open(path: &Path) -> Result<Self, FileError> {
        Self::open_with(path, None)
    }

    /// Opens like [`ModelFile::open`] and remembers weight digests in `digest_cache`.
    ///
    /// # Errors
    /// The first file or field that is wrong.
    pub fn open_with(path: &Path, digest_cache: Option<DigestCache>) -> Result<Self, FileError> {
        let metadata = std::fs::metadata(path).map_err(|source| FileError::Io { path: path.to_owned(), source })?;
        if metadata.is_dir() {
            let (shards, config) = safetensors::open(path)?;
            return Self::checked(path, Weights::Folder(shards), config, digest_cache);
        }
        let mapping = Mapping::open(path).map_err(|source| FileError::Io { path: path.to_owned(), source })?;
        Self::from_gguf(path, mapping, digest_cache)
    }

    /// Opens a GGUF file that is already in memory; `name` stands for its path in messages and in the weights digest.
    ///
    /// # Errors
    /// As [`ModelFile::open`].
    pub fn from_gguf_bytes(name: &str, bytes: Vec<u8>) -> Result<Self, FileError> {
        Self::from_gguf(Path::new(name), Mapping::from_vec(bytes), None)
    }

    fn from_gguf(path: &Path, mapping: Mapping, digest_cache: Option<DigestCache>) -> Result<Self, FileError> {
        let gguf = Gguf::parse(Arc::new(mapping)).map_err(|source| FileError::Gguf { path: path.to_owned(), source })?;
        let config = ModelConfig::from_gguf(&gguf).map_err(|source| FileError::Config { path: path.to_owned(), source })?;
        Self::checked(path, Weights::Gguf(gguf), config, digest_cache)
    }

    fn checked(path: &Path, weights: Weights, config: ModelConfig, digest_cache: Option<DigestCache>) -> Result<Self, FileError> {
        let file = Self(Arc::new(Inner { path: path.to_owned(), weights, config, digest_cache, digest: OnceLock::new() }));
        for (name, want_rows, want_cols) in required_tensors(&file.0.config) {
            let Some(view) = file.tensor(&name) else {
                return Err(FileError::MissingTensor { path: path.to_owned(), name });
            };
            let (rows, cols) = (view.rows, view.cols);
            if (rows, cols) != (want_rows, want_cols) {
                return Err(FileError::TensorShape { path: path.to_owned(), name, rows, cols, want_rows, want_cols });
            }
        }
        Ok(file)
    }

    /// The path as given when opening.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// The shape of the model.
    pub fn config(&self) -> &ModelConfig {
        &self.0.config
    }

    /// A tensor by its canonical name. `output.weight` of a tied model is the embedding.
    pub fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        let name = if name == "output.weight" && self.0.config.tied { "token_embd.weight" } else { name };
        match &self.0.weights {
            Weights::Gguf(gguf) => gguf.tensor(name),
            Weights::Folder(shards) => shards.tensor(name),
        }
    }

    /// The GGUF container, if it is one.
    pub fn gguf(&self) -> Option<&Gguf> {
        match &self.0.weights {
            Weights::Gguf(gguf) => Some(gguf),
            Weights::Folder(_) => None,
        }
    }

    /// Bytes of all weight files together.
    pub fn weight_bytes(&self) -> u64 {
        match &self.0.weights {
            Weights::Gguf(gguf) => gguf.mapping().len() as u64,
            Weights::Folder(shards) => shards.files().map(|(_, mapping)| mapping.len() as u64).sum(),
        }
    }

    /// The weights digest of `contracts` §1: a hash over name and SHA-256 of the weight files, by name.
    ///
    /// The first call reads all weights (about 1 s per GB and core) unless a digest cache knows the files; later calls are free.
    pub fn weights_digest(&self) -> Digest {
        *self.0.digest.get_or_init(|| match &self.0.weights {
            Weights::Gguf(gguf) => digest::of_files([(self.0.path.as_path(), &gguf.mapping()[..])], self.0.digest_cache.as_ref()),
            Weights::Folder(shards) => {
                digest::of_files(shards.files().map(|(path, mapping)| (path, &mapping[..])), self.0.digest_cache.as_ref())
            }
        })
    }

    /// Canonical tokenizer, template and generation settings, as a router needs them.
    ///
    /// # Errors
    /// A tokenizer or template that is missing, broken or unsupported.
    pub fn artifacts(&self) -> Result<Artifacts, FileError> {
        let wrap = |source: ArtifactsError| FileError::Artifacts { path: self.0.path.clone(), source: Box::new(source) };
        match &self.0.weights {
            Weights::Gguf(gguf) => Artifacts::from_gguf(gguf, &self.0.config).map_err(wrap),
            Weights::Folder(_) => {
                let folder = read_text_files(&self.0.path)?;
                Artifacts::from_folder(&folder, &self.0.config).map_err(wrap)
            }
        }
    }

    /// Tokenizer and template, ready to use.
    ///
    /// # Errors
    /// As [`ModelFile::artifacts`].
    pub fn text(&self) -> Result<Text, FileError> {
        let artifacts = self.artifacts()?;
        Text::from_artifacts(&artifacts).map_err(|source| FileError::Text { path: self.0.path.clone(), source: Box::new(source) })
    }
}

/// The text files of a folder, unparsed.
pub(crate) struct TextFiles {
    pub(crate) tokenizer: Vec<u8>,
    pub(crate) tokenizer_config: Option<Vec<u8>>,
    pub(crate) generation_config: Option<Vec<u8>>,
    pub(crate) model_config: Vec<u8>,
    pub(crate) chat_template: Option<Vec<u8>>,
}

fn read_text_files(folder: &Path) -> Result<TextFiles, FileError> {
    let required = |name: &str| {
        read_side_file(folder, name)?
            .ok_or_else(|| FileError::Layout { path: folder.to_owned(), problem: format!("{name} is missing from the folder") })
    };
    Ok(TextFiles {
        tokenizer: required("tokenizer.json")?,
        tokenizer_config: read_side_file(folder, "tokenizer_config.json")?,
        generation_config: read_side_file(folder, "generation_config.json")?,
        model_config: required("config.json")?,
        chat_template: read_side_file(folder, "chat_template.jinja")?,
    })
}

/// Reads a small file of the folder; `None` when there is none.
pub(crate) fn read_side_file(folder: &Path, name: &str) -> Result<Option<Vec<u8>>, FileError> {
    let path = folder.join(name);
    let len = match std::fs::metadata(&path) {
        Ok(metadata) => metadata.len(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(FileError::Io { path, source }),
    };
    if len > MAX_SIDE_FILE_BYTES {
        return Err(FileError::Layout {
            path,
            problem: format!("the file has {len} bytes, at most {MAX_SIDE_FILE_BYTES} are read"),
        });
    }
    let bytes = std::fs::read(&path).map_err(|source| FileError::Io { path: path.clone(), source })?;
    if bytes.starts_with(LFS_POINTER_PREFIX) {
        return Err(FileError::Layout {
            path,
            problem: "the file is a git lfs pointer, not the content: run `git lfs pull`".to_owned(),
        });
    }
    Ok(Some(bytes))
}

/// Canonical name, rows and columns of every tensor that the forward pass reads.
pub fn required_tensors(config: &ModelConfig) -> Vec<(String, usize, usize)> {
    let (hidden, ffn, q, kv) = (config.hidden, config.ffn, config.q_width(), config.kv_width());
    let mut all = vec![
        ("token_embd.weight".to_owned(), config.vocab, hidden),
        ("output_norm.weight".to_owned(), 1, hidden),
        ("output.weight".to_owned(), config.vocab, hidden),
    ];
    for layer in 0..config.layers {
        let mut add = |name: &str, rows, cols| all.push((format!("blk.{layer}.{name}"), rows, cols));
        add("attn_norm.weight", 1, hidden);
        add("attn_q.weight", q, hidden);
        add("attn_k.weight", kv, hidden);
        add("attn_v.weight", kv, hidden);
        add("attn_output.weight", hidden, q);
        add("ffn_norm.weight", 1, hidden);
        add("ffn_gate.weight", ffn, hidden);
        add("ffn_up.weight", ffn, hidden);
        add("ffn_down.weight", hidden, ffn);
        if config.qkv_bias {
            add("attn_q.bias", 1, q);
            add("attn_k.bias", 1, kv);
            add("attn_v.bias", 1, kv);
        }
    }
    all
}
