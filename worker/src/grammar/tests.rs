#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]

use super::*;
use crate::plan::{SampleParams, SampleRow};
use crate::sample::Sampler;
use kvasir_core::{LogitBias, Reason};
use kvasir_kernels::noise::gumbel;
use serde_json::Value;

/// All bytes, some longer tokens, two end tokens, one special and one unused token.
struct Table(Vec<Vec<u8>>);

const END: TokenId = 256;
const TURN: TokenId = 257;
const UNUSED: TokenId = 259;
const MERGES: [&str; 16] =
    ["{\"", "\":", "\",", "\"}", "name", "true", "  ", "12", "ab", "](", "한", "\u{1f600}", "a", "+1", "((", "null"];

impl TokenBytes for Table {
    fn bytes(&self, id: TokenId) -> &[u8] {
        self.0.get(id as usize).map_or(&[], Vec::as_slice)
    }
}

fn table() -> Table {
    let mut words: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
    words.extend([vec![], vec![], vec![], b"zz".to_vec()]);
    words.extend(MERGES.map(|word| word.as_bytes().to_vec()));
    Table(words)
}

fn factory() -> GrammarFactory {
    let table = table();
    GrammarFactory::new(table.0.len(), &[END, TURN], &[UNUSED], &table).unwrap()
}

const HERE: Digest = Digest::new([1; 32]);
const ELSEWHERE: Digest = Digest::new([2; 32]);

/// Favours what ends texts, so that random ones do.
fn params(seed: u64, closers: &str) -> Arc<SampleParams> {
    let towards = |bytes: &str, bias| bytes.bytes().map(move |byte| LogitBias { token: byte.into(), bias }).collect::<Vec<_>>();
    let mut logit_bias = towards(closers, 4.0);
    logit_bias.extend([END, TURN].map(|token| LogitBias { token, bias: 4.0 }));
    logit_bias.extend(towards(" \n\t\r", -8.0));
    Arc::new(SampleParams {
        seed,
        temperature: 1.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        repetition_penalty: 1.0,
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
        logit_bias,
        prompt_tokens: Vec::new(),
        end_tokens: vec![END, TURN],
        never: Arc::new([UNUSED]),
        top_logprobs: None,
        want_logits: false,
    })
}

/// A model that knows nothing: logits of the position after `written` tokens.
fn logits(vocab: usize, seed: u64, written: usize) -> Vec<f32> {
    (0..vocab as u32).map(|id| gumbel(seed, 0, written as u32, 77, id)).collect()
}

/// Writes a text under a grammar, verifying random drafts on the way; `None` if it did not end.
fn write(factory: &GrammarFactory, grammar: &Grammar, seed: u64, closers: &str) -> Option<String> {
    let table = table();
    let mut state = factory.compile(HERE, grammar).unwrap();
    let mut sampler = Sampler::default();
    let params = params(seed, closers);
    let mut text = Vec::new();
    for written in 0..600 {
        let draft: Vec<TokenId> = (0..3).map(|index| (gumbel(seed, 1, written, index, 0) * 1e4) as u32 % 300).collect();
        let masks = state.masks(&draft).unwrap();
        assert_eq!((masks.masks.len(), state.committed()), (masks.allowed + 1, written as usize));
        assert!(draft[..masks.allowed].iter().zip(&masks.masks).all(|(id, mask)| mask.allows(*id)));
        if let Some(refused) = draft.get(masks.allowed) {
            assert!(!masks.masks[masks.allowed].allows(*refused));
        }
        let mask = state.mask().unwrap();
        assert_eq!(mask, masks.masks[0]);
        let row = SampleRow {
            params: params.clone(),
            choice: 0,
            position: written,
            output_counts: Arc::default(),
            end_allowed_from: 0,
            masks: vec![mask.clone()],
        };
        let id = sampler.choose(&logits(table.0.len(), seed, written as usize), &row, &[]).id;
        assert!(mask.allows(id));
        assert_eq!(mask.allows(END), state.accepting());
        state.commit(id).unwrap();
        if id == END || id == TURN {
            assert!(state.finished());
            return Some(String::from_utf8(text).expect("constrained text is UTF-8"));
        }
        text.extend_from_slice(table.bytes(id));
    }
    None
}

/// Every text that ends satisfies `right`, and nearly all do end.
fn check(grammar: &Grammar, closers: &str, right: impl Fn(&str) -> bool) {
    let factory = factory();
    let texts: Vec<String> = (0..40).filter_map(|seed| write(&factory, grammar, seed, closers)).collect();
    assert!(texts.len() >= 30, "only {} texts ended", texts.len());
    let wrong: Vec<_> = texts.iter().filter(|text| !right(text)).collect();
    assert!(wrong.is_empty(), "{wrong:?}");
    let mut distinct = texts.clone();
    distinct.sort();
    distinct.dedup();
    assert!(distinct.len() > 5, "random texts differ: {distinct:?}");
}

#[test]
fn json_object_always_parses_as_an_object() {
    check(&Grammar::JsonObject, "\"}]:", |text| serde_json::from_str::<Value>(text).is_ok_and(|value| value.is_object()));
}

const PERSON: &str = r#"{"type":"object","properties":{"name":{"type":"string","maxLength":8},"age":{"type":"integer","minimum":0,"maximum":120},
    "tags":{"type":"array","items":{"enum":["ab","c"]},"maxItems":3}},"required":["name","age"],"additionalProperties":false}"#;

#[test]
fn json_schema_always_holds() {
    check(&Grammar::JsonSchema(PERSON.into()), "\"}],", |text| {
        let Ok(Value::Object(person)) = serde_json::from_str::<Value>(text) else { return false };
        let keys: Vec<_> = person.keys().map(String::as_str).collect();
        let tags = person.get("tags").is_none_or(|tags| {
            tags.as_array().is_some_and(|tags| tags.len() <= 3 && tags.iter().all(|tag| tag == "ab" || tag == "c"))
        });
        keys[..2] == ["name", "age"]
            && keys.len() <= 3
            && tags
            && person["name"].as_str().is_some_and(|name| name.chars().count() <= 8)
            && person["age"].as_u64().is_some_and(|age| age <= 120)
    });
}

#[test]
fn regex_always_matches_whole() {
    check(&Grammar::Regex("[a-c]{2,5}-[0-9]{3}(한|é)?".into()), "-", |text| {
        let Some((head, tail)) = text.split_once('-') else { return false };
        let tail = tail.strip_suffix(['한', 'é']).unwrap_or(tail);
        (2..=5).contains(&head.len())
            && head.bytes().all(|byte| (b'a'..=b'c').contains(&byte))
            && tail.len() == 3
            && tail.bytes().all(|byte| byte.is_ascii_digit())
    });
}

/// Reads `expr` of the Lark grammar below and gives back the rest.
fn expression(text: &str) -> Option<&str> {
    let mut rest = term(text)?;
    while let Some(next) = rest.strip_prefix('+') {
        rest = term(next)?;
    }
    Some(rest)
}

fn term(text: &str) -> Option<&str> {
    if let Some(inner) = text.strip_prefix('(') {
        return expression(inner)?.strip_prefix(')');
    }
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    (1..=3).contains(&digits).then(|| &text[digits..])
}

#[test]
fn lark_always_derives() {
    let grammar = "start: expr\nexpr: term (\"+\" term)*\nterm: NUM | \"(\" expr \")\"\nNUM: /[0-9]{1,3}/\n";
    check(&Grammar::Lark(grammar.into()), "0123456789)", |text| expression(text) == Some(""));
}

#[test]
fn rollback_restores_every_mask_and_the_end_can_be_taken_back() {
    let factory = factory();
    let mut state = factory.compile(HERE, &Grammar::JsonSchema(PERSON.into())).unwrap();
    let text = br#"{"name": "a", "age": 7}"#;
    let mut masks = Vec::new();
    for byte in text {
        masks.push(state.mask().unwrap());
        state.commit(TokenId::from(*byte)).unwrap();
    }
    let ended = state.mask().unwrap();
    assert!(ended.allows(END) && ended.allows(TURN) && !ended.allows(TokenId::from(b'}')));
    // Asked again after the end token: the end only, and never a failure.
    for _ in 0..2 {
        state.commit(TURN).unwrap();
        assert!(state.finished() && state.accepting());
        assert_eq!(state.mask().unwrap(), factory.vocabulary.end_mask());
        assert_eq!(state.masks(&[END, 3]).unwrap().allowed, 1);
    }
    assert!(matches!(state.commit(65), Err(GrammarError::NotAllowed { id: 65, .. })));
    state.rollback(2).unwrap();
    assert_eq!(state.mask().unwrap(), ended);
    for back in (0..masks.len()).rev() {
        state.rollback(1).unwrap();
        assert_eq!(state.mask().unwrap(), masks[back], "after {back} tokens");
    }
    for (byte, mask) in text.iter().zip(&masks) {
        assert_eq!(&state.mask().unwrap(), mask);
        state.commit(TokenId::from(*byte)).unwrap();
    }
    assert_eq!(state.rollback(99), Err(GrammarError::Rollback { asked: 99, committed: text.len() }));
}

#[test]
fn what_the_mask_does_not_hold_is_refused_and_changes_nothing() {
    let factory = factory();
    let mut state = factory.compile(HERE, &Grammar::JsonObject).unwrap();
    state.commit(TokenId::from(b'{')).unwrap();
    let before = state.mask().unwrap();
    for id in [END, 258, UNUSED, TokenId::from(b'x'), 5_000, u32::MAX, 0xFF] {
        assert!(!before.allows(id));
        assert_eq!(state.commit(id), Err(GrammarError::NotAllowed { id, tokens: 1 }));
    }
    assert_eq!(state.mask().unwrap(), before);
    state.commit(TokenId::from(b'}')).unwrap();
    assert_eq!(factory.compile(HERE, &Grammar::JsonObject).unwrap().masks(&[65, 66]).unwrap().allowed, 0);
}

#[test]
fn tokens_of_equal_bytes_are_allowed_together_and_special_ones_never() {
    let factory = factory();
    let mut state = factory.compile(HERE, &Grammar::Regex("a+zz".into())).unwrap();
    let twin = 260 + MERGES.iter().position(|word| *word == "a").unwrap() as TokenId;
    let mask = state.mask().unwrap();
    assert!(mask.allows(TokenId::from(b'a')) && mask.allows(twin));
    state.commit(twin).unwrap();
    let mask = state.mask().unwrap();
    assert!(mask.allows(TokenId::from(b'z')) && !mask.allows(UNUSED) && !mask.allows(258) && !mask.allows(END));
}

#[test]
fn a_text_that_the_vocabulary_cannot_write_is_stuck_and_can_step_back() {
    let mut table = table();
    table.0[usize::from(b'q')].clear();
    let factory = GrammarFactory::new(table.0.len(), &[END], &[], &table).unwrap();
    let mut state = factory.compile(HERE, &Grammar::Regex("(aq|b)c".into())).unwrap();
    let before = state.mask().unwrap();
    // A draft that leads there is cut short.
    let masks = state.masks(&[TokenId::from(b'a'), TokenId::from(b'q')]).unwrap();
    assert_eq!((masks.allowed, masks.masks.len()), (0, 1));
    state.commit(TokenId::from(b'a')).unwrap();
    let stuck = state.mask().unwrap_err();
    assert!(matches!(stuck, GrammarError::Stuck { tokens: 1, .. }), "{stuck}");
    assert_eq!(stuck.reason(), Reason::InvalidArgument);
    state.rollback(1).unwrap();
    assert_eq!(state.mask().unwrap(), before);
    state.commit(TokenId::from(b'b')).unwrap();
    state.commit(TokenId::from(b'c')).unwrap();
    assert!(state.finished());
}

#[test]
fn bad_grammars_are_refused_with_the_field_and_the_cause() {
    let factory = factory();
    let refused = |grammar: Grammar| kvasir_core::Error::from(factory.compile(HERE, &grammar).err().expect("a refusal"));
    let cases = [
        (Grammar::JsonSchema("{".into()), "response_format", "the schema is not JSON"),
        (Grammar::JsonSchema(r#"{"type":"strin"}"#.into()), "response_format", "strin"),
        (Grammar::JsonSchema(r#"{"type":"object","dependentSchemas":{"a":{}}}"#.into()), "response_format", "dependentSchemas"),
        (Grammar::JsonSchema(r#"{"$ref":"https://example.com/x"}"#.into()), "response_format", "example.com"),
        (Grammar::JsonSchema("false".into()), "response_format", "nsatisfiable"),
        (Grammar::JsonSchema(" ".repeat(MAX_SCHEMA_BYTES + 1)), "response_format", "at most 262144"),
        (Grammar::Regex("a{2".into()), "grammar", "repetition"),
        (Grammar::Regex("x".repeat(MAX_GRAMMAR_BYTES + 1)), "grammar", "at most 65536"),
        (Grammar::Lark("start: missing".into()), "grammar", "missing"),
        (Grammar::Lark(String::new()), "grammar", "start"),
    ];
    for (grammar, field, cause) in cases {
        let error = refused(grammar.clone());
        assert_eq!((error.reason, error.field.as_deref()), (Reason::InvalidArgument, Some(field)), "{error}");
        assert!(error.message.contains(cause), "{error}");
        assert!(error.message.len() < 600, "{error}");
    }
}

#[test]
fn hostile_grammars_end_in_a_state_or_a_refusal() {
    let factory = factory();
    let deep = 30_000;
    let chain = (0..5_000).fold(String::new(), |chain, rule| chain + &format!("r{rule}: r{}\n", rule + 1));
    let grammars = [
        Grammar::Regex(format!("{}a{}", "(".repeat(deep), ")".repeat(deep))),
        Grammar::Regex("((a{900}){900}){900}".into()),
        Grammar::Regex("(a|aa)*".repeat(4_000)),
        Grammar::Lark(format!("start: {}\"a\"{}", "(".repeat(deep), ")".repeat(deep))),
        Grammar::Lark(format!("start: r0\n{chain}r5000: \"a\"")),
        Grammar::Lark("start: start start | \"a\"".into()),
        Grammar::JsonSchema(format!("{}{}", r#"{"items":"#.repeat(deep / 10), "}".repeat(deep / 10))),
        Grammar::JsonSchema(r#"{"type":"array","items":{},"minItems":100000000}"#.into()),
        Grammar::JsonSchema(r##"{"$ref":"#"}"##.into()),
    ];
    for grammar in grammars {
        if let Ok(mut state) = factory.compile(HERE, &grammar) {
            for _ in 0..3 {
                let Ok(mask) = state.mask() else { break };
                let Some(id) = (0..300).find(|id| mask.allows(*id)) else { break };
                let _ = state.commit(id);
            }
        }
    }
}

#[test]
fn equal_grammars_are_compiled_once_per_partition_and_keep_the_order_of_members() {
    let factory = factory();
    let compile = |partition, schema: &str| factory.compile(partition, &Grammar::JsonSchema(schema.into())).unwrap();
    let first = |mut state: GrammarState, name: u8| {
        state.commit(TokenId::from(b'{')).unwrap();
        state.commit(TokenId::from(b'"')).unwrap();
        state.mask().unwrap().allows(TokenId::from(name))
    };
    let order = |a: &str, b: &str| {
        format!(
            r#"{{"type":"object","properties":{{"{a}":{{"type":"null"}},"{b}":{{"type":"null"}}}},"required":["a","b"],"additionalProperties":false}}"#
        )
    };
    assert!(first(compile(HERE, &order("a", "b")), b'a'));
    assert!(first(compile(HERE, &order("a", "b").replace(':', " : ")), b'a'));
    assert_eq!(factory.cached(), 1);
    assert!(first(compile(HERE, &order("b", "a")), b'b'));
    assert_eq!(factory.cached(), 2);
    compile(ELSEWHERE, &order("a", "b"));
    assert_eq!(factory.cached(), 3);
    for length in 0..CACHED_GRAMMARS {
        compile(HERE, &format!(r#"{{"type":"string","maxLength":{length}}}"#));
    }
    assert_eq!(factory.cached(), CACHED_GRAMMARS);
}

#[test]
fn a_vocabulary_without_end_is_refused() {
    let table = table();
    for (vocab, end) in [(0, END), (table.0.len(), 9_999)] {
        let error = GrammarFactory::new(vocab, &[end], &[], &table).err().unwrap();
        assert_eq!(error.reason(), Reason::UnsupportedCombination);
    }
}
