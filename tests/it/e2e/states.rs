//! The exclusive states of a request's wall time (`contracts` §4): an injected delay lands in its state and in no other, and through a real
//! fleet the states of a reply are all of the time that its client waited.

use super::support::{metric, smollm2, tiny, until, with_fleet};
use kvasir_cli::client::{Answer, Client};
use kvasir_core::{
    CachePolicy, Chunk, Contract, Framer, Incarnation, ModelIdentity, PoolSecret, Request, RequestId, ReuseDomain, Sampling,
    Speculation, State, StateTimes, Stop, TenantTag,
};
use kvasir_worker::backend::fake::{FakeBackend, FakeBytes, FakeControl, FakeModel};
use kvasir_worker::backend::{Backend, BackendError, BackendSpec};
use kvasir_worker::engine::{Clock as _, Engine, EngineParts, EngineSettings, VirtualClock};
use kvasir_worker::plan::{BlockId, Plan, StepOutput};
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// What is injected, each at its place of one and the same course of events.
#[derive(Clone, Copy, Default)]
struct Delays {
    /// Before the first step.
    queue: Duration,
    /// In each step with a prompt row.
    prefill: Duration,
    /// In each other step.
    decode: Duration,
    /// Between losing the blocks and the next step.
    preempted: Duration,
    /// While the reader reads nothing.
    reader: Duration,
}

/// The hash-model behind delays.
struct Slow {
    inner: FakeBackend,
    clock: VirtualClock,
    delays: Delays,
    /// Steps with a prompt row, other steps.
    steps: Arc<[AtomicU32; 2]>,
}

impl Backend for Slow {
    fn spec(&self) -> &BackendSpec {
        self.inner.spec()
    }

    fn allocate(&mut self, blocks: u32) -> Result<(), BackendError> {
        self.inner.allocate(blocks)
    }

    fn run(&mut self, plan: &Plan) -> Result<StepOutput, BackendError> {
        let prompt = plan.rows.iter().any(|row| row.tokens.len() > 1);
        self.steps[usize::from(!prompt)].fetch_add(1, Ordering::Relaxed);
        self.clock.advance(if prompt { self.delays.prefill } else { self.delays.decode });
        self.inner.run(plan)
    }

    fn poison(&mut self, blocks: &[BlockId]) {
        self.inner.poison(blocks);
    }

    fn fingerprint(&self, block: BlockId, slots: u32) -> u64 {
        self.inner.fingerprint(block, slots)
    }
}

fn request(identity: ModelIdentity) -> Request {
    let secret = PoolSecret::new(&[3; 32]).unwrap();
    Request {
        id: RequestId([1; 16]),
        identity,
        adapter: None,
        prompt: (0..30).collect(),
        domain: ReuseDomain::derive(&secret, "t", 0, None),
        shared: None,
        secret_epoch: secret.epoch(),
        tenant: TenantTag("t".into()),
        cache: CachePolicy::default(),
        sampling: Sampling { seed: 1, ..Sampling::default() },
        stop: Stop { max_tokens: 24, ignore_eos: true, ..Stop::default() },
        grammar: None,
        contract: Contract::Coupled,
        speculation: Speculation::default(),
        priority: 0,
        deadline: None,
        trace: None,
    }
}

/// Times, and steps with a prompt row and without. The course: queued, two prompt steps, some output, preempted, some output, a reader that
/// is away until the engine stops for it, the rest.
fn course(delays: Delays) -> (StateTimes, [u32; 2]) {
    let identity = ModelIdentity(Framer::new("states").finish());
    let clock = VirtualClock::default();
    let steps = Arc::new([AtomicU32::new(0), AtomicU32::new(0)]);
    let model = FakeModel::default();
    let inner = FakeBackend::new(model, clock.clone(), FakeControl::default());
    let mut settings = EngineSettings::new(Incarnation([1; 8]), identity, 64);
    settings.step.tokens_max = 16;
    settings.step.chunk_min = 16;
    settings.queue.chunks_max = 3;
    settings.check_laws = true;
    let parts = EngineParts {
        backend: Box::new(Slow { inner, clock: clock.clone(), delays, steps: steps.clone() }),
        bytes: Arc::new(FakeBytes::new(model.vocab)),
        constraints: None,
        clock: Arc::new(clock.clone()),
    };
    let (mut engine, handle) = Engine::new(settings, parts).unwrap();
    let mut reader = handle.submit(request(identity)).unwrap();
    clock.advance(delays.queue);
    for _ in 0..6 {
        assert!(engine.step());
        while reader.try_recv().is_some() {}
    }
    assert!(engine.preempt_one());
    clock.advance(delays.preempted);
    for _ in 0..3 {
        assert!(engine.step());
        while reader.try_recv().is_some() {}
    }
    while engine.step() {}
    assert!(engine.has_work(), "it waits for its reader");
    clock.advance(delays.reader);
    loop {
        match reader.try_recv() {
            Some(Chunk::Finished(finished)) => {
                assert_eq!(finished.states.total(), clock.now(), "the states are all of the time");
                assert_eq!(engine.stats().reconcile_violations, 0);
                return (finished.states, [0, 1].map(|kind| steps[kind].load(Ordering::Relaxed)));
            }
            Some(Chunk::Failed { error, .. }) => panic!("{error}"),
            Some(_) => {}
            None => {
                engine.step();
            }
        }
    }
}

#[test]
fn an_injected_delay_lands_in_its_state_and_in_no_other() {
    let (plain, steps) = course(Delays::default());
    assert!(steps[0] >= 3 && steps[1] >= 10, "{steps:?}");
    let delay = Duration::from_millis(40);
    let cases = [
        (State::EngineWait, Delays { queue: delay, ..Delays::default() }, 1),
        (State::Prefill, Delays { prefill: delay, ..Delays::default() }, steps[0]),
        (State::DecodePlain, Delays { decode: delay, ..Delays::default() }, steps[1]),
        (State::Preempted, Delays { preempted: delay, ..Delays::default() }, 1),
        (State::EmitWait, Delays { reader: delay, ..Delays::default() }, 1),
    ];
    for (wanted, delays, times) in cases {
        let (states, again) = course(delays);
        assert_eq!(again, steps, "the delay changed times and nothing else");
        let injected = (delay * times).as_secs_f64();
        for state in State::ALL {
            let grown = states.get(state).as_secs_f64() - plain.get(state).as_secs_f64();
            let want = if state == wanted { injected } else { 0.0 };
            assert!((grown - want).abs() <= injected * 0.1, "{wanted:?}: {state:?} grew by {grown} s of {injected} s");
        }
    }
    let all = Delays { queue: delay, prefill: delay, decode: delay, preempted: delay, reader: delay };
    assert_eq!(course(all).0.total().saturating_sub(plain.total()), delay * (3 + steps[0] + steps[1]), "together they add up");
}

fn states(report: &Value) -> Vec<(State, f64)> {
    let states = report["states_ms"].as_object().unwrap();
    states.iter().map(|(name, ms)| (State::from_name(name).unwrap(), ms.as_f64().unwrap())).collect()
}

/// Milliseconds of the client's wall time that no state has.
fn unexplained_ms(answer: &Answer) -> f64 {
    let states = states(&answer.report);
    for (state, ms) in &states {
        assert!(ms.is_finite() && *ms >= 0.0, "{state:?} took {ms} ms");
    }
    let has = |state| states.iter().any(|(other, ms)| *other == state && *ms > 0.0);
    assert!(has(State::Prepare) && has(State::Route) && has(State::Transfer) && has(State::Prefill), "{states:?}");
    let (sum, wall) = (states.iter().map(|(_, ms)| ms).sum::<f64>(), answer.total.as_secs_f64() * 1e3);
    assert!(sum <= wall, "the states of {sum} ms lie within the {wall} ms that the client waited");
    wall - sum
}

/// Within 10 % or 5 ms, the larger. The client's own time is in its wall time, and another program may take the processor from it: so the best
/// of several tries counts, which a state that is not measured would spoil as well.
async fn explained(what: &str, client: &Client, bodies: impl Fn(u32) -> Value) -> Answer {
    let mut gaps = Vec::new();
    for number in 0..8 {
        let answer = client.complete(bodies(number), |_| ()).await.unwrap();
        let gap = unexplained_ms(&answer);
        if gap <= (answer.total.as_secs_f64() * 100.0).max(5.0) {
            return answer;
        }
        gaps.push((gap, answer.total));
    }
    panic!("{what}: unexplained ms of the total: {gaps:?}");
}

fn share(answer: &Answer, state: State) -> f64 {
    let states = states(&answer.report);
    let sum: f64 = states.iter().map(|(_, ms)| ms).sum();
    states.iter().filter(|(other, _)| *other == state).map(|(_, ms)| ms / sum).sum()
}

fn body(model: &str, seed: u32, prompt: u32, output: u32) -> Value {
    let tokens: Vec<u32> = (0..prompt).map(|i| (seed * 31 + i * i * 7 + i) % 250).collect();
    json!({"model": model, "prompt": tokens, "max_tokens": output, "seed": 1, "ignore_eos": true, "kvasir": {"report": true}})
}

#[test]
fn the_states_of_a_reply_are_all_of_its_time() {
    let state = tempfile::tempdir().unwrap();
    with_fleet(&smollm2(1, state.path()), state.path(), |fleet| async move {
        let client = Client::new(&format!("http://{}", fleet.http()), None).unwrap();
        let model = fleet.model().to_owned();
        let long = explained("a long prompt", &client, |number| body(&model, number, 150, 1)).await;
        assert!(share(&long, State::Prefill) > 0.5, "a cold prompt is mostly prefill: {}", long.report);
        let warm = explained("a warm prompt", &client, |_| body(&model, 0, 150, 2)).await;
        assert!(warm.cached_tokens() >= 144);
        let talk = explained("a long answer", &client, |number| body(&model, number + 20, 8, 24)).await;
        assert!(share(&talk, State::DecodePlain) > 0.5, "a long answer is mostly decode: {}", talk.report);
    });
}

#[test]
fn a_wait_for_room_is_in_engine_wait_and_the_states_still_add_up() {
    let state = tempfile::tempdir().unwrap();
    let mut args = tiny(1, state.path());
    args.kv_mib = 1;
    with_fleet(&args, state.path(), |fleet| async move {
        let client = Client::new(&format!("http://{}", fleet.http()), None).unwrap();
        let model = fleet.model().to_owned();
        let ask = |seed| {
            let (client, body) = (client.clone(), body(&model, seed, 1200, 300));
            async move { client.complete(body, |_| ()).await.unwrap() }
        };
        let answers = futures::future::join_all((1..=6).map(ask)).await;
        let gaps: Vec<f64> = answers.iter().map(unexplained_ms).collect();
        let waited: Vec<_> = answers.iter().zip(&gaps).filter(|(answer, _)| share(answer, State::EngineWait) > 0.3).collect();
        assert!(!waited.is_empty(), "six requests do not fit a pool for a few: {:?}", answers[0].report);
        let holds = |(answer, gap): &(&Answer, &f64)| **gap <= (answer.total.as_secs_f64() * 100.0).max(5.0);
        assert!(waited.iter().any(holds), "unexplained: {gaps:?} ms");
        let client = &client;
        until("nobody waits", || async move {
            metric(&client.get_text("/metrics").await.unwrap().1, "kvasir_waiting_requests", &[]) == 0.0
        })
        .await;
    });
}
