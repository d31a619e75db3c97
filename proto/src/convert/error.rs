//! Errors ⇄ gRPC status with a `kvasir.v1.Error` detail.
//!
//! The trailer `grpc-status-details-bin` holds a `google.rpc.Status` whose one detail is the `kvasir.v1.Error`, as clients of the richer
//! error model expect.

use crate::pb;
use kvasir_core::{Error, Reason};
use prost::Message as _;
use std::time::Duration;
use tonic::{Code, Status};

/// Longest message in a status: it travels three times in the trailers, and peers refuse trailers above 8 KiB.
const MESSAGE_BYTES_MAX: usize = 1024;

/// Type name of the detail.
const TYPE_URL: &str = "type.googleapis.com/kvasir.v1.Error";

/// `google.rpc.Status`, the envelope of error details.
#[derive(Clone, PartialEq, prost::Message)]
struct RpcStatus {
    #[prost(int32, tag = "1")]
    code: i32,
    #[prost(string, tag = "2")]
    message: String,
    #[prost(message, repeated, tag = "3")]
    details: Vec<prost_types::Any>,
}

/// Writes an error.
pub fn error_to_pb(error: &Error) -> pb::Error {
    pb::Error {
        reason: error.reason.code().to_owned(),
        message: error.message.clone(),
        field: error.field.clone().unwrap_or_default(),
        retryable: error.retryable(),
        // Rounded up: a client that comes back a little late is right, one that comes early is not.
        retry_after_ms: error.retry_after.map(|after| u64::try_from(after.as_micros().div_ceil(1000)).unwrap_or(u64::MAX)),
    }
}

/// Reads an error; a reason that this version does not know becomes `internal` and is named in the message.
pub fn error_from_pb(error: pb::Error) -> Error {
    let (reason, message) = match Reason::from_code(&error.reason) {
        Some(reason) => (reason, error.message),
        None => (Reason::Internal, format!("{} (unknown reason {:?})", error.message, error.reason)),
    };
    Error {
        reason,
        message,
        field: Some(error.field).filter(|field| !field.is_empty()),
        retry_after: error.retry_after_ms.map(Duration::from_millis),
    }
}

/// The status of a refusal. A message above 1 KiB is cut.
pub fn error_to_status(error: &Error) -> Status {
    let mut detail = error_to_pb(error);
    cut(&mut detail.message);
    detail.field.truncate(detail.field.floor_char_boundary(MESSAGE_BYTES_MAX));
    let code = error.reason.grpc_code();
    let envelope = RpcStatus {
        code,
        message: detail.message.clone(),
        details: vec![prost_types::Any { type_url: TYPE_URL.to_owned(), value: detail.encode_to_vec() }],
    };
    Status::with_details(Code::from_i32(code), detail.message, envelope.encode_to_vec().into())
}

/// Reads a status: its `kvasir.v1.Error` detail if it has one, else the nearest reason of its code.
pub fn error_from_status(status: &Status) -> Error {
    let detail = RpcStatus::decode(status.details()).ok().and_then(|envelope| {
        let detail = envelope.details.into_iter().find(|detail| detail.type_url == TYPE_URL)?;
        pb::Error::decode(detail.value.as_slice()).ok()
    });
    match detail {
        Some(error) => error_from_pb(error),
        None => Error::new(reason_of(status.code()), status.message()),
    }
}

fn cut(message: &mut String) {
    if message.len() > MESSAGE_BYTES_MAX {
        message.truncate(message.floor_char_boundary(MESSAGE_BYTES_MAX - '…'.len_utf8()));
        message.push('…');
    }
}

/// Reason of a status that carries no detail: the transport or a proxy made it, not a worker.
fn reason_of(code: Code) -> Reason {
    match code {
        Code::Cancelled => Reason::Cancelled,
        Code::InvalidArgument | Code::FailedPrecondition => Reason::InvalidArgument,
        Code::DeadlineExceeded => Reason::DeadlineExceeded,
        Code::NotFound => Reason::NotFound,
        Code::PermissionDenied => Reason::PermissionDenied,
        // tonic answers OUT_OF_RANGE to a message above its limit.
        Code::OutOfRange => Reason::PayloadTooLarge,
        Code::ResourceExhausted => Reason::Overloaded,
        Code::Unimplemented => Reason::Unimplemented,
        Code::Unauthenticated => Reason::Unauthenticated,
        // A broken connection reads as UNAVAILABLE, UNKNOWN or ABORTED, depending on where it broke.
        Code::Unavailable | Code::Unknown | Code::Aborted => Reason::WorkerLost,
        Code::Ok | Code::AlreadyExists | Code::Internal | Code::DataLoss => Reason::Internal,
    }
}
