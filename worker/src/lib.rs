//! The worker: an inference engine with a paged prefix cache, and the service that offers it.
//!
//! Glossary
//! - *step*: one pass `take → plan → run → accept → commit → emit` of the engine thread.
//! - *plan*: plain data that a backend executes without asking back ([`plan::Plan`]).
//! - *backend*: what computes ([`backend::Backend`]): `cpu`, later `cuda`, and `fake` for simulation.
//! - *row*: the part of one sequence that takes part in a step.

pub mod args;
pub mod backend;
pub mod drain;
pub mod engine;
pub mod grammar;
pub mod kv;
pub mod plan;
pub mod sample;
pub mod scheduler;
pub mod service;
pub mod start;
pub mod text;
