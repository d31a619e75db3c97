//! Enumerations and small shared messages. Zero is "unspecified" on the wire and is refused wherever a word must be stated.

use super::Malformed;
use crate::pb;
use crate::worker as wire;
use kvasir_core::{
    CacheMode, Contract, FinishReason, MissReason, RemovalCause, SpeculationMode, State, StateTimes, Tier, TierHit, Usage,
};
use std::time::Duration;

fn unknown(field: &str, value: i32) -> Malformed {
    let what = if value == 0 { "must be stated".to_owned() } else { format!("has the unknown value {value}") };
    Malformed::new(field, what)
}

/// Declares both directions of one enumeration.
macro_rules! words {
    ($(#[$doc:meta])* $to:ident, $from:ident, $core:ty, $wire:ty, { $($core_word:pat => $wire_word:ident => $value:expr),+ $(,)? }) => {
        $(#[$doc])*
        pub fn $to(value: $core) -> $wire {
            match value { $($core_word => <$wire>::$wire_word),+ }
        }

        /// Reads the word back; unspecified and unknown values are refused.
        #[allow(dead_code, reason = "a word that only answers carry is read by its message")]
        pub fn $from(field: &str, value: i32) -> Result<$core, Malformed> {
            match <$wire>::try_from(value) {
                $(Ok(<$wire>::$wire_word) => Ok($value),)+
                _ => Err(unknown(field, value)),
            }
        }
    };
}

words!(
    /// Acceptance contract.
    contract_to_wire, contract_from_wire, Contract, pb::Contract, {
    Contract::Coupled => Coupled => Contract::Coupled,
    Contract::Rejection => Rejection => Contract::Rejection,
});
words!(
    /// Prefix cache mode.
    cache_mode_to_wire, cache_mode_from_wire, CacheMode, pb::CacheMode, {
    CacheMode::Auto => Auto => CacheMode::Auto,
    CacheMode::On => On => CacheMode::On,
    CacheMode::Off => Off => CacheMode::Off,
});
words!(
    /// Speculation mode.
    speculation_mode_to_wire, speculation_mode_from_wire, SpeculationMode, pb::SpeculationMode, {
    SpeculationMode::Auto => Auto => SpeculationMode::Auto,
    SpeculationMode::Fixed => Fixed => SpeculationMode::Fixed,
    SpeculationMode::Off => Off => SpeculationMode::Off,
});
words!(
    /// Memory tier.
    tier_to_wire, tier_from_wire, Tier, pb::Tier, {
    Tier::Device => Device => Tier::Device,
    Tier::Host => Host => Tier::Host,
    Tier::Disk => Disk => Tier::Disk,
});
words!(
    /// Why a choice ended.
    finish_reason_to_wire, finish_reason_from_wire, FinishReason, pb::FinishReason, {
    FinishReason::Stop => Stop => FinishReason::Stop,
    FinishReason::Length => Length => FinishReason::Length,
});
words!(
    /// Why blocks left.
    removal_cause_to_wire, removal_cause_from_wire, RemovalCause, wire::RemovalCause, {
    RemovalCause::Capacity => Capacity => RemovalCause::Capacity,
    RemovalCause::Expired => Expired => RemovalCause::Expired,
    RemovalCause::Flushed => Flushed => RemovalCause::Flushed,
    RemovalCause::Rotated => Rotated => RemovalCause::Rotated,
    RemovalCause::Corrupt => Corrupt => RemovalCause::Corrupt,
});
words!(
    /// Exclusive state of a request's time.
    state_to_wire, state_from_wire, State, pb::State, {
    State::AdmitWait => AdmitWait => State::AdmitWait,
    State::Prepare => Prepare => State::Prepare,
    State::Route => Route => State::Route,
    State::Transfer => Transfer => State::Transfer,
    State::EngineWait => EngineWait => State::EngineWait,
    State::Lookup => Lookup => State::Lookup,
    State::RestoreWait => RestoreWait => State::RestoreWait,
    State::Prefill => Prefill => State::Prefill,
    State::FirstOutput => FirstOutput => State::FirstOutput,
    State::Draft => Draft => State::Draft,
    State::Verify => Verify => State::Verify,
    State::DecodePlain => DecodePlain => State::DecodePlain,
    State::Correction => Correction => State::Correction,
    State::Scheduler => Scheduler => State::Scheduler,
    State::Preempted => Preempted => State::Preempted,
    State::EmitWait => EmitWait => State::EmitWait,
});

/// Why a prompt was not reused further; `None` is unspecified.
pub fn miss_reason_to_wire(reason: Option<MissReason>) -> pb::MissReason {
    match reason {
        None => pb::MissReason::Unspecified,
        Some(MissReason::Cold) => pb::MissReason::Cold,
        Some(MissReason::Evicted) => pb::MissReason::Evicted,
        Some(MissReason::Diverged) => pb::MissReason::Diverged,
        Some(MissReason::PartialBlock) => pb::MissReason::PartialBlock,
        Some(MissReason::Pending) => pb::MissReason::Pending,
        Some(MissReason::Bypass) => pb::MissReason::Bypass,
        Some(MissReason::Disabled) => pb::MissReason::Disabled,
    }
}

pub(super) fn miss_reason_from_wire(field: &str, value: i32) -> Result<Option<MissReason>, Malformed> {
    Ok(match pb::MissReason::try_from(value) {
        Ok(pb::MissReason::Unspecified) => None,
        Ok(pb::MissReason::Cold) => Some(MissReason::Cold),
        Ok(pb::MissReason::Evicted) => Some(MissReason::Evicted),
        Ok(pb::MissReason::Diverged) => Some(MissReason::Diverged),
        Ok(pb::MissReason::PartialBlock) => Some(MissReason::PartialBlock),
        Ok(pb::MissReason::Pending) => Some(MissReason::Pending),
        Ok(pb::MissReason::Bypass) => Some(MissReason::Bypass),
        Ok(pb::MissReason::Disabled) => Some(MissReason::Disabled),
        Err(_) => return Err(unknown(field, value)),
    })
}

/// Token totals.
pub fn usage_to_wire(usage: &Usage) -> pb::Usage {
    pb::Usage {
        prompt_tokens: usage.prompt_tokens,
        cached_tokens: usage.cached_tokens,
        completion_tokens: usage.completion_tokens,
        recomputed_tokens: usage.recomputed_tokens,
    }
}

pub(super) fn usage_from_wire(usage: pb::Usage) -> Usage {
    Usage {
        prompt_tokens: usage.prompt_tokens,
        cached_tokens: usage.cached_tokens,
        completion_tokens: usage.completion_tokens,
        recomputed_tokens: usage.recomputed_tokens,
    }
}

/// Each state that time was spent in. A time above 584 years is cut.
pub fn states_to_wire(states: &StateTimes) -> Vec<pb::StateTime> {
    states
        .iter()
        .map(|(state, time)| pb::StateTime {
            state: state_to_wire(state) as i32,
            time_ns: u64::try_from(time.as_nanos()).unwrap_or(u64::MAX),
        })
        .collect()
}

pub(super) fn states_from_wire(field: &str, wire: &[pb::StateTime]) -> Result<StateTimes, Malformed> {
    let mut states = StateTimes::default();
    let mut seen = [false; State::ALL.len()];
    for entry in wire {
        let state = state_from_wire(&format!("{field}.state"), entry.state)?;
        if std::mem::replace(&mut seen[state as usize], true) {
            return Err(Malformed::new(field, format!("names {} twice", state.name())));
        }
        states.add(state, Duration::from_nanos(entry.time_ns));
    }
    Ok(states)
}

pub(super) fn hits_to_wire(hits: &[TierHit]) -> Vec<pb::TierHit> {
    hits.iter().map(|hit| pb::TierHit { tier: tier_to_wire(hit.tier) as i32, tokens: hit.tokens }).collect()
}

pub(super) fn hits_from_wire(field: &str, wire: &[pb::TierHit]) -> Result<Vec<TierHit>, Malformed> {
    let tier_field = format!("{field}.tier");
    wire.iter().map(|hit| Ok(TierHit { tier: tier_from_wire(&tier_field, hit.tier)?, tokens: hit.tokens })).collect()
}
