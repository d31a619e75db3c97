//! Makes `tests/it/golden/numerics.json`: how far a real llama.cpp is from the reference, over the windows that the gate uses.
//!
//! `cargo xtask bench numerics` builds llama.cpp and runs this. Arguments: a Python that has `llama_cpp`, and the file to write.

#![expect(clippy::expect_used, reason = "a measurement: any failure should stop it")]

#[path = "../it/golden/numerics/measure.rs"]
#[expect(dead_code, reason = "the gate uses what this program does not")]
mod measure;
#[path = "../it/golden/numerics/reference.rs"]
#[expect(dead_code, reason = "defects are for the gate's own test")]
mod reference;

use kvasir_model::ModelFile;
use measure::{Distance, Figures, THREADS, WINDOW, WINDOWS, smollm2, surprise, windows, windows_digest};
use std::error::Error;
use std::process::Command;

/// Above this the reference or the peer is broken, and the figures would hold nothing.
const BELIEVABLE_KL_MAX: f64 = 0.05;

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let (Some(python), Some(json)) = (args.next(), args.next()) else {
        return Err("usage: numerics PYTHON FILE.json".into());
    };
    let path = smollm2();
    let file = ModelFile::open(&path)?;
    let windows = windows(&file);
    let folder = tempfile::tempdir()?;
    let (asked, answered) = (folder.path().join("windows.json"), folder.path().join("logits.f32"));
    std::fs::write(
        &asked,
        serde_json::to_vec(&serde_json::json!({ "text": measure::CORPUS, "windows": windows, "threads": THREADS }))?,
    )?;
    let script = "tests/py/llama_numerics.py";
    let out = Command::new(&python).arg(script).arg(&path).arg(&asked).arg(&answered).output()?;
    if !out.status.success() {
        return Err(format!("{python} {script}: {}\n{}", out.status, String::from_utf8_lossy(&out.stderr)).into());
    }
    let implementation: serde_json::Value = serde_json::from_slice(&out.stdout)?;
    let logits = std::fs::read(&answered)?;
    let vocab = file.config().vocab;
    if logits.len() != WINDOWS * WINDOW * vocab * 4 {
        return Err(format!("llama.cpp gave {} bytes of logits, expected {}", logits.len(), WINDOWS * WINDOW * vocab * 4).into());
    }
    let mut rows = logits.chunks_exact(vocab * 4);
    let mut reference = reference::Reference::open(&path)?;
    let (mut distance, mut surprises) = (Distance::default(), 0.0);
    for window in &windows {
        let want = reference.logits(window, None)?;
        for (want, row) in want.iter().zip(&mut rows) {
            let row: Vec<f32> =
                row.chunks_exact(4).map(|bytes| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])).collect();
            distance.add(want, &row);
        }
        surprises += want.iter().zip(&window[1..]).map(|(logits, next)| surprise(logits, *next)).sum::<f64>();
    }
    let figures = Figures {
        model: "SmolLM2-135M-Instruct Q4_1".to_owned(),
        weights_digest: file.weights_digest().to_hex(),
        windows_digest: windows_digest(&windows),
        windows: (WINDOWS, WINDOW),
        implementation,
        mean_kl: distance.mean_kl(),
        top1_agreement: distance.top1_agreement(),
        reference_perplexity: (surprises / ((WINDOW - 1) * WINDOWS) as f64).exp(),
        command: "cargo xtask bench numerics".to_owned(),
    };
    if figures.mean_kl > BELIEVABLE_KL_MAX {
        return Err(format!("a mean KL of {} is no rounding: {figures:?}", figures.mean_kl).into());
    }
    let text = serde_json::to_string_pretty(&figures)? + "\n";
    print!("{text}");
    std::fs::write(json, text)?;
    Ok(())
}
