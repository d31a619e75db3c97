//! Devices of a worker pod: amounts of an extended resource, or a claim whose devices may be tied by an attribute.

use super::frame::Frame;
use crate::apply::content_hash;
use crate::design::Accelerator;
use crate::validate::{DeviceAsk, Devices, Draft, Pool, RESERVED_NAMES};
use k8s_openapi::api::core::v1::{PodResourceClaim, ResourceClaim};
use k8s_openapi::api::resource::v1::{
    DeviceClaim, DeviceConstraint, DeviceRequest, ExactDeviceRequest, ResourceClaimSpec, ResourceClaimTemplate,
    ResourceClaimTemplateSpec,
};
use std::num::NonZeroU32;

/// Name of a pod's claim.
const CLAIM: &str = "devices";
/// Requests of a claim.
const TARGET: &str = "target";
const DRAFT: &str = "draft";

/// Devices of one pod, as it asks for them.
#[derive(Default)]
pub(super) struct PodDevices {
    /// Extended resource and how many.
    pub(super) resource: Option<(String, u32)>,
    /// Claim of the pod, and the container's share of it, which is all.
    pub(super) claim: Option<(PodResourceClaim, ResourceClaim)>,
}

/// Whether the pool is served without its draft where no pair of devices is found.
pub(super) fn is_optional_pair(pool: &Pool) -> bool {
    let pair = matches!(&pool.devices, Devices::Resource { ask, .. } | Devices::Class { ask, .. } if ask.draft.is_some());
    pair && pool.draft.as_ref().is_some_and(|draft| draft.optional)
}

/// Attribute that devices of target and draft have to share.
pub(super) fn link(pool: &Pool) -> Option<String> {
    match &pool.devices {
        Devices::Class { ask, link, .. } if ask.draft.is_some() => link.clone(),
        Devices::Class { .. } | Devices::Resource { .. } | Devices::None => None,
    }
}

/// Claim templates of all pods of the pool.
pub(super) fn templates(frame: &Frame<'_>) -> Vec<ResourceClaimTemplate> {
    let pool = frame.pool;
    let mut specs: Vec<ResourceClaimSpec> = target_claim(pool, true).into_iter().collect();
    if is_optional_pair(pool) {
        specs.extend(target_claim(pool, false));
    }
    specs.extend(pool.draft.as_ref().filter(|_| pool.draft_pods()).and_then(|draft| draft_claim(pool, draft)));
    specs.into_iter().map(|spec| template(frame, spec)).collect()
}

/// What a worker pod asks for.
pub(super) fn of_target(frame: &Frame<'_>, with_draft: bool) -> PodDevices {
    match &frame.pool.devices {
        Devices::None => PodDevices::default(),
        Devices::Resource { name, ask } => PodDevices { resource: Some((name.clone(), count(*ask, with_draft))), claim: None },
        Devices::Class { .. } => of_claim(frame, target_claim(frame.pool, with_draft)),
    }
}

/// What a draft pod asks for.
pub(super) fn of_draft(frame: &Frame<'_>, draft: &Draft) -> PodDevices {
    match (&frame.pool.devices, draft.devices) {
        (Devices::Resource { name, .. }, Some(count)) => PodDevices { resource: Some((name.clone(), count.get())), claim: None },
        _ => of_claim(frame, draft_claim(frame.pool, draft)),
    }
}

/// How free devices for a pod are counted.
pub(super) fn accelerator(pool: &Pool, per_pod: u32) -> Accelerator {
    match &pool.devices {
        Devices::Class { name, .. } if per_pod > 0 => Accelerator::Class { name: name.clone(), count: per_pod },
        _ => Accelerator::InRequests,
    }
}

/// Devices per worker pod.
pub(super) fn per_target(pool: &Pool, with_draft: bool) -> u32 {
    match &pool.devices {
        Devices::None => 0,
        Devices::Resource { ask, .. } | Devices::Class { ask, .. } => count(*ask, with_draft),
    }
}

fn count(ask: DeviceAsk, with_draft: bool) -> u32 {
    if with_draft { ask.total() } else { ask.target.get() }
}

fn target_claim(pool: &Pool, with_draft: bool) -> Option<ResourceClaimSpec> {
    let Devices::Class { name, ask, link } = &pool.devices else { return None };
    let draft = ask.draft.filter(|_| with_draft);
    let requests = [Some(request(TARGET, name, ask.target)), draft.map(|draft| request(DRAFT, name, draft))];
    let constraint = link.as_ref().filter(|_| draft.is_some()).map(|attribute| DeviceConstraint {
        match_attribute: Some(attribute.clone()),
        requests: Some(vec![TARGET.to_owned(), DRAFT.to_owned()]),
        ..DeviceConstraint::default()
    });
    Some(claim(requests.into_iter().flatten().collect(), constraint))
}

fn draft_claim(pool: &Pool, draft: &Draft) -> Option<ResourceClaimSpec> {
    let Devices::Class { name, .. } = &pool.devices else { return None };
    Some(claim(vec![request(DRAFT, name, draft.devices?)], None))
}

fn request(name: &str, class: &str, count: NonZeroU32) -> DeviceRequest {
    DeviceRequest {
        name: name.to_owned(),
        exactly: Some(ExactDeviceRequest {
            device_class_name: class.to_owned(),
            allocation_mode: Some("ExactCount".to_owned()),
            count: Some(i64::from(count.get())),
            ..ExactDeviceRequest::default()
        }),
        ..DeviceRequest::default()
    }
}

fn claim(requests: Vec<DeviceRequest>, constraint: Option<DeviceConstraint>) -> ResourceClaimSpec {
    let constraints = constraint.map(|constraint| vec![constraint]);
    ResourceClaimSpec { devices: Some(DeviceClaim { requests: Some(requests), constraints, ..DeviceClaim::default() }) }
}

fn template(frame: &Frame<'_>, spec: ResourceClaimSpec) -> ResourceClaimTemplate {
    ResourceClaimTemplate {
        metadata: frame.metadata(name_of(frame, &spec), None),
        spec: ResourceClaimTemplateSpec { spec, ..ResourceClaimTemplateSpec::default() },
    }
}

fn name_of(frame: &Frame<'_>, spec: &ResourceClaimSpec) -> String {
    frame.names.devices(&content_hash(&serde_json::to_value(spec).unwrap_or_default()))
}

fn of_claim(frame: &Frame<'_>, spec: Option<ResourceClaimSpec>) -> PodDevices {
    let claim = spec.map(|spec| {
        let name = format!("{RESERVED_NAMES}{CLAIM}");
        let of_pod = PodResourceClaim {
            name: name.clone(),
            resource_claim_template_name: Some(name_of(frame, &spec)),
            ..PodResourceClaim::default()
        };
        (of_pod, ResourceClaim { name, request: None })
    });
    PodDevices { resource: None, claim }
}
