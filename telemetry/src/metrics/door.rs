//! What clients see, recorded at the door.

use super::{EncodeLabelSet, Family, Gauge, Histogram, HistogramFamily, Registry, StateLabel, seconds, secs};
use crate::names;
use prometheus_client::metrics::counter::Counter;
use std::time::Duration;

/// How a request ended: `ok`, or the code of its reason.
pub type Outcome = &'static str;

/// Metrics of a door; one per process that has one.
#[derive(Clone)]
pub struct DoorMetrics {
    requests: Family<RequestLabels, Counter>,
    in_flight: Family<DoorLabel, Gauge>,
    ttft: HistogramFamily<HitLabels>,
    tpot: Histogram,
    itl: Histogram,
    total: Histogram,
    output_tokens: Counter,
    states: Family<StateLabel, Counter<f64, std::sync::atomic::AtomicU64>>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    door: &'static str,
    route: &'static str,
    model: String,
    outcome: Outcome,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DoorLabel {
    door: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct HitLabels {
    hit: &'static str,
    tier: &'static str,
}

/// What is known of a request when it ends.
#[derive(Clone, Debug)]
pub struct FinishedRequest<'a> {
    /// `http` or `grpc`.
    pub door: &'static str,
    /// A fixed name per route.
    pub route: &'static str,
    /// A configured model name, or `other`.
    pub model: &'a str,
    /// `ok` or a reason's code.
    pub outcome: Outcome,
    /// From receipt to the first output, if there was one.
    pub ttft: Option<Duration>,
    /// From receipt to the end.
    pub total: Duration,
    /// Visible output tokens.
    pub output_tokens: u32,
    /// Prompt tokens.
    pub prompt_tokens: u32,
    /// Reused prompt tokens.
    pub cached_tokens: u32,
    /// Deepest tier that was hit, or `none`.
    pub tier: &'static str,
}

// === impl DoorMetrics ===

impl DoorMetrics {
    /// Registers all door metrics.
    pub fn new(registry: &Registry) -> Self {
        Self {
            requests: registry.add(names::DOOR_REQUESTS, "Requests by door, route, model and outcome", Family::default()),
            in_flight: registry.add(names::DOOR_IN_FLIGHT, "Requests that are open", Family::default()),
            ttft: registry.histograms(names::TTFT_SECONDS, "Receipt to first output by hit share and deepest tier", seconds),
            tpot: registry.histogram(names::TPOT_SECONDS, "Mean time per output token after the first", seconds),
            itl: registry.histogram(names::ITL_SECONDS, "Time between consecutive outputs", seconds),
            total: registry.histogram(names::REQUEST_SECONDS, "Receipt to end", seconds),
            output_tokens: registry.add(names::OUTPUT_TOKENS, "Visible output tokens", Counter::default()),
            states: registry.add(names::STATE_SECONDS, "Seconds that requests spent in each exclusive state", Family::default()),
        }
    }

    /// A request came in; pair with [`Self::closed`].
    pub fn opened(&self, door: &'static str) {
        self.in_flight.get_or_create(&DoorLabel { door }).inc();
    }

    /// A request left, however it ended.
    pub fn closed(&self, door: &'static str) {
        self.in_flight.get_or_create(&DoorLabel { door }).dec();
    }

    /// Time between two outputs of a choice.
    pub fn gap(&self, gap: Duration) {
        self.itl.observe(secs(gap));
    }

    /// A request ended.
    pub fn finished(&self, request: &FinishedRequest<'_>, states: impl Iterator<Item = (&'static str, Duration)>) {
        let labels =
            RequestLabels { door: request.door, route: request.route, model: request.model.to_owned(), outcome: request.outcome };
        self.requests.get_or_create(&labels).inc();
        self.total.observe(secs(request.total));
        self.output_tokens.inc_by(request.output_tokens.into());
        if let Some(ttft) = request.ttft {
            let labels = HitLabels { hit: hit_bucket(request.cached_tokens, request.prompt_tokens), tier: request.tier };
            self.ttft.get_or_create(&labels).observe(secs(ttft));
            if request.output_tokens > 1 {
                self.tpot.observe(secs(request.total.saturating_sub(ttft)) / f64::from(request.output_tokens - 1));
            }
        }
        for (state, time) in states {
            self.states.get_or_create(&StateLabel { state }).inc_by(secs(time));
        }
    }
}

/// Bucket of the reused share H.
fn hit_bucket(cached: u32, prompt: u32) -> &'static str {
    if cached == 0 || prompt == 0 {
        return "0";
    }
    let share = f64::from(cached) / f64::from(prompt);
    match share {
        share if share < 0.5 => "0-50",
        share if share < 0.9 => "50-90",
        _ => "90-100",
    }
}
