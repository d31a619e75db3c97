//! Writes small GGUF files for tests and tools: random weights, a working tokenizer, a chat template.
//!
//! Owns a GGUF writer and [`TinyModel`]. Refuses to be a converter: weights are random blocks of the asked type, not quantised floats. Called
//! by tests of every crate that needs a model in milliseconds, and by `kvasir` tools. A model of a few layers takes about 1 ms.
//!
//! Invariants
//! 1. The same description gives the same bytes on every machine.
//! 2. Every written file opens with [`crate::ModelFile`]; hostile files are made by patching one.

mod blocks;
#[cfg(test)]
mod tests;
mod writer;

use crate::config::Arch;
use crate::tensor::TensorType;
use crate::tokenizer::byte_level_symbols;
pub use blocks::{Noise, random_rows};
pub use writer::GgufWriter;

/// Fewest vocabulary entries: 256 bytes, the merges, the added tokens.
pub const MIN_VOCAB: usize = 256 + MERGES.len() + ADDED.len();

/// Merges in rank order: enough for a few common words to be single tokens.
const MERGES: [(&str, &str); 24] = [
    ("Ġ", "t"),
    ("h", "e"),
    ("i", "n"),
    ("e", "r"),
    ("Ġt", "he"),
    ("a", "n"),
    ("o", "n"),
    ("r", "e"),
    ("Ġ", "a"),
    ("an", "d"),
    ("Ġ", "and"),
    ("in", "g"),
    ("Ġ", "s"),
    ("l", "l"),
    ("Ġ", "w"),
    ("o", "r"),
    ("or", "l"),
    ("Ġw", "orl"),
    ("Ġworl", "d"),
    ("he", "ll"),
    ("hell", "o"),
    ("Ġ", "Ġ"),
    ("u", "s"),
    ("us", "er"),
];
/// Added tokens with their GGUF token type: 3 control, 4 user-defined.
const ADDED: [(&str, i32); 7] = [
    ("<|endoftext|>", 3),
    ("<|im_start|>", 3),
    ("<|im_end|>", 3),
    ("<s>", 3),
    ("<tool_call>", 4),
    ("</tool_call>", 4),
    ("<|fim|>", 3),
];

/// The ChatML template that SmolLM2 and Qwen2 share in spirit.
pub const CHATML: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}\
                          {% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// Element type per class of tensor; norms and biases are always F32.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WeightTypes {
    /// Token embedding.
    pub embedding: TensorType,
    /// Query, key, value and attention output.
    pub attention: TensorType,
    /// Feed-forward layers.
    pub ffn: TensorType,
    /// Output projection of an untied model.
    pub output: TensorType,
}

/// A small model to be written. Widths in elements; a row must be whole blocks of its type.
#[derive(Clone, PartialEq, Debug)]
pub struct TinyModel {
    /// Family; `Qwen2` gets q/k/v biases.
    pub arch: Arch,
    /// Transformer blocks.
    pub layers: usize,
    /// Width of the residual stream, a multiple of `heads`.
    pub hidden: usize,
    /// Width of the feed-forward layer.
    pub ffn: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Vocabulary, at least [`MIN_VOCAB`]; the rest is unused tokens.
    pub vocab: usize,
    /// Context length in tokens.
    pub context_len: usize,
    /// Element types.
    pub types: WeightTypes,
    /// Seed of all weights.
    pub seed: u64,
    /// Leaves `output.weight` out.
    pub tied: bool,
    /// The chat template.
    pub chat_template: String,
}

/// Why a description cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum SynthError {
    /// The vocabulary is too small.
    #[error("vocab is {vocab}, at least {MIN_VOCAB} are needed for bytes, merges and added tokens")]
    Vocab {
        /// As described.
        vocab: usize,
    },
    /// A row is no whole number of blocks.
    #[error("tensor {tensor} has {cols} columns, which is no multiple of the block of {ty}")]
    Block {
        /// The tensor.
        tensor: String,
        /// Elements of a row.
        cols: usize,
        /// The type's name.
        ty: &'static str,
    },
    /// The number of heads is 0 or does not divide.
    #[error("{heads} heads and {kv_heads} kv heads do not fit a width of {hidden}")]
    Heads {
        /// Query heads.
        heads: usize,
        /// Key and value heads.
        kv_heads: usize,
        /// Width.
        hidden: usize,
    },
}

// === impl WeightTypes ===

impl WeightTypes {
    /// One type for everything.
    pub const fn all(ty: TensorType) -> Self {
        Self { embedding: ty, attention: ty, ffn: ty, output: ty }
    }
}

// === impl TinyModel ===

impl Default for TinyModel {
    /// Two layers of width 64 with F32 weights: 4 heads, 2 KV heads, 512 positions.
    fn default() -> Self {
        Self {
            arch: Arch::Llama,
            layers: 2,
            hidden: 64,
            ffn: 128,
            heads: 4,
            kv_heads: 2,
            vocab: 320,
            context_len: 512,
            types: WeightTypes::all(TensorType::F32),
            seed: 1,
            tied: true,
            chat_template: CHATML.to_owned(),
        }
    }
}

impl TinyModel {
    /// The bytes of a complete GGUF v3 file.
    ///
    /// # Errors
    /// What about the description is impossible.
    pub fn to_gguf(&self) -> Result<Vec<u8>, SynthError> {
        Ok(self.writer()?.finish())
    }

    /// The writer with all keys and tensors, so that a test can change some before finishing.
    ///
    /// # Errors
    /// What about the description is impossible.
    pub fn writer(&self) -> Result<GgufWriter, SynthError> {
        let (heads, kv_heads, hidden) = (self.heads, self.kv_heads, self.hidden);
        if heads == 0 || kv_heads == 0 || !hidden.is_multiple_of(heads) || !heads.is_multiple_of(kv_heads) {
            return Err(SynthError::Heads { heads, kv_heads, hidden });
        }
        if self.vocab < MIN_VOCAB {
            return Err(SynthError::Vocab { vocab: self.vocab });
        }
        let mut writer = GgufWriter::new();
        self.write_config(&mut writer);
        self.write_tokenizer(&mut writer);
        self.write_tensors(&mut writer)?;
        Ok(writer)
    }

    fn write_config(&self, writer: &mut GgufWriter) {
        let arch = self.arch.name();
        writer.string("general.architecture", arch);
        writer.string("general.name", "tiny");
        let mut number = |key: &str, value: usize| writer.u32(&format!("{arch}.{key}"), value as u32);
        number("block_count", self.layers);
        number("context_length", self.context_len);
        number("embedding_length", self.hidden);
        number("feed_forward_length", self.ffn);
        number("attention.head_count", self.heads);
        number("attention.head_count_kv", self.kv_heads);
        writer.f32(&format!("{arch}.attention.layer_norm_rms_epsilon"), 1e-5);
        writer.f32(&format!("{arch}.rope.freq_base"), 10_000.0);
    }

    fn write_tokenizer(&self, writer: &mut GgufWriter) {
        let mut tokens: Vec<String> = byte_level_symbols().iter().map(char::to_string).collect();
        tokens.extend(MERGES.iter().map(|(left, right)| format!("{left}{right}")));
        let mut types = vec![1; tokens.len()];
        let first_added = tokens.len();
        for (token, kind) in ADDED {
            tokens.push(token.to_owned());
            types.push(kind);
        }
        for unused in tokens.len()..self.vocab {
            tokens.push(format!("[UNUSED{unused}]"));
            types.push(5);
        }
        let merges: Vec<String> = MERGES.iter().map(|(left, right)| format!("{left} {right}")).collect();
        writer.string("tokenizer.ggml.model", "gpt2");
        writer.string(
            "tokenizer.ggml.pre",
            match self.arch {
                Arch::Llama => "smollm",
                Arch::Qwen2 => "qwen2",
            },
        );
        writer.strings("tokenizer.ggml.tokens", tokens.iter().map(String::as_str));
        writer.i32s("tokenizer.ggml.token_type", &types);
        writer.strings("tokenizer.ggml.merges", merges.iter().map(String::as_str));
        writer.u32("tokenizer.ggml.bos_token_id", (first_added + 3) as u32);
        writer.u32("tokenizer.ggml.eos_token_id", (first_added + 2) as u32);
        writer.bool("tokenizer.ggml.add_bos_token", false);
        writer.string("tokenizer.chat_template", &self.chat_template);
    }

    fn write_tensors(&self, writer: &mut GgufWriter) -> Result<(), SynthError> {
        let mut noise = Noise::new(self.seed);
        let kv = self.hidden / self.heads * self.kv_heads;
        let (hidden, ffn, types) = (self.hidden, self.ffn, self.types);
        let mut add = |name: String, ty: TensorType, rows: usize, cols: usize, gain: f32| {
            let bytes = random_rows(&mut noise, ty, rows, cols, gain / (cols as f32).sqrt())
                .ok_or_else(|| SynthError::Block { tensor: name.clone(), cols, ty: ty.name() })?;
            writer.tensor(&name, ty, &[cols as u64, rows as u64], bytes);
            Ok(())
        };
        // Logits with a spread of about 2.5, so that the likeliest token is clear but not certain.
        add("token_embd.weight".to_owned(), types.embedding, self.vocab, hidden, 2.5)?;
        if !self.tied {
            add("output.weight".to_owned(), types.output, self.vocab, hidden, 2.5)?;
        }
        for layer in 0..self.layers {
            let name = |part: &str| format!("blk.{layer}.{part}.weight");
            add(name("attn_q"), types.attention, hidden, hidden, 1.5)?;
            add(name("attn_k"), types.attention, kv, hidden, 1.5)?;
            add(name("attn_v"), types.attention, kv, hidden, 1.0)?;
            add(name("attn_output"), types.attention, hidden, hidden, 1.0)?;
            add(name("ffn_gate"), types.ffn, ffn, hidden, 1.0)?;
            add(name("ffn_up"), types.ffn, ffn, hidden, 1.0)?;
            add(name("ffn_down"), types.ffn, hidden, ffn, 1.0)?;
        }
        let mut vector = |name: String, len: usize, centre: f32| {
            let bytes = (0..len).flat_map(|_| (centre + 0.2 * noise.unit()).to_le_bytes()).collect();
            writer.tensor(&name, TensorType::F32, &[len as u64], bytes);
        };
        vector("output_norm.weight".to_owned(), hidden, 1.0);
        for layer in 0..self.layers {
            vector(format!("blk.{layer}.attn_norm.weight"), hidden, 1.0);
            vector(format!("blk.{layer}.ffn_norm.weight"), hidden, 1.0);
            if self.arch == Arch::Qwen2 {
                vector(format!("blk.{layer}.attn_q.bias"), hidden, 0.0);
                vector(format!("blk.{layer}.attn_k.bias"), kv, 0.0);
                vector(format!("blk.{layer}.attn_v.bias"), kv, 0.0);
            }
        }
        Ok(())
    }
}
