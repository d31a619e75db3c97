//! Leaving: stop taking work, let what runs finish until a deadline, hand back the rest.
//!
//! Owns the state "draining until". Refuses to know signals and sockets. Begun by SIGTERM or by the `Drain` method; read by everything that
//! takes or reports work. A new incarnation starts undrained.
//!
//! Invariants
//! 1. Draining never ends, and its deadline only moves towards now.
//! 2. Requests that have not started are refused at once, retryably; running ones keep their pace until the deadline, then the engine hands
//!    them back with their usage.

use crate::engine::EngineHandle;
use kvasir_core::{Error, Reason};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;

/// Whether the worker is draining, and until when; clones share it.
#[derive(Clone, Debug)]
pub struct Drain(watch::Sender<Option<Instant>>);

// === impl Drain ===

impl Default for Drain {
    fn default() -> Self {
        Self(watch::Sender::new(None))
    }
}

impl Drain {
    /// Begins to drain, or shortens a drain that has begun. Returns the time left.
    pub fn begin(&self, within: Duration) -> Duration {
        let now = Instant::now();
        let asked = now + within;
        self.0.send_modify(|deadline| *deadline = Some(deadline.map_or(asked, |set| set.min(asked))));
        self.deadline().map_or(within, |deadline| deadline.saturating_duration_since(now))
    }

    /// Whether it has begun.
    pub fn is_draining(&self) -> bool {
        self.0.borrow().is_some()
    }

    /// The moment at which the rest is handed back.
    pub fn deadline(&self) -> Option<Instant> {
        *self.0.borrow()
    }

    /// Waits until it begins.
    pub async fn begun(&self) {
        // The sender lives in `self`, so waiting ends only with the condition.
        let _ = self.0.subscribe().wait_for(Option::is_some).await;
    }

    /// Waits until the deadline, also one that is shortened meanwhile.
    pub async fn expired(&self) {
        let mut watched = self.0.subscribe();
        loop {
            let deadline = *watched.borrow_and_update();
            match deadline {
                None => {
                    let _ = watched.changed().await;
                }
                Some(deadline) => tokio::select! {
                    () = tokio::time::sleep_until(deadline) => return,
                    _ = watched.changed() => {}
                },
            }
        }
    }

    /// Carries a drain out once it begins: the engine refuses new work, and is stopped at the deadline if anything is left.
    pub async fn carry_out(&self, engine: &EngineHandle) {
        self.begun().await;
        tokio::select! {
            // An error means that the engine has ended already: nothing is left to hand back.
            _ = engine.drain() => {}
            () = self.expired() => engine.stop(),
        }
    }
}

/// The refusal of a worker that is draining.
pub fn refusal() -> Error {
    Error::new(Reason::Draining, "the worker is draining and takes no new work; send the request to another worker")
        .with_retry_after(Duration::from_secs(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_deadline_only_moves_towards_now() {
        let drain = Drain::default();
        assert!(!drain.is_draining());
        assert_eq!(drain.begin(Duration::from_secs(10)), Duration::from_secs(10));
        assert_eq!(drain.begin(Duration::from_mins(1)), Duration::from_secs(10));
        assert_eq!(drain.begin(Duration::from_secs(3)), Duration::from_secs(3));
    }

    #[tokio::test(start_paused = true)]
    async fn waiting_for_the_deadline_follows_a_shorter_one() {
        let drain = Drain::default();
        let started = Instant::now();
        let waiter = tokio::spawn({
            let drain = drain.clone();
            async move { drain.expired().await }
        });
        drain.begin(Duration::from_secs(100));
        tokio::task::yield_now().await;
        drain.begin(Duration::from_secs(2));
        assert!(waiter.await.is_ok());
        assert_eq!(started.elapsed(), Duration::from_secs(2));
    }
}
