//! Load reports.

use super::words::{tier_from_wire, tier_to_wire};
use super::{Malformed, bytes_from_wire, in_range};
use crate::worker as wire;
use kvasir_core::{CostPoint, Error, Incarnation, TierLoad, WorkerLoad};
use std::time::Duration;

/// Largest rate or time that a report may hold; anything above is a defect of the sender.
const FIGURE_MAX: f32 = 1e12;

/// Writes a report that was measured `age` ago.
pub fn load_to_wire(load: &WorkerLoad, age: Duration) -> wire::LoadResponse {
    wire::LoadResponse {
        incarnation: load.incarnation.0.to_vec(),
        seq: load.seq,
        age_us: u64::try_from(age.as_micros()).unwrap_or(u64::MAX),
        running: load.running,
        waiting: load.waiting,
        tiers: load.tiers.iter().map(tier_load_to_wire).collect(),
        queued_prefill_tokens: load.queued_prefill_tokens,
        prefill_tokens_per_second: load.prefill_tokens_per_second,
        decode_tokens_per_second: load.decode_tokens_per_second,
        cost: load.cost.iter().map(|point| wire::CostPoint { rows: point.rows, seconds: point.seconds }).collect(),
        acceptance: load
            .acceptance
            .iter()
            .map(|(drafter, share)| wire::DrafterAcceptance { drafter: drafter.clone(), share: *share })
            .collect(),
        draining: load.draining,
    }
}

/// Reads a report and its age when it was sent.
pub fn load_from_wire(load: wire::LoadResponse) -> Result<(WorkerLoad, Duration), Error> {
    let age = Duration::from_micros(load.age_us);
    read(load).map(|load| (load, age)).map_err(Malformed::into_internal)
}

fn read(load: wire::LoadResponse) -> Result<WorkerLoad, Malformed> {
    Ok(WorkerLoad {
        incarnation: Incarnation(bytes_from_wire("incarnation", &load.incarnation)?),
        seq: load.seq,
        running: load.running,
        waiting: load.waiting,
        tiers: load.tiers.iter().map(|tier| tier_load_from_wire("tiers", tier)).collect::<Result<_, _>>()?,
        queued_prefill_tokens: load.queued_prefill_tokens,
        prefill_tokens_per_second: in_range("prefill_tokens_per_second", load.prefill_tokens_per_second, 0.0..=FIGURE_MAX)?,
        decode_tokens_per_second: in_range("decode_tokens_per_second", load.decode_tokens_per_second, 0.0..=FIGURE_MAX)?,
        cost: load
            .cost
            .iter()
            .map(|point| Ok(CostPoint { rows: point.rows, seconds: in_range("cost.seconds", point.seconds, 0.0..=FIGURE_MAX)? }))
            .collect::<Result<_, Malformed>>()?,
        acceptance: load
            .acceptance
            .into_iter()
            .map(|entry| Ok((entry.drafter, in_range("acceptance.share", entry.share, 0.0..=1.0)?)))
            .collect::<Result<_, Malformed>>()?,
        draining: load.draining,
    })
}

/// Writes the blocks of one tier.
pub fn tier_load_to_wire(tier: &TierLoad) -> wire::TierLoad {
    wire::TierLoad { tier: tier_to_wire(tier.tier) as i32, free: tier.free, cached: tier.cached, held: tier.held }
}

/// Reads the blocks of one tier.
pub fn tier_load_from_wire(field: &str, tier: &wire::TierLoad) -> Result<TierLoad, Malformed> {
    Ok(TierLoad {
        tier: tier_from_wire(&format!("{field}.tier"), tier.tier)?,
        free: tier.free,
        cached: tier.cached,
        held: tier.held,
    })
}
