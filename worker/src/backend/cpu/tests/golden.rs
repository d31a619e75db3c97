//! Bits pinned per numerics revision: who changes them must raise [`NUMERICS_REVISION`] and pin anew.

use super::exactness::{Manner, Script, Trace, run};
use super::*;

/// Short name of everything in a trace.
pub(super) fn digest(trace: &Trace) -> String {
    let words = [&trace.ids, &trace.logprobs, &trace.scores];
    let mut bytes: Vec<u8> = words.into_iter().flatten().flat_map(|word| word.to_le_bytes()).collect();
    bytes.extend(trace.kv.iter().flat_map(|digest| digest.to_le_bytes()));
    blake3::hash(&bytes).to_hex()[..16].to_owned()
}

#[test]
fn golden_bits_of_the_tiny_models_belong_to_this_numerics_revision() {
    let digests: Vec<String> = tiny_models()
        .into_iter()
        .map(|(_, tiny)| {
            let script = Script { prompt: tokens(280, tiny.vocab, 13), output: 12, temperature: 0.8, block_size: 16 };
            digest(&run(&load(&tiny), &script, &Manner::plain(Isa::detect()), &[]))
        })
        .collect();
    let digests: Vec<&str> = digests.iter().map(String::as_str).collect();
    assert_eq!(
        (NUMERICS_REVISION, digests.as_slice()),
        (1, ["d5922f0f613a29f5", "4915ff289ff595b2", "de777501df49a699", "98e4200179cfcd59", "45e0eda32e552a34"].as_slice())
    );
}
