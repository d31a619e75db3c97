//! The product on a real Kubernetes that the test starts itself, one module per layer: API server, played nodes, a real node, a fleet.
//!
//! Owns the road to a cluster: prerequisites, one cluster at a time, what is printed when a test fails. `cargo xtask e2e` runs these tests with
//! everything they need; elsewhere a test whose prerequisites are missing says so and is left out, in CI it fails.

mod api_server;
mod at_rest;
mod faults;
mod fleet;
mod harness;
mod helm;
mod lives;
mod models;
mod operator;
mod pairs;
mod played;
mod replicas;
mod rights;
mod rollouts;
mod serving;
pub(crate) mod support;
mod traffic;
mod worker;
