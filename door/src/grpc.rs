//! The gRPC door: `kvasir.inference.v1.Inference`, health and reflection.
//!
//! Owns protobuf. Refuses to decide anything about a request: the same [`Ask`](crate::ask::Ask), ranges, preparation and answer as over HTTP.
//! A failure ends a call with a status whose detail is a `kvasir.v1.Error`; closing a stream drops the answer, which cancels the work.

mod ask;
mod health;
mod reply;
mod service;

pub(crate) use service::{router, status_response};

#[cfg(test)]
mod tests;
