//! Configuration out of GGUF keys. Called by [`super::ModelConfig::from_gguf`].

use super::{
    Arch, ConfigError, MAX_CONTEXT, MAX_HEADS, MAX_LAYERS, MAX_VOCAB, MAX_WIDTH, ModelConfig, RopeConfig, RopeScaling, RopeStyle,
    bounded, check_heads, positive,
};
use crate::gguf::Gguf;
use crate::tensor::TensorType;

const ROPE_FACTORS_TENSOR: &str = "rope_freqs.weight";

pub(super) fn read(gguf: &Gguf) -> Result<ModelConfig, ConfigError> {
    let name = gguf
        .string("general.architecture")?
        .ok_or_else(|| ConfigError::Missing { key: "general.architecture".to_owned(), expected: "llama or qwen2" })?;
    let arch = Arch::from_name(name).ok_or_else(|| ConfigError::Unsupported {
        key: "general.architecture".to_owned(),
        value: name.to_owned(),
        supported: "llama, qwen2",
    })?;
    let keys = Keys { gguf, prefix: arch.name() };
    keys.refuse_above("expert_count", 0, "dense models (0 experts)")?;
    keys.refuse_above("attention.sliding_window", 0, "full attention (no window)")?;

    let hidden = keys.required("embedding_length", MAX_WIDTH)?;
    let heads = keys.required("attention.head_count", MAX_HEADS)?;
    let kv_heads = keys.optional("attention.head_count_kv", MAX_HEADS)?.unwrap_or(heads);
    let head_dim = match keys.optional("attention.key_length", MAX_WIDTH)? {
        Some(head_dim) => head_dim,
        None if hidden.is_multiple_of(heads) => hidden / heads,
        None => {
            return Err(ConfigError::Value {
                key: keys.name("attention.head_count"),
                value: heads.to_string(),
                expected: format!("a divisor of embedding_length {hidden}"),
            });
        }
    };
    keys.must_equal("attention.value_length", head_dim, "equal key and value widths")?;
    keys.must_equal("rope.dimension_count", head_dim, "a rope over the whole head")?;
    let vocab = match keys.optional("vocab_size", MAX_VOCAB)? {
        Some(vocab) => vocab,
        None => {
            bounded("tokenizer.ggml.tokens", gguf.array("tokenizer.ggml.tokens", "an array of strings")?.len as u64, MAX_VOCAB)?
        }
    };
    let config = ModelConfig {
        arch,
        layers: keys.required("block_count", MAX_LAYERS)?,
        hidden,
        ffn: keys.required("feed_forward_length", MAX_WIDTH)?,
        heads,
        kv_heads,
        head_dim,
        vocab,
        context_len: keys.required("context_length", MAX_CONTEXT)?,
        rms_eps: keys.epsilon()?,
        rope: keys.rope(arch)?,
        tied: gguf.shape("output.weight").is_none(),
        qkv_bias: gguf.shape("blk.0.attn_q.bias").is_some(),
    };
    check_heads(&config, |part| {
        keys.name(match part {
            "kv_heads" => "attention.head_count_kv",
            "head_dim" => "attention.key_length",
            _ => return ROPE_FACTORS_TENSOR.to_owned(),
        })
    })?;
    Ok(config)
}

struct Keys<'a> {
    gguf: &'a Gguf,
    prefix: &'static str,
}

impl Keys<'_> {
    fn name(&self, key: &str) -> String {
        format!("{}.{key}", self.prefix)
    }

    fn optional(&self, key: &str, limit: u64) -> Result<Option<usize>, ConfigError> {
        let name = self.name(key);
        self.gguf.unsigned(&name)?.map(|value| bounded(&name, value, limit)).transpose()
    }

    fn required(&self, key: &str, limit: u64) -> Result<usize, ConfigError> {
        self.optional(key, limit)?.ok_or_else(|| ConfigError::Missing { key: self.name(key), expected: "a positive integer" })
    }

    fn refuse_above(&self, key: &str, limit: u64, supported: &'static str) -> Result<(), ConfigError> {
        let name = self.name(key);
        match self.gguf.unsigned(&name)? {
            Some(value) if value > limit => Err(ConfigError::Unsupported { key: name, value: value.to_string(), supported }),
            Some(_) | None => Ok(()),
        }
    }

    fn must_equal(&self, key: &str, wanted: usize, supported: &'static str) -> Result<(), ConfigError> {
        let name = self.name(key);
        match self.gguf.unsigned(&name)? {
            Some(value) if value != wanted as u64 => {
                Err(ConfigError::Unsupported { key: name, value: value.to_string(), supported })
            }
            Some(_) | None => Ok(()),
        }
    }

    fn epsilon(&self) -> Result<f32, ConfigError> {
        let key = self.name("attention.layer_norm_rms_epsilon");
        let value = self.gguf.float(&key)?.ok_or_else(|| ConfigError::Missing { key: key.clone(), expected: "a small float" })?;
        positive(&key, value, 1.0)
    }

    fn rope(&self, arch: Arch) -> Result<RopeConfig, ConfigError> {
        let key = self.name("rope.freq_base");
        let base = positive(&key, self.gguf.float(&key)?.unwrap_or(10_000.0), 1e12)?;
        let style = match arch {
            Arch::Llama => RopeStyle::Interleaved,
            Arch::Qwen2 => RopeStyle::HalfSplit,
        };
        Ok(RopeConfig { base, style, scaling: self.scaling()?, freq_factors: self.freq_factors()? })
    }

    fn scaling(&self) -> Result<RopeScaling, ConfigError> {
        let key = self.name("rope.scaling.type");
        match self.gguf.string(&key)? {
            None | Some("none") => {}
            Some("linear") => {
                let factor_key = self.name("rope.scaling.factor");
                let factor = self.gguf.float(&factor_key)?.unwrap_or(1.0);
                return Ok(RopeScaling::Linear { factor: positive(&factor_key, factor, 1e6)? });
            }
            Some(other) => return Err(ConfigError::Unsupported { key, value: other.to_owned(), supported: "none, linear" }),
        }
        // Files of before the `scaling.type` key say only how much.
        let legacy = self.name("rope.scale_linear");
        match self.gguf.float(&legacy)? {
            Some(factor) if factor != 1.0 => Ok(RopeScaling::Linear { factor: positive(&legacy, factor, 1e6)? }),
            Some(_) | None => Ok(RopeScaling::None),
        }
    }

    fn freq_factors(&self) -> Result<Option<Vec<f32>>, ConfigError> {
        if self.gguf.shape(ROPE_FACTORS_TENSOR).is_none() {
            return Ok(None);
        }
        match self.gguf.tensor(ROPE_FACTORS_TENSOR) {
            Some(view) if view.ty == TensorType::F32 && view.rows == 1 && view.cols as u64 <= MAX_WIDTH => {
                let (raw, _) = view.bytes.as_chunks::<4>();
                Ok(Some(raw.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()))
            }
            _ => Err(ConfigError::Unsupported {
                key: ROPE_FACTORS_TENSOR.to_owned(),
                value: "of another type or shape".to_owned(),
                supported: "one row of F32",
            }),
        }
    }
}
