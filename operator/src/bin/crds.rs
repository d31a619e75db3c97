//! Writes the CRDs that follow from the types into `crds/`.

use std::error::Error;

/// Below the root of the workspace, where `cargo run` is called.
const FILE: &str = "crds/servingpools.kvasir.dev.yaml";

fn main() -> Result<(), Box<dyn Error>> {
    std::fs::write(FILE, kvasir_operator::api::crd_yaml()?)
        .map_err(|error| format!("{FILE}: {error}; run this in the root of the workspace"))?;
    println!("{FILE}");
    Ok(())
}
