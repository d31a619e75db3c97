//! Requests in flight: the one list that gauges, drains and `Inspect` read.

use kvasir_core::{Request, RequestId, TenantTag};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// All requests in flight; clones share the list.
#[derive(Clone)]
pub(super) struct Flights(Arc<Inner>);

struct Inner {
    open: Mutex<Open>,
    count: watch::Sender<u32>,
}

#[derive(Default)]
struct Open {
    next: u64,
    entries: BTreeMap<u64, Arc<Entry>>,
}

struct Entry {
    id: RequestId,
    tenant: TenantTag,
    prompt_tokens: u32,
    output_tokens: AtomicU32,
    started: AtomicBool,
    since: Instant,
}

/// One request in flight; dropping it ends the flight.
pub(super) struct Flight {
    list: Flights,
    number: u64,
    entry: Arc<Entry>,
}

/// What is told of a request in flight.
#[derive(Clone, Debug)]
pub struct InFlightRequest {
    /// Its name.
    pub id: RequestId,
    /// Whose.
    pub tenant: TenantTag,
    /// Whether the engine has admitted it.
    pub started: bool,
    /// Prompt tokens.
    pub prompt_tokens: u32,
    /// Output tokens handed over.
    pub output_tokens: u32,
    /// Time since receipt.
    pub age: Duration,
}

// === impl Flights ===

impl Default for Flights {
    fn default() -> Self {
        Self(Arc::new(Inner { open: Mutex::default(), count: watch::Sender::new(0) }))
    }
}

impl Flights {
    pub(super) fn enter(&self, request: &Request) -> Flight {
        let entry = Arc::new(Entry {
            id: request.id,
            tenant: request.tenant.clone(),
            prompt_tokens: request.prompt.len() as u32,
            output_tokens: AtomicU32::new(0),
            started: AtomicBool::new(false),
            since: Instant::now(),
        });
        let mut open = self.lock();
        let number = open.next;
        open.next += 1;
        open.entries.insert(number, Arc::clone(&entry));
        // Told under the lock, so that two changes cannot be told in the wrong order.
        self.0.count.send_replace(open.entries.len() as u32);
        drop(open);
        Flight { list: self.clone(), number, entry }
    }

    pub(super) fn count(&self) -> u32 {
        *self.0.count.borrow()
    }

    pub(super) async fn idle(&self) {
        // The sender lives in `self`, so waiting ends only with the condition.
        let _ = self.0.count.subscribe().wait_for(|count| *count == 0).await;
    }

    /// Every request, oldest first.
    pub(super) fn list(&self) -> Vec<InFlightRequest> {
        let entries: Vec<_> = self.lock().entries.values().cloned().collect();
        entries
            .iter()
            .map(|entry| InFlightRequest {
                id: entry.id,
                tenant: entry.tenant.clone(),
                started: entry.started.load(Ordering::Relaxed),
                prompt_tokens: entry.prompt_tokens,
                output_tokens: entry.output_tokens.load(Ordering::Relaxed),
                age: entry.since.elapsed(),
            })
            .collect()
    }

    fn lock(&self) -> MutexGuard<'_, Open> {
        self.0.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Flight ===

impl Flight {
    pub(super) fn start(&self) {
        self.entry.started.store(true, Ordering::Relaxed);
    }

    pub(super) fn add_output(&self, tokens: u32) {
        self.entry.output_tokens.fetch_add(tokens, Ordering::Relaxed);
    }

    pub(super) fn age(&self) -> Duration {
        self.entry.since.elapsed()
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        let mut open = self.list.lock();
        open.entries.remove(&self.number);
        self.list.0.count.send_replace(open.entries.len() as u32);
    }
}
