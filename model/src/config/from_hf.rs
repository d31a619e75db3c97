//! Configuration out of a Hugging Face `config.json`. Called by [`super::ModelConfig::from_hf_json`].

use serde::Deserialize;

use super::{
    Arch, ConfigError, MAX_CONTEXT, MAX_HEADS, MAX_LAYERS, MAX_VOCAB, MAX_WIDTH, ModelConfig, RopeConfig, RopeScaling, RopeStyle,
    bounded, check_heads, positive,
};

/// The keys that matter; all others describe training or the Python classes.
#[derive(Deserialize)]
struct HfConfig {
    model_type: String,
    num_hidden_layers: u64,
    hidden_size: u64,
    intermediate_size: u64,
    num_attention_heads: u64,
    num_key_value_heads: Option<u64>,
    head_dim: Option<u64>,
    vocab_size: u64,
    max_position_embeddings: u64,
    rms_norm_eps: f64,
    rope_theta: Option<f64>,
    rope_scaling: Option<HfRope>,
    rope_parameters: Option<HfRope>,
    tie_word_embeddings: Option<bool>,
    attention_bias: Option<bool>,
    mlp_bias: Option<bool>,
    use_sliding_window: Option<bool>,
    hidden_act: Option<String>,
}

#[derive(Deserialize)]
struct HfRope {
    rope_type: Option<String>,
    #[serde(rename = "type")]
    legacy_type: Option<String>,
    rope_theta: Option<f64>,
    factor: Option<f64>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    original_max_position_embeddings: Option<f64>,
}

pub(super) fn read(json: &[u8]) -> Result<ModelConfig, ConfigError> {
    let hf: HfConfig = serde_json::from_slice(json)?;
    let arch = Arch::from_name(&hf.model_type).ok_or_else(|| ConfigError::Unsupported {
        key: "model_type".to_owned(),
        value: hf.model_type.clone(),
        supported: "llama, qwen2",
    })?;
    refuse_features(&hf, arch)?;
    let hidden = bounded("hidden_size", hf.hidden_size, MAX_WIDTH)?;
    let heads = bounded("num_attention_heads", hf.num_attention_heads, MAX_HEADS)?;
    let kv_heads = bounded("num_key_value_heads", hf.num_key_value_heads.unwrap_or(hf.num_attention_heads), MAX_HEADS)?;
    let head_dim = match hf.head_dim {
        Some(head_dim) => bounded("head_dim", head_dim, MAX_WIDTH)?,
        None if hidden.is_multiple_of(heads) => hidden / heads,
        None => {
            return Err(ConfigError::Value {
                key: "num_attention_heads".to_owned(),
                value: heads.to_string(),
                expected: format!("a divisor of hidden_size {hidden}"),
            });
        }
    };
    let config = ModelConfig {
        arch,
        layers: bounded("num_hidden_layers", hf.num_hidden_layers, MAX_LAYERS)?,
        hidden,
        ffn: bounded("intermediate_size", hf.intermediate_size, MAX_WIDTH)?,
        heads,
        kv_heads,
        head_dim,
        vocab: bounded("vocab_size", hf.vocab_size, MAX_VOCAB)?,
        context_len: bounded("max_position_embeddings", hf.max_position_embeddings, MAX_CONTEXT)?,
        rms_eps: positive("rms_norm_eps", hf.rms_norm_eps, 1.0)?,
        rope: rope(&hf, head_dim)?,
        tied: hf.tie_word_embeddings.unwrap_or(false),
        qkv_bias: arch == Arch::Qwen2,
    };
    check_heads(&config, |part| {
        match part {
            "kv_heads" => "num_key_value_heads",
            "head_dim" => "head_dim",
            _ => "rope_scaling",
        }
        .to_owned()
    })?;
    Ok(config)
}

fn refuse_features(hf: &HfConfig, arch: Arch) -> Result<(), ConfigError> {
    let refused = |key: &str, value: &str, supported| {
        Err(ConfigError::Unsupported { key: key.to_owned(), value: value.to_owned(), supported })
    };
    if arch == Arch::Llama && hf.attention_bias == Some(true) {
        return refused("attention_bias", "true", "false for llama");
    }
    if hf.mlp_bias == Some(true) {
        return refused("mlp_bias", "true", "false");
    }
    if hf.use_sliding_window == Some(true) {
        return refused("use_sliding_window", "true", "false");
    }
    match hf.hidden_act.as_deref() {
        None | Some("silu") => Ok(()),
        Some(other) => refused("hidden_act", other, "silu"),
    }
}

fn rope(hf: &HfConfig, head_dim: usize) -> Result<RopeConfig, ConfigError> {
    let details = hf.rope_scaling.as_ref().or(hf.rope_parameters.as_ref());
    let theta = hf.rope_theta.or_else(|| details.and_then(|rope| rope.rope_theta)).unwrap_or(10_000.0);
    let base = positive("rope_theta", theta, 1e12)?;
    let plain = RopeConfig { base, style: RopeStyle::HalfSplit, scaling: RopeScaling::None, freq_factors: None };
    let Some(rope) = details else { return Ok(plain) };
    let kind = rope.rope_type.as_deref().or(rope.legacy_type.as_deref()).unwrap_or("default");
    match kind {
        "default" | "none" => Ok(plain),
        "linear" => {
            let factor = positive("rope_scaling.factor", rope.factor.unwrap_or(f64::NAN), 1e6)?;
            Ok(RopeConfig { scaling: RopeScaling::Linear { factor }, ..plain })
        }
        "llama3" => Ok(RopeConfig { freq_factors: Some(llama3_factors(rope, theta, head_dim)?), ..plain }),
        other => Err(ConfigError::Unsupported {
            key: "rope_scaling.rope_type".to_owned(),
            value: other.to_owned(),
            supported: "default, linear, llama3",
        }),
    }
}

/// Llama 3's divisors per frequency: 1 above `high`, `factor` below `low`, a smooth mix between; as converters write them into GGUF files.
fn llama3_factors(rope: &HfRope, theta: f64, head_dim: usize) -> Result<Vec<f32>, ConfigError> {
    let field =
        |name: &str, value: Option<f64>| positive(&format!("rope_scaling.{name}"), value.unwrap_or(f64::NAN), 1e9).map(f64::from);
    let factor = field("factor", rope.factor)?;
    let low = field("low_freq_factor", rope.low_freq_factor)?;
    let high = field("high_freq_factor", rope.high_freq_factor)?;
    let context = field("original_max_position_embeddings", rope.original_max_position_embeddings)?;
    if high <= low {
        return Err(ConfigError::Value {
            key: "rope_scaling.high_freq_factor".to_owned(),
            value: high.to_string(),
            expected: format!("more than low_freq_factor {low}"),
        });
    }
    let factors = (0..head_dim / 2).map(|pair| {
        let wavelength = 2.0 * std::f64::consts::PI * theta.powf(2.0 * pair as f64 / head_dim as f64);
        if wavelength < context / high {
            1.0
        } else if wavelength > context / low {
            factor as f32
        } else {
            let smooth = (context / wavelength - low) / (high - low);
            (1.0 / ((1.0 - smooth) / factor + smooth)) as f32
        }
    });
    Ok(factors.collect())
}
