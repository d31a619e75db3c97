//! Cancellation at every step and phase, failure of every allocation, loss of the device: nothing leaks and nothing is wrong.

use crate::rig::{Answer, Rig, prompt, request, rig, settings, solo};
use kvasir_core::{Reason, Request};

fn pair() -> [Request; 2] {
    let mut many = request("a", &prompt(1, 22), 9);
    many.sampling.n = 3;
    many.sampling.temperature = 1.0;
    let mut other = request("a", &prompt(1, 30), 9);
    other.sampling.seed = 5;
    other.sampling.temperature = 0.8;
    [many, other]
}

fn tight() -> Rig {
    rig(settings(20))
}

#[test]
fn a_cancellation_at_every_step_and_phase_frees_all_and_disturbs_nobody() {
    let [many, other] = pair();
    let expected = [solo(&many), solo(&other)];
    let mut cancelled = 0;
    for victim in 0..2 {
        for phase in 0..3 {
            for step in 0..25 {
                let mut rig = tight();
                let mut readers = [Some(rig.submit(many.clone())), Some(rig.submit(other.clone()))];
                for _ in 0..step {
                    rig.engine.step();
                }
                match phase {
                    0 => drop(readers[victim].take()),
                    _ => {
                        if let Some(plan) = rig.engine.begin() {
                            if phase == 1 {
                                drop(readers[victim].take());
                            }
                            let output = rig.engine.run(&plan);
                            drop(readers[victim].take());
                            rig.engine.finish(&plan, output);
                        } else {
                            drop(readers[victim].take());
                        }
                    }
                }
                rig.engine.step();
                if let Some(mut reader) = readers[1 - victim].take() {
                    assert_eq!(
                        rig.wait(&mut reader).output(),
                        expected[1 - victim].output(),
                        "victim {victim} phase {phase} step {step}"
                    );
                }
                rig.engine.step();
                rig.assert_at_rest();
                cancelled += rig.engine.stats().requests.cancelled;
            }
        }
    }
    assert!(cancelled > 60, "the path is taken: {cancelled}");
}

#[test]
fn the_failure_of_any_allocation_costs_time_only() {
    let requests = pair();
    let expected = requests.each_ref().map(solo);
    let run = |fail_at: Option<u64>| {
        let mut rig = tight();
        rig.engine.fail_allocation_at(fail_at);
        let mut readers = requests.clone().map(|request| rig.submit(request));
        for (reader, expected) in readers.iter_mut().zip(&expected) {
            assert_eq!(rig.wait(reader).output(), expected.output(), "allocation {fail_at:?}");
        }
        rig.assert_at_rest();
        rig.engine.pool().allocations()
    };
    let allocations = run(None);
    assert!(allocations > 10);
    for number in 1..=allocations {
        run(Some(number));
    }
}

#[test]
fn a_step_without_memory_is_done_again_and_three_in_a_row_fail_typed() {
    let requests = pair();
    let expected = requests.each_ref().map(solo);
    let run = |out_of_memory_at: Option<u64>| {
        let mut rig = tight();
        out_of_memory_at.inspect(|at| rig.control.out_of_memory_at(*at));
        let mut readers = requests.clone().map(|request| rig.submit(request));
        for (reader, expected) in readers.iter_mut().zip(&expected) {
            assert_eq!(rig.wait(reader).output(), expected.output(), "step {out_of_memory_at:?}");
        }
        assert_eq!(rig.engine.stats().steps.out_of_memory, u64::from(out_of_memory_at.is_some()));
        rig.assert_at_rest();
        rig.control.runs()
    };
    let runs = run(None);
    assert!(runs > 8);
    for number in 1..=runs {
        run(Some(number));
    }
    let mut rig = tight();
    let mut reader = rig.submit(requests[1].clone());
    for run in 1..=3 {
        rig.control.out_of_memory_at(run);
        rig.engine.step();
    }
    let mut answer = Answer::default();
    answer.take(&mut reader);
    assert_eq!(answer.failed.unwrap().0.reason, Reason::OutOfMemory);
    rig.assert_at_rest();
    assert_eq!(rig.ask(requests[1].clone()).output(), expected[1].output());
}

#[test]
fn a_lost_device_fails_everybody_and_clears_the_cache() {
    for at in 1..12 {
        let mut rig = tight();
        rig.control.device_lost_at(at);
        let mut readers = pair().map(|request| rig.submit(request));
        for _ in 0..at {
            rig.engine.step();
        }
        for reader in &mut readers {
            let mut answer = Answer::default();
            answer.take(reader);
            assert_eq!(answer.failed.unwrap().0.reason, Reason::DeviceLost);
        }
        rig.assert_at_rest();
        assert_eq!(rig.engine.pool().counts().cached, 0);
        assert_eq!(rig.handle.submit(pair()[0].clone()).map(|_| ()).unwrap_err().reason, Reason::NotReady);
        assert_eq!(rig.handle.refusal().unwrap().reason, Reason::NotReady);
    }
}

#[test]
fn a_result_of_a_sequence_that_was_preempted_meanwhile_is_dropped() {
    let [_, other] = pair();
    let expected = solo(&other);
    for step in 0..10 {
        let mut rig = tight();
        let mut reader = rig.submit(other.clone());
        for _ in 0..step {
            rig.engine.step();
        }
        let plan = rig.engine.begin().unwrap();
        let output = rig.engine.run(&plan);
        assert!(rig.engine.preempt_one());
        rig.engine.finish(&plan, output);
        assert_eq!(rig.engine.stats().steps.stale_rows, 1);
        assert_eq!(rig.wait(&mut reader).output(), expected.output());
        rig.assert_at_rest();
    }
}
