//! The `ServingPool` controller: what users ask for becomes objects, and what is true becomes status.
//!
//! Owns the API types, the pure road spec → validated pool → objects, and the shell that reads and writes them. Refuses to know requests.

pub mod admin;
pub mod api;
pub mod apply;
pub mod args;
pub mod build;
pub mod clock;
pub mod control;
pub mod design;
pub mod lead;
pub mod meter;
pub mod names;
pub mod rollout;
pub mod scale;
pub mod start;
pub mod status;
pub mod validate;
pub mod world;

#[cfg(test)]
mod testing;
