//! What the operator did, recorded by the operator.

use super::{EncodeLabelSet, Family, Gauge, HistogramFamily, OutcomeLabel, Reason, Registry, level, seconds, secs};
use crate::names;
use prometheus_client::metrics::counter::Counter;
use std::time::Duration;

/// Metrics of one operator.
#[derive(Clone)]
pub struct OperatorMetrics {
    reconcile: HistogramFamily<OutcomeLabel>,
    faults: Family<Reason, Counter>,
    writes: Family<Write, Counter>,
    steps: Family<Step, Counter>,
    pools: Family<Phase, Gauge>,
    leading: Gauge,
    events: Family<OutcomeLabel, Counter>,
    scalings: Family<OutcomeLabel, Counter>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Write {
    verb: &'static str,
    resource: &'static str,
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Step {
    step: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Phase {
    phase: &'static str,
}

// === impl OperatorMetrics ===

impl OperatorMetrics {
    /// Registers all operator metrics.
    pub fn new(registry: &Registry) -> Self {
        Self {
            reconcile: registry.histograms(
                names::OPERATOR_RECONCILE_SECONDS,
                "Time of one pass over a pool, by outcome",
                seconds,
            ),
            faults: registry.add(names::OPERATOR_FAULTS, "Faults of passes, by reason", Family::default()),
            writes: registry.add(
                names::OPERATOR_API_WRITES,
                "Writing requests to the API server by verb, resource and outcome",
                Family::default(),
            ),
            steps: registry.add(names::OPERATOR_STEPS, "Steps of rollouts, by kind", Family::default()),
            pools: registry.add(names::OPERATOR_POOLS, "Pools by phase", Family::default()),
            leading: registry.add(names::OPERATOR_LEADING, "Whether this process leads", Gauge::default()),
            events: registry.add(names::OPERATOR_EVENTS, "Events of pools, by outcome", Family::default()),
            scalings: registry.add(names::OPERATOR_SCALINGS, "Decisions of pools' scalers, by outcome", Family::default()),
        }
    }

    /// One pass ended: `rest`, `changed` or `fault`.
    pub fn reconciled(&self, outcome: &'static str, time: Duration) {
        self.reconcile.get_or_create(&OutcomeLabel { outcome }).observe(secs(time));
    }

    /// A pass met a fault.
    pub fn fault(&self, reason: &'static str) {
        self.faults.get_or_create(&Reason { reason }).inc();
    }

    /// A writing request ended: `done`, `refused`, `conflict`, `server`, `unreachable` or `not_leading`.
    pub fn wrote(&self, verb: &'static str, resource: &'static str, outcome: &'static str) {
        self.writes.get_or_create(&Write { verb, resource, outcome }).inc();
    }

    /// A step of a rollout was carried out.
    pub fn step(&self, step: &'static str) {
        self.steps.get_or_create(&Step { step }).inc();
    }

    /// How many pools are in a phase.
    pub fn pools(&self, phase: &'static str, count: u64) {
        level(&self.pools.get_or_create(&Phase { phase }), count);
    }

    /// Whether this process leads.
    pub fn leading(&self, leads: bool) {
        level(&self.leading, leads.into());
    }

    /// An event was `written`, `dropped` or has `failed`.
    pub fn event(&self, outcome: &'static str) {
        self.events.get_or_create(&OutcomeLabel { outcome }).inc();
    }

    /// A scaler has `kept`, gone `out` or `in`, or `held`.
    pub fn scaled(&self, outcome: &'static str) {
        self.scalings.get_or_create(&OutcomeLabel { outcome }).inc();
    }
}
