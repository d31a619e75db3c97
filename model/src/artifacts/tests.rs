//! Round trips and hostile bytes.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]

use super::*;
use crate::file::ModelFile;
use crate::synth::TinyModel;
use crate::template::ChatInput;
use crate::text::Text;

fn tiny() -> Artifacts {
    ModelFile::from_gguf_bytes("tiny.gguf", TinyModel::default().to_gguf().unwrap()).unwrap().artifacts().unwrap()
}

#[test]
fn a_router_rebuilds_the_same_text_from_the_bytes() {
    let sent = tiny();
    let received = Artifacts::decode(&sent.encode()).unwrap();
    assert_eq!(received, sent);
    assert_eq!(received.digest(), sent.digest());
    let (here, there) = (Text::from_artifacts(&sent).unwrap(), Text::from_artifacts(&received).unwrap());
    assert_eq!(here.tokenizer_digest(), there.tokenizer_digest());
    assert_eq!(here.chat_template_digest(), there.chat_template_digest());
    let messages = [serde_json::json!({"role": "user", "content": "hello"})];
    let input = ChatInput { messages: &messages, tools: None, add_generation_prompt: true, extra: None };
    assert_eq!(here.encode_chat(&input, None).unwrap(), there.encode_chat(&input, None).unwrap());
}

#[test]
fn each_part_changes_the_digest() {
    let base = tiny();
    let mut digests = vec![base.digest()];
    let mut changed = |change: fn(&mut Artifacts)| {
        let mut other = base.clone();
        change(&mut other);
        digests.push(other.digest());
    };
    changed(|a| a.tokenizer_json.push(b' '));
    changed(|a| a.chat_template = None);
    changed(|a| a.chat_template = Some(String::new()));
    changed(|a| a.generation_config_json.push(b' '));
    changed(|a| a.settings.add_bos = true);
    changed(|a| a.settings.stop_ids.push(0));
    let all = digests.len();
    digests.sort();
    digests.dedup();
    assert_eq!(digests.len(), all);
}

#[test]
fn bytes_cut_anywhere_or_claiming_too_much_are_refused() {
    let mut artifacts = tiny();
    artifacts.tokenizer_json.truncate(50);
    let whole = artifacts.encode();
    assert!(Artifacts::decode(&whole).is_ok());
    for cut in 0..whole.len() {
        assert!(Artifacts::decode(&whole[..cut]).is_err(), "cut at {cut}");
    }
    let mut longer = whole.clone();
    longer.push(0);
    assert!(Artifacts::decode(&longer).unwrap_err().to_string().contains("follow the last section"));
    let mut giant = whole;
    giant[MAGIC.len()..MAGIC.len() + 8].copy_from_slice(&(u64::MAX - 1).to_le_bytes());
    assert!(Artifacts::decode(&giant).unwrap_err().to_string().contains("end inside a section"));
}

#[test]
fn settings_past_the_vocabulary_are_refused() {
    let mut artifacts = tiny();
    artifacts.settings.stop_ids.push(1 << 20);
    let error = Text::from_artifacts(&artifacts).unwrap_err();
    assert!(error.to_string().contains("stop id is 1048576"));
}
