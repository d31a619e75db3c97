//! A request's way through the router: admitted once, placed and attempted until one worker produces output, then streamed.
//!
//! Owns the order of these steps, the time that each takes, and the end of every stream. Refuses to know doors and wire formats. This is the
//! router's [`Serve`]; dropping the future or the stream anywhere gives back admission, lease and upstream work.
//!
//! Flow: admit → keys, once → (pick → attempt) until output, at most [`RouterSettings::attempts_max`] times and within the retry budget → chunks,
//! with the router's states merged into the last one.
//!
//! Guarantees
//! 1. `Started` and everything after it come from one worker: a retry happens only before anything was handed on.
//! 2. The stream ends with exactly one `Finished` or `Failed`; a worker that is lost after the first token is `Failed`, never a short success.
//! 3. `transfer` = attempt − the worker's own states, never negative.

mod run;
#[cfg(test)]
mod tests;

use crate::admit::{Admission, Ticket};
use crate::attempt::Attempt;
use crate::cost::Work;
use crate::fleet::Fleet;
use crate::pick::{Moment, Pick, Placement, pick};
use crate::retry::Budget;
use crate::secrets::Secrets;
use crate::settings::RouterSettings;
use crate::view::{Readiness, View, WorkerView};
use crate::worker_client::CallError;
use futures::future::BoxFuture;
use futures::{FutureExt as _, StreamExt as _};
use kvasir_core::{BlockKey, CacheMode, Error, KeyChain, Reason, Request, WorkerUid};
use kvasir_door::{Catalog, ChunkStream, Prepared, Serve};
use kvasir_telemetry::{RouterMetrics, Tracer};
use run::Run;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::time::Instant;

/// The router as doors see it; cheap to clone.
#[derive(Clone)]
pub struct RouterServe(Arc<Inner>);

struct Inner {
    fleet: Fleet,
    /// Absent where the door's tenants are fixed by whoever built it.
    secrets: Option<Arc<Secrets>>,
    admission: Admission,
    budget: Budget,
    settings: RouterSettings,
    outputs: Outputs,
    metrics: RouterMetrics,
    tracer: Tracer,
    draws: AtomicU64,
    draw_seed: u64,
    draining: AtomicBool,
}

/// How long answers are, learned: a running mean of output tokens per choice.
#[derive(Debug)]
struct Outputs(Mutex<f64>);

/// Output tokens per choice until answers were seen: a short chat turn.
const OUTPUT_PRIOR_TOKENS: f64 = 128.0;
/// Weight of the newest answer.
const OUTPUT_LEARN_RATE: f64 = 0.05;

// === impl RouterServe ===

impl RouterServe {
    /// A router over a running fleet.
    pub fn new(fleet: Fleet, settings: RouterSettings, metrics: RouterMetrics, tracer: Tracer) -> Self {
        Self::with_secrets(fleet, settings, metrics, tracer, None)
    }

    /// A router that is not ready before `secrets` are loaded.
    pub fn with_secrets(
        fleet: Fleet,
        settings: RouterSettings,
        metrics: RouterMetrics,
        tracer: Tracer,
        secrets: Option<Arc<Secrets>>,
    ) -> Self {
        let inner = Inner {
            secrets,
            admission: Admission::new(settings.admit),
            budget: Budget::new(Instant::now()),
            outputs: Outputs(Mutex::new(OUTPUT_PRIOR_TOKENS)),
            draws: AtomicU64::new(0),
            draining: AtomicBool::new(false),
            // Only spreads prompts that have no key; predictable is harmless.
            draw_seed: getrandom::u64().unwrap_or(0),
            fleet,
            settings,
            metrics,
            tracer,
        };
        Self(Arc::new(inner))
    }

    /// The admission gate, for shutdown and figures.
    pub fn admission(&self) -> &Admission {
        &self.0.admission
    }

    /// Says "not ready" from now on, and goes on serving.
    pub fn begin_drain(&self) {
        self.0.draining.store(true, Ordering::Relaxed);
    }

    /// The fleet.
    pub fn fleet(&self) -> &Fleet {
        &self.0.fleet
    }

    /// What whoever runs this router is to know although it is ready: what it goes by may be behind.
    pub fn notes(&self) -> Vec<String> {
        let workers = self.0.fleet.view().source.stale.clone();
        let secrets = self.0.secrets.as_ref().and_then(|secrets| secrets.hint());
        let workers = workers.map(|stale| format!("workers: {}; the last list stays in force", stale.message));
        let secrets = secrets.map(|hint| format!("secrets: {hint}; what was in force stays"));
        workers.into_iter().chain(secrets).collect()
    }
}

impl Serve for RouterServe {
    fn serve(&self, prepared: Prepared) -> BoxFuture<'static, Result<ChunkStream, Error>> {
        let inner = Arc::clone(&self.0);
        async move {
            let metrics = inner.metrics.clone();
            match Run::begin(inner, prepared).await {
                Ok(run) => Ok(futures::stream::unfold(run, Run::step).boxed()),
                Err(error) => {
                    metrics.shed(error.reason.code());
                    Err(error)
                }
            }
        }
        .boxed()
    }

    fn catalog(&self) -> Arc<Catalog> {
        Arc::clone(&self.0.fleet.view().catalog)
    }

    fn ready(&self) -> Result<(), Error> {
        if self.0.draining.load(Ordering::Relaxed) {
            return Err(Error::new(Reason::Draining, "the router is shutting down"));
        }
        if let Some(secrets) = &self.0.secrets {
            secrets.ready()?;
        }
        let view = self.0.fleet.view();
        if !view.source.listed {
            let why = view.source.stale.as_ref().map_or_else(String::new, |stale| format!(": {}", stale.message));
            return Err(Error::new(Reason::NotReady, format!("the first list of workers is not complete{why}")));
        }
        if !view.source.settled {
            let unprobed = view.workers().iter().filter(|worker| worker.readiness == Readiness::Unprobed).count();
            return Err(Error::new(Reason::NotReady, format!("{unprobed} workers have not been probed yet")));
        }
        let now = Instant::now();
        let usable = |worker: &WorkerView| worker.readiness == Readiness::Ready && worker.fresh_load(now).is_some();
        let ready = view.workers().iter().filter(|worker| usable(worker)).count();
        if ready < self.0.settings.ready_workers_min {
            let wanted = self.0.settings.ready_workers_min;
            let why = whys(&view, now);
            return Err(Error::new(Reason::NotReady, format!("{ready} of at least {wanted} workers are ready{why}")));
        }
        Ok(())
    }
}

/// Why workers cannot be used: of the first few, for the message of `/readyz`.
fn whys(view: &View, now: Instant) -> String {
    const SHOWN_MAX: usize = 4;
    let stale = |worker: &WorkerView| worker.fresh_load(now).is_none().then(|| "its load reports are overdue".to_owned());
    let why = |worker: &Arc<WorkerView>| {
        worker.readiness.why_not().or_else(|| stale(worker)).map(|why| format!("; worker {}: {why}", worker.address))
    };
    view.workers().iter().filter_map(why).take(SHOWN_MAX).collect()
}

// === impl Inner ===

impl Inner {
    fn gauges(&self) {
        self.metrics.leases(self.fleet.total().attempts());
        self.metrics.queued(self.admission.waiting() as u64);
    }

    fn ticket(request: &Request) -> Ticket {
        Ticket { tenant: request.tenant.clone(), priority: request.priority, tokens: request.prompt.len() as u64 }
    }

    /// What the request needs. The block size is that of any worker of the identity: it is part of the identity.
    fn work(&self, request: &Request) -> Work {
        let view = self.fleet.view();
        let described =
            view.workers().iter().filter(|worker| worker.serves(&request.identity)).find_map(|worker| worker.described.as_ref());
        let output = self.outputs.mean().min(f64::from(request.stop.max_tokens)).max(f64::from(request.stop.min_tokens));
        Work {
            prompt_tokens: request.prompt.len() as u32,
            output_tokens: output.max(1.0),
            choices: request.sampling.n.max(1),
            block_size: described.map_or(16, |described| described.block_size).max(1),
        }
    }

    /// Keys of the blocks that can be reused: full ones, and never the whole prompt (its last token is computed).
    fn keys(request: &Request, work: &Work) -> Vec<BlockKey> {
        if request.cache.mode == CacheMode::Off || request.sampling.prompt_logprobs.is_some() {
            return Vec::new();
        }
        let mut chain = KeyChain::new(request.prefix(), work.block_size);
        let reusable = &request.prompt[..request.prompt.len().saturating_sub(1)];
        reusable.chunks_exact(work.block_size as usize).map(|block| chain.push(block, None)).collect()
    }

    fn pick(&self, request: &Request, work: Work, keys: &[BlockKey], tried: &[WorkerUid]) -> Result<Pick, Error> {
        let began = std::time::Instant::now();
        let view = self.fleet.view();
        let now = Instant::now();
        let at = Moment { now, index: self.fleet.index().time(now) };
        let placement = Placement { identity: request.identity, keys, work, tried };
        let mut draw = || crate::rendezvous::rank(self.draw_seed, self.draws.fetch_add(1, Ordering::Relaxed));
        let picked = pick(&view, &self.fleet.index().read(), &placement, &self.settings.pick, at, &mut draw)?;
        self.metrics.decided(picked.branch.name(), began.elapsed());
        Ok(picked)
    }

    async fn attempt(&self, pick: Pick, work: Work, request: &Request) -> Result<Attempt, CallError> {
        let opened = Attempt::open(pick, work, request, &self.tracer, &self.metrics).await;
        self.gauges();
        opened
    }

    /// Whether another attempt may be made after `error`.
    fn may_retry(&self, error: &Error, attempts: u32) -> bool {
        error.retryable() && attempts < self.settings.attempts_max && self.budget.retry(Instant::now())
    }
}

// === impl Outputs ===

impl Outputs {
    fn mean(&self) -> f64 {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn observe(&self, tokens_per_choice: f64) {
        let mut mean = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *mean += (tokens_per_choice - *mean) * OUTPUT_LEARN_RATE;
    }
}

/// The name under which a worker stands in errors.
fn named(worker: &WorkerView, error: Error) -> Error {
    if error.reason != Reason::WorkerLost {
        return error;
    }
    let message = format!("worker {} was lost: {}", worker.uid, error.message);
    Error { message, ..error }
}
