//! As a user sees it: real clients, a real collector, real processes, the real SmolLM2.

mod disconnect;
mod jaeger;
mod limits;
mod metrics;
mod processes;
mod python;
mod states;
pub(crate) mod support;
mod tenants;
