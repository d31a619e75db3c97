//! The one vocabulary of refusals and failures.
//!
//! A reason alone sets the HTTP status, the gRPC code, whether a retry can help, and the label in metrics and conditions; each has a page
//! `docs/errors/<CODE>.md`. Refuses to carry context: that is [`crate::Error`]'s message. Everyone maps into it, nobody guesses out of it.

/// Why a request was refused or failed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub enum Reason {
    /// A parameter is missing, malformed or out of range.
    InvalidArgument,
    /// Two requested features cannot be combined.
    UnsupportedCombination,
    /// The prompt, or prompt plus output, does not fit the model's context.
    ContextLengthExceeded,
    /// The request can never fit this worker's KV pool.
    CapacityExceeded,
    /// The body or message is larger than the limit.
    PayloadTooLarge,
    /// No valid credential was presented.
    Unauthenticated,
    /// The credential is valid but does not allow this.
    PermissionDenied,
    /// No such model is served here.
    ModelNotFound,
    /// No such route, method or object.
    NotFound,
    /// The route exists, the HTTP method does not.
    MethodNotAllowed,
    /// The chat template refused the conversation.
    TemplateRefused,
    /// The tenant's quota is used up.
    QuotaExceeded,
    /// Queues are full; nothing was started.
    Overloaded,
    /// No worker can take the request now.
    NoWorker,
    /// The worker is draining and takes no new work.
    Draining,
    /// The worker or router has not finished starting.
    NotReady,
    /// The worker serves another model, adapter or arithmetic than the request expects.
    IdentityMismatch,
    /// The deadline passed before the work was done.
    DeadlineExceeded,
    /// The client went away or cancelled.
    Cancelled,
    /// The connection to the worker was lost.
    WorkerLost,
    /// The client reads its stream too slowly.
    SlowConsumer,
    /// A model file is broken or of an unsupported kind.
    ModelFile,
    /// A tier, drafter or device is out of memory.
    OutOfMemory,
    /// The compute device was lost.
    DeviceLost,
    /// The operation is part of the protocol but not built in this version.
    Unimplemented,
    /// A broken invariant; always a defect.
    Internal,
}

// === impl Reason ===

impl Reason {
    /// Every reason, in the order of the error pages.
    pub const ALL: [Self; 26] = [
        Self::InvalidArgument,
        Self::UnsupportedCombination,
        Self::ContextLengthExceeded,
        Self::CapacityExceeded,
        Self::PayloadTooLarge,
        Self::Unauthenticated,
        Self::PermissionDenied,
        Self::ModelNotFound,
        Self::NotFound,
        Self::MethodNotAllowed,
        Self::TemplateRefused,
        Self::QuotaExceeded,
        Self::Overloaded,
        Self::NoWorker,
        Self::Draining,
        Self::NotReady,
        Self::IdentityMismatch,
        Self::DeadlineExceeded,
        Self::Cancelled,
        Self::WorkerLost,
        Self::SlowConsumer,
        Self::ModelFile,
        Self::OutOfMemory,
        Self::DeviceLost,
        Self::Unimplemented,
        Self::Internal,
    ];

    /// Stable machine-readable code: metric label, error `code`, name of the error page.
    pub const fn code(self) -> &'static str {
        match self {
            Self::InvalidArgument => "invalid_argument",
            Self::UnsupportedCombination => "unsupported_combination",
            Self::ContextLengthExceeded => "context_length_exceeded",
            Self::CapacityExceeded => "capacity_exceeded",
            Self::PayloadTooLarge => "payload_too_large",
            Self::Unauthenticated => "unauthenticated",
            Self::PermissionDenied => "permission_denied",
            Self::ModelNotFound => "model_not_found",
            Self::NotFound => "not_found",
            Self::MethodNotAllowed => "method_not_allowed",
            Self::TemplateRefused => "template_refused",
            Self::QuotaExceeded => "quota_exceeded",
            Self::Overloaded => "overloaded",
            Self::NoWorker => "no_worker",
            Self::Draining => "draining",
            Self::NotReady => "not_ready",
            Self::IdentityMismatch => "identity_mismatch",
            Self::DeadlineExceeded => "deadline_exceeded",
            Self::Cancelled => "cancelled",
            Self::WorkerLost => "worker_lost",
            Self::SlowConsumer => "slow_consumer",
            Self::ModelFile => "model_file",
            Self::OutOfMemory => "out_of_memory",
            Self::DeviceLost => "device_lost",
            Self::Unimplemented => "unimplemented",
            Self::Internal => "internal",
        }
    }

    /// Reads a code back.
    pub fn from_code(code: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|reason| reason.code() == code)
    }

    /// HTTP status of a refusal for this reason.
    pub const fn http_status(self) -> u16 {
        match self {
            Self::InvalidArgument
            | Self::UnsupportedCombination
            | Self::ContextLengthExceeded
            | Self::CapacityExceeded
            | Self::TemplateRefused => 400,
            Self::Unauthenticated => 401,
            Self::PermissionDenied => 403,
            Self::ModelNotFound | Self::NotFound => 404,
            Self::MethodNotAllowed => 405,
            Self::PayloadTooLarge => 413,
            Self::QuotaExceeded => 429,
            // 499 is the field's convention for "client closed request"; it reaches logs and metrics, never a client.
            Self::Cancelled => 499,
            Self::Internal | Self::ModelFile => 500,
            Self::Unimplemented => 501,
            Self::WorkerLost => 502,
            Self::Overloaded
            | Self::NoWorker
            | Self::Draining
            | Self::NotReady
            | Self::IdentityMismatch
            | Self::SlowConsumer
            | Self::OutOfMemory
            | Self::DeviceLost => 503,
            Self::DeadlineExceeded => 504,
        }
    }

    /// Number of the gRPC status code (as in `google.rpc.Code`).
    pub const fn grpc_code(self) -> i32 {
        match self {
            Self::Cancelled => 1,
            Self::InvalidArgument
            | Self::UnsupportedCombination
            | Self::ContextLengthExceeded
            | Self::CapacityExceeded
            | Self::TemplateRefused => 3,
            Self::DeadlineExceeded => 4,
            Self::ModelNotFound | Self::NotFound => 5,
            Self::PermissionDenied => 7,
            Self::PayloadTooLarge | Self::QuotaExceeded | Self::SlowConsumer | Self::OutOfMemory => 8,
            Self::IdentityMismatch => 9,
            Self::MethodNotAllowed | Self::Unimplemented => 12,
            Self::Internal | Self::ModelFile => 13,
            Self::Overloaded | Self::NoWorker | Self::Draining | Self::NotReady | Self::WorkerLost | Self::DeviceLost => 14,
            Self::Unauthenticated => 16,
        }
    }

    /// Whether the same request may succeed elsewhere or later, as long as no token was delivered.
    pub const fn retryable(self) -> bool {
        match self {
            Self::Overloaded
            | Self::NoWorker
            | Self::Draining
            | Self::NotReady
            | Self::IdentityMismatch
            | Self::WorkerLost
            | Self::OutOfMemory
            | Self::DeviceLost
            | Self::QuotaExceeded => true,
            Self::InvalidArgument
            | Self::UnsupportedCombination
            | Self::ContextLengthExceeded
            | Self::CapacityExceeded
            | Self::PayloadTooLarge
            | Self::Unauthenticated
            | Self::PermissionDenied
            | Self::ModelNotFound
            | Self::NotFound
            | Self::MethodNotAllowed
            | Self::TemplateRefused
            | Self::DeadlineExceeded
            | Self::Cancelled
            | Self::SlowConsumer
            | Self::ModelFile
            | Self::Unimplemented
            | Self::Internal => false,
        }
    }

    /// Whether an end for this reason is the service's own doing: neither a client's mistake nor its choice, nor a limit that it was given.
    pub const fn blames_service(self) -> bool {
        self.http_status() >= 500 && !matches!(self, Self::SlowConsumer | Self::Unimplemented)
    }

    /// The `type` member of an OpenAI error body.
    pub const fn openai_type(self) -> &'static str {
        match self.http_status() {
            401 => "authentication_error",
            403 => "permission_error",
            404 | 405 => "not_found_error",
            429 => "rate_limit_error",
            400..=499 => "invalid_request_error",
            _ => "server_error",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn what_clients_do_is_not_the_services_fault() {
        let ours: Vec<&str> = Reason::ALL.iter().filter(|reason| reason.blames_service()).map(|reason| reason.code()).collect();
        let wanted = [
            "overloaded",
            "no_worker",
            "draining",
            "not_ready",
            "identity_mismatch",
            "deadline_exceeded",
            "worker_lost",
            "model_file",
            "out_of_memory",
            "device_lost",
            "internal",
        ];
        assert_eq!(ours, wanted);
    }

    #[test]
    fn codes_are_unique_and_read_back() {
        let codes: HashSet<_> = Reason::ALL.iter().map(|reason| reason.code()).collect();
        assert_eq!(codes.len(), Reason::ALL.len());
        for reason in Reason::ALL {
            assert_eq!(Reason::from_code(reason.code()), Some(reason));
        }
        assert_eq!(Reason::from_code("no_such_code"), None);
    }

    #[test]
    fn a_client_error_is_never_retryable_but_a_quota_is() {
        for reason in Reason::ALL {
            let client_error = (400..500).contains(&reason.http_status()) && reason != Reason::QuotaExceeded;
            assert!(!(client_error && reason.retryable()), "{reason:?}");
        }
    }
}
