//! The simulated engine: one prefill at a time, decoding at a set pace, a true block cache.

use super::text::END_TOKEN;
use kvasir_core::{
    BlockKey, CacheEvent, CacheMode, Chunk, Contract, Counters, Digest, Error, EventBatch, FinishReason, Finished, Framer,
    IdentityParts, Incarnation, MissReason, ModelIdentity, NumericsMode, NumericsParts, Reason, RemovalCause, Request, Started,
    State as TimeState, StateTimes, TenantTag, Tier, TierHit, TierLoad, Tokens, Usage, WorkerLoad, WorkerUid, block_keys,
    weights_digest,
};
use kvasir_model::{Artifacts, Text, TextError};
use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{broadcast, mpsc};
use tokio::time::{Instant, sleep};

/// How a mock worker behaves.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MockSettings {
    /// Stable name.
    pub uid: String,
    /// Name of the model that it serves.
    pub model: String,
    /// Tokens per block.
    pub block_size: u32,
    /// Blocks of the cache.
    pub blocks: u32,
    /// Longest prompt plus output, in tokens.
    pub context: u32,
    /// Time to compute one prompt token.
    pub prefill_token: Duration,
    /// Time between two output tokens of a choice.
    pub decode_token: Duration,
    /// Output tokens per message.
    pub tokens_per_message: u32,
}

/// A fault that a request meets.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum Fault {
    /// None.
    #[default]
    None,
    /// It is refused in the worker's own words.
    Refuse(Error),
    /// The connection breaks before the first byte.
    CloseBeforeFirst,
    /// The stream ends after so many messages with output, without an end.
    CloseAfter(u32),
    /// It is taken and never answered.
    Silent,
}

/// Counters of a mock worker.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct MockLevels {
    /// Requests that are open.
    pub open: u64,
    /// Requests that were taken since start.
    pub taken: u64,
    /// Requests whose reader went away.
    pub cancelled: u64,
    /// Prompt tokens computed.
    pub computed_tokens: u64,
    /// Prompt tokens reused.
    pub cached_tokens: u64,
    /// Blocks in the cache.
    pub blocks: u64,
}

pub(super) struct Engine {
    settings: MockSettings,
    parts: IdentityParts,
    numerics: NumericsParts,
    artifacts: Artifacts,
    incarnation: Incarnation,
    state: Mutex<State>,
    events: broadcast::Sender<Arc<EventBatch>>,
    prefill: tokio::sync::Mutex<()>,
}

#[derive(Default)]
struct State {
    cache: HashMap<BlockKey, Block>,
    leaves: BTreeSet<(u64, BlockKey)>,
    clock: u64,
    seq: u64,
    load_seq: u64,
    queued_tokens: u64,
    levels: MockLevels,
    fault: Fault,
    refusal: Option<Error>,
}

struct Block {
    parent: Option<BlockKey>,
    tenant: TenantTag,
    children: u32,
    used: u64,
}

/// An open request; counts itself out.
struct Open<'a>(&'a Engine, u64);

/// Batches that a slow reader of events may lag behind before it gets a new snapshot.
const EVENTS_LAG_MAX: usize = 1_024;

// === impl MockSettings ===

impl Default for MockSettings {
    fn default() -> Self {
        Self {
            uid: "mock-0".to_owned(),
            model: "mock".to_owned(),
            block_size: 16,
            blocks: 4_096,
            context: 32_768,
            prefill_token: Duration::from_micros(20),
            decode_token: Duration::from_micros(500),
            tokens_per_message: 1,
        }
    }
}

// === impl Engine ===

impl Engine {
    pub(super) fn new(settings: MockSettings, artifacts: Artifacts) -> Result<Self, TextError> {
        let text = Text::from_artifacts(&artifacts)?;
        let numerics = NumericsParts {
            mode: NumericsMode::Fake,
            revision: 1,
            kv_dtype: "f32".to_owned(),
            kv_layout: "mock".to_owned(),
            parallel_degree: 1,
            block_size: settings.block_size,
        };
        let name = Framer::new("kvasir/mock-weights/v1").bytes(settings.model.as_bytes()).finish();
        let parts = IdentityParts {
            weights: weights_digest([("mock", name)]),
            architecture: b"mock".to_vec(),
            tokenizer: text.tokenizer_digest(),
            chat_template: text.chat_template_digest(),
            adapter: None,
            numerics: numerics.id(),
        };
        let mut incarnation = [0; 8];
        // Without a random source two lives of one mock would look alike: the clock is the next best.
        if getrandom::fill(&mut incarnation).is_err() {
            let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
            incarnation = (now.as_nanos() as u64).to_le_bytes();
        }
        let (events, _) = broadcast::channel(EVENTS_LAG_MAX);
        let incarnation = Incarnation(incarnation);
        Ok(Self {
            settings,
            parts,
            numerics,
            artifacts,
            incarnation,
            state: Mutex::default(),
            events,
            prefill: tokio::sync::Mutex::default(),
        })
    }

    pub(super) fn settings(&self) -> &MockSettings {
        &self.settings
    }

    pub(super) fn parts(&self) -> &IdentityParts {
        &self.parts
    }

    pub(super) fn numerics(&self) -> &NumericsParts {
        &self.numerics
    }

    pub(super) fn artifacts(&self) -> &Artifacts {
        &self.artifacts
    }

    pub(super) fn identity(&self) -> ModelIdentity {
        self.parts.id()
    }

    pub(super) fn incarnation(&self) -> Incarnation {
        self.incarnation
    }

    pub(super) fn uid(&self) -> WorkerUid {
        WorkerUid(self.settings.uid.as_str().into())
    }

    pub(super) fn set_fault(&self, fault: Fault) {
        self.lock().fault = fault;
    }

    pub(super) fn set_refusal(&self, refusal: Option<Error>) {
        self.lock().refusal = refusal;
    }

    pub(super) fn refusal(&self) -> Option<Error> {
        self.lock().refusal.clone()
    }

    pub(super) fn levels(&self) -> MockLevels {
        let state = self.lock();
        MockLevels { blocks: state.cache.len() as u64, ..state.levels }
    }

    pub(super) fn load(&self) -> WorkerLoad {
        let mut state = self.lock();
        state.load_seq += 1;
        let cached = state.cache.len() as u32;
        let rate = |time: Duration| if time.is_zero() { 0.0 } else { time.as_secs_f32().recip() };
        WorkerLoad {
            incarnation: self.incarnation,
            seq: state.load_seq,
            running: state.levels.open as u32,
            waiting: 0,
            tiers: vec![TierLoad { tier: Tier::Device, free: self.settings.blocks.saturating_sub(cached), cached, held: 0 }],
            queued_prefill_tokens: state.queued_tokens,
            prefill_tokens_per_second: rate(self.settings.prefill_token),
            decode_tokens_per_second: rate(self.settings.decode_token),
            cost: Vec::new(),
            acceptance: Vec::new(),
            draining: state.refusal.as_ref().is_some_and(|refusal| refusal.reason == Reason::Draining),
        }
    }

    /// What the cache holds now, and every batch after that.
    pub(super) fn subscribe(&self) -> (EventBatch, broadcast::Receiver<Arc<EventBatch>>) {
        let state = self.lock();
        let stored = |(key, block): (&BlockKey, &Block)| CacheEvent::Stored {
            keys: vec![*key],
            parent: block.parent,
            tier: Tier::Device,
            tenant: block.tenant.clone(),
        };
        let events = state.cache.iter().map(stored).collect();
        let snapshot =
            EventBatch { incarnation: self.incarnation, seq: state.seq, epoch: state.seq, snapshot: Some(true), events };
        // Under the lock: no batch falls between snapshot and stream.
        (snapshot, self.events.subscribe())
    }

    pub(super) fn clear(&self, announce: Option<CacheEvent>) {
        let mut state = self.lock();
        state.cache.clear();
        state.leaves.clear();
        match announce {
            Some(event) => self.publish(&mut state, vec![event]),
            // The number is used up: the loss shows with the next batch.
            None => state.seq += 1,
        }
    }

    /// Whether a request is taken, and the fault that it will meet.
    pub(super) fn take(&self, request: &Request) -> Result<Fault, Error> {
        let state = self.lock();
        if let Some(refusal) = &state.refusal {
            return Err(refusal.clone());
        }
        if request.identity != self.identity() {
            return Err(Error::new(Reason::IdentityMismatch, "this mock worker serves another identity"));
        }
        match &state.fault {
            Fault::Refuse(error) => Err(error.clone()),
            fault => Ok(fault.clone()),
        }
    }

    /// Does a request; ends early when the reader is gone.
    pub(super) async fn run(&self, request: &Request, fault: Fault, out: &mpsc::Sender<Chunk>) {
        let open = Open::new(self, request.prompt.len() as u64);
        tokio::select! {
            () = self.generate(request, fault, out, open) => {}
            () = out.closed() => self.lock().levels.cancelled += 1,
        }
    }

    async fn generate(&self, request: &Request, fault: Fault, out: &mpsc::Sender<Chunk>, mut open: Open<'_>) {
        if fault == Fault::Silent {
            std::future::pending::<()>().await;
        }
        let received = Instant::now();
        let mut states = StateTimes::default();
        let turn = self.prefill.lock().await;
        states.add(TimeState::EngineWait, received.elapsed());
        let keys = block_keys(request.prefix(), self.settings.block_size, &request.prompt);
        let hit = if request.cache.mode == CacheMode::Off { 0 } else { self.hit(&keys, request.prompt.len()) };
        let computed = request.prompt.len() as u32 - hit;
        let started = Started {
            hits: (hit > 0).then_some(TierHit { tier: Tier::Device, tokens: hit }).into_iter().collect(),
            computed,
            miss_reason: (computed > 1).then_some(if hit == 0 { MissReason::Cold } else { MissReason::Diverged }),
        };
        if out.send(Chunk::Started(started)).await.is_err() {
            return;
        }
        let prefill = Instant::now();
        pause(self.settings.prefill_token * computed).await;
        drop(turn);
        open.computed();
        states.add(TimeState::Prefill, prefill.elapsed());
        {
            let mut state = self.lock();
            state.levels.computed_tokens += u64::from(computed);
            state.levels.cached_tokens += u64::from(hit);
        }
        if request.cache.mode != CacheMode::Off {
            self.commit(&keys, &request.tenant);
        }
        let decode = Instant::now();
        let Some(completion) = self.decode(request, &fault, out).await else { return };
        states.add(TimeState::DecodePlain, decode.elapsed());
        let usage = Usage {
            prompt_tokens: request.prompt.len() as u32,
            cached_tokens: hit,
            completion_tokens: completion,
            recomputed_tokens: 0,
        };
        let finished = Finished {
            reasons: vec![FinishReason::Length; request.sampling.n as usize],
            usage,
            states,
            counters: Counters { steps: completion.into(), sampled: completion.into(), ..Counters::default() },
            contract: Contract::Coupled,
        };
        // A reader that is gone needs no end.
        let _gone = out.send(Chunk::Finished(Box::new(finished))).await;
    }

    /// Emits the output; `None` when it was cut off.
    async fn decode(&self, request: &Request, fault: &Fault, out: &mpsc::Sender<Chunk>) -> Option<u32> {
        let (mut position, mut messages, mut completion) = (0, 0, 0);
        while position < request.stop.max_tokens {
            if *fault == Fault::CloseAfter(messages) {
                return None;
            }
            let count = self.settings.tokens_per_message.max(1).min(request.stop.max_tokens - position);
            pause(self.settings.decode_token * count).await;
            for choice in 0..request.sampling.n {
                let ids: Vec<u32> = (position..position + count).map(|at| token(request, choice, at)).collect();
                let text = ids.iter().map(|id| char::from(*id as u8)).collect();
                out.send(Chunk::Tokens(Tokens { choice, ids, text, ..Tokens::default() })).await.ok()?;
                completion += count;
            }
            position += count;
            messages += 1;
        }
        Some(completion)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Leading tokens in the cache, at most all but the last.
    fn hit(&self, keys: &[BlockKey], prompt: usize) -> u32 {
        let mut state = self.lock();
        state.clock += 1;
        let clock = state.clock;
        let reusable = (prompt.saturating_sub(1)) / self.settings.block_size as usize;
        let mut blocks = 0;
        for key in &keys[..reusable.min(keys.len())] {
            if !state.touch(key, clock) {
                break;
            }
            blocks += 1;
        }
        blocks * self.settings.block_size
    }

    /// Stores blocks, evicting the least recently used leaves, and says so in one batch.
    fn commit(&self, keys: &[BlockKey], tenant: &TenantTag) {
        let mut state = self.lock();
        state.clock += 1;
        let clock = state.clock;
        let mut events = Vec::new();
        let mut parent = None;
        for key in keys {
            if !state.touch(key, clock) {
                if state.cache.len() >= self.settings.blocks as usize {
                    match state.evict(parent) {
                        Some(gone) => events.push(CacheEvent::Removed {
                            keys: vec![gone],
                            tier: Tier::Device,
                            cause: RemovalCause::Capacity,
                        }),
                        None => break,
                    }
                }
                state.insert(*key, parent, tenant, clock);
                events.push(CacheEvent::Stored { keys: vec![*key], parent, tier: Tier::Device, tenant: tenant.clone() });
            }
            parent = Some(*key);
        }
        if !events.is_empty() {
            self.publish(&mut state, events);
        }
    }

    fn publish(&self, state: &mut State, events: Vec<CacheEvent>) {
        state.seq += 1;
        let batch = EventBatch { incarnation: self.incarnation, seq: state.seq, epoch: state.seq, snapshot: None, events };
        // Without a reader nobody needs it: the next reader begins with a snapshot.
        let _no_reader = self.events.send(Arc::new(batch));
    }
}

// === impl State ===

impl State {
    fn touch(&mut self, key: &BlockKey, clock: u64) -> bool {
        let Some(block) = self.cache.get_mut(key) else { return false };
        if block.children == 0 {
            self.leaves.remove(&(block.used, *key));
            self.leaves.insert((clock, *key));
        }
        block.used = clock;
        true
    }

    fn insert(&mut self, key: BlockKey, parent: Option<BlockKey>, tenant: &TenantTag, clock: u64) {
        if let Some(above) = parent.and_then(|parent| self.cache.get_mut(&parent)) {
            above.children += 1;
            if let Some(parent) = parent {
                self.leaves.remove(&(above.used, parent));
            }
        }
        self.cache.insert(key, Block { parent, tenant: tenant.clone(), children: 0, used: clock });
        self.leaves.insert((clock, key));
    }

    /// Takes the least recently used leaf out, but not `keep`, the end of the chain that is being stored.
    fn evict(&mut self, keep: Option<BlockKey>) -> Option<BlockKey> {
        let entry = *self.leaves.iter().find(|(_, key)| Some(*key) != keep)?;
        self.leaves.remove(&entry);
        let block = self.cache.remove(&entry.1)?;
        if let Some(parent) = block.parent
            && let Some(above) = self.cache.get_mut(&parent)
        {
            above.children -= 1;
            if above.children == 0 {
                self.leaves.insert((above.used, parent));
            }
        }
        Some(entry.1)
    }
}

// === impl Open ===

impl<'a> Open<'a> {
    fn new(engine: &'a Engine, prompt_tokens: u64) -> Self {
        let mut state = engine.lock();
        state.levels.open += 1;
        state.levels.taken += 1;
        state.queued_tokens += prompt_tokens;
        drop(state);
        Self(engine, prompt_tokens)
    }

    fn computed(&mut self) {
        self.0.lock().queued_tokens -= std::mem::take(&mut self.1);
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.computed();
        self.0.lock().levels.open -= 1;
    }
}

/// Lets time pass; without any, others have their turn, so that each message leaves on its own. (A sleep of 0 takes a tick of 1 ms.)
async fn pause(time: Duration) {
    if time.is_zero() { tokio::task::yield_now().await } else { sleep(time).await }
}

/// The output token of a choice at a position: a printable character that depends on prompt, seed, choice and position.
fn token(request: &Request, choice: u32, position: u32) -> u32 {
    let last: u64 = request
        .prompt
        .iter()
        .rev()
        .take(8)
        .fold(request.sampling.seed, |hash, id| hash.wrapping_mul(31).wrapping_add((*id).into()));
    let mixed = crate::rendezvous::rank(last ^ u64::from(choice), u64::from(position));
    let id = b' ' as u32 + (mixed % 95) as u32;
    debug_assert!(id < END_TOKEN, "output is printable");
    id
}

/// Digest and bytes of the artifact that routers fetch.
pub(super) fn artifact_of(artifacts: &Artifacts) -> (Digest, Vec<u8>) {
    (artifacts.digest(), artifacts.encode())
}
