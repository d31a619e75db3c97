//! Memory: what one process knows of pools beside what is in objects. Losing it costs some reads and some delays, never a wrong decision.
//!
//! Owns the writes whose effects the cache has not shown yet, the pods that we deleted ourselves, the last status that was written, what workers
//! said of themselves, and how long nothing has moved.

use crate::admin::Described;
use crate::api::{ServingPool, ServingPoolStatus};
use crate::design::Design;
use crate::scale;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use kvasir_telemetry::OperatorMetrics;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// Shortest and longest time between two looks at something that moves.
const MOVING: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(10));
/// Shortest and longest time after a fault.
const FAILING: (Duration, Duration) = (Duration::from_secs(1), Duration::from_mins(2));

/// Memories of all pools.
pub(super) struct Memories {
    term: AtomicU64,
    metrics: OperatorMetrics,
    pools: Mutex<HashMap<String, Entry>>,
}

struct Entry {
    memory: Arc<tokio::sync::Mutex<Memory>>,
    phase: &'static str,
}

/// Memory of one pool.
pub(super) struct Memory {
    term: u64,
    /// Uids of pods that this process has deleted and that are not gone.
    pub(super) ours: BTreeSet<String>,
    /// Pods that were written, by name.
    unseen: HashMap<String, Unseen>,
    /// Whether pods have to be read from the API server.
    must_list: bool,
    /// The last status that was written, its version, and when.
    pub(super) status: Option<(u64, ServingPoolStatus)>,
    pub(super) status_at: Option<Instant>,
    /// The last design that could be made.
    pub(super) design: Option<Arc<Design>>,
    /// What workers serve, by uid and life.
    pub(super) described: HashMap<(String, i32), Described>,
    /// Passes in a row that failed, and that neither moved nor rested.
    failures: u32,
    waits: u32,
    passes: u64,
    /// The pool's own scaler.
    pub(super) scaler: scale::Scaler,
    /// Autoscalers that target the pool, and when they were looked for.
    pub(super) rivals: Option<(Instant, Vec<String>)>,
}

/// What the cache has to show before it is believed again.
struct Unseen {
    uid: String,
    /// Version after the write; `None` if the pod is gone.
    version: Option<u64>,
}

// === impl Memories ===

impl Memories {
    pub(super) fn new(metrics: OperatorMetrics) -> Self {
        Self { term: AtomicU64::new(0), metrics, pools: Mutex::default() }
    }

    /// This process begins to lead: others may have written since.
    pub(super) fn begin_term(&self) {
        self.term.fetch_add(1, Ordering::SeqCst);
    }

    /// Memory of a pool, fresh if a new term has begun.
    pub(super) async fn of(&self, pool: &ServingPool) -> tokio::sync::OwnedMutexGuard<Memory> {
        let term = self.term.load(Ordering::SeqCst);
        let memory = {
            let mut pools = self.pools.lock().unwrap_or_else(PoisonError::into_inner);
            let fresh = || Entry { memory: Arc::new(tokio::sync::Mutex::new(Memory::new(term))), phase: "new" };
            Arc::clone(&pools.entry(pool.uid().unwrap_or_default()).or_insert_with(fresh).memory)
        };
        let mut memory = memory.lock_owned().await;
        if memory.term != term {
            *memory = Memory::new(term);
        }
        memory
    }

    /// Notes the phase of a pool and forgets those that are gone.
    pub(super) fn note(&self, pool: &ServingPool, phase: &'static str, existing: &HashSet<String>) {
        let mut pools = self.pools.lock().unwrap_or_else(PoisonError::into_inner);
        pools.retain(|uid, _| existing.contains(uid));
        if let Some(entry) = pools.get_mut(&pool.uid().unwrap_or_default()) {
            entry.phase = phase;
        }
        for phase in ["ready", "rolling", "held", "stalled", "not_ready"] {
            self.metrics.pools(phase, pools.values().filter(|entry| entry.phase == phase).count() as u64);
        }
    }
}

// === impl Memory ===

impl Memory {
    fn new(term: u64) -> Self {
        Self {
            term,
            ours: BTreeSet::new(),
            unseen: HashMap::new(),
            must_list: true,
            status: None,
            status_at: None,
            design: None,
            described: HashMap::new(),
            failures: 0,
            waits: 0,
            passes: 0,
            scaler: scale::Scaler::default(),
            rivals: None,
        }
    }

    /// Notes a pod as it was after a write.
    pub(super) fn wrote(&mut self, pod: &Pod) {
        let (uid, version) = (pod.uid().unwrap_or_default(), version(pod));
        self.unseen.insert(pod.name_any(), Unseen { uid, version });
        self.must_list |= version.is_none();
    }

    /// Notes that a pod is gone.
    pub(super) fn gone(&mut self, name: &str, uid: &str) {
        self.unseen.insert(name.to_owned(), Unseen { uid: uid.to_owned(), version: None });
    }

    /// The effect of a write is not known.
    pub(super) fn unsure(&mut self) {
        self.must_list = true;
    }

    /// Whether `cached` shows every write so far. What is shown is forgotten.
    pub(super) fn is_current(&mut self, cached: &[Arc<Pod>]) -> bool {
        self.unseen.retain(|name, unseen| {
            let found = cached.iter().find(|pod| pod.name_any() == *name);
            let same = found.filter(|pod| pod.uid().as_deref() == Some(&*unseen.uid));
            let shown = match (found, same, unseen.version) {
                (_, Some(pod), Some(wanted)) => version(&**pod).is_some_and(|shown| shown >= wanted),
                (_, Some(_), None) => false,
                // Another pod of that name is newer than ours. None at all: gone, or not there yet.
                (Some(_), None, _) => true,
                (None, None, wanted) => wanted.is_none(),
            };
            !shown
        });
        self.unseen.is_empty() && !self.must_list
    }

    /// Pods were read from the API server.
    pub(super) fn listed(&mut self) {
        self.unseen.clear();
        self.must_list = false;
    }

    /// Forgets what concerned pods that are gone.
    pub(super) fn keep_only(&mut self, pods: &[Arc<Pod>]) {
        let uids: BTreeSet<String> = pods.iter().filter_map(|pod| pod.uid()).collect();
        self.ours.retain(|uid| uids.contains(uid));
        self.described.retain(|(uid, _), _| uids.contains(uid));
    }

    /// Time until the next look, by how this one ended.
    pub(super) fn delay(&mut self, uid: &str, ending: Ending, rest: Duration) -> Duration {
        self.passes += 1;
        let (base, spread) = match ending {
            Ending::Rest => (rest, 0.1),
            Ending::Moved => (MOVING.0, 0.2),
            Ending::Waits => (later(MOVING, self.waits), 0.2),
            Ending::Failed => (later(FAILING, self.failures), 0.5),
        };
        self.failures = if ending == Ending::Failed { self.failures.saturating_add(1) } else { 0 };
        self.waits = if ending == Ending::Waits { self.waits.saturating_add(1) } else { 0 };
        // Pools that failed together must not come back together.
        let hash = blake3::hash(format!("{uid}/{}", self.passes).as_bytes());
        let share = f64::from(hash.as_bytes()[0]) / 255.0;
        base.mul_f64(1.0 - spread + 2.0 * spread * share)
    }
}

/// How a pass ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Ending {
    /// All is as wanted.
    Rest,
    /// Something was written.
    Moved,
    /// Something is waited for.
    Waits,
    /// Something went wrong.
    Failed,
}

/// Grows by half each time.
pub(super) fn later((shortest, longest): (Duration, Duration), times: u32) -> Duration {
    shortest.mul_f64(1.5f64.powi(times.min(24) as i32)).min(longest)
}

pub(super) fn version(object: &impl kube::ResourceExt) -> Option<u64> {
    object.resource_version().and_then(|version| version.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pod(uid: &str, version: u64) -> Arc<Pod> {
        let pod = json!({"metadata": {"name": "p", "uid": uid, "resourceVersion": version.to_string()}});
        Arc::new(serde_json::from_value(pod).unwrap())
    }

    fn memory() -> Memory {
        let mut memory = Memory::new(0);
        memory.listed();
        memory
    }

    #[test]
    fn a_cache_is_believed_once_it_shows_what_was_written() {
        let mut memory = memory();
        assert!(memory.is_current(&[]));
        memory.wrote(&pod("a", 7));
        assert!(!memory.is_current(&[]), "created and not shown");
        assert!(!memory.is_current(&[pod("a", 6)]), "older than our write");
        assert!(memory.is_current(&[pod("a", 8)]));
        memory.gone("p", "a");
        assert!(!memory.is_current(&[pod("a", 8)]), "deleted and still shown");
        assert!(memory.is_current(&[pod("b", 9)]), "another one of that name");
        memory.unsure();
        assert!(!memory.is_current(&[]));
    }

    #[test]
    fn a_stuck_pool_is_looked_at_ever_later_and_a_resting_one_evenly() {
        let (mut memory, rest) = (memory(), Duration::from_secs(5));
        let delays: Vec<Duration> = (0..40).map(|_| memory.delay("u", Ending::Failed, rest)).collect();
        assert!(delays[0] <= Duration::from_millis(1_500) && delays[39] >= Duration::from_mins(1), "{delays:?}");
        assert!(delays.iter().all(|delay| *delay <= Duration::from_mins(3)));
        assert!(memory.delay("u", Ending::Moved, rest) <= Duration::from_millis(1_200));
        assert!(memory.delay("u", Ending::Failed, rest) <= Duration::from_millis(1_500), "a success begins anew");
        let resting = memory.delay("u", Ending::Rest, rest);
        assert!(resting >= rest.mul_f64(0.9) && resting <= rest.mul_f64(1.1));
        let waits: Vec<Duration> = (0..20).map(|_| memory.delay("u", Ending::Waits, rest)).collect();
        assert!(waits[19] <= Duration::from_secs(12) && waits[19] > waits[0]);
    }
}
