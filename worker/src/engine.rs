//! The engine: one thread that owns all state of generation.
//!
//! Owns requests, sequences, the block pool and the order of a step. Refuses to know sockets, tokenisers and what computes. Everyone else
//! holds an [`EngineHandle`].
//!
//! Flow of a step, each arrow a call: `take → plan = schedule(state) → output = run(plan) → kept = accept(row, output) → commit → emit`.
//!
//! Guarantees
//! 1. A block is published only after its KV is written and its tokens are committed.
//! 2. A result counts only for the sequence and epoch that it was computed for; cancelled and preempted sequences drop theirs.
//! 3. Ending a request, however it ends, goes through one release path, which may be taken again without effect.
//! 4. A request's states partition the time from receipt to its last chunk.
//! 5. The counter laws hold after every step; a breach is counted in `reconcile_violations` and logged, never hidden.
//!
//! Costs: beside the backend's work, O(rows + requests) per step, and for the first few waiting sequences a lookup each.

mod accept;
mod clock;
mod commit;
mod constraint;
mod cost;
mod emit;
mod handle;
mod laws;
mod mailbox;
mod planning;
mod release;
mod request;
mod sequence;
mod settings;
mod stats;
mod stream;
mod take;
mod thread;

pub use clock::{Clock, MonotonicClock, VirtualClock};
pub use constraint::{Constraint, ConstraintFactory};
pub use cost::CostCurve;
pub use handle::{EngineHandle, MeasuredLoad};
pub use settings::{EngineParts, EngineSettings, QueueLimits, StepLimits};
pub use stats::{EngineStats, Inspection, OutputStats, PromptStats, RequestStats, StepStats};
pub use stream::ChunkReceiver;
pub use thread::EngineThread;

use crate::backend::{Backend, BackendError, TokenBytes};
use crate::kv::{EventFeed, Pool, PoolSettings};
use crate::plan::{Plan, SequenceId, StepOutput};
use crate::scheduler::Rank;
use handle::Shared;
use kvasir_core::{BlockKey, Error, Reason, SecretEpoch, State, Tier, TierLoad, WorkerLoad};
use request::{Job, JobId};
use sequence::Sequence;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::oneshot;

/// Load reports are at least this far apart, except for a change of draining.
const LOAD_EVERY: Duration = Duration::from_millis(50);

/// The engine. Runs on a thread ([`Engine::spawn`]) or step by step in simulation ([`Engine::step`]).
pub struct Engine {
    shared: Arc<Shared>,
    backend: Box<dyn Backend>,
    bytes: Arc<dyn TokenBytes>,
    pool: Pool,
    feed: EventFeed,
    work: Work,
    cost: CostCurve,
    stats: EngineStats,
    epoch: u64,
    pressure: Pressure,
    reports: Reports,
}

/// Requests and sequences.
#[derive(Default)]
struct Work {
    jobs: BTreeMap<JobId, Job>,
    sequences: BTreeMap<SequenceId, Sequence>,
    running: BTreeSet<Rank>,
    waiting: BTreeSet<Rank>,
    /// Keys of prompt blocks that a running sequence is computing.
    pending: HashMap<BlockKey, SequenceId>,
    /// The only secret whose domains may publish, once a rotation named it.
    active_epoch: Option<SecretEpoch>,
    next_sequence: u64,
}

/// Memory pressure from the backend.
#[derive(Default)]
struct Pressure {
    /// Consecutive steps that ran out of memory.
    streak: u32,
    /// The step's token budget is divided by two to this power.
    halvings: u32,
}

/// What is told to others, and when it was.
#[derive(Default)]
struct Reports {
    load_seq: u64,
    load_at: Option<Duration>,
    draining: bool,
    decode_seconds: f64,
    drained: Vec<oneshot::Sender<()>>,
    stopping: bool,
}

// === impl Engine ===

impl Engine {
    /// Allocates the pool and makes the engine with its handle.
    pub fn new(settings: EngineSettings, parts: EngineParts) -> Result<(Self, EngineHandle), Error> {
        let EngineParts { mut backend, bytes, constraints, clock } = parts;
        backend.allocate(settings.blocks).map_err(|error| Error::new(error.reason(), error.to_string()))?;
        let spec = backend.spec().clone();
        let pool = Pool::new(PoolSettings { blocks: settings.blocks, block_size: spec.block_size });
        if settings.poison {
            backend.poison(&(0..settings.blocks).collect::<Vec<_>>());
        }
        let feed = EventFeed::new(settings.incarnation, settings.queue.events_max);
        let load = WorkerLoad {
            incarnation: settings.incarnation,
            seq: 0,
            running: 0,
            waiting: 0,
            tiers: vec![TierLoad { tier: Tier::Device, free: settings.blocks, cached: 0, held: 0 }],
            queued_prefill_tokens: 0,
            prefill_tokens_per_second: 0.0,
            decode_tokens_per_second: 0.0,
            cost: Vec::new(),
            acceptance: Vec::new(),
            draining: false,
        };
        let mut shared = Shared::new(settings, spec, clock, load);
        shared.constraints = constraints;
        let shared = Arc::new(shared);
        let handle = shared.handle();
        let engine = Self {
            shared,
            backend,
            bytes,
            pool,
            feed,
            work: Work::default(),
            cost: CostCurve::default(),
            stats: EngineStats::default(),
            epoch: 0,
            pressure: Pressure::default(),
            reports: Reports::default(),
        };
        Ok((engine, handle))
    }

    /// One step. False if there was nothing to run.
    pub fn step(&mut self) -> bool {
        let Some(plan) = self.begin() else { return false };
        let output = self.run(&plan);
        self.finish(&plan, output);
        true
    }

    /// First half of a step: takes messages and makes the plan; `None` if no sequence has a row.
    pub fn begin(&mut self) -> Option<Plan> {
        self.take();
        self.epoch += 1;
        let plan = self.plan();
        if plan.rows.is_empty() {
            self.settle();
            return None;
        }
        if self.shared.settings.poison {
            let freed = self.pool.take_freed();
            self.backend.poison(&freed);
        }
        self.enter_states(&plan);
        Some(plan)
    }

    /// Has the backend compute the plan and learns its cost.
    pub fn run(&mut self, plan: &Plan) -> Result<StepOutput, BackendError> {
        let started = self.now();
        let output = self.backend.run(plan);
        let took = self.now().saturating_sub(started);
        if output.is_ok() {
            let tokens = plan.tokens();
            self.cost.observe(tokens as u32, took);
            let decodes = plan.rows.iter().filter(|row| row.tokens.len() == 1).count();
            self.stats.steps.steps += 1;
            self.stats.steps.rows += plan.rows.len() as u64;
            self.stats.steps.decode_rows += decodes as u64;
            self.stats.steps.prefill_tokens += (tokens - decodes) as u64;
            if decodes > 0 {
                let seconds = took.as_secs_f64();
                let old = self.reports.decode_seconds;
                self.reports.decode_seconds = if old == 0.0 { seconds } else { old + 0.1 * (seconds - old) };
            }
        }
        output
    }

    /// Second half of a step: takes messages that came meanwhile, judges the results, commits and emits.
    pub fn finish(&mut self, plan: &Plan, output: Result<StepOutput, BackendError>) {
        self.leave_states(plan);
        self.take();
        match output {
            Ok(output) if output.epoch == plan.epoch && output.rows.len() == plan.rows.len() => {
                self.pressure.streak = 0;
                self.pressure.halvings = self.pressure.halvings.saturating_sub(1);
                for (row, result) in plan.rows.iter().zip(output.rows) {
                    self.accept_row(plan.epoch, row, result);
                }
            }
            Ok(output) => {
                let text = format!(
                    "step {} with {} rows was answered as {} with {}",
                    plan.epoch,
                    plan.rows.len(),
                    output.epoch,
                    output.rows.len()
                );
                self.fail_rows(plan, &Error::new(Reason::Internal, text));
            }
            Err(error) => self.step_failed(plan, &error),
        }
        self.settle();
    }

    /// Whether a step could find something to do.
    pub fn has_work(&self) -> bool {
        !self.work.jobs.is_empty()
    }

    /// Requests that the engine works on.
    pub fn requests(&self) -> usize {
        self.work.jobs.len()
    }

    /// The block pool, for checks in tests.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// The backend, for checks in tests.
    pub fn backend(&self) -> &dyn Backend {
        &*self.backend
    }

    /// Step counter.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Counters up to now.
    pub fn stats(&self) -> &EngineStats {
        &self.stats
    }

    /// Makes the pool's reservation with this number fail (tests).
    pub fn fail_allocation_at(&mut self, number: Option<u64>) {
        self.pool.fail_allocation_at(number);
    }

    /// Takes a sequence's blocks away as memory pressure would: the worst-ranked of the running (tests).
    pub fn preempt_one(&mut self) -> bool {
        let last = self.work.running.iter().next_back().map(Rank::sequence);
        let Some(last) = last else { return false };
        self.preempt(last);
        let now = self.now();
        self.wait_states(now);
        true
    }

    fn now(&self) -> Duration {
        self.shared.clock.now()
    }

    /// Ends a step: events, laws, counters, load, and whoever waits for the end.
    fn settle(&mut self) {
        self.publish_events();
        let now = self.now();
        self.wait_states(now);
        self.stats.evictions = self.pool.evictions();
        self.stats.collisions = self.pool.collisions();
        self.check_laws();
        lock(&self.shared.stats).clone_from(&self.stats);
        self.report_load();
        if self.work.jobs.is_empty() {
            for waiter in self.reports.drained.drain(..) {
                // A waiter that went away needs no answer.
                let _ = waiter.send(());
            }
        }
    }

    fn publish_events(&mut self) {
        let events = self.pool.take_events();
        self.feed.push(self.epoch, events);
        let pool = &self.pool;
        self.feed.serve_snapshots(self.epoch, || pool.snapshot());
    }

    fn report_load(&mut self) {
        let now = self.now();
        let draining = self.shared.draining.load(Ordering::Acquire);
        let idle = self.work.jobs.is_empty();
        let due = self.reports.load_at.is_none_or(|last| now.saturating_sub(last) >= LOAD_EVERY);
        if !due && !idle && draining == self.reports.draining {
            return;
        }
        self.reports.load_at = Some(now);
        self.reports.load_seq += 1;
        self.reports.draining = draining;
        let counts = self.pool.counts();
        let queued = self.work.sequences.values().filter(|sequence| sequence.missing() > 1);
        let decode = self.reports.decode_seconds;
        let load = WorkerLoad {
            incarnation: self.shared.settings.incarnation,
            seq: self.reports.load_seq,
            running: self.work.running.len() as u32,
            waiting: self.work.waiting.len() as u32,
            tiers: vec![TierLoad { tier: Tier::Device, free: counts.free, cached: counts.cached, held: counts.held }],
            queued_prefill_tokens: queued.map(|sequence| u64::from(sequence.missing())).sum(),
            prefill_tokens_per_second: self.cost.prefill_rate(),
            decode_tokens_per_second: if decode > 0.0 { (1.0 / decode) as f32 } else { 0.0 },
            cost: self.cost.points(),
            acceptance: Vec::new(),
            draining,
        };
        self.shared.load.send_replace(MeasuredLoad { load, at: now });
    }

    /// Puts every request into the state of its own rows.
    fn enter_states(&mut self, plan: &Plan) {
        let now = self.now();
        self.wait_states(now);
        for row in &plan.rows {
            let Some(sequence) = self.work.sequences.get(&row.sequence) else { continue };
            let state = if row.drafted > 0 {
                State::Verify
            } else if sequence.output.tokens == 0 || row.tokens.len() > 1 {
                State::Prefill
            } else {
                State::DecodePlain
            };
            if let Some(job) = self.work.jobs.get_mut(&sequence.job)
                && (job.timing.meter.state() != State::Prefill || state == State::Prefill)
            {
                job.timing.meter.switch(now, state);
            }
        }
    }

    /// States of requests before rows are looked at: who waits, and for what.
    fn wait_states(&mut self, now: Duration) {
        for job in self.work.jobs.values_mut() {
            let mut sequences = job.sequences.iter().filter_map(|id| self.work.sequences.get(id)).peekable();
            let preempted = sequences.peek().is_some() && sequences.all(|sequence| sequence.preempted);
            let state = if !job.delivery.is_clear() {
                State::EmitWait
            } else if preempted {
                State::Preempted
            } else if job.ledger.started.is_some() {
                State::Scheduler
            } else {
                State::EngineWait
            };
            job.timing.meter.switch(now, state);
        }
    }

    /// Ends the states of rows: what follows is scheduling, or the way to the first output.
    fn leave_states(&mut self, plan: &Plan) {
        let now = self.now();
        for row in &plan.rows {
            let Some(sequence) = self.work.sequences.get(&row.sequence) else { continue };
            let first = row.sample.is_some() && sequence.output.tokens == 0;
            if let Some(job) = self.work.jobs.get_mut(&sequence.job) {
                job.timing.meter.switch(now, if first { State::FirstOutput } else { State::Scheduler });
            }
        }
    }
}

/// Locks, going on with the data as it is if another thread died meanwhile: all that is shared are plain values.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
