//! Weights of a Hugging Face folder: one safetensors file, or shards with an index.
//!
//! Owns name translation and shard lookup; header parsing is the `safetensors` crate's. Refuses to know text files. Called by
//! [`super::ModelFile`].

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use safetensors::SafeTensors;
use serde::Deserialize;

use super::{FileError, LFS_POINTER_PREFIX, read_side_file};
use crate::config::ModelConfig;
use crate::mmap::Mapping;
use crate::tensor::{TensorType, TensorView};

/// Most shards of one model.
const MAX_SHARDS: usize = 1_024;

#[derive(Debug)]
pub(super) struct Shards {
    files: Vec<(PathBuf, Mapping)>,
    tensors: HashMap<String, Entry>,
}

#[derive(Debug)]
struct Entry {
    file: usize,
    ty: TensorType,
    rows: usize,
    cols: usize,
    start: usize,
    end: usize,
}

#[derive(Deserialize)]
struct Index {
    weight_map: HashMap<String, String>,
}

impl Shards {
    pub(super) fn tensor(&self, canonical: &str) -> Option<TensorView<'_>> {
        let entry = self.tensors.get(canonical)?;
        let (_, mapping) = self.files.get(entry.file)?;
        let bytes = mapping.get(entry.start..entry.end)?;
        Some(TensorView { ty: entry.ty, rows: entry.rows, cols: entry.cols, bytes })
    }

    pub(super) fn files(&self) -> impl Iterator<Item = (&Path, &Mapping)> {
        self.files.iter().map(|(path, mapping)| (path.as_path(), mapping))
    }
}

pub(super) fn open(folder: &Path) -> Result<(Shards, ModelConfig), FileError> {
    let layout = |problem: String| FileError::Layout { path: folder.to_owned(), problem };
    let json =
        read_side_file(folder, "config.json")?.ok_or_else(|| layout("config.json is missing from the folder".to_owned()))?;
    let mut config =
        ModelConfig::from_hf_json(&json).map_err(|source| FileError::Config { path: folder.join("config.json"), source })?;
    let names = match read_side_file(folder, "model.safetensors.index.json")? {
        Some(json) => {
            let index: Index =
                serde_json::from_slice(&json).map_err(|error| layout(format!("model.safetensors.index.json: {error}")))?;
            index.weight_map.into_values().collect()
        }
        None => BTreeSet::from(["model.safetensors".to_owned()]),
    };
    if names.len() > MAX_SHARDS {
        return Err(layout(format!("the index names {} shards, at most {MAX_SHARDS} are read", names.len())));
    }
    let mut shards = Shards { files: Vec::new(), tensors: HashMap::new() };
    for name in names {
        // A shard is a plain file of this folder; an index must not reach outside.
        if Path::new(&name).components().count() != 1 || name.starts_with('.') {
            return Err(layout(format!("the index names shard {name:?}, which is no plain file name")));
        }
        add_file(&mut shards, folder.join(&name))?;
    }
    if !shards.tensors.contains_key("output.weight") {
        // Some tied models leave the flag out.
        config.tied = true;
    }
    Ok((shards, config))
}

fn add_file(shards: &mut Shards, path: PathBuf) -> Result<(), FileError> {
    let mapping = Mapping::open(&path).map_err(|source| FileError::Io { path: path.clone(), source })?;
    let refused = |problem: String| FileError::Safetensors { path: path.clone(), problem };
    if mapping.starts_with(LFS_POINTER_PREFIX) {
        return Err(refused(
            "the file is a git lfs pointer, not the weights: run `git lfs pull` or download the file itself".to_owned(),
        ));
    }
    let (header_len, metadata) =
        SafeTensors::read_metadata(&mapping).map_err(|error| refused(format!("not a valid safetensors file: {error}")))?;
    let data_start = header_len + size_of::<u64>();
    for (name, info) in metadata.tensors() {
        let Some(canonical) = canonical_name(&name) else {
            tracing::debug!(tensor = %name, "not part of the forward pass");
            continue;
        };
        let ty = match info.dtype {
            Dtype::F32 => TensorType::F32,
            Dtype::F16 => TensorType::F16,
            Dtype::BF16 => TensorType::Bf16,
            other => return Err(refused(format!("tensor {name} has type {other:?}, supported are F32, F16, BF16"))),
        };
        let (rows, cols) = match info.shape[..] {
            [cols] => (1, cols),
            [rows, cols] => (rows, cols),
            _ => return Err(refused(format!("tensor {name} has shape {:?}, expected one or two dimensions", info.shape))),
        };
        let (start, end) = info.data_offsets;
        let (start, end) = (data_start + start, data_start + end);
        let entry = Entry { file: shards.files.len(), ty, rows, cols, start, end };
        if shards.tensors.insert(canonical, entry).is_some() {
            return Err(refused(format!("tensor {name} is also in another shard")));
        }
    }
    shards.files.push((path, mapping));
    Ok(())
}

/// The canonical name of a Hugging Face tensor of the `llama` and `qwen2` families.
fn canonical_name(name: &str) -> Option<String> {
    match name {
        "model.embed_tokens.weight" => return Some("token_embd.weight".to_owned()),
        "lm_head.weight" => return Some("output.weight".to_owned()),
        "model.norm.weight" => return Some("output_norm.weight".to_owned()),
        _ => {}
    }
    let (layer, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
    let layer: usize = layer.parse().ok()?;
    let (module, suffix) = rest.rsplit_once('.')?;
    let module = match module {
        "input_layernorm" => "attn_norm",
        "post_attention_layernorm" => "ffn_norm",
        "self_attn.q_proj" => "attn_q",
        "self_attn.k_proj" => "attn_k",
        "self_attn.v_proj" => "attn_v",
        "self_attn.o_proj" => "attn_output",
        "mlp.gate_proj" => "ffn_gate",
        "mlp.up_proj" => "ffn_up",
        "mlp.down_proj" => "ffn_down",
        _ => return None,
    };
    matches!(suffix, "weight" | "bias").then(|| format!("blk.{layer}.{module}.{suffix}"))
}
