//! The output stream of one request: a bounded queue from the engine thread to one reader.
//!
//! Owns delivery, the reader's absence and its slowness. Refuses to know what a chunk says. The engine sends; a door receives.
//!
//! Invariants
//! 1. The engine never waits: a full queue is an answer.
//! 2. The last chunk always fits, so that a reader who comes back late still learns how it ended.
//! 3. Dropping the receiver before the last chunk cancels the request, at once and exactly once.

use super::mailbox::{Mailbox, Message};
use super::request::JobId;
use kvasir_core::Chunk;
use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

/// The reader's end; also a `futures::Stream`.
pub struct ChunkReceiver {
    shared: Arc<Shared>,
    mailbox: Arc<Mailbox>,
    job: JobId,
}

/// The engine's end.
pub(super) struct ChunkSender(Arc<Shared>);

struct Shared {
    state: Mutex<StreamState>,
    capacity: usize,
    cancelled: AtomicBool,
}

#[derive(Default)]
struct StreamState {
    chunks: VecDeque<Chunk>,
    ended: bool,
    /// The engine found the queue full and wants to hear when it is not.
    stalled: bool,
    waker: Option<Waker>,
}

/// Makes both ends.
pub(super) fn channel(capacity: usize, mailbox: &Arc<Mailbox>, job: JobId) -> (ChunkSender, ChunkReceiver) {
    let shared = Arc::new(Shared { state: Mutex::default(), capacity, cancelled: AtomicBool::new(false) });
    (ChunkSender(Arc::clone(&shared)), ChunkReceiver { shared, mailbox: Arc::clone(mailbox), job })
}

// === impl ChunkSender ===

impl ChunkSender {
    /// Queues a chunk, or gives it back if the queue is full; the mailbox then gets `Resumed` when the reader has taken one.
    #[expect(
        clippy::result_large_err,
        reason = "what comes back is the chunk itself, to be queued; it is no error to carry upwards"
    )]
    pub(super) fn try_send(&self, chunk: Chunk) -> Result<(), Chunk> {
        let mut state = self.0.lock();
        if state.chunks.len() >= self.0.capacity {
            state.stalled = true;
            return Err(chunk);
        }
        state.chunks.push_back(chunk);
        wake(state);
        Ok(())
    }

    /// Queues the last chunk, whether there is room or not.
    pub(super) fn end(&self, chunk: Chunk) {
        let mut state = self.0.lock();
        state.chunks.push_back(chunk);
        state.ended = true;
        wake(state);
    }

    /// Whether the reader is gone.
    pub(super) fn is_cancelled(&self) -> bool {
        self.0.cancelled.load(Ordering::Acquire)
    }
}

// === impl ChunkReceiver ===

impl ChunkReceiver {
    /// Waits for the next chunk; `None` after the last.
    pub async fn recv(&mut self) -> Option<Chunk> {
        std::future::poll_fn(|context| self.poll_recv(context)).await
    }

    /// The next chunk if it is there.
    pub fn try_recv(&mut self) -> Option<Chunk> {
        let mut state = self.shared.lock();
        let chunk = state.chunks.pop_front();
        let resumed = chunk.is_some() && std::mem::take(&mut state.stalled);
        drop(state);
        if resumed {
            self.mailbox.signal(Message::Resumed(self.job));
        }
        chunk
    }

    /// Whether the last chunk was queued and taken.
    pub fn is_finished(&self) -> bool {
        let state = self.shared.lock();
        state.ended && state.chunks.is_empty()
    }

    fn poll_recv(&mut self, context: &mut Context<'_>) -> Poll<Option<Chunk>> {
        if let Some(chunk) = self.try_recv() {
            return Poll::Ready(Some(chunk));
        }
        let mut state = self.shared.lock();
        if !state.chunks.is_empty() {
            drop(state);
            return Poll::Ready(self.try_recv());
        }
        if state.ended {
            return Poll::Ready(None);
        }
        state.waker = Some(context.waker().clone());
        Poll::Pending
    }
}

impl futures::Stream for ChunkReceiver {
    type Item = Chunk;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Chunk>> {
        self.get_mut().poll_recv(context)
    }
}

impl Drop for ChunkReceiver {
    fn drop(&mut self) {
        if !self.shared.lock().ended {
            self.shared.cancelled.store(true, Ordering::Release);
            self.mailbox.signal(Message::Cancel(self.job));
        }
    }
}

// === impl Shared ===

impl Shared {
    fn lock(&self) -> MutexGuard<'_, StreamState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn wake(mut state: MutexGuard<'_, StreamState>) {
    let waker = state.waker.take();
    drop(state);
    if let Some(waker) = waker {
        waker.wake();
    }
}
