//! Metadata values: one pass that only notes where each value lies.
//!
//! Owns value types and typed access. Refuses to know keys. Called by [`super::Gguf`]. Strings and arrays are ranges of the file; strings of
//! an array were walked once and are decoded on access.

use std::collections::HashMap;

use super::cursor::Cursor;
use super::{GgufError, MAX_NAME_BYTES};

/// Type of a metadata value.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the names are the documentation")]
pub enum ValueType {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    String,
    Array,
    U64,
    I64,
    F64,
}

/// One metadata value. Strings and arrays point into the file.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Value {
    /// Any unsigned width.
    Unsigned(ValueType, u64),
    /// Any signed width.
    Signed(ValueType, i64),
    /// Either float width.
    Float(ValueType, f64),
    /// A boolean.
    Bool(bool),
    /// A UTF-8 string at `offset`.
    String {
        /// Where its bytes start.
        offset: usize,
        /// How many there are.
        len: usize,
    },
    /// An array of one element type.
    Array(ArrayView),
}

/// Where an array lies and what it holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ArrayView {
    /// Type of every element.
    pub element: ValueType,
    /// Number of elements.
    pub len: usize,
    offset: usize,
    bytes: usize,
}

// === impl ValueType ===

impl ValueType {
    const BY_ID: [Self; 13] = [
        Self::U8,
        Self::I8,
        Self::U16,
        Self::I16,
        Self::U32,
        Self::I32,
        Self::F32,
        Self::Bool,
        Self::String,
        Self::Array,
        Self::U64,
        Self::I64,
        Self::F64,
    ];

    const fn fixed_bytes(self) -> Option<u64> {
        match self {
            Self::U8 | Self::I8 | Self::Bool => Some(1),
            Self::U16 | Self::I16 => Some(2),
            Self::U32 | Self::I32 | Self::F32 => Some(4),
            Self::U64 | Self::I64 | Self::F64 => Some(8),
            Self::String | Self::Array => None,
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::U8 => "u8",
            Self::I8 => "i8",
            Self::U16 => "u16",
            Self::I16 => "i16",
            Self::U32 => "u32",
            Self::I32 => "i32",
            Self::F32 => "f32",
            Self::Bool => "bool",
            Self::String => "string",
            Self::Array => "array",
            Self::U64 => "u64",
            Self::I64 => "i64",
            Self::F64 => "f64",
        }
    }
}

// === reading ===

pub(super) fn read_all(cursor: &mut Cursor<'_>, count: u64) -> Result<HashMap<String, Value>, GgufError> {
    let mut values = HashMap::new();
    for index in 0..count {
        let key = cursor.string(MAX_NAME_BYTES, || format!("metadata key {index}"))?;
        let ty = read_type(cursor, || format!("type of key {key}"))?;
        let value = if ty == ValueType::Array { read_array(cursor, key)? } else { read_scalar(cursor, key, ty)? };
        if values.insert(key.to_owned(), value).is_some() {
            return Err(GgufError::Duplicate { kind: "key", name: key.to_owned() });
        }
    }
    Ok(values)
}

fn read_type(cursor: &mut Cursor<'_>, field: impl Fn() -> String) -> Result<ValueType, GgufError> {
    let found = cursor.u32(&field)?;
    let known = usize::try_from(found).ok().and_then(|id| ValueType::BY_ID.get(id));
    known.copied().ok_or_else(|| GgufError::ValueType { field: field(), found })
}

fn read_scalar(cursor: &mut Cursor<'_>, key: &str, ty: ValueType) -> Result<Value, GgufError> {
    let field = || format!("value of key {key}");
    let Some(width) = ty.fixed_bytes() else {
        let text = cursor.string(u64::MAX, field)?;
        return Ok(Value::String { offset: cursor.position() - text.len(), len: text.len() });
    };
    let raw = cursor.take(width, field)?;
    let mut buffer = [0; 8];
    buffer[..raw.len()].copy_from_slice(raw);
    let bits = u64::from_le_bytes(buffer);
    Ok(match ty {
        ValueType::I8 => Value::Signed(ty, i64::from(bits as u8 as i8)),
        ValueType::I16 => Value::Signed(ty, i64::from(bits as u16 as i16)),
        ValueType::I32 => Value::Signed(ty, i64::from(bits as u32 as i32)),
        ValueType::I64 => Value::Signed(ty, bits as i64),
        ValueType::F32 => Value::Float(ty, f64::from(f32::from_bits(bits as u32))),
        ValueType::F64 => Value::Float(ty, f64::from_bits(bits)),
        ValueType::Bool if bits <= 1 => Value::Bool(bits == 1),
        ValueType::Bool => {
            return Err(GgufError::Value {
                key: key.to_owned(),
                value: bits.to_string(),
                expected: "0 or 1 (a bool)".to_owned(),
            });
        }
        ValueType::U8 | ValueType::U16 | ValueType::U32 | ValueType::U64 | ValueType::String | ValueType::Array => {
            Value::Unsigned(ty, bits)
        }
    })
}

fn read_array(cursor: &mut Cursor<'_>, key: &str) -> Result<Value, GgufError> {
    let element = read_type(cursor, || format!("element type of key {key}"))?;
    if element == ValueType::Array {
        return Err(GgufError::NestedArray { field: format!("key {key}") });
    }
    let count = cursor.u64(|| format!("length of key {key}"))?;
    let width = element.fixed_bytes();
    cursor.check_count(&format!("length of key {key}"), count, width.unwrap_or(8), u64::MAX)?;
    let offset = cursor.position();
    if let Some(width) = width {
        // No overflow: the count was just bounded by the bytes left over `width`.
        cursor.take(count * width, || format!("elements of key {key}"))?;
    } else {
        for index in 0..count {
            cursor.string(u64::MAX, || format!("element {index} of key {key}"))?;
        }
    }
    let len = usize::try_from(count).unwrap_or(usize::MAX);
    Ok(Value::Array(ArrayView { element, len, offset, bytes: cursor.position() - offset }))
}

// === impl Value ===

impl Value {
    /// The value for a message: scalars and strings in full, arrays by type and length.
    pub fn describe(&self, file: &[u8]) -> String {
        match *self {
            Self::Unsigned(ty, value) => format!("{value} ({})", ty.name()),
            Self::Signed(ty, value) => format!("{value} ({})", ty.name()),
            Self::Float(ty, value) => format!("{value} ({})", ty.name()),
            Self::Bool(value) => format!("{value} (bool)"),
            Self::String { offset, len } => {
                let raw = file.get(offset..offset + len.min(80)).unwrap_or_default();
                format!("{:?} (string)", String::from_utf8_lossy(raw))
            }
            Self::Array(array) => format!("an array of {} {}", array.len, array.element.name()),
        }
    }

    fn type_name(&self) -> String {
        match self {
            Self::Unsigned(ty, _) | Self::Signed(ty, _) | Self::Float(ty, _) => ty.name().to_owned(),
            Self::Bool(_) => ValueType::Bool.name().to_owned(),
            Self::String { .. } => ValueType::String.name().to_owned(),
            Self::Array(array) => format!("an array of {}", array.element.name()),
        }
    }

    fn wrong(&self, key: &str, expected: &'static str) -> GgufError {
        GgufError::WrongType { key: key.to_owned(), found: self.type_name(), expected }
    }

    pub(super) fn as_str<'a>(&self, file: &'a [u8], key: &str) -> Result<&'a str, GgufError> {
        let Self::String { offset, len } = *self else { return Err(self.wrong(key, "a string")) };
        let raw = file.get(offset..offset + len).unwrap_or_default();
        std::str::from_utf8(raw).map_err(|_| GgufError::Utf8 { field: format!("key {key}") })
    }

    pub(super) fn as_unsigned(&self, key: &str) -> Result<u64, GgufError> {
        match *self {
            Self::Unsigned(_, value) => Ok(value),
            Self::Signed(_, value) => u64::try_from(value).map_err(|_| GgufError::Value {
                key: key.to_owned(),
                value: value.to_string(),
                expected: "0 or more".to_owned(),
            }),
            Self::Float(..) | Self::Bool(_) | Self::String { .. } | Self::Array(_) => Err(self.wrong(key, "an integer")),
        }
    }

    pub(super) fn as_float(&self, key: &str) -> Result<f64, GgufError> {
        match *self {
            Self::Float(_, value) => Ok(value),
            _ => Err(self.wrong(key, "a float")),
        }
    }

    pub(super) fn as_bool(&self, key: &str) -> Result<bool, GgufError> {
        match *self {
            Self::Bool(value) => Ok(value),
            _ => Err(self.wrong(key, "a bool")),
        }
    }

    pub(super) fn as_array(&self, key: &str, expected: &'static str) -> Result<ArrayView, GgufError> {
        match *self {
            Self::Array(array) => Ok(array),
            _ => Err(self.wrong(key, expected)),
        }
    }
}

// === impl ArrayView ===

impl ArrayView {
    fn wrong(&self, key: &str, expected: &'static str) -> GgufError {
        GgufError::WrongType { key: key.to_owned(), found: format!("an array of {}", self.element.name()), expected }
    }

    pub(super) fn strings<'a>(&self, file: &'a [u8], key: &str) -> Result<Vec<&'a str>, GgufError> {
        if self.element != ValueType::String {
            return Err(self.wrong(key, "an array of strings"));
        }
        let range = file.get(self.offset..self.offset + self.bytes).unwrap_or_default();
        let mut cursor = Cursor::new(range);
        // Each element was walked when the file was parsed, so `len` is bounded by the file's size.
        let mut out = Vec::with_capacity(self.len);
        for index in 0..self.len {
            out.push(cursor.string(u64::MAX, || format!("element {index} of key {key}"))?);
        }
        Ok(out)
    }

    pub(super) fn integers(&self, file: &[u8], key: &str) -> Result<Vec<i32>, GgufError> {
        if !matches!(self.element, ValueType::I32 | ValueType::U32) {
            return Err(self.wrong(key, "an array of 32-bit integers"));
        }
        let range = file.get(self.offset..self.offset + self.bytes).unwrap_or_default();
        let (values, _) = range.as_chunks::<4>();
        Ok(values.iter().map(|raw| i32::from_le_bytes(*raw)).collect())
    }
}
