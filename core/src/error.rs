//! A refusal or failure on its way to a client: one [`Reason`] and what a person needs to act on it.

use crate::reason::Reason;
use std::fmt;
use std::time::Duration;

/// What a client is told: reason, message, the field at fault, and when to come back.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub struct Error {
    /// The one public word for what went wrong.
    pub reason: Reason,
    /// What happened, to which object, and what to do.
    pub message: String,
    /// The parameter at fault, as the client wrote it.
    pub field: Option<String>,
    /// When a retry may succeed, if the refuser knows.
    pub retry_after: Option<Duration>,
}

// === impl Error ===

impl Error {
    /// An error without a field.
    pub fn new(reason: Reason, message: impl Into<String>) -> Self {
        Self { reason, message: message.into(), field: None, retry_after: None }
    }

    /// A bad parameter.
    pub fn invalid(field: impl Into<String>, message: impl Into<String>) -> Self {
        Self { reason: Reason::InvalidArgument, message: message.into(), field: Some(field.into()), retry_after: None }
    }

    /// Names the field at fault.
    pub fn with_field(mut self, field: impl Into<String>) -> Self {
        self.field = Some(field.into());
        self
    }

    /// Says when to come back.
    pub fn with_retry_after(mut self, after: Duration) -> Self {
        self.retry_after = Some(after);
        self
    }

    /// Whether the same request may succeed elsewhere or later.
    pub fn retryable(&self) -> bool {
        self.reason.retryable()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.reason.code(), self.message)
    }
}
