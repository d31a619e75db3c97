//! The shape of a model: what the forward pass needs to know, from either file format.
//!
//! Owns bounds and consistency of the numbers. Refuses to know where tensors lie. Called by [`crate::ModelFile`] and by the backends. Pure.
//!
//! Invariants
//! 1. `heads` is a multiple of `kv_heads`, `head_dim` is even, nothing is 0.
//! 2. A rope that this version cannot compute exactly is refused by name, never approximated.
//! 3. Query and key weights of `llama` in GGUF are stored permuted for interleaved pairs; in safetensors, and in `qwen2` everywhere, the pairs
//!    are the two halves of a head. [`RopeStyle`] says which one the weights at hand need.

mod from_gguf;
mod from_hf;
#[cfg(test)]
mod tests;

use kvasir_core::Reason;

use crate::gguf::{Gguf, GgufError};

/// Most layers of a model.
pub const MAX_LAYERS: u64 = 1_024;
/// Widest hidden or feed-forward layer, in elements.
pub const MAX_WIDTH: u64 = 1 << 20;
/// Most attention heads of a layer.
pub const MAX_HEADS: u64 = 4_096;
/// Largest vocabulary, in tokens.
pub const MAX_VOCAB: u64 = 1 << 24;
/// Longest context, in tokens.
pub const MAX_CONTEXT: u64 = 1 << 30;

/// Which family of forward pass.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Arch {
    /// Llama and its relatives, such as SmolLM2: no biases.
    Llama,
    /// Qwen2 and Qwen2.5: biases on query, key and value.
    Qwen2,
}

/// Which elements of a head form a rotated pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RopeStyle {
    /// Elements 2i and 2i + 1.
    Interleaved,
    /// Elements i and i + head_dim / 2.
    HalfSplit,
}

/// How positions are stretched.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum RopeScaling {
    /// Positions as they are.
    None,
    /// Positions divided by `factor`.
    Linear {
        /// At least 1.
        factor: f32,
    },
}

/// Rotary position embedding.
#[derive(Clone, PartialEq, Debug)]
pub struct RopeConfig {
    /// Base of the frequencies, such as 10,000.
    pub base: f32,
    /// Pairing of the stored weights.
    pub style: RopeStyle,
    /// Stretching of positions.
    pub scaling: RopeScaling,
    /// A divisor per frequency (head_dim / 2 of them), as Llama 3 uses.
    pub freq_factors: Option<Vec<f32>>,
}

/// The shape of a model. Widths in elements.
#[derive(Clone, PartialEq, Debug)]
pub struct ModelConfig {
    /// Family.
    pub arch: Arch,
    /// Transformer blocks.
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the feed-forward layer.
    pub ffn: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; `heads` is a multiple.
    pub kv_heads: usize,
    /// Width of one head; even.
    pub head_dim: usize,
    /// Rows of the embedding, including unused ones.
    pub vocab: usize,
    /// Longest sequence the model was made for, in tokens.
    pub context_len: usize,
    /// Added to the mean square in RMS norms.
    pub rms_eps: f32,
    /// Position embedding.
    pub rope: RopeConfig,
    /// The output projection is the embedding.
    pub tied: bool,
    /// Query, key and value have biases.
    pub qkv_bias: bool,
}

/// Why a configuration was refused. Names the key and the value.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The container refused a key.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// A value out of range or inconsistent with another.
    #[error("{key} is {value}, expected {expected}")]
    Value {
        /// The key.
        key: String,
        /// What the file says.
        value: String,
        /// What is allowed.
        expected: String,
    },
    /// A required key that is absent.
    #[error("{key} is missing, expected {expected}")]
    Missing {
        /// The key.
        key: String,
        /// What it should hold.
        expected: &'static str,
    },
    /// A feature that this version cannot compute.
    #[error("{key} is {value}, which is not supported; supported: {supported}")]
    Unsupported {
        /// The key.
        key: String,
        /// What the file says.
        value: String,
        /// What would be accepted.
        supported: &'static str,
    },
    /// `config.json` is not what it should be.
    #[error("config.json: {0}")]
    Json(#[from] serde_json::Error),
}

// === impl Arch ===

impl Arch {
    /// The format's spelling.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Qwen2 => "qwen2",
        }
    }

    fn from_name(name: &str) -> Option<Self> {
        [Self::Llama, Self::Qwen2].into_iter().find(|arch| arch.name() == name)
    }
}

// === impl ModelConfig ===

impl ModelConfig {
    /// Reads the configuration of a GGUF file.
    ///
    /// # Errors
    /// The key that is missing, of the wrong type, out of range or unsupported.
    pub fn from_gguf(gguf: &Gguf) -> Result<Self, ConfigError> {
        from_gguf::read(gguf)
    }

    /// Reads a Hugging Face `config.json`.
    ///
    /// # Errors
    /// The key that is missing, of the wrong type, out of range or unsupported.
    pub fn from_hf_json(json: &[u8]) -> Result<Self, ConfigError> {
        from_hf::read(json)
    }

    /// Width of all query heads together.
    pub const fn q_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Width of all key (or value) heads together.
    pub const fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Canonical bytes of architecture, rope and attention for the model identity: one `name=value` line per field, floats by their bits.
    pub fn architecture_bytes(&self) -> Vec<u8> {
        let style = match self.rope.style {
            RopeStyle::Interleaved => "interleaved",
            RopeStyle::HalfSplit => "half_split",
        };
        let scaling = match self.rope.scaling {
            RopeScaling::None => "none".to_owned(),
            RopeScaling::Linear { factor } => format!("linear:{:08x}", factor.to_bits()),
        };
        let factors = self.rope.freq_factors.as_ref().map_or_else(
            || "none".to_owned(),
            |factors| factors.iter().map(|factor| format!("{:08x}", factor.to_bits())).collect::<Vec<_>>().join(","),
        );
        format!(
            "arch={}\nlayers={}\nhidden={}\nffn={}\nheads={}\nkv_heads={}\nhead_dim={}\nvocab={}\ncontext_len={}\nrms_eps={:08x}\nrope_base={:08x}\n\
             rope_style={style}\nrope_scaling={scaling}\nrope_freq_factors={factors}\ntied={}\nqkv_bias={}\n",
            self.arch.name(),
            self.layers,
            self.hidden,
            self.ffn,
            self.heads,
            self.kv_heads,
            self.head_dim,
            self.vocab,
            self.context_len,
            self.rms_eps.to_bits(),
            self.rope.base.to_bits(),
            self.tied,
            self.qkv_bias,
        )
        .into_bytes()
    }
}

impl ConfigError {
    /// The public reason.
    pub const fn reason(&self) -> Reason {
        match self {
            Self::Gguf(error) => error.reason(),
            Self::Value { .. } | Self::Missing { .. } | Self::Unsupported { .. } | Self::Json(_) => Reason::ModelFile,
        }
    }
}

// === bounds shared by both formats ===

fn bounded(key: &str, value: u64, limit: u64) -> Result<usize, ConfigError> {
    if (1..=limit).contains(&value) {
        return Ok(value as usize);
    }
    Err(ConfigError::Value { key: key.to_owned(), value: value.to_string(), expected: format!("1 to {limit}") })
}

fn positive(key: &str, value: f64, below: f64) -> Result<f32, ConfigError> {
    if value.is_finite() && value > 0.0 && value < below && (value as f32) > 0.0 {
        return Ok(value as f32);
    }
    Err(ConfigError::Value {
        key: key.to_owned(),
        value: value.to_string(),
        expected: format!("more than 0 and less than {below}"),
    })
}

/// Checks what only several numbers together can violate; `key` names them in the format at hand.
fn check_heads(config: &ModelConfig, key: impl Fn(&str) -> String) -> Result<(), ConfigError> {
    let refused = |name: &str, value: usize, expected: String| {
        Err(ConfigError::Value { key: key(name), value: value.to_string(), expected })
    };
    if !config.heads.is_multiple_of(config.kv_heads) {
        return refused("kv_heads", config.kv_heads, format!("a divisor of the {} heads", config.heads));
    }
    if !config.head_dim.is_multiple_of(2) {
        return refused("head_dim", config.head_dim, "an even number".to_owned());
    }
    let half = config.head_dim / 2;
    match &config.rope.freq_factors {
        Some(factors) if factors.len() != half => refused("rope factors", factors.len(), format!("{half} factors, half a head")),
        Some(factors) if !factors.iter().all(|factor| factor.is_finite() && *factor > 0.0) => {
            refused("rope factors", factors.len(), "finite factors above 0".to_owned())
        }
        Some(_) | None => Ok(()),
    }
}
