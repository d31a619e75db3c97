//! The load stream: on change at most every 100 ms, without change at least every second.
//!
//! The engine publishes a report after steps and, while it idles, a few times a second; so a report whose age grows means an engine that
//! hangs, and readers see that. The age counts from the moment at which the engine measured, so that readers can tell what they themselves had
//! running then.

use super::WorkerService;
use crate::engine::{Clock, MeasuredLoad};
use futures::Stream;
use futures::stream;
use kvasir_core::WorkerLoad;
use kvasir_proto::convert::load_to_wire;
use kvasir_proto::worker as wire;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout_at};

/// Reports of one stream are at least this far apart.
const EVERY_MIN: Duration = Duration::from_millis(100);

/// And at most this far.
const EVERY_MAX: Duration = Duration::from_secs(1);

/// State of one subscriber.
struct Reports {
    watched: watch::Receiver<MeasuredLoad>,
    /// That of the watched moments.
    clock: Arc<dyn Clock>,
    last: Option<(Instant, WorkerLoad)>,
}

// === impl WorkerService ===

impl WorkerService {
    /// Reports for one subscriber, for ever.
    pub(super) fn load_reports(&self) -> impl Stream<Item = wire::LoadResponse> + Send + 'static {
        let reports = Reports { watched: self.0.engine.load(), clock: self.0.engine.clock(), last: None };
        stream::unfold(reports, |mut reports| async move {
            let report = reports.next().await?;
            Some((report, reports))
        })
    }
}

// === impl Reports ===

impl Reports {
    async fn next(&mut self) -> Option<wire::LoadResponse> {
        if let Some((sent_at, sent)) = self.last.take() {
            sleep_until(sent_at + EVERY_MIN).await;
            loop {
                if self.watched.has_changed().ok()? {
                    let measured = self.watched.borrow_and_update().clone();
                    if differs(&measured.load, &sent) {
                        return Some(self.report(measured));
                    }
                }
                if let Ok(changed) = timeout_at(sent_at + EVERY_MAX, self.watched.changed()).await {
                    changed.ok()?;
                    self.watched.mark_changed();
                } else {
                    break;
                }
            }
        }
        let measured = self.watched.borrow_and_update().clone();
        Some(self.report(measured))
    }

    fn report(&mut self, measured: MeasuredLoad) -> wire::LoadResponse {
        let wire = load_to_wire(&measured.load, self.clock.now().saturating_sub(measured.at));
        self.last = Some((Instant::now(), measured.load));
        wire
    }
}

/// Whether two reports say something different, apart from their number.
fn differs(a: &WorkerLoad, b: &WorkerLoad) -> bool {
    let seq = a.seq;
    *a != WorkerLoad { seq, ..b.clone() }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]
    use super::*;
    use kvasir_core::Incarnation;

    /// Time that stands still with the runtime's.
    struct Paused(Instant);

    impl Clock for Paused {
        fn now(&self) -> Duration {
            self.0.elapsed()
        }
    }

    fn load(clock: &Paused, seq: u64, running: u32) -> MeasuredLoad {
        let load = WorkerLoad {
            incarnation: Incarnation([1; 8]),
            seq,
            running,
            waiting: 0,
            tiers: Vec::new(),
            queued_prefill_tokens: 0,
            prefill_tokens_per_second: 0.0,
            decode_tokens_per_second: 0.0,
            cost: Vec::new(),
            acceptance: Vec::new(),
            draining: false,
        };
        MeasuredLoad { load, at: clock.now() }
    }

    #[tokio::test(start_paused = true)]
    async fn a_change_is_told_after_100_ms_and_silence_after_a_second() {
        let started = Instant::now();
        let clock = Arc::new(Paused(started));
        let sender = watch::Sender::new(load(&clock, 0, 0));
        let mut reports = Reports { watched: sender.subscribe(), clock: clock.clone(), last: None };
        assert_eq!(reports.next().await.unwrap().seq, 0);
        assert_eq!(started.elapsed(), Duration::ZERO);

        sender.send_replace(load(&clock, 1, 5));
        sender.send_replace(load(&clock, 2, 6));
        let report = reports.next().await.unwrap();
        assert_eq!((report.running, started.elapsed()), (6, EVERY_MIN));
        assert_eq!(report.age_us, 100_000, "it counts from the measurement and not from the look at it");

        // The same figures under a new number are no change.
        let next = tokio::spawn(async move {
            let report = reports.next().await.unwrap();
            (report, reports)
        });
        tokio::time::sleep(Duration::from_millis(300)).await;
        sender.send_replace(load(&clock, 3, 6));
        let (report, mut reports) = next.await.unwrap();
        assert_eq!(report.seq, 3);
        assert_eq!(started.elapsed(), EVERY_MIN + EVERY_MAX);
        assert_eq!(report.age_us, 700_000);

        // An engine that says nothing grows old in its readers' eyes.
        for seconds in [1u64, 2, 3] {
            assert_eq!(reports.next().await.unwrap().age_us, 700_000 + seconds * 1_000_000);
        }
    }
}
