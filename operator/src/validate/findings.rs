//! Findings: everything that is wrong with a spec, collected while it is read, and the readers of values with units.
//!
//! A reader that finds a fault returns a value that is never used: [`Findings::finish`] hands out nothing once there is a fault.

use super::{Pool, unsupported_note};
use crate::api::{ConditionReason, CountOrPercent, CpuText, DurationText, PercentText, SizeText};
use crate::status::{Fault, Note};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use std::fmt::Display;
use std::time::Duration;

/// Longest value in a message, in characters.
const VALUE_CHARS_MAX: usize = 80;

/// What was found so far.
#[derive(Default)]
pub(super) struct Findings {
    faults: Vec<Fault>,
    unsupported: Vec<String>,
}

// === impl Findings ===

impl Findings {
    /// A field whose value cannot be served, and what to do.
    pub(super) fn refuse(&mut self, field: &str, value: impl Display, fix: impl Display) {
        let value: String = value.to_string().chars().take(VALUE_CHARS_MAX).collect();
        self.faults.push(Fault::new(ConditionReason::InvalidSpec, format!("{field} is {value}: {fix}")));
    }

    /// A field, with what happens instead, that workers or routers cannot honour yet.
    pub(super) fn unsupported(&mut self, field: impl Into<String>) {
        self.unsupported.push(field.into());
    }

    /// The pool with its notes, or all that is wrong.
    pub(super) fn finish(self, mut pool: Pool) -> Result<Pool, Vec<Fault>> {
        if !self.faults.is_empty() {
            return Err(self.faults);
        }
        let note: Option<Note> = (!self.unsupported.is_empty()).then(|| unsupported_note(&self.unsupported));
        pool.notes.extend(note);
        Ok(pool)
    }

    /// A number within its limits.
    pub(super) fn number(&mut self, field: &str, value: i32, min: u32, max: u32) -> u32 {
        u32::try_from(value).ok().filter(|it| (min..=max).contains(it)).unwrap_or_else(|| {
            self.refuse(field, value, format_args!("write a number from {min} to {max}"));
            min
        })
    }

    /// A duration.
    pub(super) fn duration(&mut self, field: &str, text: &DurationText) -> Duration {
        text.parse().unwrap_or_else(|error| {
            self.refuse(field, text, error);
            Duration::ZERO
        })
    }

    /// Bytes.
    pub(super) fn size(&mut self, field: &str, text: &SizeText) -> u64 {
        text.parse().unwrap_or_else(|error| {
            self.refuse(field, text, error);
            0
        })
    }

    /// Thousandths of a core.
    pub(super) fn cpu(&mut self, field: &str, text: &CpuText) -> u64 {
        text.parse_millis().unwrap_or_else(|error| {
            self.refuse(field, text, error);
            0
        })
    }

    /// A share from 0 to 1.
    pub(super) fn percent(&mut self, field: &str, text: &PercentText) -> f64 {
        text.parse().unwrap_or_else(|error| {
            self.refuse(field, text, error);
            0.0
        })
    }

    /// A number of pods or a percentage of them.
    pub(super) fn budget(&mut self, field: &str, budget: &CountOrPercent) -> IntOrString {
        if budget.of_rounded_up(1).is_none() {
            let value = match &budget.0 {
                IntOrString::Int(count) => count.to_string(),
                IntOrString::String(text) => text.clone(),
            };
            self.refuse(field, value, "write a number of workers from 0 to 10000, or a percentage such as 25%");
        }
        budget.0.clone()
    }

    /// A sum that still is an amount that Kubernetes can hold.
    pub(super) fn sum(&mut self, field: &str, parts: impl IntoIterator<Item = u64>) -> u64 {
        let sum = parts.into_iter().try_fold(0u64, u64::checked_add).filter(|sum| i64::try_from(*sum).is_ok());
        sum.unwrap_or_else(|| {
            self.refuse(field, "more than 8 EiB together with what is added to it", "ask for less");
            0
        })
    }
}
