//! Writes the CRDs that follow from the types into `crds/`.

use std::error::Error;
use std::path::Path;

fn main() -> Result<(), Box<dyn Error>> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crds/servingpools.kvasir.dev.yaml");
    std::fs::write(&file, kvasir_operator::api::crd_yaml()?)?;
    println!("{}", file.display());
    Ok(())
}
