//! The HTTP door: OpenAI's routes, vLLM's `/tokenize` and `/detokenize`, health and metrics.
//!
//! Owns JSON and SSE. Refuses to decide anything about a request: ranges are [`params`](crate::params)', the road to tokens is
//! [`prepare`](crate::prepare)'s, the end of an answer [`answer`](crate::answer)'s.
//!
//! Guarantees
//! 1. Until the headers leave, a failure has its true status; afterwards it is an error event without `[DONE]`.
//! 2. Headers leave with the first output, or after [`DoorSettings::headers_wait`](crate::DoorSettings); then comments keep the line open.
//! 3. Closing the connection drops the answer, which cancels the work, streamed or not.

mod ask;
mod body;
mod error;
mod fields;
mod messages;
mod pieces;
mod print;
mod reply;
mod routes;
mod sse;
mod tokens;

pub(crate) use ask::{template, tools};
pub(crate) use error::error_response;
pub(crate) use fields::Fields;
pub(crate) use messages::read as read_messages;
pub(crate) use routes::router;
pub(crate) use tokens::without_start;

#[cfg(test)]
mod tests;
