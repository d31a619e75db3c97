//! Wire ⇄ core, each message in one place.
//!
//! Owns the strict reading of messages: a part that is missing, a digest of the wrong length, an unknown word, a NaN or a zero where none
//! may be is refused with the field's name. Refuses to know who sent a message and what happens to it. Writing cannot fail.
//!
//! A request that cannot be read is the caller's fault (`invalid_argument`); an answer that cannot be read is the worker's (`internal`).
//!
//! Costs: one pass over the message; digests are copied, prompt tokens and texts are moved where the types allow.

mod chunk;
mod description;
mod error;
mod event;
mod load;
mod request;
mod words;

pub use chunk::{chunk_from_wire, chunk_to_wire};
pub use description::{artifact_kind_to_wire, description_from_wire, description_to_wire};
pub use error::{error_from_pb, error_from_status, error_to_pb, error_to_status};
pub use event::{EventReader, KEYS_PER_MESSAGE, events_to_wire};
pub use load::{load_from_wire, load_to_wire, tier_load_from_wire, tier_load_to_wire};
pub use request::{CHOICES_MAX, LOGPROBS_MAX, PROMPT_TOKENS_MAX, request_from_wire, request_to_wire};
pub use words::{
    cache_mode_from_wire, cache_mode_to_wire, contract_from_wire, contract_to_wire, finish_reason_to_wire, miss_reason_to_wire,
    speculation_mode_from_wire, speculation_mode_to_wire, state_to_wire, states_to_wire, tier_from_wire, tier_to_wire,
    usage_to_wire,
};

use kvasir_core::{Digest, Error, Reason};

/// Why a message could not be read.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{field}: {problem}")]
pub struct Malformed {
    /// The field at fault, dotted.
    pub field: String,
    /// What is wrong with it and what is expected.
    pub problem: String,
}

// === impl Malformed ===

impl Malformed {
    /// A field and what is wrong with it.
    pub fn new(field: impl Into<String>, problem: impl Into<String>) -> Self {
        Self { field: field.into(), problem: problem.into() }
    }

    /// The caller sent it.
    pub fn into_invalid(self) -> Error {
        let message = self.to_string();
        Error::invalid(self.field, message)
    }

    /// The answering side sent it.
    pub fn into_internal(self) -> Error {
        Error::new(Reason::Internal, format!("the peer sent a message that cannot be read: {self}"))
    }

    fn missing(field: &str) -> Self {
        Self::new(field, "is required")
    }
}

/// Reads a fixed number of bytes.
pub fn bytes_from_wire<const N: usize>(field: &str, bytes: &[u8]) -> Result<[u8; N], Malformed> {
    bytes.try_into().map_err(|_| Malformed::new(field, format!("must be {N} bytes, not {}", bytes.len())))
}

/// Reads a digest of 32 bytes.
pub fn digest_from_wire(field: &str, bytes: &[u8]) -> Result<Digest, Malformed> {
    bytes_from_wire::<32>(field, bytes).map(Digest::new)
}

fn required<T>(field: &str, value: Option<T>) -> Result<T, Malformed> {
    value.ok_or_else(|| Malformed::missing(field))
}

fn finite(field: &str, value: f32) -> Result<f32, Malformed> {
    if value.is_finite() { Ok(value) } else { Err(Malformed::new(field, format!("must be a finite number, not {value}"))) }
}

fn in_range(field: &str, value: f32, range: std::ops::RangeInclusive<f32>) -> Result<f32, Malformed> {
    if range.contains(&finite(field, value)?) {
        Ok(value)
    } else {
        Err(Malformed::new(field, format!("must be from {} to {}, not {value}", range.start(), range.end())))
    }
}

fn not_nan(field: &str, value: f32) -> Result<f32, Malformed> {
    if value.is_nan() { Err(Malformed::new(field, "is not a number")) } else { Ok(value) }
}

#[cfg(test)]
mod tests;
