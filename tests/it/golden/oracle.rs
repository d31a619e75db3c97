//! The oracle matrix (`contracts` §7.2 without speculation and lower tiers) on the real CPU backend.
//!
//! A request is run alone, cold, in one chunk: that is the truth. Then it runs on every other road: {cold, warm, half warm, cache off} ×
//! {undisturbed, preempted again and again, neighbours cancelled, itself cancelled and sent again} × every sampler, in full; chunk sizes,
//! neighbours and instruction sets rotate over that product so that each pair of values meets. Ids, log-probability bits, alternatives, text
//! and finish reasons must be equal. Each road also proves that it was taken: hits, preemptions and cancellations are counted.

use kvasir_core::{
    CacheMode, CachePolicy, Chunk, Contract, Digest, FinishReason, Framer, Grammar, Incarnation, LogitBias, ModelIdentity,
    PoolSecret, Request, RequestId, ReuseDomain, Sampling, SecretEpoch, Speculation, Stop, TenantTag, TokenId,
};
use kvasir_kernels::{Isa, Pool};
use kvasir_model::synth::TinyModel;
use kvasir_model::{Arch, ModelFile, Text};
use kvasir_worker::backend::TokenBytes;
use kvasir_worker::backend::cpu::{CpuBackend, CpuModel, CpuOptions};
use kvasir_worker::engine::{ChunkReceiver, Engine, EngineHandle, EngineParts, EngineSettings, MonotonicClock};
use kvasir_worker::grammar::GrammarFactory;
use std::sync::Arc;

const PROMPT_TOKENS: usize = 53;
const OUTPUT_TOKENS: u32 = 14;
const BLOCKS: u32 = 96;

#[derive(Clone, Copy, PartialEq, Debug)]
enum Reuse {
    Cold,
    Warm,
    HalfWarm,
    Off,
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Interruption {
    Undisturbed,
    Preempted,
    NeighboursCancelled,
    CancelledAndSentAgain,
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Sampler {
    Greedy,
    Seeded,
    Penalties,
    Truncated,
    Grammar,
    Logprobs,
    StopString,
    Choices,
}

const REUSES: [Reuse; 4] = [Reuse::Cold, Reuse::Warm, Reuse::HalfWarm, Reuse::Off];
const INTERRUPTIONS: [Interruption; 4] =
    [Interruption::Undisturbed, Interruption::Preempted, Interruption::NeighboursCancelled, Interruption::CancelledAndSentAgain];
const SAMPLERS: [Sampler; 8] = [
    Sampler::Greedy,
    Sampler::Seeded,
    Sampler::Penalties,
    Sampler::Truncated,
    Sampler::Grammar,
    Sampler::Logprobs,
    Sampler::StopString,
    Sampler::Choices,
];
const CHUNKS: [u32; 3] = [3, 16, 256];
const NEIGHBOURS: [usize; 3] = [0, 1, 4];
/// Offsets into the rotating axes; with them each pair of values of any two axes meets.
const ROTATIONS: usize = 9;

/// Everything of an output that must not differ.
#[derive(Clone, PartialEq, Debug, Default)]
struct Output {
    choices: Vec<ChoiceOutput>,
    reasons: Vec<FinishReason>,
}

#[derive(Clone, PartialEq, Debug, Default)]
struct ChoiceOutput {
    ids: Vec<TokenId>,
    text: String,
    /// Bits of the log-probability, then of each alternative.
    bits: Vec<(u32, Vec<(TokenId, u32)>)>,
}

struct Bytes(Arc<Text>);

impl TokenBytes for Bytes {
    fn bytes(&self, id: TokenId) -> &[u8] {
        self.0.tokenizer().decode_bytes(id)
    }
}

/// A model with what engines over it share.
struct Bench {
    model: Arc<CpuModel>,
    text: Arc<Text>,
    pool: Arc<Pool>,
    identity: ModelIdentity,
}

impl Bench {
    fn new(arch: Arch) -> Self {
        let tiny = TinyModel { arch, tied: arch == Arch::Llama, ..TinyModel::default() };
        let file = ModelFile::from_gguf_bytes("tiny.gguf", tiny.to_gguf().unwrap()).unwrap();
        let pool = Arc::new(Pool::new(2));
        Self {
            model: Arc::new(CpuModel::load(&file, &pool).unwrap()),
            text: Arc::new(file.text().unwrap()),
            pool,
            identity: ModelIdentity(Framer::new("oracle").finish()),
        }
    }

    fn engine(&self, isa: Isa, chunk: u32) -> (Engine, EngineHandle) {
        let options = CpuOptions { isa: Some(isa), ..CpuOptions::new(self.pool.clone()) };
        let backend = CpuBackend::new(self.model.clone(), options).unwrap();
        let mut settings = EngineSettings::new(Incarnation([1; 8]), self.identity, BLOCKS);
        settings.end_tokens = self.text.stop_ids().to_vec();
        settings.never = self.text.masked_ids().to_vec().into();
        settings.step.tokens_max = chunk;
        settings.step.chunk_min = chunk.min(settings.step.chunk_min);
        settings.poison = true;
        settings.check_laws = true;
        let bytes: Arc<dyn TokenBytes> = Arc::new(Bytes(self.text.clone()));
        let vocab = TinyModel::default().vocab;
        let grammars = GrammarFactory::new(vocab, self.text.stop_ids(), self.text.masked_ids(), bytes.as_ref()).unwrap();
        let parts = EngineParts {
            backend: Box::new(backend),
            bytes,
            constraints: Some(Arc::new(grammars)),
            clock: Arc::new(MonotonicClock::default()),
        };
        Engine::new(settings, parts).unwrap()
    }

    fn request(&self, name: u8, prompt: Vec<TokenId>, sampler: Sampler, cache: CacheMode) -> Request {
        let secret = PoolSecret::new(&[3; 32]).unwrap();
        let (sampling, stop, grammar) = parameters(sampler);
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
            sampling,
            stop,
            grammar,
            contract: Contract::Coupled,
            speculation: Speculation::default(),
            priority: 0,
            deadline: None,
            trace: None,
        }
    }
}

fn parameters(sampler: Sampler) -> (Sampling, Stop, Option<Grammar>) {
    let base = Sampling { seed: 11, temperature: 0.9, logprobs: Some(2), ..Sampling::default() };
    let stop = Stop { max_tokens: OUTPUT_TOKENS, ignore_eos: true, ..Stop::default() };
    match sampler {
        Sampler::Greedy => (Sampling { temperature: 0.0, ..base }, stop, None),
        Sampler::Seeded => (base, stop, None),
        Sampler::Penalties => (
            Sampling {
                repetition_penalty: 1.3,
                presence_penalty: 0.5,
                frequency_penalty: 0.4,
                logit_bias: vec![LogitBias { token: 65, bias: 2.5 }],
                ..base
            },
            stop,
            None,
        ),
        Sampler::Truncated => {
            (Sampling { top_k: 40, top_p: 0.9, min_p: 0.01, ..base }, Stop { min_tokens: 5, ignore_eos: false, ..stop }, None)
        }
        Sampler::Grammar => (base, Stop { ignore_eos: false, ..stop }, Some(Grammar::Regex("[a-f0-9]{4,12}".into()))),
        Sampler::Logprobs => (Sampling { logprobs: Some(5), prompt_logprobs: Some(1), ..base }, stop, None),
        Sampler::StopString => {
            (Sampling { temperature: 1.2, ..base }, Stop { strings: vec!["a".into(), "er".into()], ..stop }, None)
        }
        Sampler::Choices => (Sampling { n: 3, ..base }, stop, None),
    }
}

/// Distinct, reproducible prompts of ordinary byte tokens.
fn prompt(seed: u32) -> Vec<TokenId> {
    (0..PROMPT_TOKENS as u32).map(|i| (seed.wrapping_mul(97).wrapping_add(i * i * 31 + i * 7)) % 250).collect()
}

/// Gathers chunks of one request until it ends.
struct Collector {
    receiver: ChunkReceiver,
    output: Output,
    cached: u32,
    done: bool,
}

impl Collector {
    fn new(receiver: ChunkReceiver) -> Self {
        Self { receiver, output: Output::default(), cached: 0, done: false }
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
                    self.done = true;
                }
                Chunk::Failed { error, .. } => panic!("{error}"),
            }
        }
    }
}

fn run_to_end(engine: &mut Engine, collector: &mut Collector, mut disturb: impl FnMut(&mut Engine, usize)) {
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

fn run_solo(bench: &Bench, sampler: Sampler, isa: Isa) -> Output {
    let (mut engine, handle) = bench.engine(isa, 256);
    let request = bench.request(1, prompt(1), sampler, CacheMode::On);
    let mut collector = Collector::new(handle.submit(request).unwrap());
    run_to_end(&mut engine, &mut collector, |_, _| ());
    assert_eq!(collector.cached, 0);
    collector.output
}

#[derive(Clone, Copy, Debug)]
struct Road {
    reuse: Reuse,
    interruption: Interruption,
    sampler: Sampler,
    chunk: u32,
    neighbours: usize,
    isa: Isa,
}

/// What proves that a road was taken.
#[derive(Default, Debug)]
struct Proof {
    warm_hits: u32,
    half_hits: u32,
    preemptions: u64,
    cancelled: u64,
}

fn run_road(bench: &Bench, road: &Road, proof: &mut Proof) -> Output {
    let (mut engine, handle) = bench.engine(road.isa, road.chunk);
    let cache = if road.reuse == Reuse::Off { CacheMode::Off } else { CacheMode::On };
    warm_up(bench, road, &mut engine, &handle);
    let mut neighbours: Vec<Option<Collector>> = (0..road.neighbours)
        .map(|i| {
            let request = bench.request(100 + i as u8, prompt(50 + i as u32), Sampler::Seeded, CacheMode::On);
            Some(Collector::new(handle.submit(request).unwrap()))
        })
        .collect();
    if road.interruption == Interruption::CancelledAndSentAgain {
        let request = bench.request(2, prompt(1), road.sampler, cache);
        let first = handle.submit(request).unwrap();
        for _ in 0..(5 + road.chunk as usize % 7) {
            engine.step();
        }
        drop(first);
        engine.step();
    }
    let request = bench.request(1, prompt(1), road.sampler, cache);
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
    match (road.reuse, road.interruption) {
        (_, Interruption::CancelledAndSentAgain) => {}
        (Reuse::Cold | Reuse::Off, _) => assert_eq!(collector.cached, 0, "{road:?}"),
        (Reuse::Warm, _) => proof.warm_hits += collector.cached,
        (Reuse::HalfWarm, _) => proof.half_hits += collector.cached,
    }
    let stats = engine.stats();
    proof.preemptions += stats.steps.preemptions;
    proof.cancelled += stats.requests.cancelled;
    assert_eq!(stats.reconcile_violations, 0, "{road:?}");
    collector.output
}

fn warm_up(bench: &Bench, road: &Road, engine: &mut Engine, handle: &EngineHandle) {
    let mut tokens = prompt(1);
    match road.reuse {
        Reuse::Cold | Reuse::Off => return,
        Reuse::Warm => {}
        Reuse::HalfWarm => tokens[PROMPT_TOKENS / 2..].iter_mut().for_each(|token| *token = (*token + 1) % 250),
    }
    let mut first = Collector::new(handle.submit(bench.request(9, tokens, Sampler::Greedy, CacheMode::On)).unwrap());
    run_to_end(engine, &mut first, |_, _| ());
}

fn matrix(arch: Arch) -> usize {
    let bench = Bench::new(arch);
    let isas = Isa::available();
    let mut proof = Proof::default();
    let mut runs = 0;
    for sampler in SAMPLERS {
        let truth = run_solo(&bench, sampler, isas[0]);
        assert!(truth.choices.iter().all(|choice| !choice.ids.is_empty()));
        for isa in &isas {
            assert_eq!(run_solo(&bench, sampler, *isa), truth, "{sampler:?} alone on {isa:?}");
        }
        for rotation in 0..ROTATIONS {
            for (i, reuse) in REUSES.into_iter().enumerate() {
                for (j, interruption) in INTERRUPTIONS.into_iter().enumerate() {
                    let road = Road {
                        reuse,
                        interruption,
                        sampler,
                        chunk: CHUNKS[rotation % 3],
                        neighbours: NEIGHBOURS[(rotation / 3 + i + j) % 3],
                        isa: isas[(rotation + rotation / 3 + i) % isas.len()],
                    };
                    assert_eq!(run_road(&bench, &road, &mut proof), truth, "{road:?}");
                    runs += 1;
                }
            }
        }
    }
    assert!(proof.warm_hits > 1000 && proof.half_hits > 500 && proof.preemptions > 500 && proof.cancelled > 200, "{proof:?}");
    runs
}

#[test]
fn every_road_gives_the_same_bits_on_a_llama() {
    assert_eq!(matrix(Arch::Llama), SAMPLERS.len() * ROTATIONS * REUSES.len() * INTERRUPTIONS.len());
}

#[test]
fn every_road_gives_the_same_bits_on_a_qwen2() {
    assert_eq!(matrix(Arch::Qwen2), SAMPLERS.len() * ROTATIONS * REUSES.len() * INTERRUPTIONS.len());
}

#[test]
fn the_oracle_sees_a_difference() {
    let bench = Bench::new(Arch::Llama);
    let isa = Isa::detect();
    let truth = run_solo(&bench, Sampler::Seeded, isa);
    let (mut engine, handle) = bench.engine(isa, 256);
    let mut request = bench.request(1, prompt(1), Sampler::Seeded, CacheMode::On);
    request.sampling.seed += 1;
    let mut other = Collector::new(handle.submit(request).unwrap());
    run_to_end(&mut engine, &mut other, |_, _| ());
    assert_ne!(other.output, truth, "another seed gives another output");
    let digest: Digest = Framer::new("x").finish();
    assert_ne!(bench.identity.0, digest);
}
