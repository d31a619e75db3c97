//! Control: pools are looked at, one pass after another, until the world is as they ask and says so.
//!
//! Owns the shell around the pure road: caches fed by watches, the queue of pools to look at, passes, leadership and the end. Refuses to know
//! what a pool means ([`Blueprint`]), what to do with pods ([`crate::rollout`]) and what to say ([`crate::status`]).
//!
//! A pass: fetch what the pool names → design → apply objects → look at pods and ask routers → plan → carry steps out → status → events.
//! It begins when something of the pool changes, and again after a while: while something moves after a second or so, at rest after
//! [`ControllerSettings::rest`], because routers do not tell by themselves, after a fault ever later.
//!
//! Guarantees
//! 1. At rest nothing is written: what is compared is equal, and a status that says the same is not written again.
//! 2. A pass that decides on pods has seen every write of an earlier pass of this process; the first pass after taking the lead reads pods
//!    from the API server and not from a cache.
//! 3. A pool that is being deleted gets nothing new, so a foreground deletion ends. There is no finalizer: whatever a pool has is owned by it
//!    and collected by Kubernetes, and streams end by themselves in the grace of their pods; a deletion never waits for this process.
//! 4. One kind of object that cannot be watched or written holds up that kind only, and is said in a condition.
//! 5. Everything that has to outlive this process is in objects: what a pod was made from and since when it drains on the pod, the rest in
//!    status.
//!
//! Costs at rest: per pool and [`ControllerSettings::rest`] one question to each router and a comparison in memory; no request to the API
//! server but watches and the lease.

mod ask;
mod caches;
mod events;
mod memory;
mod observe;
mod packed;
mod pass;
mod references;
mod room;
mod scaling;
mod steps;
mod tell;
#[cfg(test)]
mod tests;

use crate::admin::Admin;
use crate::api::ServingPool;
use crate::apply::Applier;
use crate::clock::Clock;
use crate::design::Blueprint;
use crate::lead::Gate;
use caches::{Caches, Trigger};
use events::Recorder;
use futures::{StreamExt as _, stream};
use kube::Client;
use kube::core::ApiResource;
use kube::runtime::controller::{Config, applier};
use kube::runtime::reflector::ObjectRef;
use kvasir_telemetry::{OperatorMetrics, Tracer};
use memory::Memories;
use references::References;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

/// Pools that may wait to be queued; a watch that finds it full waits.
const TRIGGERS_MAX: usize = 1_024;
/// Longest that a pass in hand may take at the end.
const FINISH_MAX: Duration = Duration::from_secs(10);
/// Longest wait for the kinds of objects that a start can do without.
const KINDS_WAIT_MAX: Duration = Duration::from_secs(10);

/// How to control.
#[derive(Clone, Debug)]
pub struct ControllerSettings {
    /// The one namespace to look at; all if absent.
    pub namespace: Option<String>,
    /// Kinds of the objects that pools turn into, but pods.
    pub kinds: Vec<ApiResource>,
    /// Passes that run at once.
    pub concurrency: u16,
    /// Time between two looks at a pool at rest.
    pub rest: Duration,
    /// Name of this process in events.
    pub instance: String,
}

/// What a controller works with.
pub struct Parts {
    /// The way to the API server, behind the gate.
    pub client: Client,
    /// Asks routers and workers.
    pub admin: Arc<dyn Admin>,
    /// Reads pools.
    pub blueprint: Arc<dyn Blueprint>,
    /// Open while this process leads.
    pub gate: Gate,
    /// Tells the time of day.
    pub clock: Clock,
    /// Counts.
    pub metrics: OperatorMetrics,
    /// Exports traces of passes that changed something.
    pub tracer: Tracer,
    /// The rest.
    pub settings: ControllerSettings,
}

/// A controller whose watches run.
pub struct Controller {
    context: Arc<Context>,
    triggers: mpsc::Receiver<ObjectRef<ServingPool>>,
    trigger: Trigger,
    watches: JoinSet<()>,
}

/// Whether the first lists are complete; cheap to clone.
#[derive(Clone)]
pub struct Readiness(Arc<Context>);

/// What every pass needs.
struct Context {
    client: Client,
    applier: Applier,
    admin: Arc<dyn Admin>,
    blueprint: Arc<dyn Blueprint>,
    gate: Gate,
    clock: Clock,
    metrics: OperatorMetrics,
    tracer: Tracer,
    settings: ControllerSettings,
    caches: Caches,
    references: References,
    recorder: Recorder,
    memories: Memories,
    /// Held from counting free devices until the pods for them are created, so that no two pools count on one device.
    room: tokio::sync::Mutex<()>,
}

// === impl Controller ===

impl Controller {
    /// A controller; its watches begin at once. Must be called inside a tokio runtime.
    pub fn start(parts: Parts) -> Self {
        let Parts { client, admin, blueprint, gate, clock, metrics, tracer, settings } = parts;
        let (sender, triggers) = mpsc::channel(TRIGGERS_MAX);
        let trigger = Trigger::new(sender);
        let (caches, watches) = Caches::start(&client, &settings, &blueprint, &trigger);
        let context = Context {
            applier: Applier::new(client.clone()),
            recorder: Recorder::new(client.clone(), settings.instance.clone(), clock.clone(), metrics.clone()),
            references: References::new(client.clone()),
            memories: Memories::new(metrics.clone()),
            room: tokio::sync::Mutex::default(),
            client,
            admin,
            blueprint,
            gate,
            clock,
            metrics,
            tracer,
            settings,
            caches,
        };
        Self { context: Arc::new(context), triggers, trigger, watches }
    }

    /// Tells whether the watches have delivered.
    pub fn readiness(&self) -> Readiness {
        Readiness(Arc::clone(&self.context))
    }

    /// Controls until `stop`, then lets passes in hand end.
    pub async fn run(self, stop: CancellationToken) {
        let Self { context, triggers, trigger, mut watches } = self;
        tokio::select! {
            () = context.caches.essential() => {}
            () = stop.cancelled() => return,
        }
        if timeout(KINDS_WAIT_MAX, context.caches.complete()).await.is_err() {
            tracing::warn!(kinds = ?context.caches.missing(), "kinds of objects cannot be watched yet; pools are looked at without them");
        }
        let leader = tokio::spawn(lead(Arc::clone(&context), trigger));
        let queue = stream::unfold(triggers, |mut triggers| async move { Some((triggers.recv().await?, triggers)) });
        let queue = queue.take_until(stop.clone().cancelled_owned()).map(Ok::<_, Infallible>);
        let store = context.caches.pools.clone();
        // No debounce: it would put a pool off as long as its pods keep changing. What comes while a pass runs is looked at once after it.
        let config = Config::default().concurrency(context.settings.concurrency.max(1));
        let passes = applier(
            |pool, context| Box::pin(pass::reconcile(pool, context)),
            // A pass has no error: what went wrong is in its status and its delay.
            |_pool, never: &Infallible, _context| match *never {},
            Arc::clone(&context),
            store,
            Box::pin(queue),
            config,
        );
        let mut passes = std::pin::pin!(passes);
        let all = async {
            while let Some(ended) = passes.next().await {
                if let Err(error) = ended {
                    tracing::debug!(%error, "a pool was gone before its turn");
                }
            }
        };
        let late = async {
            stop.cancelled().await;
            tokio::time::sleep(FINISH_MAX).await;
        };
        tokio::select! {
            () = all => {}
            () = late => tracing::warn!("a pass did not end in time; what it wrote is taken up by the next leader"),
        }
        leader.abort();
        watches.shutdown().await;
    }
}

/// Looks at every pool whenever this process begins to lead.
async fn lead(context: Arc<Context>, trigger: Trigger) {
    loop {
        context.gate.opened().await;
        context.metrics.leading(true);
        context.memories.begin_term();
        for pool in context.caches.pools.state() {
            trigger.send(ObjectRef::from_obj(&*pool)).await;
        }
        context.gate.shut().await;
        context.metrics.leading(false);
    }
}

// === impl Readiness ===

impl Readiness {
    /// Whether pools and pods are known.
    pub fn is_ready(&self) -> bool {
        self.0.caches.is_essential_ready()
    }

    /// Kinds that cannot be watched, with the reason.
    pub fn missing(&self) -> Vec<String> {
        self.0.caches.missing()
    }
}
