//! As a user sees it: real clients, a real collector, real processes, the real SmolLM2.

mod disconnect;
pub(crate) mod jaeger;
mod limits;
mod metrics;
mod processes;
mod python;
mod states;
pub(crate) mod support;
mod tenants;
