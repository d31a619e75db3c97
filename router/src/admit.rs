//! Admission: how many requests run at once, who waits, and who is refused.
//!
//! Owns the running counts and the bounded queue. Refuses to know workers and prices. Called once per request, before placement: a retry never
//! queues twice. The order of the queue is [`Order`]: priority, then arrival; weighted fair queueing per tenant replaces that one type.
//!
//! Invariants
//! 1. Running requests and tokens stay within their limits (a request larger than the token limit runs alone).
//! 2. The queue stays within its limits; beyond them a typed refusal with a time to come back.
//! 3. Dropping a wait or a [`Permit`] anywhere gives its place back; at rest all counts are 0.
//!
//! Costs: one uncontended mutex per entry and exit, O(log n) of the queue.

use kvasir_core::{Error, Reason, TenantTag};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};

/// Limits of admission.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AdmitSettings {
    /// Requests that run at once: 4,096, several times what a fleet of tens of workers batches.
    pub running_max: usize,
    /// Prompt tokens of running requests: 64 Mi, 256 MiB of token ids.
    pub running_tokens_max: u64,
    /// Requests that wait: 1,024.
    pub queue_max: usize,
    /// Prompt tokens of waiting requests: 16 Mi, 64 MiB of token ids.
    pub queue_tokens_max: u64,
    /// Longest wait: 30 s, after which most callers have given up.
    pub wait_max: Duration,
}

/// What asks to be admitted.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Ticket {
    /// Whose; for quotas and fair shares.
    pub tenant: TenantTag,
    /// Larger goes first.
    pub priority: i32,
    /// Prompt tokens.
    pub tokens: u64,
}

/// The gate; cheap to clone.
#[derive(Clone, Debug)]
pub struct Admission(Arc<Shared>);

/// The right to run; dropping it lets the next one in.
#[derive(Debug)]
pub struct Permit {
    shared: Arc<Shared>,
    tokens: u64,
}

#[derive(Debug)]
struct Shared {
    settings: AdmitSettings,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    running: usize,
    running_tokens: u64,
    queue: BTreeMap<Order, Waiter>,
    queue_tokens: u64,
    next: u64,
    closed: bool,
}

#[derive(Debug)]
struct Waiter {
    tokens: u64,
    grant: oneshot::Sender<Permit>,
}

/// Place in the queue; the least goes first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Order {
    priority: Reverse<i32>,
    arrival: u64,
}

/// A wait that gives its place back when dropped.
struct Place<'a> {
    shared: &'a Shared,
    order: Order,
}

// === impl AdmitSettings ===

impl Default for AdmitSettings {
    fn default() -> Self {
        Self {
            running_max: 4_096,
            running_tokens_max: 64 << 20,
            queue_max: 1_024,
            queue_tokens_max: 16 << 20,
            wait_max: Duration::from_secs(30),
        }
    }
}

// === impl Admission ===

impl Admission {
    /// An open gate.
    pub fn new(settings: AdmitSettings) -> Self {
        Self(Arc::new(Shared { settings, state: Mutex::default() }))
    }

    /// Waits for the right to run.
    pub async fn enter(&self, ticket: &Ticket, deadline: Option<Instant>) -> Result<Permit, Error> {
        let (order, granted) = match self.0.enter_now(ticket)? {
            Entered::Running(permit) => return Ok(permit),
            Entered::Waiting(order, granted) => (order, granted),
        };
        let _place = Place { shared: &self.0, order };
        let patience = Instant::now() + self.0.settings.wait_max;
        let until = deadline.map_or(patience, |deadline| deadline.min(patience));
        match timeout_at(until, granted).await {
            Ok(Ok(permit)) => Ok(permit),
            Ok(Err(_closed)) => Err(stopping()),
            Err(_elapsed) if deadline.is_some_and(|deadline| deadline <= patience) => {
                Err(Error::new(Reason::DeadlineExceeded, "the deadline passed while the request waited for admission"))
            }
            Err(_elapsed) => {
                let message = format!("no worker became free within {} s", self.0.settings.wait_max.as_secs());
                Err(Error::new(Reason::Overloaded, message).with_retry_after(self.0.retry_after()))
            }
        }
    }

    /// Lets nobody wait from now on: who waits is refused, and so is who would have to. Running requests go on, and what there is room for still runs:
    /// its client could not know yet that it should go elsewhere.
    pub fn close(&self) {
        let waiters = {
            let mut state = self.0.lock();
            state.closed = true;
            state.queue_tokens = 0;
            std::mem::take(&mut state.queue)
        };
        drop(waiters);
    }

    /// Requests that run.
    pub fn running(&self) -> usize {
        self.0.lock().running
    }

    /// Prompt tokens of requests that run.
    pub fn running_tokens(&self) -> u64 {
        self.0.lock().running_tokens
    }

    /// Requests that wait.
    pub fn waiting(&self) -> usize {
        self.0.lock().queue.len()
    }
}

enum Entered {
    Running(Permit),
    Waiting(Order, oneshot::Receiver<Permit>),
}

// === impl Shared ===

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn enter_now(self: &Arc<Self>, ticket: &Ticket) -> Result<Entered, Error> {
        let mut state = self.lock();
        if state.queue.is_empty() && state.fits(&self.settings, ticket.tokens) {
            return Ok(Entered::Running(self.admit(&mut state, ticket.tokens)));
        }
        if state.closed {
            return Err(stopping());
        }
        let full =
            state.queue.len() >= self.settings.queue_max || state.queue_tokens + ticket.tokens > self.settings.queue_tokens_max;
        if full {
            let message = format!("{} requests run and {} wait; the queue is full", state.running, state.queue.len());
            drop(state);
            return Err(Error::new(Reason::Overloaded, message).with_retry_after(self.retry_after()));
        }
        let order = Order { priority: Reverse(ticket.priority), arrival: state.next };
        state.next += 1;
        state.queue_tokens += ticket.tokens;
        let (grant, granted) = oneshot::channel();
        state.queue.insert(order, Waiter { tokens: ticket.tokens, grant });
        Ok(Entered::Waiting(order, granted))
    }

    fn admit(self: &Arc<Self>, state: &mut State, tokens: u64) -> Permit {
        state.running += 1;
        state.running_tokens += tokens;
        Permit { shared: Arc::clone(self), tokens }
    }

    /// Lets waiting requests in as far as they fit. Grants are sent outside the lock: a grant whose receiver is gone drops its permit, which
    /// comes back here.
    fn advance(self: &Arc<Self>) {
        let mut grants = Vec::new();
        {
            let mut state = self.lock();
            while let Some(first) = state.queue.first_entry() {
                let tokens = first.get().tokens;
                let order = *first.key();
                if !state.fits(&self.settings, tokens) {
                    break;
                }
                if let Some(waiter) = state.take(order) {
                    grants.push((waiter.grant, self.admit(&mut state, tokens)));
                }
            }
        }
        for (grant, permit) in grants {
            // A receiver that is gone hands the permit back as the error, and dropping it lets the next one in.
            drop(grant.send(permit));
        }
    }

    /// Grows with the queue: a caller that finds it full comes back later than one that finds it half empty.
    fn retry_after(&self) -> Duration {
        let waiting = self.lock().queue.len() as u64;
        let turns = waiting / (self.settings.running_max as u64).max(1);
        Duration::from_secs((1 + turns).min(self.settings.wait_max.as_secs().max(1)))
    }
}

// === impl State ===

impl State {
    fn fits(&self, settings: &AdmitSettings, tokens: u64) -> bool {
        self.running == 0 || (self.running < settings.running_max && self.running_tokens + tokens <= settings.running_tokens_max)
    }

    fn take(&mut self, order: Order) -> Option<Waiter> {
        let waiter = self.queue.remove(&order)?;
        self.queue_tokens -= waiter.tokens;
        Some(waiter)
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        // Nothing to do when the wait was granted: it has left the queue then.
        let gone = self.shared.lock().take(self.order);
        drop(gone);
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        {
            let mut state = self.shared.lock();
            state.running -= 1;
            state.running_tokens -= self.tokens;
        }
        self.shared.advance();
    }
}

fn stopping() -> Error {
    Error::new(Reason::Draining, "the router is shutting down; send the request again").with_retry_after(Duration::from_secs(1))
}

#[cfg(test)]
mod tests;
