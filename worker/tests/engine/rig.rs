//! A rig for engine tests: the engine on the hash-model and a virtual clock, requests by a small builder, and readers.
#![allow(dead_code, reason = "each test binary uses its part of the rig")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests state their assumptions")]

use kvasir_core::{
    CacheMode, CachePolicy, Chunk, Contract, Digest, Error, FinishReason, Finished, Framer, Incarnation, LogitBias,
    ModelIdentity, PoolSecret, Request, RequestId, ReuseDomain, Sampling, SharedDomain, Speculation, Started, Stop, TenantTag,
    TokenLogprob, Usage,
};
use kvasir_worker::backend::fake::{FakeBackend, FakeBytes, FakeControl, FakeModel};
use kvasir_worker::engine::{ChunkReceiver, Engine, EngineHandle, EngineParts, EngineSettings, VirtualClock};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Engine with everything around it.
pub struct Rig {
    pub engine: Engine,
    pub handle: EngineHandle,
    pub clock: VirtualClock,
    pub control: FakeControl,
}

/// Small deterministic generator (SplitMix64, Steele et al. 2014).
#[derive(Clone, Debug)]
pub struct Dice(pub u64);

impl Dice {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    pub fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

pub fn identity(name: &str) -> ModelIdentity {
    ModelIdentity(Framer::new("test/model").bytes(name.as_bytes()).finish())
}

pub fn secret() -> PoolSecret {
    PoolSecret::new(&[3; 32]).unwrap()
}

pub fn domain(tenant: &str) -> ReuseDomain {
    ReuseDomain::derive(&secret(), tenant, 0, None)
}

pub fn shared_domain() -> SharedDomain {
    SharedDomain::derive(&secret(), "pool")
}

pub fn settings(blocks: u32) -> EngineSettings {
    let mut settings = EngineSettings::new(Incarnation([1; 8]), identity("m"), blocks);
    settings.poison = true;
    settings.check_laws = true;
    settings.step.tokens_max = 16;
    settings.step.chunk_min = 4;
    settings
}

pub fn rig(settings: EngineSettings) -> Rig {
    rig_with(settings, FakeModel::default())
}

pub fn rig_with(settings: EngineSettings, model: FakeModel) -> Rig {
    let clock = VirtualClock::default();
    let control = FakeControl::default();
    let parts = EngineParts {
        backend: Box::new(FakeBackend::new(model, clock.clone(), control.clone())),
        bytes: Arc::new(FakeBytes::new(model.vocab)),
        constraints: None,
        clock: Arc::new(clock.clone()),
    };
    let (engine, handle) = Engine::new(settings, parts).unwrap();
    Rig { engine, handle, clock, control }
}

/// A prompt of `len` tokens that `seed` determines.
pub fn prompt(seed: u64, len: usize) -> Vec<u32> {
    let mut dice = Dice(seed);
    (0..len).map(|_| dice.below(64) as u32).collect()
}

pub fn request(tenant: &str, prompt: &[u32], max_tokens: u32) -> Request {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let mut id = [0; 16];
    id[..8].copy_from_slice(&NEXT.fetch_add(1, Ordering::Relaxed).to_le_bytes());
    Request {
        id: RequestId(id),
        identity: identity("m"),
        adapter: None,
        prompt: prompt.into(),
        domain: domain(tenant),
        shared: None,
        secret_epoch: secret().epoch(),
        tenant: TenantTag(tenant.into()),
        cache: CachePolicy { mode: CacheMode::On, ttl: None, pin: false },
        sampling: Sampling { temperature: 0.0, logprobs: Some(2), ..Sampling::default() },
        stop: Stop { max_tokens, ..Stop::default() },
        grammar: None,
        contract: Contract::Coupled,
        speculation: Speculation::default(),
        priority: 0,
        deadline: None,
        trace: None,
    }
}

/// Ids, text and the bits of log-probabilities of one choice.
pub type ChoiceOutput = (Vec<u32>, String, Vec<u32>);

/// Everything that came over a stream.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Answer {
    pub started: Option<Started>,
    pub choices: Vec<ChoiceAnswer>,
    pub prompt_logprobs: Vec<Option<TokenLogprob>>,
    pub finished: Option<Box<Finished>>,
    pub failed: Option<(Error, Usage, Duration)>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChoiceAnswer {
    pub ids: Vec<u32>,
    pub text: String,
    pub logprobs: Vec<TokenLogprob>,
}

impl Answer {
    pub fn take(&mut self, receiver: &mut ChunkReceiver) {
        while let Some(chunk) = receiver.try_recv() {
            assert!(self.finished.is_none() && self.failed.is_none(), "a chunk after the last");
            match chunk {
                Chunk::Started(started) => {
                    assert!(self.started.is_none(), "started twice");
                    self.started = Some(started);
                }
                Chunk::Tokens(tokens) => {
                    assert!(self.started.is_some(), "tokens before started");
                    let index = tokens.choice as usize;
                    if self.choices.len() <= index {
                        self.choices.resize(index + 1, ChoiceAnswer::default());
                    }
                    let choice = &mut self.choices[index];
                    choice.ids.extend(&tokens.ids);
                    choice.text.push_str(&tokens.text);
                    choice.logprobs.extend(tokens.logprobs);
                    self.prompt_logprobs.extend(tokens.prompt_logprobs);
                }
                Chunk::Finished(finished) => self.finished = Some(finished),
                Chunk::Failed { error, usage, states } => self.failed = Some((error, usage, states.total())),
            }
        }
    }

    /// What must be equal whatever happened on the way: ids, text, bits of log-probabilities, reasons.
    pub fn output(&self) -> (Vec<ChoiceOutput>, Vec<FinishReason>) {
        let bits = |choice: &ChoiceAnswer| {
            let values = choice.logprobs.iter();
            let bits = values
                .flat_map(|token| std::iter::once(token.logprob.to_bits()).chain(token.top.iter().map(|top| top.1.to_bits())));
            (choice.ids.clone(), choice.text.clone(), bits.collect())
        };
        let reasons = self.finished.as_ref().map(|finished| finished.reasons.clone()).unwrap_or_default();
        (self.choices.iter().map(bits).collect(), reasons)
    }

    pub fn cached(&self) -> u32 {
        self.started.as_ref().map_or(0, Started::cached)
    }

    pub fn is_over(&self) -> bool {
        self.finished.is_some() || self.failed.is_some()
    }

    pub fn ids(&self) -> &[u32] {
        &self.choices[0].ids
    }
}

impl Rig {
    pub fn submit(&self, request: Request) -> ChunkReceiver {
        self.handle.submit(request).unwrap()
    }

    /// Steps until nothing is left to do; bounded.
    pub fn run_dry(&mut self) {
        for _ in 0..100_000 {
            self.engine.step();
            if !self.engine.has_work() {
                return;
            }
        }
        panic!("the engine does not come to rest: {:?}", self.engine.stats());
    }

    /// Submits one request and runs it alone.
    pub fn ask(&mut self, request: Request) -> Answer {
        let mut receiver = self.submit(request);
        self.wait(&mut receiver)
    }

    /// Steps until a stream has ended.
    pub fn wait(&mut self, receiver: &mut ChunkReceiver) -> Answer {
        let mut answer = Answer::default();
        for _ in 0..100_000 {
            answer.take(receiver);
            if answer.is_over() {
                return answer;
            }
            self.engine.step();
        }
        panic!("no end: {answer:?} {:?}", self.engine.stats());
    }

    /// Polls an administrative call, steps once, and takes its answer.
    pub fn command<T>(&mut self, call: impl Future<Output = Result<T, Error>>) -> T {
        let mut call = Box::pin(call);
        let waker = futures::task::noop_waker();
        let mut context = std::task::Context::from_waker(&waker);
        assert!(call.as_mut().poll(&mut context).is_pending());
        self.engine.step();
        match call.as_mut().poll(&mut context) {
            std::task::Poll::Ready(answer) => answer.unwrap(),
            std::task::Poll::Pending => panic!("the engine did not answer within a step"),
        }
    }

    /// Nothing is held, nothing runs, no law was broken.
    pub fn assert_at_rest(&self) {
        let counts = self.engine.pool().counts();
        assert_eq!(self.engine.requests(), 0);
        assert_eq!(counts.held, 0, "{counts:?}");
        assert_eq!(counts.free + counts.cached, counts.total);
        self.assert_lawful();
    }

    pub fn assert_lawful(&self) {
        assert_eq!(self.engine.stats().reconcile_violations, 0, "{:?}", self.engine.stats());
        assert_eq!(self.control.poison_reads(), 0);
        self.engine.pool().check().unwrap();
    }
}

/// The answer of an engine that does nothing else.
pub fn solo(request: &Request) -> Answer {
    let mut rig = rig(settings(128));
    let answer = rig.ask(request.clone());
    rig.assert_at_rest();
    answer
}

pub fn bias(token: u32, bias: f32) -> LogitBias {
    LogitBias { token, bias }
}

pub fn digest(name: &str) -> Digest {
    Framer::new("test").bytes(name.as_bytes()).finish()
}
