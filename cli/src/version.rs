//! What was built and what it runs on.

use kvasir_kernels::Isa;
use serde_json::{Value, json};
use std::thread::available_parallelism;

/// Commit that was built.
pub const COMMIT: &str = env!("KVASIR_COMMIT");
/// Version of the workspace.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// `kvasir version`
pub fn print() {
    println!("kvasir {VERSION} ({COMMIT})");
    println!("backends: cpu ({:?}; available {:?})", Isa::detect(), Isa::available());
    println!("profile: {}", if cfg!(debug_assertions) { "checked (debug assertions on)" } else { "release" });
}

/// The machine, for bench reports.
pub fn machine() -> Value {
    json!({
        "arch": std::env::consts::ARCH,
        "os": std::env::consts::OS,
        "cores": available_parallelism().map_or(0, std::num::NonZero::get),
        "isa": format!("{:?}", Isa::detect()),
        "version": VERSION,
    })
}
