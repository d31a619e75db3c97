//! The mock's tokenizer: one token per byte, and an end token.

use kvasir_core::TokenId;
use kvasir_model::{Artifacts, TextSettings};
use std::fmt::Write as _;

/// Ends an answer.
pub const END_TOKEN: TokenId = 256;

/// Tokenizer, template and settings of the mock's model.
pub fn artifacts(context: u32) -> Artifacts {
    let mut vocab = String::new();
    for byte in 0..=255u8 {
        // Each byte as the character that byte-level vocabularies write for it, escaped.
        let _infallible = write!(vocab, "\"\\u{:04x}\":{byte},", u32::from(written(byte)));
    }
    let tokenizer_json = format!(
        concat!(
            r#"{{"version":"1.0","truncation":null,"padding":null,"added_tokens":[{{"id":{end},"content":"<|end|>","single_word":false,"#,
            r#""lstrip":false,"rstrip":false,"normalized":false,"special":true}}],"normalizer":null,"#,
            r#""pre_tokenizer":{{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":false}},"post_processor":null,"#,
            r#""decoder":{{"type":"ByteLevel","add_prefix_space":true,"trim_offsets":true,"use_regex":true}},"#,
            r#""model":{{"type":"BPE","dropout":null,"unk_token":null,"continuing_subword_prefix":null,"end_of_word_suffix":null,"#,
            r#""fuse_unk":false,"byte_fallback":false,"ignore_merges":false,"vocab":{{{vocab}"<|end|>":{end}}},"merges":[]}}}}"#
        ),
        end = END_TOKEN,
        vocab = vocab,
    );
    let template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}";
    Artifacts {
        tokenizer_json: tokenizer_json.into_bytes(),
        chat_template: Some(template.to_owned()),
        generation_config_json: b"{}".to_vec(),
        settings: TextSettings {
            vocab: END_TOKEN + 1,
            context_len: context,
            bos: None,
            add_bos: false,
            eos: Some(END_TOKEN),
            stop_ids: vec![END_TOKEN],
        },
    }
}

/// The character for a byte in byte-level vocabularies: printable ones stand for themselves, the others follow from U+0100 on in order.
fn written(byte: u8) -> char {
    let plain = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if plain(byte) {
        return char::from(byte);
    }
    let rank = (0..byte).filter(|other| !plain(*other)).count() as u32;
    char::from_u32(0x100 + rank).unwrap_or(char::REPLACEMENT_CHARACTER)
}
