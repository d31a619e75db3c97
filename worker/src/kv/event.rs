//! The event feed: how indexes elsewhere follow the pool.
//!
//! Owns numbering and the bounded queue of each subscriber. Refuses to know what the events mean. The engine pushes; doors read.
//!
//! Invariants
//! 1. A subscriber's first batches are a snapshot; every later batch has the next `seq`.
//! 2. A subscriber that falls behind loses its queue, never the engine's time: it is marked lost and gets a new snapshot when it reads.
//! 3. A queue holds at most `events_max` events beside one snapshot, which the pool's size bounds.

use kvasir_core::{CacheEvent, EventBatch, Incarnation};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use tokio::sync::Notify;

/// Keys per event of a snapshot chunk.
pub(super) const SNAPSHOT_KEYS_MAX: usize = 512;

/// Asks the engine for a new snapshot.
pub type SnapshotRequest = Arc<dyn Fn() + Send + Sync>;

/// The engine's side: numbering and all subscribers.
pub struct EventFeed {
    incarnation: Incarnation,
    seq: u64,
    events_max: usize,
    subscribers: Vec<Weak<Queue>>,
}

/// A subscriber's side: reads batches in order.
pub struct EventStream {
    queue: Arc<Queue>,
    ask: SnapshotRequest,
}

struct Queue {
    state: Mutex<QueueState>,
    notify: Notify,
    wants_snapshot: AtomicBool,
}

#[derive(Default)]
struct QueueState {
    batches: VecDeque<EventBatch>,
    events: usize,
    lost: bool,
    closed: bool,
}

// === impl EventFeed ===

impl EventFeed {
    /// A feed without subscribers.
    pub fn new(incarnation: Incarnation, events_max: usize) -> Self {
        Self { incarnation, seq: 0, events_max, subscribers: Vec::new() }
    }

    /// Number of the last batch.
    pub fn seq(&self) -> u64 {
        self.seq
    }

    /// Adds a subscriber; it gets a snapshot with the next [`Self::serve_snapshots`].
    pub fn subscribe(&mut self, ask: SnapshotRequest) -> EventStream {
        let queue = Arc::new(Queue {
            state: Mutex::new(QueueState { lost: true, ..QueueState::default() }),
            notify: Notify::new(),
            wants_snapshot: AtomicBool::new(true),
        });
        self.subscribers.push(Arc::downgrade(&queue));
        EventStream { queue, ask }
    }

    /// Numbers the events of a step and hands them to every subscriber; nothing happens without events.
    pub fn push(&mut self, epoch: u64, events: Vec<CacheEvent>) {
        if events.is_empty() {
            return;
        }
        self.seq += 1;
        let batch = EventBatch { incarnation: self.incarnation, seq: self.seq, epoch, snapshot: None, events };
        self.subscribers.retain(|queue| queue.upgrade().inspect(|queue| queue.push(&batch, self.events_max)).is_some());
    }

    /// Gives a snapshot to every subscriber that asked for one; `snapshot` yields the pool's content, parents first.
    pub fn serve_snapshots(&mut self, epoch: u64, snapshot: impl Fn() -> Vec<CacheEvent>) {
        let waiting: Vec<_> = self
            .subscribers
            .iter()
            .filter_map(Weak::upgrade)
            .filter(|queue| queue.wants_snapshot.swap(false, Ordering::AcqRel))
            .collect();
        if waiting.is_empty() {
            return;
        }
        let events = snapshot();
        let mut chunks: Vec<EventBatch> = events
            .chunks(8)
            .map(|events| EventBatch {
                incarnation: self.incarnation,
                seq: self.seq,
                epoch,
                snapshot: Some(false),
                events: events.to_vec(),
            })
            .collect();
        match chunks.last_mut() {
            Some(last) => last.snapshot = Some(true),
            None => chunks.push(EventBatch {
                incarnation: self.incarnation,
                seq: self.seq,
                epoch,
                snapshot: Some(true),
                events: Vec::new(),
            }),
        }
        for queue in waiting {
            queue.restart(&chunks);
        }
    }

    /// Ends every stream after what is queued.
    pub fn close(&mut self) {
        for queue in self.subscribers.drain(..).filter_map(|queue| queue.upgrade()) {
            queue.lock().closed = true;
            queue.notify.notify_one();
        }
    }
}

// === impl EventStream ===

impl EventStream {
    /// The next batch if one is there. A stream that was lost asks for a snapshot and goes on with it.
    pub fn try_recv(&self) -> Option<EventBatch> {
        let mut state = self.queue.lock();
        let batch = state.batches.pop_front();
        match &batch {
            Some(batch) if batch.snapshot.is_none() => state.events -= batch.events.len(),
            None if state.lost && !state.closed && !self.queue.wants_snapshot.swap(true, Ordering::AcqRel) => {
                drop(state);
                (self.ask)();
            }
            Some(_) | None => {}
        }
        batch
    }

    /// Waits for the next batch; `None` after the engine stopped.
    pub async fn recv(&self) -> Option<EventBatch> {
        loop {
            if let Some(batch) = self.try_recv() {
                return Some(batch);
            }
            if self.queue.lock().closed {
                return self.try_recv();
            }
            self.queue.notify.notified().await;
        }
    }

    /// Throws away what is queued and asks for a new snapshot: for a reader that saw a gap.
    pub fn resync(&self) {
        self.queue.lose();
        self.queue.wants_snapshot.store(true, Ordering::Release);
        (self.ask)();
    }
}

// === impl Queue ===

impl Queue {
    fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, batch: &EventBatch, events_max: usize) {
        {
            let mut state = self.lock();
            if state.lost {
                return;
            }
            if state.events + batch.events.len() > events_max {
                state.lost = true;
                state.batches.clear();
                state.events = 0;
            } else {
                state.events += batch.events.len();
                state.batches.push_back(batch.clone());
            }
        }
        self.notify.notify_one();
    }

    fn lose(&self) {
        let mut state = self.lock();
        state.lost = true;
        state.batches.clear();
        state.events = 0;
    }

    fn restart(&self, chunks: &[EventBatch]) {
        {
            let mut state = self.lock();
            state.batches = chunks.to_vec().into();
            state.events = 0;
            state.lost = false;
        }
        self.notify.notify_one();
    }
}
