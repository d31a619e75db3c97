//! The one integration-test binary.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]

mod chart;
mod cluster;
mod e2e;
mod golden;
mod tidy;
