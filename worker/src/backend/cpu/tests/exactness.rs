//! One sequence, cut and surrounded in every way: equal ids, equal log-probability bits, equal stored keys and values.

use super::*;

/// What must be equal.
#[derive(Clone, PartialEq, Debug, Default)]
pub(super) struct Trace {
    pub(super) ids: Vec<u32>,
    /// Bits of the chosen tokens' log-probabilities and of their alternatives.
    pub(super) logprobs: Vec<u32>,
    /// Bits of the prompt's log-probabilities.
    pub(super) scores: Vec<u32>,
    /// Fingerprints of the sequence's blocks, up to its valid slots.
    pub(super) kv: Vec<u64>,
}

/// How a sequence is run.
#[derive(Clone, Debug)]
pub(super) struct Manner {
    pub(super) isa: Isa,
    pub(super) threads: usize,
    /// Prompt tokens per step.
    pub(super) chunk: usize,
    /// Which blocks it gets.
    pub(super) order: u32,
    /// Whether other sequences share its steps.
    pub(super) neighbours: bool,
    /// Drafted tokens per step; they are right but for every third.
    pub(super) drafted: usize,
}

impl Manner {
    pub(super) fn plain(isa: Isa) -> Self {
        Self { isa, threads: 1, chunk: usize::MAX, order: 0, neighbours: false, drafted: 0 }
    }
}

/// A prompt and how to go on from it.
pub(super) struct Script {
    pub(super) prompt: Vec<u32>,
    pub(super) output: usize,
    pub(super) temperature: f32,
    pub(super) block_size: u32,
}

fn record(trace: &mut Trace, chosen: &Chosen) {
    trace.ids.push(chosen.id);
    trace.logprobs.push(chosen.logprob.to_bits());
    trace.logprobs.extend(chosen.top.iter().flat_map(|(id, logprob)| [*id, logprob.to_bits()]));
}

/// Other sequences' rows: a prefill that starts anew, a decode and a verification over what the prefill wrote in the step before.
fn neighbours(step: u32, vocab: usize, params: &Arc<SampleParams>) -> [Row; 2] {
    let tokens = tokens(23, vocab, step + 11);
    let (mine, before) = if step.is_multiple_of(2) { ([50, 51], [52, 53]) } else { ([52, 53], [50, 51]) };
    let mut first = row(&tokens, 0, 0, &mine, params);
    first.score = Some(ScoreRow { top: 1, next_prompt_token: None });
    [first, row(&tokens[..3], if step == 0 { 0 } else { 20 }, 2, &before, params)]
}

/// Runs a script in a manner. `known` are right outputs to draft from.
pub(super) fn run(model: &Arc<CpuModel>, script: &Script, manner: &Manner, known: &[u32]) -> Trace {
    let vocab = model.config().vocab;
    let mut backend = backend(model, manner.isa, manner.threads, script.block_size);
    let params = params(script.temperature);
    let length = script.prompt.len() + script.output + manner.drafted;
    // 48 blocks are ours to choose from, in an order of our own.
    let mut table: Vec<u32> = (0..48).collect();
    table.sort_by_key(|block| block.wrapping_mul(manner.order.wrapping_mul(2_654_435_762) | 1));
    table.truncate(length.div_ceil(script.block_size as usize));
    let mut trace = Trace::default();
    let mut step = 0;
    let mut execute = |backend: &mut CpuBackend, row: Row| {
        let (rows, ours) = if manner.neighbours {
            let [first, last] = neighbours(step, vocab, &params);
            (vec![first, row, last], 1)
        } else {
            (vec![row], 0)
        };
        step += 1;
        backend.run(&plan(rows)).unwrap().rows.remove(ours)
    };
    let mut start = 0;
    for chunk in script.prompt.chunks(manner.chunk) {
        let end = start + chunk.len();
        let mut row = row(chunk, start as u32, 0, &table, &params);
        row.score = Some(ScoreRow { top: 0, next_prompt_token: script.prompt.get(end).copied() });
        if end < script.prompt.len() {
            row.sample = None;
        }
        let out = execute(&mut backend, row);
        trace.scores.extend(out.scores.iter().flatten().map(|score| score.logprob.to_bits()));
        out.chosen.iter().for_each(|chosen| record(&mut trace, chosen));
        start = end;
    }
    while trace.ids.len() < script.output {
        let done = trace.ids.len();
        let drafted = manner.drafted.min(script.output - done - 1);
        let mut tokens = vec![trace.ids[done - 1]];
        tokens.extend((done..done + drafted).map(|i| if i % 3 == 2 { (known[i] + 1) % vocab as u32 } else { known[i] }));
        let start = (script.prompt.len() + done - 1) as u32;
        let out = execute(&mut backend, row(&tokens, start, drafted as u32, &table, &params));
        assert_eq!(out.chosen.len(), drafted + 1);
        for (verified, chosen) in out.chosen.iter().enumerate() {
            record(&mut trace, chosen);
            if tokens.get(verified + 1) != Some(&chosen.id) {
                break;
            }
        }
    }
    let valid = script.prompt.len() + script.output - 1;
    for (index, block) in table.iter().enumerate().take(valid.div_ceil(script.block_size as usize)) {
        let slots = (valid - index * script.block_size as usize).min(script.block_size as usize);
        trace.kv.push(backend.fingerprint(*block, slots as u32));
    }
    trace
}

#[test]
fn a_sequence_does_not_feel_how_it_is_computed() {
    for (name, tiny) in tiny_models() {
        let model = load(&tiny);
        // Past one partition of keys, so that several are combined.
        for (length, temperature, block_size) in [(37, 0.0, 16), (265, 0.9, 32)] {
            let script = Script { prompt: tokens(length, tiny.vocab, 21), output: 9, temperature, block_size };
            let want = run(&model, &script, &Manner::plain(Isa::Scalar), &[]);
            assert_eq!((want.ids.len(), want.scores.len()), (9, length - 1));
            assert!(want.logprobs.iter().step_by(7).all(|bits| f32::from_bits(*bits).is_finite()), "{name}: poison was read");
            for isa in Isa::available() {
                for (index, chunk) in [1, 5, 16, 31, 100, usize::MAX].into_iter().enumerate() {
                    let manner = Manner {
                        isa,
                        threads: index % 3 + 1,
                        chunk,
                        order: index as u32,
                        neighbours: index % 2 == 0,
                        drafted: index % 4,
                    };
                    let got = run(&model, &script, &manner, &want.ids);
                    assert_eq!(got, want, "{name}, {manner:?}");
                }
            }
        }
    }
}

#[test]
fn block_size_changes_where_things_lie_and_nothing_else() {
    let (_, tiny) = tiny_models().remove(1);
    let model = load(&tiny);
    let trace = |block_size| {
        let script = Script { prompt: tokens(300, tiny.vocab, 4), output: 5, temperature: 0.7, block_size };
        Trace { kv: Vec::new(), ..run(&model, &script, &Manner::plain(Isa::detect()), &[]) }
    };
    let want = trace(16);
    for block_size in [32, 64, 128, 256] {
        assert_eq!(trace(block_size), want, "{block_size}");
    }
}

#[test]
fn a_fork_over_a_copied_tail_equals_the_sequence_it_came_from() {
    let (_, tiny) = tiny_models().remove(2);
    let model = load(&tiny);
    let prompt = tokens(45, tiny.vocab, 8);
    let mut backend = backend(&model, Isa::detect(), 2, 16);
    let params = params(0.0);
    let first = backend.run(&plan(vec![row(&prompt, 0, 0, &[3, 4, 5], &params)])).unwrap();
    let next = first.rows[0].chosen[0].id;
    // Copy and use of the copy in one step: 13 slots of the last block are valid.
    let rows = vec![row(&[next], 45, 0, &[3, 4, 5], &params), row(&[next], 45, 0, &[3, 4, 9], &params)];
    let copies = vec![crate::plan::BlockCopy { from: 5, to: 9, slots: 13 }];
    let out = backend.run(&Plan { epoch: 8, copies, rows }).unwrap();
    assert_eq!(out.epoch, 8);
    assert_eq!(out.rows[0].chosen, out.rows[1].chosen);
    assert_eq!(backend.fingerprint(5, 14), backend.fingerprint(9, 14));
    assert_ne!(backend.fingerprint(5, 14), backend.fingerprint(4, 14));
}

#[test]
fn backends_that_share_weights_and_threads_do_not_share_state() {
    let (_, tiny) = tiny_models().remove(0);
    let model = load(&tiny);
    let pool = Arc::new(Pool::new(2));
    let make = || {
        let mut backend = CpuBackend::new(Arc::clone(&model), CpuOptions::new(Arc::clone(&pool))).unwrap();
        backend.allocate(8).unwrap();
        backend
    };
    let prompt = tokens(30, tiny.vocab, 2);
    let params = params(0.0);
    let alone = make().run(&plan(vec![row(&prompt, 0, 0, &[0, 1], &params)])).unwrap();
    let others: Vec<_> = std::thread::scope(|scope| {
        let workers: Vec<_> =
            (0..3).map(|_| scope.spawn(|| make().run(&plan(vec![row(&prompt, 0, 0, &[0, 1], &params)])).unwrap())).collect();
        workers.into_iter().map(|worker| worker.join().unwrap()).collect()
    });
    assert!(others.iter().all(|other| other.rows[0].chosen == alone.rows[0].chosen));
}
