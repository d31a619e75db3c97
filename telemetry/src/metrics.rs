//! The metric registry and one typed recorder per component.
//!
//! Owns label sets and buckets. Refuses to compute: callers hand over what they measured. Labels are closed vocabularies (`&'static str`)
//! or names from configuration; a name that is not configured must arrive here as `other`.
//!
//! Costs: an update is one hash lookup in a family and one atomic operation.

use crate::names;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

mod door;
mod operator;
mod router;
mod worker;

pub use door::{DoorMetrics, FinishedRequest, Outcome, Slo};
pub use operator::OperatorMetrics;
pub use router::RouterMetrics;
pub use worker::{AdmittedPrompt, WorkerLevels, WorkerMetrics, WorkerTotals};

/// All metrics of one process or component; cheap to clone.
#[derive(Clone)]
pub struct Registry(Arc<Mutex<prometheus_client::registry::Registry>>);

/// Label set of one closed word.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Reason {
    reason: &'static str,
}

/// Label set of one tier.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Tier {
    tier: &'static str,
}

/// Label set of one outcome.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabel {
    outcome: &'static str,
}

/// Label set of one state.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StateLabel {
    state: &'static str,
}

type HistogramFamily<L> = Family<L, Histogram, fn() -> Histogram>;

// === impl Registry ===

impl Default for Registry {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(prometheus_client::registry::Registry::with_prefix(names::PREFIX))))
    }
}

impl Registry {
    /// A registry whose metrics all carry one more label, for several components in one process (`component="worker-0"`).
    pub fn with_component(component: &str) -> Self {
        let labels = [("component".into(), component.to_owned().into())].into_iter();
        Self(Arc::new(Mutex::new(prometheus_client::registry::Registry::with_prefix_and_labels(names::PREFIX, labels))))
    }

    /// All metrics in the OpenMetrics text format.
    pub fn render(&self) -> String {
        let mut text = String::new();
        let registry = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Writing into a String cannot fail.
        let _infallible = prometheus_client::encoding::text::encode(&mut text, &registry);
        text
    }

    /// Content type of [`Self::render`].
    pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

    fn add<M>(&self, name: &'static str, help: &'static str, metric: M) -> M
    where
        M: prometheus_client::registry::Metric + Clone,
    {
        let mut registry = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        registry.register(name, help, metric.clone());
        metric
    }

    fn histogram(&self, name: &'static str, help: &'static str, buckets: fn() -> Histogram) -> Histogram {
        self.add(name, help, buckets())
    }

    fn histograms<L>(&self, name: &'static str, help: &'static str, buckets: fn() -> Histogram) -> HistogramFamily<L>
    where
        L: EncodeLabelSet + Clone + std::hash::Hash + Eq + std::fmt::Debug + Send + Sync + 'static,
    {
        self.add(name, help, Family::new_with_constructor(buckets))
    }
}

/// Seconds from 100 µs to about 100 s, by half decades.
fn seconds() -> Histogram {
    Histogram::new([0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 30.0, 100.0])
}

/// Microseconds to milliseconds, for decisions and lookups.
fn short_seconds() -> Histogram {
    Histogram::new([1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1])
}

/// Token counts by powers of two.
fn token_counts() -> Histogram {
    Histogram::new((0..18).map(|power| f64::from(1u32 << power)))
}

/// Shares from 0 to 1.
fn ratios() -> Histogram {
    Histogram::new([0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0])
}

/// Sizes of token differences. OpenMetrics has no sum for a histogram with negative buckets: a direction is a label.
fn token_errors() -> Histogram {
    Histogram::new([0.0, 15.0, 63.0, 255.0, 1023.0, 4095.0])
}

/// Brings a counter up to an absolute total that its owner keeps.
fn set_total(counter: &Counter, total: u64) {
    let inner: &AtomicU64 = counter.inner();
    inner.fetch_max(total, Ordering::Relaxed);
}

fn secs(duration: Duration) -> f64 {
    duration.as_secs_f64()
}

fn level(gauge: &Gauge, value: u64) {
    gauge.set(i64::try_from(value).unwrap_or(i64::MAX));
}

#[cfg(test)]
mod tests;
