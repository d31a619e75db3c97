//! The engine on the hash-model and a virtual clock: what it promises, seen through its handle.
//!
//! `reports` are bugs that others had; `simulation` interleaves requests, cancellations and preemptions; `fuzz` drives pool and scheduler
//! against a naive map; `isolation` is what one tenant can learn of another.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests state their assumptions")]

mod events;
mod faults;
mod fuzz;
mod isolation;
mod limits;
mod output;
mod reports;
mod rig;
mod simulation;
mod threads;
