//! Events: what happened to a pool and why, for `kubectl describe`.
//!
//! Owns the recorder (events.k8s.io/v1): something that is said again soon becomes a series of one event, and a pool that says too much is cut
//! short. Refuses to decide what is worth saying. A failure to write an event is counted and never disturbs a pass.

use crate::api::ServingPool;
use crate::apply::answered;
use crate::clock::Clock;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{Api, Patch, PatchParams, PostParams};
use kube::{Client, Resource as _, ResourceExt as _};
use kvasir_telemetry::OperatorMetrics;
use serde_json::json;
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// Name of the reporting controller.
const CONTROLLER: &str = "kvasir.dev/operator";
/// Longest note, in bytes; the API server refuses more.
const NOTE_BYTES_MAX: usize = 1_000;
/// Within this time the same words belong to one series.
const SERIES: Duration = Duration::from_mins(6);
/// Events that a pool may write at once, and the time in which it gets one more.
const BURST: f64 = 32.0;
const REFILL: Duration = Duration::from_secs(5);
/// Series and pools that are remembered; beyond it all are forgotten.
const REMEMBERED_MAX: usize = 4_096;

/// Writes events.
pub(super) struct Recorder {
    client: Client,
    instance: String,
    clock: Clock,
    metrics: OperatorMetrics,
    state: Mutex<State>,
}

/// Something that happened.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) struct Occurrence {
    /// Whether a person should look.
    pub(super) warning: bool,
    /// Why, in one word.
    pub(super) reason: &'static str,
    /// What was done, in one word.
    pub(super) action: &'static str,
    /// The sentence.
    pub(super) note: String,
}

#[derive(Default)]
struct State {
    series: HashMap<(String, Occurrence), Series>,
    budgets: HashMap<String, (f64, Instant)>,
}

struct Series {
    event: String,
    count: i32,
    last: Instant,
}

/// What to write for an occurrence.
enum Writing {
    New(String),
    Again(String, i32),
    Nothing,
}

// === impl Occurrence ===

impl Occurrence {
    pub(super) fn normal(reason: &'static str, action: &'static str, note: impl Into<String>) -> Self {
        Self { warning: false, reason, action, note: cut(note.into()) }
    }

    pub(super) fn warning(reason: &'static str, action: &'static str, note: impl Into<String>) -> Self {
        Self { warning: true, reason, action, note: cut(note.into()) }
    }
}

fn cut(mut note: String) -> String {
    if note.len() > NOTE_BYTES_MAX {
        note.truncate(note.floor_char_boundary(NOTE_BYTES_MAX));
        note.push('…');
    }
    note
}

// === impl Recorder ===

impl Recorder {
    pub(super) fn new(client: Client, instance: String, clock: Clock, metrics: OperatorMetrics) -> Self {
        Self { client, instance, clock, metrics, state: Mutex::default() }
    }

    /// Writes an event about a pool.
    pub(super) async fn publish(&self, pool: &ServingPool, occurrence: &Occurrence) {
        let events: Api<Event> = Api::namespaced(self.client.clone(), &pool.namespace().unwrap_or_default());
        let written = match self.decide(pool, occurrence) {
            Writing::Nothing => {
                self.metrics.event("dropped");
                return;
            }
            Writing::New(name) => answered(events.create(&PostParams::default(), &self.event(pool, occurrence, name))).await,
            Writing::Again(name, count) => {
                let series = json!({"series": {"count": count, "lastObservedTime": self.clock.micro_time()}});
                answered(events.patch(&name, &PatchParams::default(), &Patch::Merge(series))).await
            }
        };
        match written {
            Ok(_) => self.metrics.event("written"),
            Err(error) => {
                self.metrics.event("failed");
                tracing::debug!(%error, reason = occurrence.reason, "an event could not be written");
                // The event may be gone; the next of its kind begins anew.
                self.state().series.remove(&key(pool, occurrence));
            }
        }
    }

    fn decide(&self, pool: &ServingPool, occurrence: &Occurrence) -> Writing {
        let (now, uid) = (Instant::now(), pool.uid().unwrap_or_default());
        let mut state = self.state();
        let (left, at) = state.budgets.get(&uid).copied().unwrap_or((BURST, now));
        let left = (left + (now - at).div_duration_f64(REFILL)).min(BURST);
        if left < 1.0 {
            return Writing::Nothing;
        }
        if state.budgets.len() >= REMEMBERED_MAX || state.series.len() >= REMEMBERED_MAX {
            (state.budgets, state.series) = (HashMap::new(), HashMap::new());
        }
        state.budgets.insert(uid, (left - 1.0, now));
        let key = key(pool, occurrence);
        if let Some(series) = state.series.get_mut(&key).filter(|series| now - series.last < SERIES) {
            (series.count, series.last) = (series.count + 1, now);
            return Writing::Again(series.event.clone(), series.count);
        }
        // Names are the pool's with digits that differ by what is said and when.
        let seed = format!("{}/{occurrence:?}/{:?}/{}", key.0, self.clock.now(), self.instance);
        let name = format!("{}.{}", pool.name_any(), &blake3::hash(seed.as_bytes()).to_hex()[..16]);
        state.series.insert(key, Series { event: name.clone(), count: 1, last: now });
        Writing::New(name)
    }

    fn event(&self, pool: &ServingPool, occurrence: &Occurrence, name: String) -> Event {
        Event {
            metadata: ObjectMeta { name: Some(name), namespace: pool.namespace(), ..ObjectMeta::default() },
            event_time: Some(self.clock.micro_time()),
            reporting_controller: Some(CONTROLLER.to_owned()),
            reporting_instance: Some(self.instance.clone()),
            action: Some(occurrence.action.to_owned()),
            reason: Some(occurrence.reason.to_owned()),
            note: Some(occurrence.note.clone()),
            type_: Some(if occurrence.warning { "Warning" } else { "Normal" }.to_owned()),
            regarding: Some(ObjectReference { resource_version: None, ..pool.object_ref(&()) }),
            ..Event::default()
        }
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn key(pool: &ServingPool, occurrence: &Occurrence) -> (String, Occurrence) {
    (pool.uid().unwrap_or_default(), occurrence.clone())
}
