//! As a user sees it: real clients, a real collector, real processes, the real SmolLM2.

mod disconnect;
mod jaeger;
mod metrics;
mod processes;
mod python;
mod support;
mod tenants;
