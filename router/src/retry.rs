//! The retry budget: retries are a bounded share of requests, so that a failing fleet is not hit harder for failing.
//!
//! Owns the count over a sliding window. Refuses to know what is retried. Shared by all requests of a router.
//!
//! Guarantee: a retry is granted only while the retries of the last [`WINDOW_S`] seconds are fewer than [`SHARE`] × their requests + [`FLOOR`].

use std::sync::{Mutex, PoisonError};
use tokio::time::Instant;

/// Retries per request at most, over the window (DESIGN §6 and the usual value in service meshes).
pub const SHARE: f64 = 0.1;
/// Retries that are allowed in a window whatever the load, so that a quiet router can retry at all.
pub const FLOOR: u64 = 10;
/// Length of the window.
pub const WINDOW_S: u64 = 10;

/// The budget.
#[derive(Debug)]
pub struct Budget {
    start: Instant,
    window: Mutex<[Second; WINDOW_S as usize]>,
}

#[derive(Clone, Copy, Default, Debug)]
struct Second {
    number: u64,
    requests: u64,
    retries: u64,
}

// === impl Budget ===

impl Budget {
    /// An empty window.
    pub fn new(now: Instant) -> Self {
        Self { start: now, window: Mutex::default() }
    }

    /// A request came in.
    pub fn request(&self, now: Instant) {
        self.with(now, |seconds, current| seconds[current].requests += 1);
    }

    /// Takes one retry out of the budget; false when there is none left.
    pub fn retry(&self, now: Instant) -> bool {
        self.with(now, |seconds, current| {
            let requests: u64 = seconds.iter().map(|second| second.requests).sum();
            let retries: u64 = seconds.iter().map(|second| second.retries).sum();
            let allowed = (requests as f64 * SHARE) as u64 + FLOOR;
            let granted = retries < allowed;
            seconds[current].retries += u64::from(granted);
            granted
        })
    }

    fn with<T>(&self, now: Instant, change: impl FnOnce(&mut [Second], usize) -> T) -> T {
        let number = now.saturating_duration_since(self.start).as_secs();
        let mut seconds = self.window.lock().unwrap_or_else(PoisonError::into_inner);
        for second in seconds.iter_mut() {
            if second.number + WINDOW_S <= number {
                *second = Second::default();
            }
        }
        let current = (number % WINDOW_S) as usize;
        seconds[current].number = number;
        change(&mut seconds[..], current)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::time::Duration;

    proptest! {
        #[test]
        fn retries_never_exceed_their_share_of_the_last_seconds(steps in prop::collection::vec((0u64..1_500, 0u64..40, 0u64..40), 1..60)) {
            let start = Instant::now();
            let budget = Budget::new(start);
            let (mut at_ms, mut log) = (0, Vec::new());
            for (gap_ms, requests, retries) in steps {
                at_ms += gap_ms;
                let now = start + Duration::from_millis(at_ms);
                (0..requests).for_each(|_| { budget.request(now); log.push((at_ms, false)); });
                let before = log.len();
                (0..retries).for_each(|_| if budget.retry(now) { log.push((at_ms, true)); });
                if log.len() == before {
                    continue;
                }
                let from = (at_ms / 1_000 + 1).saturating_sub(WINDOW_S) * 1_000;
                let recent = log.iter().filter(|(at, _)| *at >= from);
                let (tried, asked) = recent.fold((0u64, 0u64), |(tried, asked), (_, retry)| (tried + u64::from(*retry), asked + u64::from(!retry)));
                prop_assert!(tried <= FLOOR + (asked as f64 * SHARE) as u64, "{} retries for {} requests", tried, asked);
            }
        }
    }

    #[tokio::test]
    async fn the_floor_lets_a_quiet_router_retry_and_comes_back_after_the_window() {
        let now = Instant::now();
        let budget = Budget::new(now);
        assert_eq!((0..100).filter(|_| budget.retry(now)).count() as u64, FLOOR);
        let later = now + Duration::from_secs(WINDOW_S);
        assert!(budget.retry(later));
    }
}
