//! What every oracle test shares: engines over one model, roads that a request can take, and the reading of its output.
//!
//! Owns how a road is walked and how it proves that it was taken. Refuses to know which requests and which combinations are tried.

use kvasir_core::{
    CacheMode, CachePolicy, Chunk, Contract, FinishReason, Framer, Grammar, Incarnation, ModelIdentity, PoolSecret, Request,
    RequestId, ReuseDomain, Sampling, SecretEpoch, Speculation, State, StateTimes, Stop, TenantTag, TokenId,
};
use kvasir_kernels::{Isa, Pool};
use kvasir_model::{ModelFile, Text};
use kvasir_worker::backend::TokenBytes;
use kvasir_worker::backend::cpu::{CpuBackend, CpuModel, CpuOptions};
use kvasir_worker::engine::{ChunkReceiver, Engine, EngineHandle, EngineParts, EngineSettings, MonotonicClock};
use kvasir_worker::grammar::GrammarFactory;
use std::sync::Arc;

const BLOCKS: u32 = 96;
/// Chunk of the runs that are the truth: the whole prompt at once.
const WHOLE: u32 = 512;

/// What of the prompt is in the cache before.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Reuse {
    Cold,
    Warm,
    HalfWarm,
    Off,
}

/// What happens meanwhile.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Interruption {
    Undisturbed,
    Preempted,
    NeighboursCancelled,
    CancelledAndSentAgain,
}

pub const REUSES: [Reuse; 4] = [Reuse::Cold, Reuse::Warm, Reuse::HalfWarm, Reuse::Off];
pub const INTERRUPTIONS: [Interruption; 4] =
    [Interruption::Undisturbed, Interruption::Preempted, Interruption::NeighboursCancelled, Interruption::CancelledAndSentAgain];

/// How a request is run.
#[derive(Clone, Copy, Debug)]
pub struct Road {
    pub reuse: Reuse,
    pub interruption: Interruption,
    pub chunk: u32,
    pub neighbours: usize,
    pub isa: Isa,
}

/// What is asked for beside the prompt.
#[derive(Clone, Debug)]
pub struct Wish {
    pub sampling: Sampling,
    pub stop: Stop,
    pub grammar: Option<Grammar>,
}

/// A request with everything around it.
pub struct Scene {
    pub prompt: Vec<TokenId>,
    pub wish: Wish,
    /// Shares the first half of the prompt with it and no block after that.
    pub relative: Vec<TokenId>,
    /// One per neighbour, as many as any road has.
    pub neighbours: Vec<Vec<TokenId>>,
    pub neighbours_wish: Wish,
}

/// Everything of an output that must not differ.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Output {
    pub choices: Vec<ChoiceOutput>,
    pub reasons: Vec<FinishReason>,
}

#[derive(Clone, PartialEq, Debug, Default)]
pub struct ChoiceOutput {
    pub ids: Vec<TokenId>,
    pub text: String,
    /// Bits of the log-probability, then of each alternative.
    pub bits: Vec<(u32, Vec<(TokenId, u32)>)>,
}

/// What proves that a road was taken, summed over roads.
#[derive(Default, Debug)]
pub struct Proof {
    /// Reused tokens.
    pub warm_hits: u32,
    pub half_hits: u32,
    /// Of any sequence.
    pub preemptions: u64,
    /// Roads on which the request itself lost its blocks.
    pub preempted: u32,
    pub cancelled: u64,
    /// Rows beyond the first of their step.
    pub shared_rows: u64,
}

struct Bytes(Arc<Text>);

impl TokenBytes for Bytes {
    fn bytes(&self, id: TokenId) -> &[u8] {
        self.0.tokenizer().decode_bytes(id)
    }
}

/// A model with what engines over it share.
pub struct Bench {
    pub text: Arc<Text>,
    pub identity: ModelIdentity,
    model: Arc<CpuModel>,
    pool: Arc<Pool>,
    bytes: Arc<dyn TokenBytes>,
    grammars: Arc<GrammarFactory>,
}

impl Bench {
    pub fn new(file: &ModelFile) -> Self {
        let pool = Arc::new(Pool::new(2));
        let model = Arc::new(CpuModel::load(file, &pool).unwrap());
        let text = Arc::new(file.text().unwrap());
        let bytes: Arc<dyn TokenBytes> = Arc::new(Bytes(text.clone()));
        let grammars = GrammarFactory::new(model.config().vocab, text.stop_ids(), text.masked_ids(), bytes.as_ref()).unwrap();
        Self { text, identity: ModelIdentity(Framer::new("oracle").finish()), model, pool, bytes, grammars: Arc::new(grammars) }
    }

    pub fn engine(&self, isa: Isa, chunk: u32) -> (Engine, EngineHandle) {
        let options = CpuOptions { isa: Some(isa), ..CpuOptions::new(self.pool.clone()) };
        let backend = CpuBackend::new(self.model.clone(), options).unwrap();
        let mut settings = EngineSettings::new(Incarnation([1; 8]), self.identity, BLOCKS);
        settings.end_tokens = self.text.stop_ids().to_vec();
        settings.never = self.text.masked_ids().to_vec().into();
        settings.step.tokens_max = chunk;
        settings.step.chunk_min = chunk.min(settings.step.chunk_min);
        settings.poison = true;
        settings.check_laws = true;
        let parts = EngineParts {
            backend: Box::new(backend),
            bytes: self.bytes.clone(),
            constraints: Some(self.grammars.clone()),
            clock: Arc::new(MonotonicClock::default()),
        };
        Engine::new(settings, parts).unwrap()
    }

    pub fn request(&self, name: u8, prompt: &[TokenId], wish: &Wish, cache: CacheMode) -> Request {
        let secret = PoolSecret::new(&[3; 32]).unwrap();
        Request {
            id: RequestId([name; 16]),
            identity: self.identity,
            adapter: None,
            prompt: prompt.into(),
            domain: ReuseDomain::derive(&secret, "tenant", 0, None),
            shared: None,
            secret_epoch: SecretEpoch(secret.epoch().0),
            tenant: TenantTag("tenant".into()),
            cache: CachePolicy { mode: cache, ..CachePolicy::default() },
            sampling: wish.sampling.clone(),
            stop: wish.stop.clone(),
            grammar: wish.grammar.clone(),
            contract: Contract::Coupled,
            speculation: Speculation::default(),
            priority: 0,
            deadline: None,
            trace: None,
        }
    }

    /// The truth: alone, cold, in one chunk.
    pub fn run_solo(&self, scene: &Scene, isa: Isa) -> Output {
        let (mut engine, handle) = self.engine(isa, WHOLE);
        let request = self.request(1, &scene.prompt, &scene.wish, CacheMode::On);
        let mut collector = Collector::new(handle.submit(request).unwrap());
        run_to_end(&mut engine, &mut collector, |_, _| ());
        assert_eq!(collector.cached, 0);
        collector.output
    }

    pub fn run_road(&self, scene: &Scene, road: &Road, proof: &mut Proof) -> Output {
        let (mut engine, handle) = self.engine(road.isa, road.chunk);
        let cache = if road.reuse == Reuse::Off { CacheMode::Off } else { CacheMode::On };
        self.warm_up(scene, road, &mut engine, &handle);
        let neighbours = scene.neighbours.iter().zip(100u8..).take(road.neighbours);
        let mut neighbours: Vec<Option<Collector>> = neighbours
            .map(|(prompt, name)| self.request(name, prompt, &scene.neighbours_wish, CacheMode::On))
            .map(|request| Some(Collector::new(handle.submit(request).unwrap())))
            .collect();
        assert_eq!(neighbours.len(), road.neighbours, "the scene has that many");
        let again = road.interruption == Interruption::CancelledAndSentAgain;
        if again {
            let first = handle.submit(self.request(2, &scene.prompt, &scene.wish, cache)).unwrap();
            for _ in 0..(5 + road.chunk % 7) {
                engine.step();
            }
            drop(first);
            engine.step();
        }
        let request = self.request(1, &scene.prompt, &scene.wish, cache);
        let mut collector = Collector::new(handle.submit(request).unwrap());
        run_to_end(&mut engine, &mut collector, |engine, step| match road.interruption {
            Interruption::Preempted if step % 3 == 2 && step < 60 => {
                engine.preempt_one();
            }
            Interruption::NeighboursCancelled => {
                if let Some(slot) = neighbours.get_mut(step / 2) {
                    *slot = None;
                }
            }
            _ => neighbours.iter_mut().flatten().for_each(Collector::poll),
        });
        match road.reuse {
            // The cancelled one may have left blocks.
            _ if again => {}
            Reuse::Cold | Reuse::Off => assert_eq!(collector.cached, 0, "{road:?}"),
            Reuse::Warm => proof.warm_hits += collector.cached,
            Reuse::HalfWarm => proof.half_hits += collector.cached,
        }
        let stats = engine.stats();
        proof.preemptions += stats.steps.preemptions;
        proof.preempted += u32::from(!collector.states.get(State::Preempted).is_zero());
        proof.cancelled += stats.requests.cancelled;
        proof.shared_rows += stats.steps.rows - stats.steps.steps;
        assert_eq!(stats.reconcile_violations, 0, "{road:?}");
        collector.output
    }

    fn warm_up(&self, scene: &Scene, road: &Road, engine: &mut Engine, handle: &EngineHandle) {
        let prompt = match road.reuse {
            Reuse::Cold | Reuse::Off => return,
            Reuse::Warm => &scene.prompt,
            Reuse::HalfWarm => &scene.relative,
        };
        let request = self.request(9, prompt, &scene.neighbours_wish, CacheMode::On);
        let mut first = Collector::new(handle.submit(request).unwrap());
        run_to_end(engine, &mut first, |_, _| ());
    }
}

/// Gathers chunks of one request until it ends.
pub struct Collector {
    receiver: ChunkReceiver,
    pub output: Output,
    pub cached: u32,
    states: StateTimes,
    done: bool,
}

impl Collector {
    pub fn new(receiver: ChunkReceiver) -> Self {
        Self { receiver, output: Output::default(), cached: 0, states: StateTimes::default(), done: false }
    }

    fn poll(&mut self) {
        while let Some(chunk) = self.receiver.try_recv() {
            match chunk {
                Chunk::Started(started) => self.cached = started.cached(),
                Chunk::Tokens(tokens) => {
                    let index = tokens.choice as usize;
                    if self.output.choices.len() <= index {
                        self.output.choices.resize(index + 1, ChoiceOutput::default());
                    }
                    let choice = &mut self.output.choices[index];
                    choice.ids.extend(&tokens.ids);
                    choice.text.push_str(&tokens.text);
                    for entry in tokens.logprobs.iter().chain(tokens.prompt_logprobs.iter().flatten()) {
                        let top = entry.top.iter().map(|(id, logprob)| (*id, logprob.to_bits())).collect();
                        choice.bits.push((entry.logprob.to_bits(), top));
                    }
                }
                Chunk::Finished(finished) => {
                    self.output.reasons = finished.reasons;
                    self.states = finished.states;
                    self.done = true;
                }
                Chunk::Failed { error, .. } => panic!("{error}"),
            }
        }
    }
}

/// Steps until the request has ended; `disturb` is called before each step.
pub fn run_to_end(engine: &mut Engine, collector: &mut Collector, mut disturb: impl FnMut(&mut Engine, usize)) {
    for step in 0..4000 {
        collector.poll();
        if collector.done {
            return;
        }
        disturb(engine, step);
        engine.step();
    }
    panic!("not finished after 4000 steps");
}
