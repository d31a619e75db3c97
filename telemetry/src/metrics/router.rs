//! What the router decided, recorded by the router.

use super::{
    EncodeLabelSet, Family, Gauge, Histogram, HistogramFamily, OutcomeLabel, Reason, Registry, level, secs, short_seconds,
    token_errors,
};
use crate::names;
use prometheus_client::metrics::counter::Counter;
use std::cmp::Ordering;
use std::time::Duration;

/// Metrics of one router.
#[derive(Clone)]
pub struct RouterMetrics {
    decisions: Family<Branch, Counter>,
    pick: Histogram,
    prediction: HistogramFamily<Direction>,
    index_workers: Family<IndexState, Gauge>,
    index_bytes: Gauge,
    leases: Gauge,
    queued: Gauge,
    retries: Family<Reason, Counter>,
    shed: Family<Reason, Counter>,
    attempts: Family<OutcomeLabel, Counter>,
    discovery_endpoints: Gauge,
    discovery_stale: Gauge,
    discovery_errors: Family<Reason, Counter>,
    tenants: Gauge,
    secrets_stale: Gauge,
    secrets_loads: Family<OutcomeLabel, Counter>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Branch {
    branch: &'static str,
}

/// Which way a prediction was wrong: `over` promised more than was reused, `under` less, `exact` neither.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Direction {
    direction: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct IndexState {
    state: &'static str,
}

// === impl RouterMetrics ===

impl RouterMetrics {
    /// Registers all router metrics.
    pub fn new(registry: &Registry) -> Self {
        Self {
            decisions: registry.add(names::ROUTER_DECISIONS, "Placement decisions by branch", Family::default()),
            pick: registry.histogram(names::ROUTER_PICK_SECONDS, "Time of one placement decision", short_seconds),
            prediction: registry.histograms(
                names::ROUTER_PREDICTION_ERROR_TOKENS,
                "Distance of predicted from reported cached tokens, by direction",
                token_errors,
            ),
            index_workers: registry.add(names::ROUTER_INDEX_WORKERS, "Workers by state of their index", Family::default()),
            index_bytes: registry.add(names::ROUTER_INDEX_BYTES, "Bytes of the prefix index", Gauge::default()),
            leases: registry.add(names::ROUTER_LEASES, "Attempts in flight", Gauge::default()),
            queued: registry.add(names::ROUTER_QUEUED, "Requests that wait for admission", Gauge::default()),
            retries: registry.add(names::ROUTER_RETRIES, "Retries by reason of the failed attempt", Family::default()),
            shed: registry.add(names::ROUTER_SHED, "Requests refused before any attempt, by reason", Family::default()),
            attempts: registry.add(names::ROUTER_ATTEMPTS, "Attempts by outcome", Family::default()),
            discovery_endpoints: registry.add(
                names::ROUTER_DISCOVERY_ENDPOINTS,
                "Endpoints of workers that discovery names",
                Gauge::default(),
            ),
            discovery_stale: registry.add(
                names::ROUTER_DISCOVERY_STALE,
                "Whether the list of endpoints may be behind",
                Gauge::default(),
            ),
            discovery_errors: registry.add(
                names::ROUTER_DISCOVERY_ERRORS,
                "Failures to follow the source of endpoints, by reason",
                Family::default(),
            ),
            tenants: registry.add(names::ROUTER_TENANTS, "Tenants that are in force", Gauge::default()),
            secrets_stale: registry.add(
                names::ROUTER_SECRETS_STALE,
                "Whether secrets and tenants in force may be behind",
                Gauge::default(),
            ),
            secrets_loads: registry.add(
                names::ROUTER_SECRETS_LOADS,
                "Changes of secrets and tenants, by outcome",
                Family::default(),
            ),
        }
    }

    /// A worker was chosen.
    pub fn decided(&self, branch: &'static str, took: Duration) {
        self.decisions.get_or_create(&Branch { branch }).inc();
        self.pick.observe(secs(took));
    }

    /// A worker reported what it reused.
    pub fn predicted(&self, predicted_tokens: u32, reported_tokens: u32) {
        let direction = match predicted_tokens.cmp(&reported_tokens) {
            Ordering::Greater => "over",
            Ordering::Less => "under",
            Ordering::Equal => "exact",
        };
        let distance = f64::from(predicted_tokens.abs_diff(reported_tokens));
        self.prediction.get_or_create(&Direction { direction }).observe(distance);
    }

    /// How many workers are in each index state.
    pub fn index(&self, states: &[(&'static str, u64)], bytes: u64) {
        for (state, count) in states {
            level(&self.index_workers.get_or_create(&IndexState { state }), *count);
        }
        level(&self.index_bytes, bytes);
    }

    /// Attempts in flight now.
    pub fn leases(&self, count: u64) {
        level(&self.leases, count);
    }

    /// Requests that wait for admission now.
    pub fn queued(&self, count: u64) {
        level(&self.queued, count);
    }

    /// An attempt failed and another is made.
    pub fn retried(&self, reason: &'static str) {
        self.retries.get_or_create(&Reason { reason }).inc();
    }

    /// A request was refused before any attempt.
    pub fn shed(&self, reason: &'static str) {
        self.shed.get_or_create(&Reason { reason }).inc();
    }

    /// An attempt ended: `ok` or a reason's code.
    pub fn attempted(&self, outcome: &'static str) {
        self.attempts.get_or_create(&OutcomeLabel { outcome }).inc();
    }

    /// How many endpoints discovery names, and whether that may be behind.
    pub fn discovery(&self, endpoints: u64, stale: bool) {
        level(&self.discovery_endpoints, endpoints);
        level(&self.discovery_stale, stale.into());
    }

    /// The source of endpoints could not be followed.
    pub fn discovery_failed(&self, reason: &'static str) {
        self.discovery_errors.get_or_create(&Reason { reason }).inc();
    }

    /// How many tenants are in force, and whether they and the secrets may be behind.
    pub fn secrets(&self, tenants: u64, stale: bool) {
        level(&self.tenants, tenants);
        level(&self.secrets_stale, stale.into());
    }

    /// Secrets and tenants were found changed: `applied`, `refused` or `unreadable`.
    pub fn secrets_loaded(&self, outcome: &'static str) {
        self.secrets_loads.get_or_create(&OutcomeLabel { outcome }).inc();
    }
}
