//! Compiles the `.proto` files without `protoc` and keeps their descriptor set for reflection.

use std::path::PathBuf;

/// Every `.proto` file, relative to this crate.
const FILES: [&str; 5] = [
    "kvasir/v1/error.proto",
    "kvasir/v1/common.proto",
    "kvasir/worker/v1/worker.proto",
    "kvasir/router/v1/admin.proto",
    "kvasir/inference/v1/inference.proto",
];

/// Messages that hold a reuse domain: their `Debug` is written by hand, so that a capability never reaches a log.
const SECRET_MESSAGES: [&str; 4] = [
    ".kvasir.worker.v1.GenerateRequest",
    ".kvasir.worker.v1.SharedPrefix",
    ".kvasir.worker.v1.FetchBlocksRequest",
    ".kvasir.worker.v1.DraftOpenRequest",
];

#[expect(clippy::disallowed_methods, reason = "cargo gives a build script its folders this way")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    for file in FILES {
        println!("cargo::rerun-if-changed={file}");
    }
    let root = PathBuf::from(std::env::var("CARGO_MANIFEST_DIR")?);
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    let mut compiler = protox::Compiler::new([&root])?;
    compiler.include_source_info(true).include_imports(true).open_files(FILES.map(|file| root.join(file)))?;
    std::fs::write(out.join("kvasir.bin"), compiler.encode_file_descriptor_set())?;
    tonic_prost_build::configure()
        .skip_debug(SECRET_MESSAGES)
        .emit_rerun_if_changed(false)
        .compile_fds(compiler.file_descriptor_set())?;
    Ok(())
}
