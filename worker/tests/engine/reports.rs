//! Field reports of kind prefix-cache: what others got wrong, and the proof that the path was taken.

use crate::rig::{Answer, identity, prompt, request, rig, rig_with, settings, solo};
use kvasir_core::MissReason;
use kvasir_worker::backend::fake::FakeModel;

/// Ids that a worker which only ever had these weights gives.
fn cold(weights: u64, prompt: &[u32]) -> Answer {
    let mut rig = rig(settings(64));
    rig.control.set_weights(weights);
    rig.ask(request("t", prompt, 8))
}

#[test]
fn r01_an_adapter_replaced_in_place_reuses_nothing() {
    let mut rig = rig(settings(64));
    let prompt = prompt(1, 18);
    let ask = |rig: &mut crate::rig::Rig, name: &str| {
        let mut request = request("t", &prompt, 8);
        request.identity = identity(name);
        rig.ask(request)
    };
    let swap = |rig: &mut crate::rig::Rig, name: &str, weights| {
        rig.control.set_weights(weights);
        let handle = rig.handle.clone();
        rig.command(handle.serve(vec![identity(name)]));
    };
    swap(&mut rig, "ad1=A", 11);
    let a = ask(&mut rig, "ad1=A");
    let again = ask(&mut rig, "ad1=A");
    assert_eq!(again.cached(), 16, "the path is taken: the same adapter hits");
    assert_eq!(a.output(), again.output());
    swap(&mut rig, "ad1=B", 12);
    let b = ask(&mut rig, "ad1=B");
    assert_eq!((b.cached(), b.started.as_ref().unwrap().miss_reason), (0, Some(MissReason::Cold)));
    assert_eq!(b.output(), cold(12, &prompt).output());
    assert_ne!(a.output(), b.output());
    rig.assert_at_rest();
}

#[test]
fn r02_every_selection_of_adapter_and_scale_is_its_own_cache() {
    let names = ["A@1", "B@1", "none", "A@0.5"];
    let mut settings = settings(128);
    settings.identities = names.map(identity).to_vec();
    let mut rig = rig(settings);
    let prompt = prompt(2, 21);
    for round in 0..2 {
        for (weights, name) in names.into_iter().enumerate() {
            rig.control.set_weights(weights as u64 + 20);
            let mut request = request("t", &prompt, 8);
            request.identity = identity(name);
            let answer = rig.ask(request);
            assert_eq!(answer.cached(), if round == 0 { 0 } else { 20 }, "{name}");
            assert_eq!(answer.output(), cold(weights as u64 + 20, &prompt).output(), "{name}");
        }
    }
    rig.assert_at_rest();
}

#[test]
fn r04_prompt_logprobs_are_whole_on_every_call_and_length() {
    let block = FakeModel::default().block_size as usize;
    let mut rig = rig(settings(64));
    for length in [1, block - 1, block, block + 1, 2 * block - 1, 2 * block, 2 * block + 1, 9 * block + 2] {
        let prompt = prompt(40 + length as u64, length);
        let mut asking = request("t", &prompt, 1);
        asking.sampling.prompt_logprobs = Some(0);
        let plain = rig.ask(request("t", &prompt, 1));
        let first = rig.ask(asking.clone());
        let second = rig.ask(asking.clone());
        for answer in [&first, &second] {
            assert_eq!(answer.prompt_logprobs.len(), length);
            assert!(answer.prompt_logprobs[0].is_none());
            assert!(answer.prompt_logprobs[1..].iter().zip(&prompt[1..]).all(|(score, id)| score.as_ref().unwrap().id == *id));
            assert_eq!(answer.prompt_logprobs, solo(&asking).prompt_logprobs);
            assert_eq!(answer.output(), plain.output());
            assert_eq!(answer.started.as_ref().unwrap().miss_reason, Some(MissReason::Bypass));
            assert_eq!(answer.cached(), 0);
        }
        if length > block {
            assert!(rig.ask(request("t", &prompt, 1)).cached() > 0, "the path is taken: there was something to bypass");
        }
    }
    rig.assert_at_rest();
}

#[test]
fn r05_a_prompt_that_is_cached_whole_still_computes_its_last_token() {
    let block = FakeModel::default().block_size as usize;
    for length in [block, 3 * block - 1, 3 * block, 3 * block + 1] {
        let mut rig = rig(settings(64));
        let mut long = prompt(5, length);
        let first = rig.ask(request("t", &long, 4));
        let second = rig.ask(request("t", &long, 4));
        assert_eq!(first.output(), second.output());
        assert_eq!(second.cached() as usize, (length - 1) / block * block);
        long.truncate(length);
        long.extend(prompt(6, block));
        let follow = rig.ask(request("t", &long, 4));
        assert!(follow.cached() as usize >= (length / block).saturating_sub(1) * block);
        assert_eq!(follow.cached() as usize, length / block * block, "the last full block of the first prompt is registered");
        rig.assert_at_rest();
    }
}

#[test]
fn r19_a_reader_that_leaves_frees_everything_within_a_step() {
    for steps in 0..40 {
        let mut rig = rig(settings(64));
        let receiver = rig.submit(request("t", &prompt(7, 40), 200));
        for _ in 0..steps {
            rig.engine.step();
        }
        drop(receiver);
        let committed = rig.engine.stats().output.committed;
        rig.engine.step();
        assert_eq!(rig.engine.stats().output.committed, committed, "no token after the cancellation");
        rig.assert_at_rest();
        assert_eq!(rig.engine.stats().requests.cancelled, 1);
        assert_eq!(rig.engine.stats().requests.finished, 0);
    }
}

#[test]
fn r77_a_prompt_larger_than_the_pool_is_refused_and_one_that_grows_beyond_it_ends_with_length() {
    let model = FakeModel::default();
    let pool_tokens = 10 * model.block_size;
    let mut rig = rig_with(settings(10), model);
    let error = rig.handle.submit(request("t", &prompt(8, pool_tokens as usize + 1), 4)).map(|_| ()).unwrap_err();
    assert_eq!(error.reason, kvasir_core::Reason::CapacityExceeded);
    assert!(error.message.contains("41") && error.message.contains("40"), "{error}");
    let grows = rig.ask(request("t", &prompt(9, pool_tokens as usize - 2), 100));
    assert_eq!(grows.finished.unwrap().reasons, [kvasir_core::FinishReason::Length]);
    assert_eq!(grows.choices[0].ids.len(), 3, "two more with KV, and the last needs none");
    let small = rig.ask(request("t", &prompt(10, 5), 3));
    assert_eq!(small.ids().len(), 3);
    rig.assert_at_rest();
}
