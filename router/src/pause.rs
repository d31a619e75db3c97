//! Pauses between tries: doubled after each failure in a row, and jittered, so that many do not come back at once.

use crate::fleet::random_unit;
use std::time::Duration;

/// The pauses of one thing that is tried again.
#[derive(Clone, Debug)]
pub(crate) struct Pause {
    min: Duration,
    max: Duration,
    next: Duration,
}

// === impl Pause ===

impl Pause {
    pub(crate) fn new(min: Duration, max: Duration) -> Self {
        Self { min, max, next: min }
    }

    /// A try failed: how long to wait, between half of the pause and the whole of it.
    pub(crate) fn failed(&mut self) -> Duration {
        let pause = self.next;
        self.next = (self.next * 2).min(self.max);
        pause.mul_f64(0.5 + random_unit() / 2.0)
    }

    /// A try succeeded.
    pub(crate) fn succeeded(&mut self) {
        self.next = self.min;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest_and_begin_anew_after_a_success() {
        let (min, max) = (Duration::from_millis(100), Duration::from_millis(350));
        let mut pause = Pause::new(min, max);
        for whole in [min, min * 2, max, max] {
            let waited = pause.failed();
            assert!(waited >= whole / 2 && waited <= whole, "{waited:?} of {whole:?}");
        }
        pause.succeeded();
        assert!(pause.failed() <= min);
    }
}
