//! Who may call, with which share.

use super::findings::Findings;
use crate::api::{QuotaSpec, SecretKeyRef, TenantSpec};
use std::collections::BTreeSet;

/// A tenant, as routers know it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Tenant {
    /// Its name: 1 to 63 letters, digits, `.`, `_` and `-`.
    pub name: String,
    /// Where its keys are.
    pub keys: SecretKeyRef,
    /// Share under load.
    pub weight: u32,
    /// Added to the priority of its requests.
    pub priority: i32,
    /// Highest priority of a request.
    pub priority_max: u32,
    /// Raised to make its cached state unreachable.
    pub cache_epoch: u64,
}

/// Longest tenant name, in bytes: it is a metric label.
const NAME_BYTES_MAX: usize = 63;

/// Reads all tenants.
pub(super) fn read(specs: &[TenantSpec], findings: &mut Findings) -> Vec<Tenant> {
    let mut seen = BTreeSet::new();
    let mut unsupported = BTreeSet::new();
    let tenants = specs.iter().map(|spec| {
        let field = |name: &str| format!("spec.tenants[{}].{name}", spec.name);
        if !is_name(&spec.name) || !seen.insert(&spec.name) {
            let fix = "give each tenant a name of its own, 1 to 63 letters, digits, `.`, `_` and `-`";
            findings.refuse("spec.tenants[].name", &spec.name, fix);
        }
        if !(-100..=100).contains(&spec.priority) || spec.priority > spec.priority_max {
            findings.refuse(&field("priority"), spec.priority, "write a number from -100 to 100 that is not above priorityMax");
        }
        let [floor, ceiling] = [("cacheFloor", &spec.cache_floor), ("cacheCeiling", &spec.cache_ceiling)]
            .map(|(name, share)| share.as_ref().map(|share| findings.percent(&field(name), share)));
        if floor.zip(ceiling).is_some_and(|(floor, ceiling)| floor > ceiling) {
            let floor = spec.cache_floor.as_ref().map_or("", |share| share.0.as_str());
            findings.refuse(&field("cacheFloor"), floor, "it must not be above cacheCeiling");
        }
        let limits_nothing = |quota: &QuotaSpec| {
            quota.requests_per_minute.is_none() && quota.tokens_per_minute.is_none() && quota.max_running.is_none()
        };
        if spec.quota.as_ref().is_some_and(limits_nothing) {
            let fix = "set requestsPerMinute, tokensPerMinute or maxRunning, or remove quota";
            findings.refuse(&field("quota"), "empty", fix);
        }
        for (name, set) in [("quota", spec.quota.is_some()), ("cacheFloor", floor.is_some()), ("cacheCeiling", ceiling.is_some())]
        {
            if set {
                unsupported.insert(name);
            }
        }
        Tenant {
            name: spec.name.clone(),
            keys: spec.key_secret_ref.clone(),
            weight: findings.number(&field("weight"), spec.weight, 1, 1_000),
            priority: spec.priority,
            priority_max: findings.number(&field("priorityMax"), spec.priority_max, 0, 100),
            cache_epoch: u64::try_from(spec.cache_epoch).unwrap_or_else(|_negative| {
                findings.refuse(&field("cacheEpoch"), spec.cache_epoch, "write a number that is not negative");
                0
            }),
        }
    });
    let tenants = tenants.collect();
    for name in unsupported {
        findings.unsupported(format!("tenants[].{name} (not enforced)"));
    }
    tenants
}

fn is_name(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    (1..=NAME_BYTES_MAX).contains(&name.len()) && name.bytes().all(plain)
}
