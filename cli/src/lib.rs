//! `kvasir`: a local fleet in one process, chat, generate, model, demo, bench, version.
//!
//! Owns the command line and the wiring of a fleet in one process. Refuses to decide anything that router or worker decide.

pub mod args;
pub mod bench;
pub mod chat;
pub mod client;
pub mod demo;
pub mod generate;
pub mod local;
pub mod model;
pub mod servingpool;
pub mod version;
