//! The one integration-test binary.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]

mod chart;
mod cluster;
mod e2e;
mod golden;
mod tidy;

use std::path::{Path, PathBuf};

/// The root of the checkout that is tested, which is above the folder that cargo starts tests in. Where this was built does not matter: clones
/// that share a target folder share this program too.
fn root() -> PathBuf {
    let own = Path::new(".").canonicalize().expect("the folder of this process");
    assert!(own.join("it/main.rs").is_file(), "{} is not the folder of these tests; start them with cargo", own.display());
    own.parent().expect("the workspace holds this crate").to_owned()
}
