//! Configurations from both formats, and what is refused.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]

use std::sync::Arc;

use serde_json::json;

use super::*;
use crate::mmap::Mapping;
use crate::synth::{GgufWriter, TinyModel};
use crate::tensor::TensorType;

fn from_writer(change: impl FnOnce(&mut GgufWriter)) -> Result<ModelConfig, ConfigError> {
    let mut writer = TinyModel::default().writer().unwrap();
    change(&mut writer);
    ModelConfig::from_gguf(&Gguf::parse(Arc::new(Mapping::from_vec(writer.finish()))).unwrap())
}

fn refusal(change: impl FnOnce(&mut GgufWriter)) -> String {
    from_writer(change).expect_err("the configuration is bad").to_string()
}

fn hf() -> serde_json::Value {
    json!({
        "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 320, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": true, "hidden_act": "silu"
    })
}

fn from_hf(change: impl FnOnce(&mut serde_json::Value)) -> Result<ModelConfig, ConfigError> {
    let mut json = hf();
    change(&mut json);
    ModelConfig::from_hf_json(json.to_string().as_bytes())
}

#[test]
fn both_formats_give_the_same_shape_but_their_own_rope_pairs() {
    let gguf = from_writer(|_| {}).unwrap();
    let folder = from_hf(|_| {}).unwrap();
    assert_eq!(gguf.rope.style, RopeStyle::Interleaved);
    assert_eq!(folder.rope.style, RopeStyle::HalfSplit);
    let same_rope = ModelConfig { rope: gguf.rope.clone(), ..folder.clone() };
    assert_eq!(gguf, same_rope);
    assert_eq!((gguf.q_width(), gguf.kv_width(), gguf.head_dim), (64, 32, 16));
}

#[test]
fn qwen2_pairs_halves_and_has_biases_in_both_formats() {
    let model = TinyModel { arch: Arch::Qwen2, ..TinyModel::default() };
    let gguf = Gguf::parse(Arc::new(Mapping::from_vec(model.to_gguf().unwrap()))).unwrap();
    let config = ModelConfig::from_gguf(&gguf).unwrap();
    let folder = from_hf(|json| json["model_type"] = json!("qwen2")).unwrap();
    for config in [config, folder] {
        assert_eq!((config.rope.style, config.qkv_bias), (RopeStyle::HalfSplit, true));
    }
}

#[test]
fn numbers_out_of_range_are_refused_by_key_and_value() {
    assert!(
        refusal(|file| file.u32("llama.attention.head_count", 0)).contains("llama.attention.head_count is 0, expected 1 to 4096")
    );
    assert!(
        refusal(|file| file.u32("llama.attention.head_count_kv", 3))
            .contains("head_count_kv is 3, expected a divisor of the 4 heads")
    );
    assert!(
        refusal(|file| file.u32("llama.attention.head_count", 5))
            .contains("head_count is 5, expected a divisor of embedding_length 64")
    );
    assert!(refusal(|file| file.u32("llama.block_count", 0)).contains("llama.block_count is 0"));
    assert!(refusal(|file| file.remove("llama.block_count")).contains("llama.block_count is missing"));
    assert!(refusal(|file| file.u32("llama.block_count", u32::MAX)).contains("llama.block_count is 4294967295"));
    assert!(refusal(|file| file.f32("llama.rope.freq_base", f32::NAN)).contains("llama.rope.freq_base is NaN"));
    assert!(refusal(|file| file.f32("llama.attention.layer_norm_rms_epsilon", 0.0)).contains("rms_epsilon is 0"));
    assert!(refusal(|file| file.string("llama.block_count", "2")).contains("llama.block_count is string, expected an integer"));
    assert!(
        refusal(|file| file.u32("llama.attention.key_length", 15)).contains("llama.attention.key_length is 15, expected an even")
    );
}

#[test]
fn what_cannot_be_computed_is_refused_by_name() {
    assert!(
        refusal(|file| file.string("general.architecture", "gemma3"))
            .contains("general.architecture is gemma3, which is not supported")
    );
    assert!(refusal(|file| file.u32("llama.expert_count", 8)).contains("llama.expert_count is 8"));
    assert!(refusal(|file| file.string("llama.rope.scaling.type", "yarn")).contains("llama.rope.scaling.type is yarn"));
    assert!(refusal(|file| file.u32("llama.rope.dimension_count", 8)).contains("llama.rope.dimension_count is 8"));
    assert!(
        refusal(|file| file.tensor("rope_freqs.weight", TensorType::F32, &[3], vec![0; 12])).contains("rope_freqs.weight is 3")
    );
    assert!(
        from_hf(|json| json["rope_scaling"] = json!({"rope_type": "yarn", "factor": 2.0}))
            .unwrap_err()
            .to_string()
            .contains("yarn")
    );
    assert!(from_hf(|json| json["attention_bias"] = json!(true)).unwrap_err().to_string().contains("attention_bias is true"));
    assert!(from_hf(|json| json["model_type"] = json!("mamba")).unwrap_err().to_string().contains("model_type is mamba"));
    assert!(from_hf(|json| json["num_attention_heads"] = json!(0)).unwrap_err().to_string().contains("num_attention_heads is 0"));
    assert!(from_hf(|json| json["num_attention_heads"] = json!(-1)).unwrap_err().to_string().contains("config.json"));
}

#[test]
fn stretched_positions_are_read() {
    let linear = from_writer(|file| {
        file.string("llama.rope.scaling.type", "linear");
        file.f32("llama.rope.scaling.factor", 4.0);
    });
    assert_eq!(linear.unwrap().rope.scaling, RopeScaling::Linear { factor: 4.0 });
    let factors: Vec<u8> = [1.0_f32; 8].iter().flat_map(|factor| factor.to_le_bytes()).collect();
    let with_factors = from_writer(|file| file.tensor("rope_freqs.weight", TensorType::F32, &[8], factors)).unwrap();
    assert_eq!(with_factors.rope.freq_factors, Some(vec![1.0; 8]));
}

#[test]
fn llama3_scaling_gives_the_known_factors() {
    // Llama 3.1: expected values from the formula of the reference implementation, computed in Python with doubles.
    let config = from_hf(|json| {
        json["rope_theta"] = json!(500000.0);
        json["head_dim"] = json!(128);
        json["rope_scaling"] = json!({
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192
        });
    });
    let factors = config.unwrap().rope.freq_factors.unwrap();
    assert_eq!(factors.len(), 64);
    assert_eq!((factors[0], factors[28], factors[63]), (1.0, 1.0, 8.0));
    let expected = LLAMA3_FACTORS;
    for (index, value) in expected {
        assert!((factors[index] - value).abs() < 1e-5 * value, "factor {index} is {}, expected {value}", factors[index]);
    }
}

const LLAMA3_FACTORS: [(usize, f32); 3] = [(29, 1.2074839), (31, 2.0263132), (34, 5.2573266)];

#[test]
fn every_field_changes_the_architecture_bytes() {
    let base = from_writer(|_| {}).unwrap();
    let rope = |change: fn(&mut RopeConfig)| {
        let mut config = base.clone();
        change(&mut config.rope);
        config
    };
    let others = [
        ModelConfig { arch: Arch::Qwen2, ..base.clone() },
        ModelConfig { layers: 3, ..base.clone() },
        ModelConfig { hidden: 65, ..base.clone() },
        ModelConfig { ffn: 65, ..base.clone() },
        ModelConfig { heads: 5, ..base.clone() },
        ModelConfig { kv_heads: 5, ..base.clone() },
        ModelConfig { head_dim: 5, ..base.clone() },
        ModelConfig { vocab: 5, ..base.clone() },
        ModelConfig { context_len: 5, ..base.clone() },
        ModelConfig { rms_eps: 0.5, ..base.clone() },
        ModelConfig { tied: false, ..base.clone() },
        ModelConfig { qkv_bias: true, ..base.clone() },
        rope(|rope| rope.base = 5.0),
        rope(|rope| rope.style = RopeStyle::HalfSplit),
        rope(|rope| rope.scaling = RopeScaling::Linear { factor: 2.0 }),
        rope(|rope| rope.freq_factors = Some(vec![1.0])),
    ];
    let mut all: Vec<Vec<u8>> = others.iter().map(ModelConfig::architecture_bytes).collect();
    all.push(base.architecture_bytes());
    all.sort();
    all.dedup();
    assert_eq!(all.len(), others.len() + 1);
}
