//! The router: admission, placement by prefix, attempts; no weights.
//!
//! Glossary
//! - *view*: an immutable snapshot of the fleet ([`View`]).
//! - *index*: which worker holds which block, as far as its events can be trusted ([`index`]).
//! - *pick*: the pure decision where a request goes ([`pick::pick`]).
//! - *attempt*: one try on one worker, under one *lease*.

pub mod admin;
pub mod admit;
pub mod args;
mod attempt;
pub mod breaker;
pub mod cost;
pub mod discover;
pub mod fleet;
pub mod index;
pub mod kubernetes;
pub mod lease;
pub mod mock;
mod pause;
pub mod pick;
pub mod rendezvous;
pub mod retry;
mod secrets;
mod serve;
mod settings;
mod start;
#[cfg(test)]
mod testing;
mod texts;
pub mod view;
pub mod worker_client;

pub use secrets::{Material, MaterialError, SecretFiles, Secrets, TenantSource};
pub use serve::RouterServe;
pub use settings::RouterSettings;
pub use start::{RouterRuntime, SecretSource, StartError, StartSettings, WorkerSource};
pub use view::View;
