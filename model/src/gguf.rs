//! GGUF v2 and v3, little-endian: header, metadata, tensor directory.
//!
//! Owns the container format. Refuses to know what a key or tensor means: [`crate::config`] and [`crate::tokenizer`] do. Called by
//! [`crate::ModelFile`]. Parsing is one pass over the header (about 10 ms for a vocabulary of 150,000), without copying any array.
//!
//! Invariants
//! 1. No length, count or offset from the file is used before it is checked against the bytes that are really there; nothing is allocated
//!    from a claimed length.
//! 2. Every tensor of a parsed file lies inside it, aligned, not overlapping another, with a type and shape whose byte length is exact.
//! 3. Keys and tensor names are unique.
//!
//! Source of the layout: the GGUF specification in the ggml project.

mod cursor;
mod metadata;
mod tensors;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::Arc;

use kvasir_core::Reason;

use crate::mmap::Mapping;
use crate::tensor::{TensorView, ggml_type_name};
use cursor::Cursor;
pub use metadata::{ArrayView, Value, ValueType};
use tensors::TensorEntry;

/// Most metadata entries of a file; real files have about 40.
pub const MAX_KEYS: u64 = 65_536;
/// Most tensors of a file; a 100-layer model has about 1,200.
pub const MAX_TENSORS: u64 = 1 << 20;
/// Longest key or tensor name in bytes; the specification allows 65,535 for keys and 64 for tensors.
pub const MAX_NAME_BYTES: u64 = 65_535;
/// Alignment of tensor data when `general.alignment` is absent, in bytes.
pub const DEFAULT_ALIGNMENT: u64 = 32;
/// Largest accepted alignment in bytes.
pub const MAX_ALIGNMENT: u64 = 65_536;

/// Why a GGUF file was refused. Every variant names the field.
#[derive(Debug, thiserror::Error)]
pub enum GgufError {
    /// The file ends inside a field.
    #[error("gguf is cut off: {field} needs {need} bytes at offset {offset}, {have} are left")]
    Truncated {
        /// What was being read.
        field: String,
        /// Where in the file.
        offset: u64,
        /// Bytes wanted.
        need: u64,
        /// Bytes left.
        have: u64,
    },
    /// The first bytes are not `GGUF`.
    #[error("not a gguf file: magic is {found}, expected \"GGUF\"")]
    Magic {
        /// The bytes that are there, escaped.
        found: String,
    },
    /// A Git-LFS pointer text instead of the weights.
    #[error("the file is a git lfs pointer, not the model: run `git lfs pull` or download the file itself")]
    LfsPointer,
    /// Stored with the other byte order.
    #[error("gguf version field reads {found:#010x}: the file is big-endian, only little-endian files are supported")]
    BigEndian {
        /// The version as read.
        found: u32,
    },
    /// A version that is not 2 or 3.
    #[error("gguf version is {found}, supported are 2 and 3")]
    Version {
        /// The version as read.
        found: u32,
    },
    /// A count that the file cannot hold or that is over the limit.
    #[error("gguf {field} is {count}, at most {limit} are possible here")]
    Count {
        /// Which count.
        field: String,
        /// The claimed count.
        count: u64,
        /// The bound: the named limit, or what the remaining bytes can hold.
        limit: u64,
    },
    /// A string that is not UTF-8.
    #[error("gguf {field} is not valid utf-8")]
    Utf8 {
        /// Which string.
        field: String,
    },
    /// A type number that the format does not have.
    #[error("gguf {field} has value type {found}, known are 0 to 12")]
    ValueType {
        /// Which value.
        field: String,
        /// The number as read.
        found: u32,
    },
    /// An array of arrays.
    #[error("gguf {field} is an array of arrays, which no supported key is")]
    NestedArray {
        /// Which value.
        field: String,
    },
    /// A key or tensor name twice.
    #[error("gguf has {kind} \"{name}\" twice")]
    Duplicate {
        /// `key` or `tensor`.
        kind: &'static str,
        /// The name.
        name: String,
    },
    /// `general.alignment` that is unusable.
    #[error("gguf general.alignment is {found}, expected a power of two from 8 to {MAX_ALIGNMENT}")]
    Alignment {
        /// The value as read.
        found: String,
    },
    /// A required key that is absent.
    #[error("gguf key {key} is missing, expected {expected}")]
    Missing {
        /// The key.
        key: String,
        /// What it should hold.
        expected: &'static str,
    },
    /// A key of another type.
    #[error("gguf key {key} is {found}, expected {expected}")]
    WrongType {
        /// The key.
        key: String,
        /// The type in the file.
        found: String,
        /// The type wanted.
        expected: &'static str,
    },
    /// A key whose value is out of range.
    #[error("gguf key {key} is {value}, expected {expected}")]
    Value {
        /// The key.
        key: String,
        /// The value in the file.
        value: String,
        /// What is allowed.
        expected: String,
    },
    /// An element type that is not supported.
    #[error(
        "gguf tensor {tensor} has type {found}, supported are F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K"
    )]
    TensorType {
        /// The tensor.
        tensor: String,
        /// The type in the file.
        found: String,
    },
    /// A shape that is impossible.
    #[error("gguf tensor {tensor} has shape {shape:?}: {problem}")]
    Shape {
        /// The tensor.
        tensor: String,
        /// The dimensions as read, innermost first.
        shape: Vec<u64>,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// A data range that is impossible.
    #[error("gguf tensor {tensor} at data offset {offset} with {bytes} bytes {problem}")]
    Range {
        /// The tensor.
        tensor: String,
        /// Offset in the data section.
        offset: u64,
        /// Byte length.
        bytes: u64,
        /// What is wrong with it.
        problem: String,
    },
}

/// A parsed GGUF file. Cheap to share; values and tensors point into the mapping.
pub struct Gguf {
    mapping: Arc<Mapping>,
    version: u32,
    values: HashMap<String, Value>,
    tensors: HashMap<String, TensorEntry>,
    order: Vec<String>,
}

// === impl GgufError ===

impl GgufError {
    /// The public reason: whatever is wrong with a file is one reason.
    pub const fn reason(&self) -> Reason {
        match self {
            Self::Truncated { .. }
            | Self::Magic { .. }
            | Self::LfsPointer
            | Self::BigEndian { .. }
            | Self::Version { .. }
            | Self::Count { .. }
            | Self::Utf8 { .. }
            | Self::ValueType { .. }
            | Self::NestedArray { .. }
            | Self::Duplicate { .. }
            | Self::Alignment { .. }
            | Self::Missing { .. }
            | Self::WrongType { .. }
            | Self::Value { .. }
            | Self::TensorType { .. }
            | Self::Shape { .. }
            | Self::Range { .. } => Reason::ModelFile,
        }
    }
}

// === impl Gguf ===

impl std::fmt::Debug for Gguf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gguf").field("mapping", &self.mapping).field("tensors", &self.order.len()).finish_non_exhaustive()
    }
}

impl Gguf {
    /// Parses header, metadata and tensor directory.
    ///
    /// # Errors
    /// The first thing that is wrong, with the field's name.
    pub fn parse(mapping: Arc<Mapping>) -> Result<Self, GgufError> {
        let bytes: &[u8] = &mapping;
        let mut cursor = Cursor::new(bytes);
        let version = read_version(&mut cursor)?;
        let tensor_count = cursor.u64(|| "tensor_count".to_owned())?;
        let key_count = cursor.u64(|| "metadata_kv_count".to_owned())?;
        // A tensor entry is at least 32 bytes (name length, one byte of name aside), a metadata entry at least 13.
        cursor.check_count("tensor_count", tensor_count, 32, MAX_TENSORS)?;
        cursor.check_count("metadata_kv_count", key_count, 13, MAX_KEYS)?;
        let values = metadata::read_all(&mut cursor, key_count)?;
        let alignment = alignment(bytes, &values)?;
        let (tensors, order) = tensors::read_directory(&mut cursor, tensor_count, alignment)?;
        Ok(Self { mapping, version, values, tensors, order })
    }

    /// 2 or 3.
    pub const fn version(&self) -> u32 {
        self.version
    }

    /// The whole file.
    pub const fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }

    /// Tensor names in file order.
    pub fn tensor_names(&self) -> impl Iterator<Item = &str> {
        self.order.iter().map(String::as_str)
    }

    /// Dimensions of a tensor, innermost first, as stored.
    pub fn shape(&self, name: &str) -> Option<&[u64]> {
        self.tensors.get(name).map(TensorEntry::shape)
    }

    /// A tensor of one or two dimensions.
    pub fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        self.tensors.get(name).and_then(|entry| entry.view(&self.mapping))
    }

    /// Keys of the metadata, in no order.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.values.keys().map(String::as_str)
    }

    /// The raw value of a key.
    pub fn value(&self, key: &str) -> Option<&Value> {
        self.values.get(key)
    }

    /// A string value; `None` when the key is absent.
    ///
    /// # Errors
    /// [`GgufError::WrongType`] when it is something else.
    pub fn string(&self, key: &str) -> Result<Option<&str>, GgufError> {
        self.values.get(key).map(|value| value.as_str(&self.mapping, key)).transpose()
    }

    /// An unsigned integer of any width; `None` when the key is absent.
    ///
    /// # Errors
    /// [`GgufError::WrongType`] for other types, [`GgufError::Value`] for a negative number.
    pub fn unsigned(&self, key: &str) -> Result<Option<u64>, GgufError> {
        self.values.get(key).map(|value| value.as_unsigned(key)).transpose()
    }

    /// A float of either width; `None` when the key is absent.
    ///
    /// # Errors
    /// [`GgufError::WrongType`] for other types.
    pub fn float(&self, key: &str) -> Result<Option<f64>, GgufError> {
        self.values.get(key).map(|value| value.as_float(key)).transpose()
    }

    /// A boolean; `None` when the key is absent.
    ///
    /// # Errors
    /// [`GgufError::WrongType`] for other types.
    pub fn boolean(&self, key: &str) -> Result<Option<bool>, GgufError> {
        self.values.get(key).map(|value| value.as_bool(key)).transpose()
    }

    /// An array of strings.
    ///
    /// # Errors
    /// [`GgufError::Missing`] when absent, [`GgufError::WrongType`] for another element type.
    pub fn strings(&self, key: &str) -> Result<Vec<&str>, GgufError> {
        self.array(key, "an array of strings")?.strings(&self.mapping, key)
    }

    /// An array of 32-bit integers.
    ///
    /// # Errors
    /// [`GgufError::Missing`] when absent, [`GgufError::WrongType`] for another element type, however wide.
    pub fn integers(&self, key: &str) -> Result<Vec<i32>, GgufError> {
        self.array(key, "an array of 32-bit integers")?.integers(&self.mapping, key)
    }

    /// Element type and length of an array.
    ///
    /// # Errors
    /// [`GgufError::Missing`] when absent, [`GgufError::WrongType`] when it is no array.
    pub fn array(&self, key: &str, expected: &'static str) -> Result<ArrayView, GgufError> {
        let value = self.values.get(key).ok_or_else(|| GgufError::Missing { key: key.to_owned(), expected })?;
        value.as_array(key, expected)
    }
}

fn read_version(cursor: &mut Cursor<'_>) -> Result<u32, GgufError> {
    if cursor.rest().starts_with(crate::file::LFS_POINTER_PREFIX) {
        return Err(GgufError::LfsPointer);
    }
    let magic = cursor.take(4, || "magic".to_owned())?;
    if magic != b"GGUF" {
        return Err(GgufError::Magic { found: format!("\"{}\"", magic.escape_ascii()) });
    }
    let version = cursor.u32(|| "version".to_owned())?;
    match version {
        2 | 3 => Ok(version),
        found if (1..=0xff).contains(&found.swap_bytes()) => Err(GgufError::BigEndian { found }),
        found => Err(GgufError::Version { found }),
    }
}

fn alignment(bytes: &[u8], values: &HashMap<String, Value>) -> Result<u64, GgufError> {
    let Some(value) = values.get("general.alignment") else { return Ok(DEFAULT_ALIGNMENT) };
    let refused = || GgufError::Alignment { found: value.describe(bytes) };
    let found = value.as_unsigned("general.alignment").map_err(|_| refused())?;
    if found.is_power_of_two() && (8..=MAX_ALIGNMENT).contains(&found) { Ok(found) } else { Err(refused()) }
}

/// Refusal of a tensor type, worded once.
pub(crate) fn unsupported_type(tensor: &str, id: u32) -> GgufError {
    GgufError::TensorType { tensor: tensor.to_owned(), found: ggml_type_name(id) }
}
