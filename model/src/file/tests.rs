//! Opening models in both formats, shapes, digests, and folders that are not what they should be.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]

use std::collections::HashMap;
use std::fs;

use ::safetensors::tensor::{Dtype, TensorView as StView, serialize};
use serde_json::json;

use super::*;
use crate::synth::{TinyModel, WeightTypes};
use crate::tensor::TensorType;

/// Names of the two formats, as the table in the module doc has them.
const PAIRS: [(&str, &str); 9] = [
    ("attn_norm", "input_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];

fn hf_name(canonical: &str) -> String {
    match canonical {
        "token_embd.weight" => "model.embed_tokens.weight".to_owned(),
        "output_norm.weight" => "model.norm.weight".to_owned(),
        "output.weight" => "lm_head.weight".to_owned(),
        _ => {
            let mut parts = canonical.split('.');
            let (_, layer, module, suffix) = (parts.next(), parts.next().unwrap(), parts.next().unwrap(), parts.next().unwrap());
            let hf = PAIRS.iter().find(|(ours, _)| *ours == module).unwrap().1;
            format!("model.layers.{layer}.{hf}.{suffix}")
        }
    }
}

fn tensors_of(file: &ModelFile) -> Vec<(String, Vec<usize>, Vec<u8>)> {
    let names = required_tensors(file.config()).into_iter().filter(|(name, ..)| !(file.config().tied && name == "output.weight"));
    names
        .map(|(name, rows, cols)| {
            let shape = if name.contains("norm") || name.ends_with("bias") { vec![cols] } else { vec![rows, cols] };
            (hf_name(&name), shape, file.tensor(&name).unwrap().bytes.to_vec())
        })
        .collect()
}

fn write_shard(path: &Path, tensors: &[(String, Vec<usize>, Vec<u8>)]) {
    let views = tensors.iter().map(|(name, shape, bytes)| (name.clone(), StView::new(Dtype::F32, shape.clone(), bytes).unwrap()));
    fs::write(path, serialize(views, None).unwrap()).unwrap();
}

/// A folder with the weights of a tiny model, in one or two shards.
fn folder(model: &TinyModel, shards: usize) -> (tempfile::TempDir, ModelFile) {
    let file = ModelFile::from_gguf_bytes("tiny.gguf", model.to_gguf().unwrap()).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let config = json!({
        "model_type": model.arch.name(), "num_hidden_layers": model.layers, "hidden_size": model.hidden, "intermediate_size": model.ffn,
        "num_attention_heads": model.heads, "num_key_value_heads": model.kv_heads, "vocab_size": model.vocab,
        "max_position_embeddings": model.context_len, "rms_norm_eps": 1e-5, "tie_word_embeddings": model.tied,
        "bos_token_id": 0, "eos_token_id": 1
    });
    let artifacts = file.artifacts().unwrap();
    fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    fs::write(dir.path().join("tokenizer.json"), &artifacts.tokenizer_json).unwrap();
    let tokenizer_config =
        json!({"bos_token": "<s>", "eos_token": {"content": "<|im_end|>"}, "chat_template": artifacts.chat_template});
    fs::write(dir.path().join("tokenizer_config.json"), tokenizer_config.to_string()).unwrap();
    let tensors = tensors_of(&file);
    if shards == 1 {
        write_shard(&dir.path().join("model.safetensors"), &tensors);
    } else {
        let mut map = HashMap::new();
        for (index, part) in tensors.chunks(tensors.len().div_ceil(shards)).enumerate() {
            let name = format!("model-{index}.safetensors");
            write_shard(&dir.path().join(&name), part);
            map.extend(part.iter().map(|(tensor, ..)| (tensor.clone(), name.clone())));
        }
        fs::write(dir.path().join("model.safetensors.index.json"), json!({"weight_map": map}).to_string()).unwrap();
    }
    (dir, file)
}

fn refusal(dir: &tempfile::TempDir) -> String {
    let error = ModelFile::open(dir.path()).expect_err("the folder is broken");
    error.to_string()
}

#[test]
fn a_folder_answers_the_same_names_with_the_same_bytes() {
    for shards in [1, 2] {
        for arch in [crate::Arch::Llama, crate::Arch::Qwen2] {
            for tied in [false, true] {
                let model = TinyModel { arch, tied, ..TinyModel::default() };
                let (dir, gguf) = folder(&model, shards);
                let file = ModelFile::open(dir.path()).unwrap();
                assert_eq!(file.config().tied, tied);
                for (name, ..) in required_tensors(file.config()) {
                    let (ours, theirs) = (file.tensor(&name).unwrap(), gguf.tensor(&name).unwrap());
                    assert_eq!(
                        (ours.ty, ours.rows, ours.cols, ours.bytes),
                        (theirs.ty, theirs.rows, theirs.cols, theirs.bytes),
                        "{name}"
                    );
                }
            }
        }
    }
}

#[test]
fn a_folder_has_the_same_text_as_the_gguf_file() {
    let (dir, gguf) = folder(&TinyModel::default(), 1);
    let (here, there) = (ModelFile::open(dir.path()).unwrap().text().unwrap(), gguf.text().unwrap());
    assert_eq!(here.tokenizer_digest(), there.tokenizer_digest());
    assert_eq!(here.settings().bos, there.settings().bos);
    assert_eq!(here.settings().eos, there.settings().eos);
    let messages = [json!({"role": "user", "content": "hello <|im_end|>"})];
    let input = crate::ChatInput { messages: &messages, tools: None, add_generation_prompt: true, extra: None };
    assert_eq!(here.encode_chat(&input, None).unwrap(), there.encode_chat(&input, None).unwrap());
    // Ids of config.json, the named end token and the spelled ones.
    assert!(here.stop_ids().contains(&1) && here.stop_ids().contains(&here.settings().eos.unwrap()));
}

#[test]
fn missing_and_misshapen_tensors_are_refused_by_name() {
    let mut writer = TinyModel::default().writer().unwrap();
    writer.remove_tensor("blk.1.ffn_up.weight");
    let error = ModelFile::from_gguf_bytes("tiny.gguf", writer.finish()).unwrap_err();
    assert_eq!(error.to_string(), "tiny.gguf: tensor blk.1.ffn_up.weight is missing");
    writer.tensor("blk.1.ffn_up.weight", TensorType::F32, &[64, 127], vec![0; 64 * 127 * 4]);
    let error = ModelFile::from_gguf_bytes("tiny.gguf", writer.finish()).unwrap_err();
    assert_eq!(error.to_string(), "tiny.gguf: tensor blk.1.ffn_up.weight is 127 x 64, expected 128 x 64");
    assert_eq!(error.reason(), Reason::ModelFile);
}

#[test]
fn folders_that_lack_or_fake_files_are_refused_by_name() {
    let (dir, _) = folder(&TinyModel::default(), 1);
    let weights = dir.path().join("model.safetensors");
    let good = fs::read(&weights).unwrap();
    // R38: the first eight bytes of a pointer text would be a header length near 2.3e18.
    fs::write(&weights, "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n").unwrap();
    assert!(refusal(&dir).contains("git lfs pointer"));
    fs::write(&weights, &good[..good.len() - 1]).unwrap();
    assert!(refusal(&dir).contains("not a valid safetensors file"));
    fs::write(&weights, [&u64::MAX.to_le_bytes()[..], &good[8..]].concat()).unwrap();
    assert!(refusal(&dir).contains("not a valid safetensors file"));
    fs::write(&weights, []).unwrap();
    assert!(refusal(&dir).contains("empty (0 bytes)"));
    fs::remove_file(&weights).unwrap();
    assert!(refusal(&dir).contains("model.safetensors"));
    fs::remove_file(dir.path().join("config.json")).unwrap();
    assert!(refusal(&dir).contains("config.json is missing"));
}

#[test]
fn an_index_cannot_reach_outside_its_folder() {
    let (dir, _) = folder(&TinyModel::default(), 1);
    for name in ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", ""] {
        let index = json!({"weight_map": {"model.norm.weight": name}});
        fs::write(dir.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
        assert!(refusal(&dir).contains("no plain file name"), "{name}");
    }
}

#[test]
fn a_path_that_is_not_there_is_not_found() {
    let error = ModelFile::open(Path::new("/nowhere/model.gguf")).unwrap_err();
    assert_eq!(error.reason(), Reason::ModelNotFound);
}

#[test]
fn the_digest_covers_name_and_content_and_is_remembered_until_the_file_changes() {
    let dir = tempfile::tempdir().unwrap();
    let cache = DigestCache::new(dir.path().join("digests"));
    let write = |name: &str, seed| {
        let path = dir.path().join(name);
        fs::write(
            &path,
            TinyModel { seed, types: WeightTypes::all(TensorType::Q8_0), ..TinyModel::default() }.to_gguf().unwrap(),
        )
        .unwrap();
        path
    };
    let open = |path: &Path| ModelFile::open_with(path, Some(cache.clone())).unwrap().weights_digest();
    let path = write("a.gguf", 1);
    let first = open(&path);
    let sha = sha256(&fs::read(&path).unwrap());
    assert_eq!(first, kvasir_core::weights_digest([("a.gguf", sha)]));
    assert_eq!(fs::read_dir(dir.path().join("digests")).unwrap().count(), 1);

    // A remembered digest is used: falsify it and see it come back.
    let entry = fs::read_dir(dir.path().join("digests")).unwrap().next().unwrap().unwrap().path();
    let text = fs::read_to_string(&entry).unwrap();
    let (_, state) = text.split_once('\n').unwrap();
    fs::write(&entry, format!("{}\n{state}", "0".repeat(64))).unwrap();
    assert_eq!(open(&path), kvasir_core::weights_digest([("a.gguf", Digest::new([0; 32]))]));

    // Replaced by a file of the same length: read again.
    fs::remove_file(&path).unwrap();
    let other = open(&write("a.gguf", 2));
    let sha = sha256(&fs::read(&path).unwrap());
    assert_eq!(other, kvasir_core::weights_digest([("a.gguf", sha)]));
    assert_ne!(other, first);
    assert_eq!(open(&write("b.gguf", 2)), kvasir_core::weights_digest([("b.gguf", sha)]));
}
