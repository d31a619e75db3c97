//! What a choice is and when it ends: lengths, ends, stops, choices, seeds, penalties, grammars, log-probabilities.

use crate::rig::{Rig, bias, prompt, request, rig, settings, solo};
use kvasir_core::{Error, FinishReason, Grammar, Reason};
use kvasir_worker::backend::TokenBytes;
use kvasir_worker::backend::fake::{FakeBackend, FakeBytes, FakeControl, FakeModel};
use kvasir_worker::engine::{Constraint, ConstraintFactory, Engine, EngineParts, VirtualClock};
use kvasir_worker::plan::TokenMask;
use std::sync::Arc;

#[test]
fn max_tokens_is_exact_and_ends_with_length() {
    for max in [1, 2, 3, 9] {
        let answer = solo(&request("t", &prompt(1, 6), max));
        let finished = answer.finished.as_ref().unwrap();
        assert_eq!(answer.ids().len(), max as usize);
        assert_eq!((finished.usage.completion_tokens, finished.reasons.as_slice()), (max, [FinishReason::Length].as_slice()));
        assert_eq!(answer.choices[0].logprobs.len(), max as usize);
        assert_eq!(answer.choices[0].text.len(), max as usize, "one letter per token");
    }
}

#[test]
fn nothing_asked_is_nothing_answered_but_the_prompt_is_scored() {
    let mut asking = request("t", &prompt(1, 6), 0);
    asking.sampling.prompt_logprobs = Some(1);
    let answer = solo(&asking);
    assert_eq!(answer.prompt_logprobs.len(), 6);
    assert_eq!(answer.finished.unwrap().usage.completion_tokens, 0);
}

#[test]
fn an_end_token_ends_the_output_and_is_no_part_of_it() {
    let plain = solo(&request("t", &prompt(3, 6), 10));
    let end = plain.ids()[4];
    let first = plain.ids().iter().position(|id| *id == end).unwrap();
    let mut asking = request("t", &prompt(3, 6), 10);
    asking.stop.tokens = vec![end];
    let answer = solo(&asking);
    let finished = answer.finished.as_ref().unwrap();
    assert_eq!(answer.ids(), &plain.ids()[..first]);
    assert_eq!(finished.reasons, [FinishReason::Stop]);
    assert_eq!((finished.counters.sampled, finished.counters.trimmed), (first as u64 + 1, 1));
}

#[test]
fn min_tokens_keeps_end_tokens_away_until_then() {
    let plain = solo(&request("t", &prompt(3, 6), 1));
    let mut asking = request("t", &prompt(3, 6), 30);
    asking.stop.tokens = (0..64).filter(|id| id % 2 == plain.ids()[0] % 2).collect();
    assert!(solo(&asking).choices.is_empty(), "without a minimum it ends at once");
    asking.stop.min_tokens = 5;
    let answer = solo(&asking);
    assert!(answer.ids().len() >= 5);
    assert!(answer.ids().iter().all(|id| !asking.stop.tokens.contains(id)));
}

#[test]
fn a_stop_string_is_not_in_the_text_and_its_tokens_are_trimmed() {
    let plain = solo(&request("t", &prompt(4, 6), 20));
    let mut asking = request("t", &prompt(4, 6), 20);
    asking.stop.strings = vec![plain.choices[0].text[6..8].to_owned()];
    let answer = solo(&asking);
    let at = plain.choices[0].text.find(&asking.stop.strings[0]).unwrap();
    let finished = answer.finished.as_ref().unwrap();
    assert_eq!(answer.choices[0].text, plain.choices[0].text[..at]);
    assert_eq!(answer.ids(), &plain.ids()[..at]);
    assert_eq!((finished.reasons.as_slice(), finished.counters.trimmed), ([FinishReason::Stop].as_slice(), 2));
    assert_eq!(answer.choices[0].logprobs.len(), at, "one entry per completion token");
}

#[test]
fn text_held_back_for_a_stop_string_is_given_out_at_the_end() {
    let plain = solo(&request("t", &prompt(4, 6), 8));
    let mut asking = request("t", &prompt(4, 6), 8);
    asking.stop.strings = vec![format!("{}~", &plain.choices[0].text[6..])];
    assert_eq!(solo(&asking).output(), plain.output());
}

#[test]
fn choices_share_the_prompt_and_equal_their_own_solo_runs_where_seeds_meet() {
    for length in [1, 4, 5, 8, 11] {
        let mut asking = request("t", &prompt(6, length), 9);
        asking.sampling.temperature = 1.0;
        asking.sampling.seed = 77;
        let one = solo(&asking);
        asking.sampling.n = 5;
        let five = solo(&asking);
        assert_eq!(five.choices.len(), 5);
        assert_eq!(five.choices[0], one.choices[0], "choice 0 is the one of n = 1");
        let distinct: std::collections::HashSet<_> = five.choices.iter().map(|choice| &choice.ids).collect();
        assert_eq!(distinct.len(), 5, "choices draw their own noise");
        let usage = five.finished.as_ref().unwrap().usage;
        assert_eq!((usage.prompt_tokens, usage.completion_tokens), (length as u32, 45));
        assert_eq!(five.finished.as_ref().unwrap().reasons.len(), 5);
    }
}

#[test]
fn greedy_choices_are_equal() {
    let mut asking = request("t", &prompt(6, 10), 12);
    asking.sampling.n = 3;
    let answer = solo(&asking);
    assert!(answer.choices.iter().all(|choice| *choice == answer.choices[0]));
    assert_eq!(answer.choices[0], solo(&request("t", &prompt(6, 10), 12)).choices[0]);
}

#[test]
fn penalties_and_bias_reach_the_sampler() {
    let plain = solo(&request("t", &prompt(8, 6), 30));
    let mut biased = request("t", &prompt(8, 6), 30);
    biased.sampling.logit_bias = vec![bias(7, 100.0)];
    assert!(solo(&biased).ids().iter().all(|id| *id == 7));
    biased.sampling.presence_penalty = 2.0;
    biased.sampling.logit_bias = vec![bias(7, 15.0), bias(8, 14.5)];
    let both = solo(&biased);
    assert!(both.ids().contains(&7) && both.ids().contains(&8), "the penalty makes way for the second: {:?}", both.ids());
    let mut repeated = request("t", &prompt(8, 6), 30);
    repeated.sampling.repetition_penalty = 1.7;
    assert_ne!(solo(&repeated).ids(), plain.ids());
}

/// Allows even and odd tokens in turn, and ends never.
struct Alternating(u32);

struct Alternation;

impl Constraint for Alternating {
    fn mask(&mut self) -> Result<Arc<TokenMask>, Error> {
        let mut mask = TokenMask::none(64);
        (0..64).filter(|id| id % 2 == self.0 % 2).for_each(|id| mask.allow(id));
        Ok(Arc::new(mask))
    }

    fn commit(&mut self, id: u32) -> Result<(), Error> {
        self.0 += 1;
        if id % 2 == (self.0 - 1) % 2 { Ok(()) } else { Err(Error::new(Reason::Internal, "outside the grammar")) }
    }
}

impl ConstraintFactory for Alternation {
    fn compile(&self, _: kvasir_core::Digest, grammar: &Grammar) -> Result<Box<dyn Constraint>, Error> {
        match grammar {
            Grammar::Regex(text) if text == "bad" => Err(Error::invalid("response_format", "bad grammar")),
            _ => Ok(Box::new(Alternating(0))),
        }
    }
}

#[test]
fn a_grammar_holds_for_every_choice_through_preemptions() {
    let clock = VirtualClock::default();
    let model = FakeModel::default();
    let parts = EngineParts {
        backend: Box::new(FakeBackend::new(model, clock.clone(), FakeControl::default())),
        bytes: Arc::new(FakeBytes::new(64)),
        constraints: Some(Arc::new(Alternation)),
        clock: Arc::new(clock.clone()),
    };
    let (engine, handle) = Engine::new(settings(64), parts).unwrap();
    let mut rig = Rig { engine, handle, clock, control: FakeControl::default() };
    let mut asking = request("t", &prompt(9, 7), 11);
    asking.grammar = Some(Grammar::JsonObject);
    asking.sampling.temperature = 1.0;
    asking.sampling.n = 3;
    let mut receiver = rig.submit(asking.clone());
    for _ in 0..8 {
        rig.engine.step();
        rig.engine.preempt_one();
    }
    let answer = rig.wait(&mut receiver);
    assert_eq!(answer.choices.len(), 3);
    for choice in &answer.choices {
        assert!(choice.ids.iter().enumerate().all(|(index, id)| *id as usize % 2 == index % 2), "{:?}", choice.ids);
    }
    asking.grammar = Some(Grammar::Regex("bad".to_owned()));
    assert_eq!(rig.handle.submit(asking.clone()).map(|_| ()).unwrap_err().field.as_deref(), Some("response_format"));
    let without = crate::rig::rig(settings(64));
    assert_eq!(without.handle.submit(asking).map(|_| ()).unwrap_err().reason, Reason::UnsupportedCombination);
    rig.assert_at_rest();
}

#[test]
fn the_context_ends_an_output_with_length() {
    let model = FakeModel { context: 20, ..FakeModel::default() };
    let mut rig = crate::rig::rig_with(settings(64), model);
    let answer = rig.ask(request("t", &prompt(1, 19), 10));
    assert_eq!((answer.ids().len(), answer.finished.unwrap().reasons[0]), (1, FinishReason::Length));
    let error = rig.handle.submit(request("t", &prompt(1, 20), 10)).map(|_| ()).unwrap_err();
    assert_eq!(error.reason, Reason::ContextLengthExceeded);
    assert!(error.message.contains("20"));
    rig.assert_at_rest();
}

#[test]
fn fake_bytes_are_one_letter_each() {
    let bytes = FakeBytes::new(64);
    assert_eq!((bytes.bytes(0), bytes.bytes(26), bytes.bytes(63), bytes.bytes(64)), (&b"a"[..], &b" "[..], &b"j"[..], &b""[..]));
    let _ = rig(settings(4));
}
