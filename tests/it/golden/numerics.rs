//! Numerics of the CPU backend (`contracts` §7.7): how far our logits are from an independent f32 forward pass over the same dequantised
//! weights, beside how far llama.cpp's are.
//!
//! llama.cpp's figures are a committed file, `numerics.json`, that `cargo xtask bench numerics` makes from a real llama.cpp; ours are
//! computed here, at every position of the same windows. Our arithmetic has the same bits on every machine, so this gate does too.

mod measure;
mod reference;

use kvasir_model::ModelFile;
use kvasir_worker::backend::Backend;
use measure::{Distance, Figures, WINDOW, WINDOWS, backend, prefill, smollm2, surprise, windows, windows_digest};
use reference::{Defect, Reference};

/// Our divergence is at most this many times llama.cpp's.
const KL_RATIO_MAX: f64 = 1.1;
/// Our agreement with the reference's first choice is at least this share of llama.cpp's.
const AGREEMENT_RATIO_MIN: f64 = 0.99;

fn committed() -> Figures {
    serde_json::from_str(include_str!("numerics.json")).expect("`cargo xtask bench numerics` writes the file")
}

fn passes(ours: &Distance, llama_cpp: &Figures) -> bool {
    ours.mean_kl() <= llama_cpp.mean_kl * KL_RATIO_MAX && ours.top1_agreement() >= llama_cpp.top1_agreement * AGREEMENT_RATIO_MIN
}

#[test]
fn logits_are_as_near_to_the_reference_as_those_of_llama_cpp() {
    let path = smollm2();
    let file = ModelFile::open(&path).unwrap();
    let windows = windows(&file);
    let llama_cpp = committed();
    assert_eq!(
        (&llama_cpp.weights_digest, &llama_cpp.windows_digest, llama_cpp.windows),
        (&file.weights_digest().to_hex(), &windows_digest(&windows), (WINDOWS, WINDOW)),
        "the committed figures are of something else; make them again: {}",
        llama_cpp.command
    );
    let mut reference = Reference::open(&path).unwrap();
    let (mut backend, blocks) = backend(&file, WINDOW);
    let (mut ours, mut surprises) = (Distance::default(), 0.0);
    for window in &windows {
        let want = reference.logits(window, None).unwrap();
        // All but the first token count as drafted, so logits come back for every position.
        let chosen = backend.run(&prefill(window, &blocks, WINDOW - 1, true)).unwrap().rows.remove(0).chosen;
        assert_eq!(chosen.len(), WINDOW);
        for (want, chosen) in want.iter().zip(&chosen) {
            let got = chosen.logits.as_ref().unwrap();
            ours.add(want, got);
        }
        surprises += want.iter().zip(&window[1..]).map(|(logits, next)| surprise(logits, *next)).sum::<f64>();
    }
    let perplexity = (surprises / ((WINDOW - 1) * WINDOWS) as f64).exp();
    println!(
        "mean KL {:.6} nats (llama.cpp {:.6}), top-1 agreement {:.4} (llama.cpp {:.4}), perplexity of the reference {perplexity:.3}",
        ours.mean_kl(),
        llama_cpp.mean_kl,
        ours.top1_agreement(),
        llama_cpp.top1_agreement
    );
    assert!((perplexity / llama_cpp.reference_perplexity - 1.0).abs() < 1e-6, "the reference is not the recorded one");
    assert!(passes(&ours, &llama_cpp), "{ours:?} against {llama_cpp:?}");
}

#[test]
fn the_gate_sees_a_small_defect_even_without_rounding_beside_it() {
    let path = smollm2();
    let windows = windows(&ModelFile::open(&path).unwrap());
    let llama_cpp = committed();
    let mut reference = Reference::open(&path).unwrap();
    let tokens = &windows[0][..96];
    let want = reference.logits(tokens, None).unwrap();
    for defect in [
        Defect::NoRope { layer: 17 },
        Defect::ScoresDividedBy { layer: 9, divisor: 1.6 },
        Defect::CoarseDown { layer: 12, steps: 8.0 },
    ] {
        let got = reference.logits(tokens, Some(defect)).unwrap();
        let mut distance = Distance::default();
        for (want, got) in want.iter().zip(&got) {
            distance.add(want, got);
        }
        println!("{defect:?}: mean KL {:.6}, top-1 agreement {:.4}", distance.mean_kl(), distance.top1_agreement());
        assert!(!passes(&distance, &llama_cpp), "{defect:?} passes: {distance:?}");
    }
}
