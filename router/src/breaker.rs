//! One gate per life of a worker: after failures of the *way* to it, nothing is sent for a while, then one request tries.
//!
//! Owns the gate's state. Refuses to know requests: callers say what an attempt showed. Only transport failures count; an answer of any
//! kind, also a 4xx or a refusal, proves that the worker can be reached and closes the gate.
//!
//! Flow: closed → ([`FAILURES_MAX`] failures in a row) → open for a growing, jittered time → half open: one trial → closed or open again.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// The gate.
#[derive(Debug, Default)]
pub struct Breaker {
    /// Fast path: nothing is wrong.
    troubled: AtomicBool,
    state: Mutex<State>,
}

/// What an attempt showed of the way to its worker.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Signal {
    /// The worker answered, whatever it said.
    Answered,
    /// The connection failed, or nothing came in time.
    TransportFailed,
    /// The attempt ended without showing anything (the client left).
    Nothing,
}

#[derive(Debug, Default)]
struct State {
    failures: u32,
    open_until: Option<Instant>,
    trial: bool,
}

/// Failures in a row that open the gate.
pub const FAILURES_MAX: u32 = 3;
/// First time that the gate stays open.
pub const OPEN_MIN: Duration = Duration::from_secs(1);
/// Longest time that the gate stays open.
pub const OPEN_MAX: Duration = Duration::from_secs(30);

// === impl Breaker ===

impl Breaker {
    /// Whether an attempt may be made now; does not reserve the trial.
    pub fn allows(&self, now: Instant) -> bool {
        if !self.troubled.load(Ordering::Acquire) {
            return true;
        }
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match state.open_until {
            None => true,
            Some(until) => now >= until && !state.trial,
        }
    }

    /// An attempt begins; false when the gate is open, or its one trial is under way.
    pub fn enter(&self, now: Instant) -> bool {
        if !self.troubled.load(Ordering::Acquire) {
            return true;
        }
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match state.open_until {
            None => true,
            Some(until) if now >= until && !state.trial => {
                state.trial = true;
                true
            }
            Some(_) => false,
        }
    }

    /// An attempt has shown something; `jitter` is a number in [0, 1).
    pub fn record(&self, signal: Signal, now: Instant, jitter: f64) {
        if signal != Signal::TransportFailed && !self.troubled.load(Ordering::Acquire) {
            return;
        }
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.trial = false;
        match signal {
            Signal::Nothing => {}
            Signal::Answered => {
                *state = State::default();
                self.troubled.store(false, Ordering::Release);
            }
            Signal::TransportFailed => {
                state.failures = state.failures.saturating_add(1);
                if state.failures >= FAILURES_MAX {
                    let doubled = OPEN_MIN.saturating_mul(1 << (state.failures - FAILURES_MAX).min(10));
                    state.open_until = Some(now + doubled.min(OPEN_MAX).mul_f64(0.5 + jitter / 2.0));
                }
                self.troubled.store(true, Ordering::Release);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(breaker: &Breaker, times: u32, now: Instant) {
        (0..times).for_each(|_| breaker.record(Signal::TransportFailed, now, 0.99));
    }

    #[tokio::test(start_paused = true)]
    async fn opens_after_failures_in_a_row_and_lets_one_trial_through() {
        let (breaker, now) = (Breaker::default(), Instant::now());
        failed(&breaker, FAILURES_MAX - 1, now);
        assert!(breaker.enter(now));
        failed(&breaker, 1, now);
        assert!(!breaker.allows(now) && !breaker.enter(now));
        let later = now + OPEN_MIN;
        assert!(breaker.allows(later) && breaker.enter(later));
        assert!(!breaker.allows(later) && !breaker.enter(later), "only one trial at a time");
        breaker.record(Signal::Answered, later, 0.0);
        assert!(breaker.enter(later) && breaker.enter(later));
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_between_failures_starts_the_count_anew() {
        let (breaker, now) = (Breaker::default(), Instant::now());
        for _ in 0..10 {
            failed(&breaker, FAILURES_MAX - 1, now);
            breaker.record(Signal::Answered, now, 0.0);
        }
        assert!(breaker.enter(now));
    }

    #[tokio::test(start_paused = true)]
    async fn a_trial_that_shows_nothing_frees_its_place() {
        let (breaker, now) = (Breaker::default(), Instant::now());
        failed(&breaker, FAILURES_MAX, now);
        let later = now + OPEN_MIN;
        assert!(breaker.enter(later));
        breaker.record(Signal::Nothing, later, 0.0);
        assert!(breaker.enter(later));
    }

    #[tokio::test(start_paused = true)]
    async fn repeated_failures_keep_it_open_longer_up_to_the_limit() {
        let (breaker, now) = (Breaker::default(), Instant::now());
        failed(&breaker, FAILURES_MAX + 20, now);
        assert!(!breaker.allows(now + OPEN_MAX / 2));
        assert!(breaker.allows(now + OPEN_MAX));
    }
}
