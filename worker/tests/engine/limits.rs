//! Full queues, bad fields, deadlines, slow readers, priorities: every limit and what happens at it.

use crate::rig::{Answer, bias, identity, prompt, request, rig, settings, solo};
use kvasir_core::{Reason, State};
use std::time::Duration;

fn refusal(rig: &crate::rig::Rig, request: kvasir_core::Request) -> kvasir_core::Error {
    rig.handle.submit(request).map(|_| ()).unwrap_err()
}

#[test]
fn r25_r26_bad_fields_are_refused_by_name_and_neighbours_go_on() {
    let mut rig = rig(settings(64));
    let good = request("t", &prompt(1, 9), 12);
    let mut receiver = rig.submit(good.clone());
    rig.engine.step();
    let plain = || request("t", &prompt(2, 4), 2);
    let mut cases = Vec::new();
    for (token, value) in [(64, 5.0), (999_999, 5.0), (10, 1e9), (10, f32::NAN), (10, -100.5)] {
        let mut bad = plain();
        bad.sampling.logit_bias = vec![bias(token, value)];
        cases.push((bad, "logit_bias"));
    }
    cases.push((request("t", &[], 4), "prompt"));
    cases.push((request("t", &[1, 64], 4), "prompt"));
    let mut many = plain();
    many.sampling.n = 1000;
    cases.push((many, "n"));
    let mut none = plain();
    none.sampling.n = 0;
    cases.push((none, "n"));
    let mut empty_stop = plain();
    empty_stop.stop.strings = vec![String::new()];
    cases.push((empty_stop, "stop"));
    for (bad, field) in cases {
        let error = refusal(&rig, bad);
        assert_eq!((error.reason, error.field.as_deref()), (Reason::InvalidArgument, Some(field)));
    }
    let mut edge = plain();
    edge.sampling.logit_bias = vec![bias(63, 100.0), bias(0, -100.0)];
    assert!(rig.ask(edge).ids().iter().all(|id| *id == 63));
    assert_eq!(rig.wait(&mut receiver).output(), solo(&good).output());
    rig.assert_at_rest();
}

#[test]
fn another_identity_is_refused_before_any_lookup() {
    let mut rig = rig(settings(64));
    rig.ask(request("t", &prompt(1, 20), 2));
    let mut other = request("t", &prompt(1, 20), 2);
    other.identity = identity("other");
    let error = refusal(&rig, other);
    assert_eq!(error.reason, Reason::IdentityMismatch);
    assert!(error.retryable());
    assert_eq!(rig.engine.stats().requests.received, 1);
}

#[test]
fn r76_the_queue_is_bounded_by_choices_and_by_tokens() {
    let mut limited = settings(64);
    limited.queue.sequences_max = 10;
    limited.queue.tokens_max = 300;
    let mut rig = rig(limited);
    let mut readers = Vec::new();
    for _ in 0..3 {
        let mut asking = request("t", &prompt(1, 8), 4);
        asking.sampling.n = 3;
        readers.push(rig.submit(asking));
    }
    let mut two = request("t", &prompt(1, 8), 4);
    two.sampling.n = 2;
    let error = refusal(&rig, two);
    assert_eq!(error.reason, Reason::Overloaded, "9 + 2 choices do not fit 10");
    assert!(error.retry_after.is_some() && error.retryable());
    readers.push(rig.submit(request("t", &prompt(1, 8), 4)));
    assert_eq!(refusal(&rig, request("t", &prompt(1, 8), 4)).reason, Reason::Overloaded);
    rig.run_dry();
    for reader in &mut readers {
        let mut answer = Answer::default();
        answer.take(reader);
        assert!(answer.finished.is_some());
    }
    let long = rig.submit(request("t", &prompt(3, 200), 1));
    assert_eq!(refusal(&rig, request("t", &prompt(4, 120), 1)).reason, Reason::Overloaded, "320 tokens do not fit 300");
    drop(long);
    rig.run_dry();
    rig.ask(request("t", &prompt(5, 120), 1));
    rig.assert_at_rest();
}

#[test]
fn a_burst_far_over_the_limit_is_refused_and_leaves_nothing_behind() {
    let mut limited = settings(64);
    limited.queue.sequences_max = 50;
    let mut rig = rig(limited);
    let mut readers = Vec::new();
    let mut refused = 0;
    for number in 0..2000u64 {
        match rig.handle.submit(request("t", &prompt(number, 6), 3)) {
            Ok(reader) => readers.push(reader),
            Err(error) => {
                assert_eq!(error.reason, Reason::Overloaded);
                refused += 1;
            }
        }
    }
    assert_eq!((readers.len(), refused), (50, 1950));
    rig.run_dry();
    for reader in &mut readers {
        let mut answer = Answer::default();
        answer.take(reader);
        assert!(answer.finished.is_some());
    }
    rig.assert_at_rest();
}

#[test]
fn a_deadline_ends_a_request_wherever_it_is() {
    for millis in [0, 1, 3, 5, 9, 14, 30] {
        let mut small = settings(64);
        small.step.tokens_max = 8;
        let mut rig = rig(small);
        let mut late = request("t", &prompt(1, 40), 400);
        late.deadline = Some(Duration::from_millis(millis));
        let neighbour = request("t", &prompt(2, 9), 20);
        let mut other = rig.submit(neighbour.clone());
        let mut reader = rig.submit(late);
        let answer = rig.wait(&mut reader);
        let (error, _, states) = answer.failed.unwrap();
        assert_eq!(error.reason, Reason::DeadlineExceeded);
        assert!(states >= Duration::from_millis(millis), "{states:?}");
        assert!(states <= Duration::from_millis(millis + 4), "within a step: {states:?}");
        assert_eq!(rig.wait(&mut other).output(), solo(&neighbour).output());
        rig.assert_at_rest();
    }
}

#[test]
fn a_reader_that_is_behind_waits_alone_and_one_that_stalls_is_cut() {
    let mut narrow = settings(64);
    narrow.queue.chunks_max = 2;
    narrow.queue.stall_max = Duration::from_millis(100);
    let mut rig = rig(narrow);
    let (slow, quick) = (request("t", &prompt(1, 9), 60), request("t", &prompt(2, 9), 60));
    let mut slow_reader = rig.submit(slow.clone());
    let mut quick_reader = rig.submit(quick.clone());
    let mut slow_answer = Answer::default();
    let quick_answer = rig.wait(&mut quick_reader);
    assert_eq!(quick_answer.output(), solo(&quick).output(), "the slow one did not hold the quick one up");
    let others = rig.engine.stats().output.committed - 60;
    assert!(others <= 4, "what nobody reads is not computed: {others} tokens");
    // The slow reader wakes up late but in time, and gets all of it.
    for _ in 0..1000 {
        if slow_answer.is_over() {
            break;
        }
        // More steps than chunks fit: the rest of the time it waits for its reader.
        for _ in 0..5 {
            rig.engine.step();
        }
        rig.clock.advance(Duration::from_millis(20));
        slow_answer.take(&mut slow_reader);
    }
    assert_eq!(slow_answer.output(), solo(&slow).output());
    let states = slow_answer.finished.as_ref().unwrap().states;
    assert!(states.get(State::EmitWait) >= Duration::from_millis(200), "{states:?}");
    // One that never reads is cut off, and learns why when it comes back.
    let mut reader = rig.submit(slow);
    for _ in 0..20 {
        rig.engine.step();
        rig.clock.advance(Duration::from_millis(10));
    }
    rig.assert_at_rest();
    let mut answer = Answer::default();
    answer.take(&mut reader);
    assert_eq!(answer.failed.unwrap().0.reason, Reason::SlowConsumer);
}

#[test]
fn states_partition_the_time_and_an_injected_delay_lands_in_its_state() {
    let mut rig = rig(settings(64));
    let mut reader = rig.submit(request("t", &prompt(1, 30), 10));
    rig.clock.advance(Duration::from_millis(70));
    let answer = rig.wait(&mut reader);
    use kvasir_worker::engine::Clock;
    let states = answer.finished.unwrap().states;
    assert_eq!(states.total(), rig.clock.now(), "the states are all of the time");
    assert_eq!(states.get(State::EngineWait), Duration::from_millis(70));
    // Two steps over 30 tokens at 1 ms + 0.1 ms each, nine decode steps.
    assert_eq!(states.get(State::Prefill), Duration::from_millis(2 + 3));
    assert_eq!(states.get(State::DecodePlain), Duration::from_micros(9 * 1100));
}

#[test]
fn a_preempted_request_waits_in_its_own_state() {
    let mut rig = rig(settings(64));
    let mut reader = rig.submit(request("t", &prompt(1, 9), 10));
    // One position beyond a full block, so that something is left to compute again.
    for _ in 0..5 {
        rig.engine.step();
    }
    assert!(rig.engine.preempt_one());
    rig.clock.advance(Duration::from_millis(5));
    let answer = rig.wait(&mut reader);
    let finished = answer.finished.as_ref().unwrap();
    assert_eq!(finished.states.get(State::Preempted), Duration::from_millis(5));
    let usage = finished.usage;
    assert!(usage.recomputed_tokens > 0, "recompute is counted apart");
    assert_eq!(usage.cached_tokens, 0, "and never as hits");
    assert_eq!(rig.engine.stats().prompt.tokens, 9);
}

#[test]
fn priorities_go_first_and_nobody_starves() {
    let mut tight = settings(16);
    tight.step.rows_max = 2;
    let mut rig = rig(tight);
    let mut first = rig.submit(request("low", &prompt(1, 20), 5));
    let mut first_answer = Answer::default();
    let mut readers = Vec::new();
    let mut done_at = None;
    // A flood of preferred requests, one per step, for much longer than the head start.
    for step in 0..60_000u64 {
        let mut urgent = request("high", &prompt(step + 10, 20), 5);
        urgent.priority = 1;
        if rig.engine.requests() < 40 {
            readers.push((rig.submit(urgent), Answer::default()));
        }
        rig.engine.step();
        readers.retain_mut(|(reader, answer)| {
            answer.take(reader);
            !answer.is_over()
        });
        first_answer.take(&mut first);
        if first_answer.is_over() {
            use kvasir_worker::engine::Clock;
            done_at = Some(rig.clock.now());
            break;
        }
    }
    let done_at = done_at.expect("the low one is served");
    let worth = kvasir_worker::scheduler::PRIORITY_WORTH;
    assert!(done_at > worth / 2, "the preferred ones did go first: {done_at:?}");
    assert!(done_at < worth + Duration::from_secs(3), "{done_at:?}");
    drop(readers);
    rig.run_dry();
    rig.assert_at_rest();
}
