//! The `ServingPool` controller: what users ask for becomes objects, and what is true becomes status.
//!
//! Owns the API types, the pure road spec → validated pool → objects, and the shell that reads and writes them. Refuses to know requests.

pub mod api;
pub mod names;
