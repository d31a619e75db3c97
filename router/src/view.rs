//! What placement sees: an immutable snapshot of the fleet, and per life of a worker a few live counters.
//!
//! Owns the shape of the snapshot. Refuses to know how it came about. Published by the fleet through a watch channel; read by placement,
//! doors (catalog, readiness) and the admin service. A snapshot is never changed; [`Live`] is shared by all snapshots of one life.

use crate::breaker::Breaker;
use crate::cost::{Factors, Learned, OwnLoad};
use crate::discover::Stale;
use crate::index::MemberId;
use crate::lease::{Gauge, Total};
use crate::rendezvous::salt_of;
use crate::worker_client::WorkerClient;
use kvasir_core::{Error, Incarnation, ModelIdentity, WorkerLoad, WorkerUid};
use kvasir_door::Catalog;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::time::Instant;

/// The fleet at one moment.
#[derive(Clone, Default)]
pub struct View {
    workers: Vec<Arc<WorkerView>>,
    pools: BTreeMap<ModelIdentity, Vec<(usize, u64)>>,
    members: HashMap<MemberId, usize>,
    /// Models that can be asked for.
    pub catalog: Arc<Catalog>,
    /// Whether the first list of endpoints is complete and each of them was probed once.
    pub complete: bool,
    /// Where the list of endpoints stands.
    pub source: Source,
}

/// Where the list of endpoints stands.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Source {
    /// The first list is complete.
    pub listed: bool,
    /// [`View::complete`] was true once. A worker that joins later is not probed yet, and that is no reason to take the router away from its clients.
    pub settled: bool,
    /// Why the list may be behind; absent while its source is followed.
    pub stale: Option<Stale>,
}

/// One worker at one moment.
#[derive(Clone, Debug)]
pub struct WorkerView {
    /// Stable name; its address until it has told its name.
    pub uid: WorkerUid,
    /// Where its service listens.
    pub address: String,
    /// Its connection; absent until one was made.
    pub client: Option<WorkerClient>,
    /// This worker's number in rendezvous ranks.
    pub salt: u64,
    /// Whether it gets requests.
    pub readiness: Readiness,
    /// What it told of itself; absent until it answered once.
    pub described: Option<Described>,
    /// Its last load report.
    pub load: Option<Reported>,
    /// Until when the operator wants nothing placed there.
    pub cordoned: Option<Instant>,
    /// Counters of this life, shared by all snapshots.
    pub live: Arc<Live>,
}

/// A load report as it arrived.
#[derive(Clone, PartialEq, Debug)]
pub struct Reported {
    /// The report.
    pub load: WorkerLoad,
    /// When the worker measured it.
    pub measured: Instant,
    /// The router's own requests there at that moment.
    pub own: OwnLoad,
}

/// What is fixed for one life of a worker.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Described {
    /// Which life.
    pub incarnation: Incarnation,
    /// Its name in the index.
    pub member: MemberId,
    /// Names and identities that it serves.
    pub models: Arc<[(String, ModelIdentity)]>,
    /// Tokens per block.
    pub block_size: u32,
}

/// Whether a worker gets requests.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Readiness {
    /// Known, not yet probed.
    Unprobed,
    /// Probed ready.
    Ready,
    /// It answered that it is not ready, or what it serves cannot be used.
    Unready(Error),
    /// It finishes what it has.
    Draining,
    /// It cannot be reached, or has left the list.
    Lost(Error),
}

/// Live state of one life of a worker.
#[derive(Debug)]
pub struct Live {
    /// In-flight counts.
    pub gauge: Arc<Gauge>,
    /// Gate for transport failures.
    pub breaker: Breaker,
    learned: Mutex<Learned>,
    peers: Arc<Peers>,
}

/// What was learned from all workers of one model together.
#[derive(Debug, Default)]
pub struct Peers(Mutex<Learned>);

// === impl Readiness ===

impl Readiness {
    /// Why a worker gets no requests, for people.
    pub fn why_not(&self) -> Option<String> {
        match self {
            Self::Ready => None,
            Self::Unprobed => Some("it has not been probed yet".to_owned()),
            Self::Draining => Some("it is draining or cordoned".to_owned()),
            Self::Unready(error) | Self::Lost(error) => Some(format!("{}: {}", error.reason.code(), error.message)),
        }
    }
}

// === impl Live ===

impl Live {
    /// Fresh state whose leases also count in `total` and whose observations also count among `peers`.
    pub fn new(total: Arc<Total>, peers: Arc<Peers>) -> Self {
        Self { gauge: Arc::new(Gauge::new(total)), breaker: Breaker::default(), learned: Mutex::default(), peers }
    }

    /// The corrections to apply now.
    pub fn factors(&self, now: Instant) -> Factors {
        let peers = *self.peers.0.lock().unwrap_or_else(PoisonError::into_inner);
        self.learned.lock().unwrap_or_else(PoisonError::into_inner).factors(&peers, now)
    }

    /// Notes an observation, for this worker and among its peers.
    pub fn learn(&self, observe: impl Fn(&mut Learned)) {
        observe(&mut self.learned.lock().unwrap_or_else(PoisonError::into_inner));
        observe(&mut self.peers.0.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

// === impl WorkerView ===

impl WorkerView {
    /// A worker of which only name and address are known.
    pub fn unknown(uid: WorkerUid, address: String, live: Arc<Live>) -> Self {
        let salt = salt_of(&uid);
        Self {
            uid,
            address,
            client: None,
            salt,
            readiness: Readiness::Unprobed,
            described: None,
            load: None,
            cordoned: None,
            live,
        }
    }

    /// Whether it serves `identity`.
    pub fn serves(&self, identity: &ModelIdentity) -> bool {
        self.described.as_ref().is_some_and(|described| described.models.iter().any(|(_, served)| served == identity))
    }

    /// The last load report, unless it is too old to be a signal.
    pub fn fresh_load(&self, now: Instant) -> Option<&Reported> {
        self.load.as_ref().filter(|report| now.saturating_duration_since(report.measured) <= WorkerLoad::AGE_MAX)
    }
}

// === impl View ===

impl View {
    /// A snapshot of these workers.
    pub fn new(mut workers: Vec<Arc<WorkerView>>, catalog: Arc<Catalog>, complete: bool) -> Self {
        workers.sort_by(|a, b| a.uid.cmp(&b.uid));
        let mut pools: BTreeMap<ModelIdentity, Vec<(usize, u64)>> = BTreeMap::new();
        let mut members = HashMap::with_capacity(workers.len());
        for (index, worker) in workers.iter().enumerate() {
            let (Readiness::Ready, Some(described)) = (&worker.readiness, &worker.described) else { continue };
            members.insert(described.member, index);
            for (_, identity) in described.models.iter() {
                let pool = pools.entry(*identity).or_default();
                if pool.last().is_none_or(|(last, _)| *last != index) {
                    pool.push((index, worker.salt));
                }
            }
        }
        let source = Source { listed: complete, settled: complete, stale: None };
        Self { workers, pools, members, catalog, complete, source }
    }

    /// All workers, by uid.
    pub fn workers(&self) -> &[Arc<WorkerView>] {
        &self.workers
    }

    /// Indexes and salts of the ready workers that serve `identity`.
    pub fn pool(&self, identity: &ModelIdentity) -> &[(usize, u64)] {
        self.pools.get(identity).map_or(&[], Vec::as_slice)
    }

    /// The ready worker with this name in the index.
    pub fn member(&self, member: MemberId) -> Option<&Arc<WorkerView>> {
        self.workers.get(*self.members.get(&member)?)
    }

    /// Whether any worker, ready or not, serves `identity`.
    pub fn knows(&self, identity: &ModelIdentity) -> bool {
        self.workers.iter().any(|worker| worker.serves(identity))
    }
}
