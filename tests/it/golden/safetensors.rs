//! The same model as a GGUF file and as a safetensors folder computes the same.
//!
//! Qwen2 stores its weights alike in both, so every bit must be equal. Llama's query and key rows are permuted in GGUF for interleaved rope:
//! the folder has them unpermuted for half-split rope, the products sum in another order, and log-probabilities agree to rounding.

use super::rig::{Bench, Output, Scene, Wish};
use kvasir_core::{Sampling, Stop};
use kvasir_kernels::Isa;
use kvasir_model::synth::TinyModel;
use kvasir_model::{Arch, ModelFile, required_tensors};
use safetensors::tensor::{Dtype, TensorView, serialize};
use serde_json::json;
use std::fs;
use std::path::Path;

/// Canonical module names and those of Hugging Face.
const MODULES: [(&str, &str); 9] = [
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
            let parts: Vec<&str> = canonical.split('.').collect();
            let module = MODULES.iter().find(|(ours, _)| *ours == parts[2]).unwrap().1;
            format!("model.layers.{}.{module}.{}", parts[1], parts[3])
        }
    }
}

/// Rows in the order of half-split rope: row `2 i + p` of a head becomes row `p · dim / 2 + i`.
fn unpermuted(bytes: &[u8], rows: usize, row_bytes: usize, head_dim: usize) -> Vec<u8> {
    let half = head_dim / 2;
    let source = |row: usize| {
        let (head, within) = (row / head_dim, row % head_dim);
        head * head_dim + 2 * (within % half) + within / half
    };
    (0..rows).flat_map(|row| bytes[source(row) * row_bytes..][..row_bytes].to_vec()).collect()
}

fn write_folder(file: &ModelFile, dir: &Path) {
    let config = file.config();
    let artifacts = file.artifacts().unwrap();
    let json = json!({
        "model_type": config.arch.name(), "num_hidden_layers": config.layers, "hidden_size": config.hidden,
        "intermediate_size": config.ffn, "num_attention_heads": config.heads, "num_key_value_heads": config.kv_heads,
        "vocab_size": config.vocab, "max_position_embeddings": config.context_len, "rms_norm_eps": config.rms_eps,
        "rope_theta": config.rope.base, "tie_word_embeddings": config.tied, "bos_token_id": 0, "eos_token_id": 1
    });
    fs::write(dir.join("config.json"), json.to_string()).unwrap();
    fs::write(dir.join("tokenizer.json"), &artifacts.tokenizer_json).unwrap();
    let tokenizer = json!({"eos_token": "<|im_end|>", "chat_template": artifacts.chat_template});
    fs::write(dir.join("tokenizer_config.json"), tokenizer.to_string()).unwrap();
    let stored: Vec<(String, Vec<usize>, Vec<u8>)> = required_tensors(config)
        .into_iter()
        .filter(|(name, ..)| !(config.tied && name == "output.weight"))
        .map(|(name, rows, cols)| {
            let view = file.tensor(&name).unwrap();
            let flat = name.contains("norm") || name.ends_with("bias");
            let permuted = config.arch == Arch::Llama && (name.contains("attn_q") || name.contains("attn_k"));
            let bytes = if permuted { unpermuted(view.bytes, rows, cols * 4, config.head_dim) } else { view.bytes.to_vec() };
            (hf_name(&name), if flat { vec![cols] } else { vec![rows, cols] }, bytes)
        })
        .collect();
    let views =
        stored.iter().map(|(name, shape, bytes)| (name.clone(), TensorView::new(Dtype::F32, shape.clone(), bytes).unwrap()));
    fs::write(dir.join("model.safetensors"), serialize(views, None).unwrap()).unwrap();
}

/// (from the GGUF file, from the folder)
fn outputs(arch: Arch) -> (Output, Output) {
    let tiny = TinyModel { arch, tied: arch == Arch::Llama, ..TinyModel::default() };
    let gguf = ModelFile::from_gguf_bytes("tiny.gguf", tiny.to_gguf().unwrap()).unwrap();
    let dir = tempfile::tempdir().unwrap();
    write_folder(&gguf, dir.path());
    let folder = ModelFile::open(dir.path()).unwrap();
    let wish = Wish {
        sampling: Sampling { temperature: 0.0, logprobs: Some(2), ..Sampling::default() },
        stop: Stop { max_tokens: 12, ignore_eos: true, ..Stop::default() },
        grammar: None,
    };
    let prompt: Vec<u32> = (0..70).map(|i| (i * i * 13 + i * 5) % 250).collect();
    let scene = Scene { prompt, wish: wish.clone(), relative: Vec::new(), neighbours: Vec::new(), neighbours_wish: wish };
    let run = |file: &ModelFile| Bench::new(file).run_solo(&scene, Isa::detect());
    (run(&gguf), run(&folder))
}

#[test]
fn a_qwen2_folder_gives_the_bits_of_its_gguf_file() {
    let (gguf, folder) = outputs(Arch::Qwen2);
    assert_eq!(gguf, folder);
}

#[test]
fn a_llama_folder_agrees_with_its_permuted_gguf_file() {
    let (gguf, folder) = outputs(Arch::Llama);
    let (gguf, folder) = (&gguf.choices[0], &folder.choices[0]);
    assert_eq!(gguf.ids, folder.ids);
    for ((a, _), (b, _)) in gguf.bits.iter().zip(&folder.bits) {
        let (a, b) = (f32::from_bits(*a), f32::from_bits(*b));
        assert!((a - b).abs() < 1e-3, "{a} and {b}");
    }
}
