//! The engine's mailbox: the only way in.
//!
//! Owns the order of messages. Bounded by what may be sent: submissions by the queue limits, cancellations and resumptions by one each per
//! request, and everything else by [`Mailbox::ADMIN_MAX`].

use super::request::{JobId, Submission};
use super::stats::Inspection;
use crate::kv::{EventStream, FlushScope};
use kvasir_core::ModelIdentity;
use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::oneshot;

/// What the engine can be told.
pub(super) enum Message {
    Submit(Box<Submission>),
    /// The reader is gone.
    Cancel(JobId),
    /// A reader that was behind has taken a chunk.
    Resumed(JobId),
    /// A subscriber asked for a snapshot.
    Snapshot,
    Subscribe(oneshot::Sender<EventStream>),
    Flush(FlushScope, oneshot::Sender<u32>),
    Inspect(oneshot::Sender<Inspection>),
    /// Serve these identities from now on.
    Serve(Vec<ModelIdentity>, oneshot::Sender<()>),
    /// Tell when nothing is left.
    Drained(oneshot::Sender<()>),
    Stop,
}

/// The queue of messages.
#[derive(Default)]
pub(super) struct Mailbox {
    state: Mutex<MailboxState>,
    arrived: Condvar,
}

#[derive(Default)]
struct MailboxState {
    messages: VecDeque<Message>,
    closed: bool,
}

// === impl Mailbox ===

impl Mailbox {
    /// Messages beside submissions, cancellations and resumptions that may wait.
    const ADMIN_MAX: usize = 4096;

    /// Adds a message whose number is bounded elsewhere; false if the engine is gone.
    pub(super) fn signal(&self, message: Message) -> bool {
        let mut state = self.lock();
        if state.closed {
            return false;
        }
        state.messages.push_back(message);
        drop(state);
        self.arrived.notify_one();
        true
    }

    /// Adds an administrative message; false if too many wait or the engine is gone.
    pub(super) fn ask(&self, message: Message) -> bool {
        let full = self.lock().messages.len() >= Self::ADMIN_MAX;
        !full && self.signal(message)
    }

    /// Takes all messages.
    pub(super) fn take(&self) -> VecDeque<Message> {
        std::mem::take(&mut self.lock().messages)
    }

    /// Waits for a message, at most for `timeout`.
    pub(super) fn wait(&self, timeout: Duration) {
        let state = self.lock();
        if state.messages.is_empty() && !state.closed {
            drop(self.arrived.wait_timeout(state, timeout).unwrap_or_else(PoisonError::into_inner));
        }
    }

    /// Refuses further messages and gives back those that nobody will read.
    pub(super) fn close(&self) -> VecDeque<Message> {
        let mut state = self.lock();
        state.closed = true;
        std::mem::take(&mut state.messages)
    }

    fn lock(&self) -> MutexGuard<'_, MailboxState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
