//! The HTTP door from outside: what goes in as JSON, what comes out as JSON and SSE.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]

mod refusals;
mod streams;
mod wire;
