//! Each range, at its ends and beyond.
#![allow(clippy::unwrap_used, reason = "tests fail by panicking")]

use super::*;

fn refused(knobs: Knobs) -> String {
    let error = knobs.check(1).unwrap_err();
    assert!(matches!(error.reason, Reason::InvalidArgument | Reason::UnsupportedCombination), "{error}");
    let field = error.field.unwrap();
    assert!(error.message.contains(field.split('.').next().unwrap()), "{} does not name {field}", error.message);
    field
}

#[test]
fn defaults_are_those_of_the_api() {
    let wishes = Knobs::default().check(42).unwrap();
    assert_eq!(wishes.sampling, Sampling { seed: 42, ..Sampling::default() });
    assert_eq!(wishes.stop.max_tokens, u32::MAX);
    assert_eq!(Knobs { seed: Some(7), ..Knobs::default() }.check(42).unwrap().sampling.seed, 7);
}

#[test]
fn values_beyond_a_range_are_refused_by_name() {
    for bad in [-0.1, 2.1, f64::NAN, f64::INFINITY] {
        assert_eq!(refused(Knobs { temperature: Some(bad), ..Knobs::default() }), "temperature");
    }
    assert_eq!(refused(Knobs { top_p: Some(1.1), ..Knobs::default() }), "top_p");
    assert_eq!(refused(Knobs { top_k: Some(-2), ..Knobs::default() }), "top_k");
    assert_eq!(refused(Knobs { min_p: Some(-0.1), ..Knobs::default() }), "min_p");
    assert_eq!(refused(Knobs { n: Some(0), ..Knobs::default() }), "n");
    let past = kvasir_core::CHOICES_PER_REQUEST_MAX + 1;
    assert_eq!(refused(Knobs { n: Some(i64::from(past)), ..Knobs::default() }), "n");
    assert_eq!(refused(Knobs { max_tokens: Some(0), ..Knobs::default() }), "max_tokens");
    assert_eq!(refused(Knobs { max_tokens: Some(5), min_tokens: Some(6), ..Knobs::default() }), "min_tokens");
    assert_eq!(refused(Knobs { presence_penalty: Some(2.5), ..Knobs::default() }), "presence_penalty");
    assert_eq!(refused(Knobs { frequency_penalty: Some(-2.5), ..Knobs::default() }), "frequency_penalty");
    assert_eq!(refused(Knobs { repetition_penalty: Some(0.0), ..Knobs::default() }), "repetition_penalty");
    assert_eq!(refused(Knobs { logprobs: Some(21), ..Knobs::default() }), "logprobs");
    assert_eq!(refused(Knobs { logit_bias: vec![(-1, 0.0)], ..Knobs::default() }), "logit_bias");
    assert_eq!(refused(Knobs { logit_bias: vec![(1, 100.5)], ..Knobs::default() }), "logit_bias.1");
    assert_eq!(refused(Knobs { logit_bias: vec![(1, 1.0), (1, 2.0)], ..Knobs::default() }), "logit_bias");
    assert_eq!(refused(Knobs { cache_salt: Some(String::new()), ..Knobs::default() }), "cache_salt");
    assert_eq!(refused(Knobs { stop_token_ids: vec![1; 65], ..Knobs::default() }), "stop_token_ids");
    let far = Extension { priority: Some(101), ..Extension::default() };
    assert_eq!(refused(Knobs { extension: far, ..Knobs::default() }), "kvasir.priority");
    let now = Extension { deadline_ms: Some(0), ..Extension::default() };
    assert_eq!(refused(Knobs { extension: now, ..Knobs::default() }), "kvasir.deadline_ms");
    let pinned = Extension { cache_mode: Some(CacheMode::Off), cache_pin: true, ..Extension::default() };
    assert_eq!(refused(Knobs { extension: pinned, ..Knobs::default() }), "kvasir.cache.pin");
    let fixed = Extension { speculation_mode: Some(SpeculationMode::Fixed), ..Extension::default() };
    assert_eq!(refused(Knobs { extension: fixed, ..Knobs::default() }), "kvasir.speculation.max_draft_tokens");
}

#[test]
fn values_at_the_ends_of_a_range_are_taken() {
    let knobs = Knobs {
        temperature: Some(2.0),
        top_p: Some(1.0),
        top_k: Some(-1),
        min_p: Some(1.0),
        n: Some(32),
        presence_penalty: Some(-2.0),
        frequency_penalty: Some(2.0),
        logprobs: Some(20),
        logit_bias: vec![(3, -100.0), (1, 100.0)],
        ..Knobs::default()
    };
    let sampling = knobs.check(0).unwrap().sampling;
    assert_eq!((sampling.top_k, sampling.n, sampling.logprobs), (0, 32, Some(20)));
    assert_eq!(sampling.logit_bias[0], LogitBias { token: 1, bias: 100.0 });
}

/// R29: an empty stop string would end the output at once.
#[test]
fn stop_strings_are_few_and_never_empty() {
    let with = |stop: &[&str]| Knobs { stop: stop.iter().map(ToString::to_string).collect(), ..Knobs::default() };
    assert_eq!(refused(with(&[""])), "stop");
    assert_eq!(refused(with(&["", "x"])), "stop");
    assert_eq!(refused(with(&["a", "b", "c", "d", "e"])), "stop");
    assert_eq!(refused(with(&[&"x".repeat(STOP_STRING_BYTES_MAX + 1)])), "stop");
    assert_eq!(with(&["a", "b", "c", &"x".repeat(1000)]).check(0).unwrap().stop.strings.len(), 4);
}

#[test]
fn a_mass_of_zero_and_a_tiny_temperature_are_greedy() {
    let sampling = Knobs { top_p: Some(0.0), temperature: Some(1e-6), ..Knobs::default() }.check(0).unwrap().sampling;
    assert_eq!((sampling.top_k, sampling.top_p, sampling.temperature), (1, 1.0, 0.0));
    assert_eq!(Knobs { temperature: Some(0.001), ..Knobs::default() }.check(0).unwrap().sampling.temperature, 0.001);
}
