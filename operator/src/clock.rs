//! Clock: the wall clock that Kubernetes timestamps need, handed in so that tests can drive it.
//!
//! Owns nothing but the way to ask. Durations are measured with tokio's monotonic clock; this one is for what is written into objects and read
//! back from them.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, Time};
use k8s_openapi::jiff::Timestamp;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Tells the time of day; cheap to clone.
#[derive(Clone)]
pub struct Clock(Arc<dyn Fn() -> Timestamp + Send + Sync>);

// === impl Clock ===

impl Clock {
    /// The machine's clock.
    pub fn system() -> Self {
        Self(Arc::new(Timestamp::now))
    }

    /// A clock that starts at `start` and goes with tokio's time, which tests can pause.
    pub fn from_runtime(start: Timestamp) -> Self {
        let begun = tokio::time::Instant::now();
        Self(Arc::new(move || start.checked_add(begun.elapsed()).unwrap_or(start)))
    }

    /// A clock that stands still.
    pub fn fixed(at: Timestamp) -> Self {
        Self(Arc::new(move || at))
    }

    /// Now.
    pub fn now(&self) -> Timestamp {
        (self.0)()
    }

    /// Now, to the second, as in conditions.
    pub fn time(&self) -> Time {
        let now = self.now();
        Time(Timestamp::from_second(now.as_second()).unwrap_or(now))
    }

    /// Now, to the microsecond, as in leases.
    pub fn micro_time(&self) -> MicroTime {
        let now = self.now();
        MicroTime(Timestamp::from_microsecond(now.as_microsecond()).unwrap_or(now))
    }

    /// How long ago `then` was; nothing if it lies ahead.
    pub fn since(&self, then: Timestamp) -> Duration {
        Duration::try_from(self.now().duration_since(then)).unwrap_or_default()
    }
}

impl fmt::Debug for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Clock(..)")
    }
}
