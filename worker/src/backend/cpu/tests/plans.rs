//! Plans and settings that break the contract are refused, in words, before anything is written.

use super::*;
use crate::plan::BlockCopy;

fn refusal(backend: &mut CpuBackend, plan: &Plan) -> String {
    let before: Vec<u64> = (0..BLOCKS).map(|block| backend.fingerprint(block, 16)).collect();
    let problem = match backend.run(plan) {
        Err(BackendError::InvalidPlan(problem)) => problem,
        other => panic!("expected a refusal, not {other:?}"),
    };
    let after: Vec<u64> = (0..BLOCKS).map(|block| backend.fingerprint(block, 16)).collect();
    assert_eq!(before, after, "{problem}");
    problem
}

#[test]
fn an_invalid_plan_is_refused_by_name() {
    let (_, tiny) = tiny_models().remove(0);
    let mut backend = backend(&load(&tiny), Isa::detect(), 1, 16);
    let params = params(0.0);
    let good = row(&[1, 2, 3], 20, 0, &[1, 2], &params);
    let with = |change: &dyn Fn(&mut Row)| {
        let mut row = good.clone();
        change(&mut row);
        plan(vec![good.clone(), Row { blocks: Arc::from([7, 8]), ..good.clone() }, row])
    };
    let cases: [(&str, Plan); 9] = [
        ("no tokens", with(&|row| row.tokens.clear())),
        ("3 drafted tokens leave none of 3", with(&|row| row.drafted = 3)),
        ("beyond the context of 512", with(&|row| row.start = 510)),
        ("ends at position 4294967298", with(&|row| row.start = u32::MAX)),
        ("2 blocks of 16 do not cover 33 positions", with(&|row| row.start = 30)),
        ("block 64 is not one of 64", with(&|row| row.blocks = Arc::from([3, 64]))),
        ("token 320 is not one of 320", with(&|row| row.tokens[1] = 320)),
        ("token 999 is not one of 320", with(&|row| row.score = Some(ScoreRow { top: 0, next_prompt_token: Some(999) }))),
        ("rows 0 and 2 both write to block 2", with(&|row| row.blocks = Arc::from([3, 2]))),
    ];
    for (want, plan) in cases {
        let problem = refusal(&mut backend, &plan);
        assert!(problem.contains(want), "{problem}");
    }
    for copy in [
        BlockCopy { from: 64, to: 1, slots: 1 },
        BlockCopy { from: 1, to: 64, slots: 1 },
        BlockCopy { from: 1, to: 2, slots: 17 },
    ] {
        let problem = refusal(&mut backend, &Plan { copies: vec![copy], ..plan(vec![good.clone()]) });
        assert!(problem.contains("BlockCopy"), "{problem}");
    }
}

#[test]
fn an_empty_plan_is_a_step_without_rows() {
    let (_, tiny) = tiny_models().remove(0);
    let mut backend = backend(&load(&tiny), Isa::detect(), 1, 16);
    let out = backend.run(&Plan { epoch: 5, ..Plan::default() }).unwrap();
    assert_eq!((out.epoch, out.rows.len()), (5, 0));
}

#[test]
fn settings_that_cannot_work_are_refused() {
    let (_, tiny) = tiny_models().remove(0);
    let model = load(&tiny);
    let options = CpuOptions::new(Arc::new(Pool::new(1)));
    let error = CpuBackend::new(Arc::clone(&model), CpuOptions { block_size: 20, ..options.clone() }).err().unwrap();
    assert_eq!(error.reason(), Reason::InvalidArgument);
    assert!(error.to_string().contains("block_size"), "{error}");
    let mut backend = CpuBackend::new(model, options).unwrap();
    let early = backend.run(&plan(vec![row(&[1], 0, 0, &[0], &params(0.0))])).unwrap_err();
    assert!(early.to_string().contains("not allocated"), "{early}");
    assert!(matches!(backend.allocate(u32::MAX), Err(BackendError::InvalidPlan(_) | BackendError::OutOfMemory { .. })));
}

#[test]
fn the_spec_says_what_the_numbers_depend_on() {
    let (_, tiny) = tiny_models().remove(0);
    let model = load(&tiny);
    let spec = backend(&model, Isa::Scalar, 1, 32).spec().clone();
    assert_eq!((spec.name, spec.device.as_str(), spec.vocab, spec.context, spec.block_size), ("cpu", "scalar", 320, 512, 32));
    // 2 layers, keys and values, 2 heads of 16, 32 slots, 4 bytes.
    assert_eq!(spec.block_bytes, 2 * 2 * 2 * 16 * 32 * 4);
    let fast = backend(&model, Isa::detect(), 3, 32).spec().clone();
    assert_eq!(fast.numerics.id(), spec.numerics.id(), "speed is no part of the identity");
    assert_ne!(backend(&model, Isa::Scalar, 1, 16).spec().numerics.id(), spec.numerics.id());
}
