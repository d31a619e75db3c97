//! The model that drafts, and where it runs.

use super::engine::{self, Size};
use super::findings::Findings;
use super::model::{self, Model};
use super::{Settings, engine::default_size};
use crate::api::{DraftFailure, Drafter, Placement, ServingPoolSpec, SpeculationMode};
use std::num::NonZeroU32;

/// A draft that is asked for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Draft {
    /// Which bytes.
    pub model: Model,
    /// Where it runs.
    pub placement: Placement,
    /// Draft pods; SeparatePod only.
    pub replicas: u32,
    /// Devices of its own; none on the CPU and with SameDevice.
    pub devices: Option<NonZeroU32>,
    /// CPU and memory.
    pub size: Size,
    /// Attribute that its devices share with the target's.
    pub link: Option<String>,
    /// Whether the pool is served without it where it cannot be placed.
    pub optional: bool,
}

/// Most draft pods.
const REPLICAS_MAX: u32 = 1_024;
/// Most devices of one draft.
const DEVICES_MAX: u32 = 64;

/// Reads the draft. A described draft with mode Off is checked and not asked for.
pub(super) fn read(spec: &ServingPoolSpec, settings: &Settings, findings: &mut Findings) -> Option<Draft> {
    let speculation = &spec.speculation;
    findings.number("spec.speculation.maxDraftTokens", speculation.max_draft_tokens, 1, 32);
    let off = speculation.mode == SpeculationMode::Off;
    if !off {
        findings.unsupported(format!(
            "speculation.mode {:?} with drafter {:?} (nothing is drafted)",
            speculation.mode, speculation.drafter
        ));
    }
    let Some(draft) = &speculation.draft else {
        if speculation.drafter == Drafter::Model {
            findings.refuse("spec.speculation.draft", "absent", "drafter Model needs the model that drafts");
        }
        return None;
    };
    let at = |name: &str| format!("spec.speculation.draft.{name}");
    if speculation.drafter != Drafter::Model {
        let value = format!("set, and drafter is {:?}", speculation.drafter);
        findings.refuse("spec.speculation.draft", value, "set drafter to Model, or remove draft");
    }
    if draft.interconnect.is_some() && draft.placement != Placement::OtherDevice {
        findings.refuse(&at("interconnect"), "set", "it ties two devices of one pod: set placement to OtherDevice, or remove it");
    }
    if draft.replicas.is_some() && draft.placement != Placement::SeparatePod {
        findings.refuse(&at("replicas"), "set", "it counts draft pods: set placement to SeparatePod, or remove it");
    }
    if draft.devices.is_some() && (draft.placement == Placement::SameDevice || spec.accelerator.is_none()) {
        let fix = "it counts devices of the kind that accelerator names, beside the target's: set accelerator and another placement, or remove it";
        findings.refuse(&at("devices"), "set", fix);
    }
    let own_devices = spec.accelerator.is_some() && draft.placement != Placement::SameDevice;
    let devices = draft.devices.map_or(1, |devices| findings.number(&at("devices"), devices, 1, DEVICES_MAX));
    let draft = Draft {
        model: model::read(&at("model"), &draft.model, settings, findings),
        placement: draft.placement,
        replicas: draft.replicas.map_or(1, |replicas| findings.number(&at("replicas"), replicas, 1, REPLICAS_MAX)),
        devices: NonZeroU32::new(devices).filter(|_| own_devices),
        size: engine::size(&at("resources"), &draft.resources, default_size(), findings),
        link: draft.interconnect.as_ref().map(|link| link.match_attribute.clone()),
        optional: draft.on_failure == DraftFailure::ServeWithoutDraft,
    };
    (!off).then_some(draft)
}
