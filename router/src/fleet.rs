//! The fleet: who is there, whether they can be used, and the snapshot of it that everyone else reads.
//!
//! Owns the list of workers, their lives and the published [`View`]. One task changes them; a link task per worker (see [`link`]) reports to it.
//! Refuses to know requests. The prefix index lies beside the view because it is too large to be copied: links write it, placement reads it.
//!
//! Invariants
//! 1. A new life of a worker takes the old life's credit away before anything is sent to it.
//! 2. In-flight counts belong to a life: a worker that leaves and rejoins in the same life finds the same counts.
//! 3. A worker that leaves the list gets nothing new from the next view on.
//! 4. Whoever is told that a worker is cordoned can rely on it: the view that says so is published first.
//!
//! Costs: a view is rebuilt at most every [`PUBLISH_EVERY`], O(workers) handle copies.

mod catalog;
mod cordon;
mod link;
pub(crate) use link::random_unit;

use crate::discover::{Change, Discover, Endpoint};
use crate::index::{Index, MemberId, Trust};
use crate::lease::Total;
use crate::rendezvous::salt_of;
use crate::texts::Texts;
use crate::view::{Described, Live, Peers, Readiness, Reported, Source, View, WorkerView};
use crate::worker_client::WorkerClient;
use cordon::Cordons;
use futures::StreamExt as _;
use kvasir_core::{Error, Incarnation, ModelIdentity, Reason, WorkerLoad, WorkerUid};
use kvasir_door::ServedModel;
use kvasir_proto::auth::Credentials;
use kvasir_telemetry::RouterMetrics;
use link::Link;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{AbortHandle, JoinHandle};
use tokio::time::{Instant, sleep_until};

/// Handle to the running fleet; cheap to clone. The fleet stops when the last handle and its [`FleetTask`] are gone.
#[derive(Clone)]
pub struct Fleet {
    view: watch::Receiver<Arc<View>>,
    index: SharedIndex,
    total: Arc<Total>,
    questions: mpsc::Sender<Question>,
}

/// Stops the fleet's tasks when dropped.
pub struct FleetTask(JoinHandle<()>);

/// The prefix index and the clock that it counts time by.
#[derive(Clone)]
pub struct SharedIndex {
    index: Arc<RwLock<Index>>,
    start: Instant,
}

/// What a link tells the owner.
enum Report {
    Described { life: Life, models: Vec<ServedModel>, client: WorkerClient },
    Readiness(Readiness),
    Load(WorkerLoad, Instant),
}

/// One life of a worker as its link found it.
struct Life {
    uid: WorkerUid,
    incarnation: Incarnation,
    member: MemberId,
    block_size: u32,
}

struct Owner {
    workers: BTreeMap<Endpoint, Worker>,
    lives: HashMap<(WorkerUid, Incarnation), Arc<Live>>,
    peers: HashMap<ModelIdentity, Arc<Peers>>,
    source: Source,
    cordons: Cordons,
    total: Arc<Total>,
    index: SharedIndex,
    metrics: RouterMetrics,
    reports: mpsc::Sender<(Endpoint, u64, Report)>,
    links: LinkParts,
    next_link: u64,
}

/// What others ask of the owner.
enum Question {
    /// The open attempts by life, also of workers that have left.
    InFlight(oneshot::Sender<Vec<(WorkerUid, Incarnation, u64)>>),
    /// Place nothing on a life until then. Answered with what is open there, after the view that says so.
    Cordon { uid: WorkerUid, incarnation: Incarnation, until: Instant, answer: CordonAnswer },
}

type CordonAnswer = oneshot::Sender<Result<u64, Error>>;

/// What every link shares.
#[derive(Clone)]
struct LinkParts {
    index: SharedIndex,
    texts: Texts,
    credentials: Option<Credentials>,
}

struct Worker {
    view: WorkerView,
    models: Vec<ServedModel>,
    /// Number of the link that may report; reports of an earlier one are late.
    link: u64,
    task: AbortHandle,
}

/// Shortest time between two views: at most a thousandth of a step later than the news, and one rebuild whatever the burst.
const PUBLISH_EVERY: Duration = Duration::from_millis(5);
/// Reports on their way to the owner; a full channel slows the links down, not the owner.
const REPORTS_MAX: usize = 1_024;
/// Questions on their way to the owner.
const QUESTIONS_MAX: usize = 16;
/// Lives without registration that are remembered before idle ones are forgotten.
const LIVES_SLACK: usize = 64;

// === impl Fleet ===

impl Fleet {
    /// Starts watching the workers that `discover` names.
    pub fn start(
        discover: Box<dyn Discover>,
        index_bytes: usize,
        credentials: Option<Credentials>,
        metrics: RouterMetrics,
    ) -> (Self, FleetTask) {
        let (publish, view) = watch::channel(Arc::new(View::default()));
        let index = SharedIndex { index: Arc::new(RwLock::new(Index::new(index_bytes))), start: Instant::now() };
        let total = Arc::new(Total::default());
        let (reports, inbox) = mpsc::channel(REPORTS_MAX);
        let links = LinkParts { index: index.clone(), texts: Texts::default(), credentials };
        let owner = Owner {
            workers: BTreeMap::new(),
            lives: HashMap::new(),
            peers: HashMap::new(),
            source: Source::default(),
            cordons: Cordons::default(),
            total: Arc::clone(&total),
            index: index.clone(),
            metrics,
            reports,
            links,
            next_link: 0,
        };
        let (questions, asked) = mpsc::channel(QUESTIONS_MAX);
        let task = tokio::spawn(owner.run(discover, inbox, asked, publish));
        (Self { view, index, total, questions }, FleetTask(task))
    }

    /// The newest view.
    pub fn view(&self) -> Arc<View> {
        Arc::clone(&self.view.borrow())
    }

    /// A receiver that sees every later view.
    pub fn watch(&self) -> watch::Receiver<Arc<View>> {
        self.view.clone()
    }

    /// The index.
    pub fn index(&self) -> &SharedIndex {
        &self.index
    }

    /// In-flight counts of the whole router.
    pub fn total(&self) -> &Total {
        &self.total
    }

    /// Open attempts by life of a worker, those that have left included; lives without any are left out.
    pub async fn in_flight(&self) -> Vec<(WorkerUid, Incarnation, u64)> {
        let (answer, answered) = oneshot::channel();
        if self.questions.send(Question::InFlight(answer)).await.is_err() {
            return Vec::new();
        }
        answered.await.unwrap_or_default()
    }

    /// Places nothing new on this life until then; from the answer on, which tells what is open there. A moment that has passed lifts it.
    pub async fn cordon(&self, uid: WorkerUid, incarnation: Incarnation, until: Instant) -> Result<u64, Error> {
        let stopped = || Error::new(Reason::Draining, "the router is shutting down");
        let (answer, answered) = oneshot::channel();
        let question = Question::Cordon { uid, incarnation, until, answer };
        self.questions.send(question).await.map_err(|_gone| stopped())?;
        answered.await.map_err(|_gone| stopped())?
    }

    /// Waits until `wanted` holds of a view.
    pub async fn until(&self, mut wanted: impl FnMut(&View) -> bool) -> Arc<View> {
        let mut view = self.view.clone();
        let found = view.wait_for(|view| wanted(view)).await.map(|view| Arc::clone(&view));
        // The sender lives as long as the task; without it the last view is all there will ever be.
        found.unwrap_or_else(|_closed| self.view())
    }
}

impl Drop for FleetTask {
    fn drop(&mut self) {
        self.0.abort();
    }
}

// === impl SharedIndex ===

impl SharedIndex {
    /// Reads; held for microseconds and never across an await.
    pub fn read(&self) -> RwLockReadGuard<'_, Index> {
        self.index.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Index> {
        self.index.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// The index's time at a moment.
    pub fn time(&self, at: Instant) -> Duration {
        at.saturating_duration_since(self.start)
    }
}

/// Called on a change only: a worker that stays lost is not logged with each try.
fn log_readiness(endpoint: &Endpoint, readiness: &Readiness) {
    match readiness.why_not() {
        None => tracing::info!(worker = %endpoint, "worker is ready"),
        Some(why) => tracing::warn!(worker = %endpoint, %why, "worker gets no requests"),
    }
}

// === impl Owner ===

impl Owner {
    async fn run(
        mut self,
        discover: Box<dyn Discover>,
        mut inbox: mpsc::Receiver<(Endpoint, u64, Report)>,
        mut asked: mpsc::Receiver<Question>,
        publish: watch::Sender<Arc<View>>,
    ) {
        let mut changes = discover.changes();
        let mut ended = false;
        let mut batch = Vec::new();
        let mut cordoned: Vec<(CordonAnswer, Result<u64, Error>)> = Vec::new();
        loop {
            let published = Instant::now();
            let lifted = self.cordons.first_end();
            tokio::select! {
                change = changes.next(), if !ended => match change {
                    Some(change) => self.change(change),
                    None => ended = true,
                },
                _received = inbox.recv_many(&mut batch, REPORTS_MAX) => {}
                Some(question) = asked.recv() => match question {
                    Question::InFlight(answer) => {
                        // A caller that is gone needs no answer.
                        let _gone = answer.send(self.in_flight());
                        continue;
                    }
                    Question::Cordon { uid, incarnation, until, answer } => {
                        cordoned.push((answer, self.cordon(uid, incarnation, until)));
                    }
                },
                () = sleep_until(lifted.unwrap_or(published)), if lifted.is_some() => {}
            }
            // What arrives within a moment goes into one view.
            tokio::select! {
                () = sleep_until(published + PUBLISH_EVERY) => {}
                () = publish.closed() => return,
            }
            while let Ok(report) = inbox.try_recv() {
                batch.push(report);
            }
            batch.drain(..).for_each(|(endpoint, link, report)| self.report(&endpoint, link, report));
            let view = self.view();
            self.count(&view);
            publish.send_replace(Arc::new(view));
            for (answer, result) in cordoned.drain(..) {
                // As above.
                let _gone = answer.send(result);
            }
        }
    }

    fn change(&mut self, change: Change) {
        match change {
            Change::Listed => {
                self.source.listed = true;
                self.source.stale = None;
            }
            Change::Fresh => self.source.stale = None,
            Change::Stale(stale) => {
                self.metrics.discovery_failed(stale.code);
                self.source.stale = Some(stale);
            }
            Change::Join(endpoint) => self.join(endpoint),
            Change::Leave(endpoint) => {
                if let Some(worker) = self.workers.remove(&endpoint) {
                    tracing::info!(worker = %worker.view.uid, "worker left");
                    worker.task.abort();
                    self.forget_idle_lives();
                }
            }
        }
    }

    fn join(&mut self, endpoint: Endpoint) {
        if self.workers.contains_key(&endpoint) {
            return;
        }
        let number = self.next_link;
        self.next_link += 1;
        let link = Link::new(endpoint.clone(), number, self.links.clone(), self.reports.clone());
        let task = tokio::spawn(link.run()).abort_handle();
        let uid = WorkerUid(endpoint.uri().into());
        let view =
            WorkerView::unknown(uid, endpoint.uri().to_owned(), Arc::new(Live::new(Arc::clone(&self.total), Arc::default())));
        self.workers.insert(endpoint, Worker { view, models: Vec::new(), link: number, task });
    }

    fn report(&mut self, endpoint: &Endpoint, link: u64, report: Report) {
        let Some(worker) = self.workers.get_mut(endpoint).filter(|worker| worker.link == link) else { return };
        match report {
            Report::Readiness(readiness) => {
                if worker.view.readiness != readiness {
                    log_readiness(endpoint, &readiness);
                }
                worker.view.readiness = readiness;
            }
            Report::Load(load, measured) => {
                let same_life = worker.view.described.as_ref().is_some_and(|described| described.incarnation == load.incarnation);
                if same_life {
                    worker.view.load = Some(Reported { load, measured, own: worker.view.live.gauge.own_load_at(measured) });
                }
            }
            Report::Described { life, models, client } => {
                let live = self.lives.entry((life.uid.clone(), life.incarnation));
                let live = live.or_insert_with(|| {
                    let peers =
                        models.first().map(|model| Arc::clone(self.peers.entry(model.identity).or_default())).unwrap_or_default();
                    Arc::new(Live::new(Arc::clone(&self.total), peers))
                });
                let names = models.iter().map(|model| (model.name.clone(), model.identity)).collect();
                let described =
                    Described { incarnation: life.incarnation, member: life.member, models: names, block_size: life.block_size };
                let new_life = worker.view.described.as_ref().is_none_or(|known| known.incarnation != life.incarnation);
                worker.view.salt = salt_of(&life.uid);
                worker.view.uid = life.uid;
                worker.view.live = Arc::clone(live);
                worker.view.described = Some(described);
                worker.view.client = Some(client);
                worker.models = models;
                if new_life {
                    tracing::info!(worker = %worker.view.uid, incarnation = %life.incarnation, "worker described itself");
                    worker.view.load = None;
                    worker.view.readiness = Readiness::Unprobed;
                    self.forget_idle_lives();
                }
            }
        }
    }

    fn in_flight(&self) -> Vec<(WorkerUid, Incarnation, u64)> {
        let open = self.lives.iter().map(|((uid, incarnation), live)| (uid.clone(), *incarnation, live.gauge.read().attempts));
        let mut open: Vec<_> = open.filter(|(.., attempts)| *attempts > 0).collect();
        open.sort();
        open
    }

    fn cordon(&mut self, uid: WorkerUid, incarnation: Incarnation, until: Instant) -> Result<u64, Error> {
        let lives =
            || self.workers.values().filter_map(|worker| Some((&worker.view.uid, worker.view.described.as_ref()?.incarnation)));
        if !lives().any(|(name, life)| *name == uid && life == incarnation) {
            let message = format!("worker {uid} is not known here in the life {incarnation}; list the workers again");
            return Err(Error::new(Reason::NotFound, message));
        }
        let open = self.lives.get(&(uid.clone(), incarnation)).map_or(0, |live| live.gauge.read().attempts);
        tracing::info!(worker = %uid, %incarnation, open, seconds = until.saturating_duration_since(Instant::now()).as_secs(), "worker is cordoned");
        self.cordons.set(uid, incarnation, until);
        Ok(open)
    }

    /// Lives that no worker has now are kept while they have requests in flight, so that their counts go on.
    fn forget_idle_lives(&mut self) {
        if self.lives.len() <= self.workers.len() + LIVES_SLACK {
            return;
        }
        let current: Vec<Arc<Live>> = self.workers.values().map(|worker| Arc::clone(&worker.view.live)).collect();
        self.peers.retain(|_, peers| Arc::strong_count(peers) > 1);
        self.lives.retain(|_, live| live.gauge.read().attempts > 0 || current.iter().any(|other| Arc::ptr_eq(live, other)));
    }

    fn view(&mut self) -> View {
        let now = Instant::now();
        self.cordons.end(now);
        let complete = self.source.listed && self.workers.values().all(|worker| worker.view.readiness != Readiness::Unprobed);
        let catalog =
            Arc::new(catalog::build(self.workers.values().map(|worker| (&worker.view.readiness, worker.models.as_slice()))));
        let mut seen: HashMap<&WorkerUid, &Endpoint> = HashMap::new();
        let workers = self.workers.iter().map(|(endpoint, worker)| {
            let mut view = worker.view.clone();
            // Two endpoints with one name would share counts and rank; the first keeps it.
            if let Some(first) = seen.get(&worker.view.uid) {
                let message = format!("{endpoint} and {first} both say that they are worker {}; give each its own uid", view.uid);
                view.readiness = Readiness::Unready(kvasir_core::Error::new(kvasir_core::Reason::InvalidArgument, message));
            } else {
                seen.insert(&worker.view.uid, endpoint);
            }
            view.cordoned = view.described.as_ref().and_then(|it| self.cordons.until(&view.uid, it.incarnation));
            if view.cordoned.is_some() && view.readiness == Readiness::Ready {
                view.readiness = Readiness::Draining;
            }
            Arc::new(view)
        });
        let mut view = View::new(workers.collect(), catalog, complete);
        self.source.settled |= complete;
        view.source = self.source.clone();
        view
    }

    fn count(&self, view: &View) {
        let index = self.index.read();
        let now = self.index.time(Instant::now());
        let trust = |wanted: Trust| {
            let of = |worker: &Arc<WorkerView>| {
                worker.described.as_ref().map_or(Trust::Fallback, |described| index.trust(described.member, now))
            };
            view.workers().iter().filter(|worker| of(worker) == wanted).count() as u64
        };
        let states = [Trust::Exact, Trust::Degraded, Trust::Fallback].map(|state| (state.name(), trust(state)));
        let bytes = index.stats().bytes;
        drop(index);
        self.metrics.index(&states, bytes);
        self.metrics.discovery(view.workers().len() as u64, view.source.stale.is_some());
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.workers.values().for_each(|worker| worker.task.abort());
    }
}
