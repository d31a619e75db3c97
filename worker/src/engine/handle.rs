//! The engine's handle: what everyone else holds.
//!
//! Owns the checks that need no engine state, and the limits of the queue. Refuses to wait for the engine when submitting: a full queue is a
//! typed refusal. Clones are cheap.
//!
//! Costs: `submit` checks in O(prompt); it compiles a grammar, if there is one, on the calling thread (may take long: use a blocking thread).

use super::constraint::{Constraint, ConstraintFactory};
use super::mailbox::{Mailbox, Message};
use super::request::{JobId, Submission};
use super::settings::EngineSettings;
use super::stats::{EngineStats, Inspection};
use super::stream::{self, ChunkReceiver};
use super::{Clock, lock};
use crate::backend::BackendSpec;
use crate::kv::{EventStream, FlushScope};
use crate::text::Stops;
use kvasir_core::{Error, ModelIdentity, Reason, Request, WorkerLoad};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::{oneshot, watch};

/// Shortest and longest time that a refusal for lack of room names.
const RETRY_AFTER: (Duration, Duration) = (Duration::from_secs(1), Duration::from_mins(1));

/// A handle to a running engine.
#[derive(Clone)]
pub struct EngineHandle(Arc<Shared>);

/// What handle and engine share.
pub(super) struct Shared {
    pub(super) settings: EngineSettings,
    pub(super) spec: BackendSpec,
    pub(super) mailbox: Arc<Mailbox>,
    pub(super) gate: Arc<Gate>,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) constraints: Option<Arc<dyn ConstraintFactory>>,
    pub(super) identities: Mutex<Vec<ModelIdentity>>,
    pub(super) load: watch::Sender<MeasuredLoad>,
    pub(super) stats: Mutex<EngineStats>,
    pub(super) draining: AtomicBool,
    /// The engine has ended, or its device is gone.
    pub(super) down: AtomicBool,
    next_job: AtomicU64,
}

/// A load, and when it was measured.
#[derive(Clone, PartialEq, Debug)]
pub struct MeasuredLoad {
    /// The figures.
    pub load: WorkerLoad,
    /// When, on the engine's clock.
    pub at: Duration,
}

/// What waits for its first step.
#[derive(Debug, Default)]
pub(super) struct Gate {
    sequences: AtomicU32,
    tokens: AtomicU64,
}

/// A place in the queue; dropping it gives it back.
#[derive(Debug)]
pub(super) struct Ticket {
    gate: Arc<Gate>,
    sequences: u32,
    tokens: u64,
}

// === impl EngineHandle ===

impl EngineHandle {
    /// Hands a request over. The receiver yields `Started`, `Tokens`, and one `Finished` or `Failed`; dropping it cancels.
    pub fn submit(&self, request: Request) -> Result<ChunkReceiver, Error> {
        let shared = &self.0;
        self.check_open()?;
        self.check_identity(&request)?;
        self.check_fields(&request)?;
        self.check_size(&request)?;
        let stops = Stops::new(&request.stop.strings).map_err(|error| Error::invalid("stop", error.to_string()))?;
        let constraints = self.constraints(&request)?;
        let ticket = self.enter(request.sampling.n, request.prompt.len() as u64)?;
        let id = JobId(shared.next_job.fetch_add(1, Ordering::Relaxed));
        let (sender, receiver) = stream::channel(shared.settings.queue.chunks_max, &shared.mailbox, id);
        let received_at = shared.clock.now();
        let submission = Submission { id, request, stops: Arc::new(stops), constraints, stream: sender, received_at, ticket };
        if shared.mailbox.signal(Message::Submit(Box::new(submission))) { Ok(receiver) } else { Err(gone()) }
    }

    /// The worker's load, replaced after steps.
    pub fn load(&self) -> watch::Receiver<MeasuredLoad> {
        self.0.load.subscribe()
    }

    /// The clock of [`MeasuredLoad::at`].
    pub fn clock(&self) -> Arc<dyn Clock> {
        Arc::clone(&self.0.clock)
    }

    /// Counters as of the last step.
    pub fn stats(&self) -> EngineStats {
        lock(&self.0.stats).clone()
    }

    /// What the backend is.
    pub fn spec(&self) -> &BackendSpec {
        &self.0.spec
    }

    /// Settings of this engine.
    pub fn settings(&self) -> &EngineSettings {
        &self.0.settings
    }

    /// Identities served now.
    pub fn identities(&self) -> Vec<ModelIdentity> {
        lock(&self.0.identities).clone()
    }

    /// Why the engine would refuse a request now, whatever the request; `None` if it would not (readiness).
    pub fn refusal(&self) -> Option<Error> {
        self.check_open().err()
    }

    /// Cache events from now on, beginning with a snapshot.
    pub async fn events(&self) -> Result<EventStream, Error> {
        self.ask(Message::Subscribe).await
    }

    /// Takes cached blocks away; returns how many lost their name.
    pub async fn flush(&self, scope: FlushScope) -> Result<u32, Error> {
        self.ask(|reply| Message::Flush(scope, reply)).await
    }

    /// A picture of the engine.
    pub async fn inspect(&self) -> Result<Inspection, Error> {
        self.ask(Message::Inspect).await
    }

    /// Serves these identities from now on; requests under any other fail with `identity_mismatch`.
    pub async fn serve(&self, identities: Vec<ModelIdentity>) -> Result<(), Error> {
        self.ask(|reply| Message::Serve(identities, reply)).await
    }

    /// Refuses new work from now on, and returns when no request is left.
    pub async fn drain(&self) -> Result<(), Error> {
        self.start_drain();
        self.ask(Message::Drained).await
    }

    /// Refuses new work from now on.
    pub fn start_drain(&self) {
        self.0.draining.store(true, Ordering::Release);
        // Only to show it in the load at once.
        self.0.mailbox.signal(Message::Snapshot);
    }

    /// Ends the engine: every request fails with `draining`, which is retryable elsewhere.
    pub fn stop(&self) {
        self.start_drain();
        self.0.mailbox.signal(Message::Stop);
    }

    /// One automaton per choice, if the output has a form.
    fn constraints(&self, request: &Request) -> Result<VecDeque<Box<dyn Constraint>>, Error> {
        match (&request.grammar, &self.0.constraints) {
            (None, _) => Ok(VecDeque::new()),
            (Some(grammar), Some(factory)) => {
                (0..request.sampling.n).map(|_| factory.compile(request.partition(), grammar)).collect()
            }
            (Some(_), None) => {
                let message = "this engine serves no structured output; leave the grammar out";
                Err(Error::new(Reason::UnsupportedCombination, message).with_field("response_format"))
            }
        }
    }

    async fn ask<T>(&self, message: impl FnOnce(oneshot::Sender<T>) -> Message) -> Result<T, Error> {
        let (reply, answer) = oneshot::channel();
        if !self.0.mailbox.ask(message(reply)) {
            return Err(gone());
        }
        answer.await.map_err(|_| gone())
    }

    fn check_open(&self) -> Result<(), Error> {
        if self.0.down.load(Ordering::Acquire) {
            return Err(gone());
        }
        if self.0.draining.load(Ordering::Acquire) {
            return Err(Error::new(Reason::Draining, "the worker is draining; send the request to another one"));
        }
        Ok(())
    }

    fn check_identity(&self, request: &Request) -> Result<(), Error> {
        if lock(&self.0.identities).contains(&request.identity) {
            return Ok(());
        }
        Err(mismatch())
    }

    fn check_fields(&self, request: &Request) -> Result<(), Error> {
        let vocab = self.0.spec.vocab;
        let sampling = &request.sampling;
        if request.prompt.is_empty() {
            return Err(Error::invalid("prompt", "the prompt has no tokens; there is nothing to condition on"));
        }
        if let Some(id) = request.prompt.iter().find(|id| **id >= vocab) {
            return Err(Error::invalid("prompt", format!("token {id} is outside the vocabulary of {vocab} tokens")));
        }
        if let Some(entry) = sampling.logit_bias.iter().find(|entry| entry.token >= vocab) {
            return Err(Error::invalid(
                "logit_bias",
                format!("token {} is outside the vocabulary of {vocab} tokens", entry.token),
            ));
        }
        if let Some(entry) = sampling.logit_bias.iter().find(|entry| !(-100.0..=100.0).contains(&entry.bias)) {
            return Err(Error::invalid(
                "logit_bias",
                format!("bias {} of token {} is outside -100 to 100", entry.bias, entry.token),
            ));
        }
        let most = self.0.settings.queue.choices_max;
        if !(1..=most).contains(&sampling.n) {
            return Err(Error::invalid("n", format!("n is {}, allowed are 1 to {most}", sampling.n)));
        }
        Ok(())
    }

    fn check_size(&self, request: &Request) -> Result<(), Error> {
        let (prompt, context) = (request.prompt.len() as u64, u64::from(self.0.spec.context));
        let least = u64::from(request.stop.max_tokens.min(1));
        if prompt + least > context {
            let message = format!("the prompt has {prompt} tokens, the context holds {context} including at least one of output");
            return Err(Error::new(Reason::ContextLengthExceeded, message).with_field("prompt"));
        }
        let pool = u64::from(self.0.settings.blocks) * u64::from(self.0.spec.block_size);
        if prompt > pool {
            let message = format!("the prompt has {prompt} tokens, this worker's KV pool holds {pool}");
            return Err(Error::new(Reason::CapacityExceeded, message).with_field("prompt"));
        }
        Ok(())
    }

    fn enter(&self, sequences: u32, tokens: u64) -> Result<Ticket, Error> {
        let (gate, limits) = (&self.0.gate, &self.0.settings.queue);
        // One request of any allowed size fits an empty queue.
        let queued = gate.sequences.fetch_add(sequences, Ordering::AcqRel);
        let waiting = gate.tokens.fetch_add(tokens, Ordering::AcqRel);
        let ticket = Ticket { gate: Arc::clone(gate), sequences, tokens };
        let crowded = queued + sequences > limits.sequences_max || waiting + tokens > limits.tokens_max;
        if queued == 0 || !crowded {
            return Ok(ticket);
        }
        drop(ticket);
        let rate = f64::from(self.0.load.borrow().load.prefill_tokens_per_second).max(1.0);
        let after = Duration::from_secs_f64((waiting as f64 / rate).min(3600.0)).clamp(RETRY_AFTER.0, RETRY_AFTER.1);
        let message = format!(
            "{queued} choices with {waiting} prompt tokens are waiting, at most {} and {} may; retry later",
            limits.sequences_max, limits.tokens_max
        );
        Err(Error::new(Reason::Overloaded, message).with_retry_after(after))
    }
}

// === impl Shared ===

impl Shared {
    pub(super) fn new(settings: EngineSettings, spec: BackendSpec, clock: Arc<dyn Clock>, load: WorkerLoad) -> Self {
        let load = MeasuredLoad { load, at: clock.now() };
        Self {
            identities: Mutex::new(settings.identities.clone()),
            settings,
            spec,
            mailbox: Arc::default(),
            gate: Arc::default(),
            clock,
            constraints: None,
            load: watch::Sender::new(load),
            stats: Mutex::default(),
            draining: AtomicBool::new(false),
            down: AtomicBool::new(false),
            next_job: AtomicU64::new(1),
        }
    }

    pub(super) fn handle(self: &Arc<Self>) -> EngineHandle {
        EngineHandle(Arc::clone(self))
    }
}

// === impl Gate ===

impl Gate {
    /// Choices that wait for their first step.
    pub(super) fn sequences(&self) -> u32 {
        self.sequences.load(Ordering::Acquire)
    }
}

// === impl Ticket ===

impl Drop for Ticket {
    fn drop(&mut self) {
        self.gate.sequences.fetch_sub(self.sequences, Ordering::AcqRel);
        self.gate.tokens.fetch_sub(self.tokens, Ordering::AcqRel);
    }
}

/// The engine's thread has ended or its device is lost.
fn gone() -> Error {
    Error::new(Reason::NotReady, "the engine is not running; send the request to another worker")
}

/// The request expects another model, adapter or arithmetic.
pub(super) fn mismatch() -> Error {
    Error::new(
        Reason::IdentityMismatch,
        "the worker does not serve the identity that the request expects; look up its identities anew",
    )
}
