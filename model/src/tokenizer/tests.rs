//! Ids, bytes and refusals of the tokenizer, on the tiny vocabulary. Real vocabularies: `tests/`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]

use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::*;
use crate::artifacts::Artifacts;
use crate::config::Arch;
use crate::file::ModelFile;
use crate::synth::{GgufWriter, TinyModel};

fn tiny() -> Tokenizer {
    let file = ModelFile::from_gguf_bytes("tiny.gguf", TinyModel::default().to_gguf().unwrap()).unwrap();
    Tokenizer::from_json(&file.artifacts().unwrap().tokenizer_json, file.config().vocab).unwrap()
}

fn refusal(change: impl FnOnce(&mut GgufWriter)) -> String {
    let mut writer = TinyModel::default().writer().unwrap();
    change(&mut writer);
    let file = ModelFile::from_gguf_bytes("tiny.gguf", writer.finish()).unwrap();
    let started = Instant::now();
    let error = file.text().expect_err("the tokenizer is broken");
    assert!(started.elapsed() < Duration::from_secs(1));
    assert_eq!(error.reason(), Reason::ModelFile);
    error.to_string()
}

fn id(tokenizer: &Tokenizer, text: &str) -> TokenId {
    tokenizer.token_id(text).unwrap()
}

#[test]
fn common_words_are_single_tokens_and_everything_reads_back() {
    let tokenizer = tiny();
    let ids = tokenizer.encode_plain("hello world").unwrap();
    assert_eq!(ids, [id(&tokenizer, "hello"), id(&tokenizer, "Ġworld")]);
    assert_eq!(tokenizer.decode_bytes(ids[1]), b" world");
    for text in ["hello and the world", "naïve 日本語 🙂\n\t\0", "  two  blanks  ", "12345"] {
        assert_eq!(tokenizer.decode(&tokenizer.encode_plain(text).unwrap(), false), text);
    }
}

/// Unicode normalisation, contractions in any case, digits: the golden file holds what two other implementations agree on.
#[test]
fn the_qwen2_pipeline_gives_the_golden_ids() {
    let model = TinyModel { arch: Arch::Qwen2, ..TinyModel::default() };
    let text = ModelFile::from_gguf_bytes("tiny.gguf", model.to_gguf().unwrap()).unwrap().text().unwrap();
    let cases: serde_json::Value = serde_json::from_slice(include_bytes!("../../tests/golden/tiny_qwen2_ids.json")).unwrap();
    let cases = cases.as_array().unwrap();
    assert_eq!(cases.len(), 62);
    for case in cases {
        let input = case["text"].as_str().unwrap();
        for (mode, special) in [("plain", false), ("special", true)] {
            let expected: Vec<TokenId> = serde_json::from_value(case[mode].clone()).unwrap();
            assert_eq!(text.tokenizer().encode(input, special).unwrap(), expected, "{mode} {input:?}");
        }
    }
}

#[test]
fn digits_stand_alone() {
    let tokenizer = tiny();
    assert_eq!(tokenizer.encode_plain("2024").unwrap().len(), 4);
}

#[test]
fn control_spellings_are_text_unless_asked() {
    let tokenizer = tiny();
    let end = id(&tokenizer, "<|im_end|>");
    let plain = tokenizer.encode("a<|im_end|>b", false).unwrap();
    assert!(!plain.contains(&end));
    assert_eq!(tokenizer.decode(&plain, false), "a<|im_end|>b");
    let special = tokenizer.encode("a<|im_end|>b", true).unwrap();
    assert_eq!(special.iter().filter(|id| **id == end).count(), 1);
    assert_eq!(special.len(), 3);
    assert_eq!(tokenizer.decode(&special, false), "ab");
    assert_eq!(tokenizer.decode(&special, true), "a<|im_end|>b");
}

#[test]
fn user_defined_tokens_match_whole_and_stay_visible() {
    let tokenizer = tiny();
    let call = id(&tokenizer, "<tool_call>");
    for text in ["<tool_call>", "x<tool_call>y", "  <tool_call>  ", "<tool_call><tool_call>"] {
        for special in [false, true] {
            let ids = tokenizer.encode(text, special).unwrap();
            assert!(ids.contains(&call), "{text:?}");
            assert_eq!(tokenizer.decode(&ids, false), text);
        }
    }
}

#[test]
fn unused_tokens_are_masked_and_never_encoded() {
    let tokenizer = tiny();
    let masked = tokenizer.masked_ids();
    assert!(!masked.is_empty());
    assert!(masked.iter().all(|id| tokenizer.token_bytes(*id).is_empty()));
    let text = format!("[UNUSED{}]", masked[0]);
    let ids = tokenizer.encode(&text, true).unwrap();
    assert!(ids.iter().all(|id| !masked.contains(id)));
    assert_eq!(tokenizer.decode(&ids, false), text);
    assert!(!masked.contains(&id(&tokenizer, "<|im_end|>")));
}

#[test]
fn ids_past_the_vocabulary_have_no_bytes() {
    let tokenizer = tiny();
    assert_eq!(tokenizer.decode_bytes(u32::MAX), b"");
    assert_eq!(tokenizer.token_bytes(tokenizer.vocab() as u32), b"");
}

#[test]
fn too_long_a_text_is_refused_with_its_length() {
    let tokenizer = tiny();
    let error = tokenizer.encode_plain(&"x".repeat(MAX_TEXT_BYTES + 1)).unwrap_err();
    assert_eq!(error.reason(), Reason::PayloadTooLarge);
    assert!(error.to_string().contains("4194305 bytes"));
    assert!(tokenizer.encode(&"x".repeat(MAX_TEXT_BYTES + 1), true).is_err());
}

#[test]
fn long_runs_of_one_kind_keep_their_bytes() {
    for arch in [Arch::Llama, Arch::Qwen2] {
        let model = TinyModel { arch, ..TinyModel::default() };
        let file = ModelFile::from_gguf_bytes("tiny.gguf", model.to_gguf().unwrap()).unwrap();
        let text = file.text().unwrap();
        for unit in [" ", "\n", "a", "1", "'", "é", "🙂", " \n", "a ", "\u{301}"] {
            let long = unit.repeat(100_000 / unit.len());
            let started = Instant::now();
            let ids = text.tokenizer().encode_plain(&long).unwrap();
            assert!(started.elapsed() < Duration::from_secs(20), "{unit:?} took {:?}", started.elapsed());
            assert_eq!(text.tokenizer().decode(&ids, false).len(), long.len(), "{arch:?} {unit:?}");
        }
    }
}

#[test]
fn broken_vocabularies_are_refused_by_key() {
    assert!(refusal(|file| file.string("tokenizer.ggml.pre", "hindi")).contains("tokenizer.ggml.pre is \"hindi\""));
    assert!(refusal(|file| file.string("tokenizer.ggml.model", "llama")).contains("tokenizer.ggml.model is llama"));
    assert!(refusal(|file| file.remove("tokenizer.ggml.token_type")).contains("tokenizer.ggml.token_type is missing"));
    // R37: the right count, but one byte per element.
    let bytes = [0_u32.to_le_bytes().to_vec(), 320_u64.to_le_bytes().to_vec(), vec![1; 320]].concat();
    assert!(refusal(|file| file.raw("tokenizer.ggml.token_type", 9, bytes.clone())).contains("token_type is an array of u8"));
    assert!(refusal(|file| file.raw("tokenizer.ggml.scores", 9, bytes)).contains("tokenizer.ggml.scores"));
    assert!(refusal(|file| file.i32s("tokenizer.ggml.token_type", &[1; 319])).contains("has 319 elements"));
    assert!(refusal(|file| file.i32s("tokenizer.ggml.token_type", &[9; 320])).contains("element 0 is 9"));
    assert!(refusal(|file| file.u32("tokenizer.ggml.eos_token_id", 320)).contains("eos_token_id: is 320"));
    assert!(refusal(|file| file.u32("tokenizer.ggml.padding_token_id", u32::MAX)).contains("padding_token_id"));
    assert!(refusal(|file| file.strings("tokenizer.ggml.merges", ["qq zz"].into_iter())).contains("merge 0 needs \"qq\""));
    assert!(
        refusal(|file| file.strings("tokenizer.ggml.merges", ["ab"].into_iter())).contains("expected two tokens and one blank")
    );
    assert!(
        refusal(|file| file.strings("tokenizer.ggml.tokens", vec!["x"; 320].into_iter()))
            .contains("tokens 0 and 1 are both \"x\"")
    );
    let no_bos = refusal(|file| {
        file.remove("tokenizer.ggml.bos_token_id");
        file.bool("tokenizer.ggml.add_bos_token", true);
    });
    assert!(no_bos.contains("add_bos_token"));
}

#[test]
fn a_vocabulary_of_another_length_than_the_embedding_is_refused() {
    let mut writer = TinyModel::default().writer().unwrap();
    writer.u32("llama.vocab_size", 319);
    let error = ModelFile::from_gguf_bytes("tiny.gguf", writer.finish()).unwrap_err().to_string();
    assert!(error.contains("tensor token_embd.weight is 320 x 64, expected 319 x 64"), "{error}");
    let tokens: Vec<String> = (0..319).map(|id| format!("t{id}")).collect();
    let mut writer = TinyModel::default().writer().unwrap();
    writer.u32("llama.vocab_size", 320);
    writer.strings("tokenizer.ggml.tokens", tokens.iter().map(String::as_str));
    let file = ModelFile::from_gguf_bytes("tiny.gguf", writer.finish()).unwrap();
    assert!(file.text().unwrap_err().to_string().contains("has 319 tokens, the model has 320 embedding rows"));
}

#[test]
fn a_merge_that_makes_a_control_token_is_refused() {
    let error = refusal(|file| {
        let mut tokens: Vec<String> = (0..320).map(|id| format!("t{id}")).collect();
        tokens[0] = "<|".to_owned();
        tokens[1] = "end|>".to_owned();
        tokens[2] = "<|end|>".to_owned();
        let mut types = vec![1; 320];
        types[2] = 3;
        file.strings("tokenizer.ggml.tokens", tokens.iter().map(String::as_str));
        file.i32s("tokenizer.ggml.token_type", &types);
        file.strings("tokenizer.ggml.merges", ["<| end|>"].into_iter());
    });
    assert!(error.contains("produces the control token"), "{error}");
}

#[test]
fn the_canonical_json_is_the_same_each_time_and_names_what_matters() {
    let build = || {
        let file = ModelFile::from_gguf_bytes("tiny.gguf", TinyModel::default().to_gguf().unwrap()).unwrap();
        file.artifacts().unwrap()
    };
    let Artifacts { tokenizer_json, .. } = build();
    assert_eq!(tokenizer_json, build().tokenizer_json);
    let json: serde_json::Value = serde_json::from_slice(&tokenizer_json).unwrap();
    assert_eq!(json["pre_tokenizer"]["pretokenizers"][0]["type"], "Digits");
    assert_eq!(json["added_tokens"].as_array().unwrap().len(), 7);
    assert!(json["model"]["vocab"].get("[UNUSED319]").is_none());
}

#[test]
fn json_of_other_kinds_is_refused() {
    let refused = |json: serde_json::Value| Tokenizer::from_json(json.to_string().as_bytes(), 10).unwrap_err().to_string();
    let word_level = serde_json::json!({"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}});
    assert!(refused(word_level).contains("WordLevel"));
    let bpe = serde_json::json!({"type": "BPE", "vocab": {"a": 0}, "merges": []});
    assert!(refused(serde_json::json!({"version": "1.0", "added_tokens": [], "model": bpe})).contains("decoder"));
    assert!(Tokenizer::from_json(b"version https://git-lfs", 10).unwrap_err().to_string().contains("tokenizer.json"));
    let byte_level = serde_json::json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let giant = serde_json::json!({
        "version": "1.0", "added_tokens": [], "decoder": byte_level, "pre_tokenizer": byte_level,
        "model": {"type": "BPE", "vocab": {"a": u32::MAX}, "merges": []}
    });
    assert!(refused(giant).contains("has id 4294967295"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn any_text_reads_back_and_holds_no_control_id(text in "(\\PC|[ \\n\\r\\t\\x00'<|>]|<\\|im_end\\|>|<s>|<tool_call>){0,60}") {
        thread_local! {
            static TOKENIZER: Tokenizer = tiny();
        }
        TOKENIZER.with(|tokenizer| {
            let ids = tokenizer.encode_plain(&text).unwrap();
            prop_assert!(ids.iter().all(|id| !tokenizer.is_control(*id)));
            prop_assert_eq!(tokenizer.decode(&ids, false), text);
            Ok(())
        })?;
    }
}
