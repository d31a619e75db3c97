//! What clients see, recorded at the door.

use super::{EncodeLabelSet, Family, Gauge, Histogram, HistogramFamily, Registry, StateLabel, seconds, secs};
use crate::names;
use prometheus_client::metrics::counter::Counter;
use std::time::Duration;

/// How a request ended: `ok`, or the code of its reason.
pub type Outcome = &'static str;

const OK: Outcome = "ok";
const WITHIN: &str = "yes";
const OUTSIDE: &str = "no";

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
    slo: Option<Slo>,
    judged: Family<WithinLabel, Counter>,
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
struct WithinLabel {
    within: &'static str,
}

/// A service level objective: what makes a request good.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Slo {
    /// Longest time to the first output.
    pub ttft: Duration,
    /// Longest mean time per output token after the first.
    pub tpot: Duration,
    /// Share of requests that should be good, 0 to 1.
    pub fraction: f64,
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
    /// It asked for output, and how it ended says something of the service: not what a client did wrong or gave up.
    pub judged: bool,
}

// === impl DoorMetrics ===

impl DoorMetrics {
    /// Registers all door metrics.
    pub fn new(registry: &Registry) -> Self {
        Self::with_slo(registry, None)
    }

    /// The same; with an objective, requests are counted by whether they kept it (goodput). Both of its times are compared per request: shares of
    /// each alone do not tell the share of both.
    pub fn with_slo(registry: &Registry, slo: Option<Slo>) -> Self {
        if let Some(slo) = slo {
            let fraction: Gauge<f64, std::sync::atomic::AtomicU64> = Gauge::default();
            fraction.set(slo.fraction);
            registry.add(names::SLO_FRACTION, "Share of requests that should keep the pool's objective", fraction);
        }
        let judged: Family<WithinLabel, Counter> =
            registry.add(names::SLO_REQUESTS, "Requests by whether they kept the pool's objective", Family::default());
        for within in [WITHIN, OUTSIDE].into_iter().filter(|_| slo.is_some()) {
            // Readers take a series that is missing for a router that counts nothing.
            drop(judged.get_or_create(&WithinLabel { within }));
        }
        Self {
            slo,
            judged,
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
            if let Some(tpot) = request.tpot_s() {
                self.tpot.observe(tpot);
            }
        }
        if let Some(slo) = self.slo.filter(|_| request.judged) {
            let within = if request.outcome == OK && slo.holds(request) { WITHIN } else { OUTSIDE };
            self.judged.get_or_create(&WithinLabel { within }).inc();
        }
        for (state, time) in states {
            self.states.get_or_create(&StateLabel { state }).inc_by(secs(time));
        }
    }
}

// === impl FinishedRequest ===

impl FinishedRequest<'_> {
    /// Mean seconds per output token after the first; answers of one token have none.
    fn tpot_s(&self) -> Option<f64> {
        let ttft = self.ttft.filter(|_| self.output_tokens > 1)?;
        Some(secs(self.total.saturating_sub(ttft)) / f64::from(self.output_tokens - 1))
    }
}

// === impl Slo ===

impl Slo {
    fn holds(&self, request: &FinishedRequest<'_>) -> bool {
        request.ttft.unwrap_or(request.total) <= self.ttft && request.tpot_s().is_none_or(|tpot| tpot <= secs(self.tpot))
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
