//! Conditions: the closed vocabulary in which a pool says what is true of it.
//!
//! Owns types, reasons and their meaning. Refuses to know when one applies; `status` computes that.
//!
//! Invariants
//! 1. A reason belongs to the types that [`ConditionReason::types`] lists, and each has a sentence of documentation that says what to do.
//! 2. `lastTransitionTime` moves with `status` alone ([`Condition::merged`]).

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Longest message, in bytes.
pub const MESSAGE_BYTES_MAX: usize = 1024;

/// One thing that is true of a pool, in the form that Kubernetes tools know.
#[derive(KubeSchema, Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Condition {
    /// What it is about: Ready, Progressing, Degraded, ModelResolved, DraftCompatible, DraftPlaced, RoutersInSync, Reconciling or Stalled.
    #[serde(rename = "type")]
    #[schemars(length(min = 1, max = 64), regex(pattern = r"^[A-Za-z]+$"))]
    pub condition_type: String,
    /// True, False or Unknown.
    pub status: ConditionStatus,
    /// Generation of the spec that it was computed from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub observed_generation: Option<i64>,
    /// When its status last changed.
    pub last_transition_time: Time,
    /// Why, as one of the documented words.
    #[schemars(length(min = 1, max = 128), regex(pattern = r"^[A-Za-z][A-Za-z0-9]*$"))]
    pub reason: String,
    /// What happened, to which object, and what to do.
    #[schemars(length(max = 1024))]
    pub message: String,
}

/// Whether it is so.
#[derive(JsonSchema, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub enum ConditionStatus {
    /// It is.
    True,
    /// It is not.
    False,
    /// It cannot be told.
    Unknown,
}

/// What a condition is about.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum ConditionType {
    /// Requests are answered: at least one worker is routable.
    Ready,
    /// A rollout or a change of replicas is under way.
    Progressing,
    /// Something is less than was asked for, though requests may be answered.
    Degraded,
    /// Workers serve the bytes that were asked for.
    ModelResolved,
    /// The draft's tokeniser is the target's.
    DraftCompatible,
    /// The draft runs where it was asked to.
    DraftPlaced,
    /// Every Ready router knows every ready worker and the newest tenants and secrets.
    RoutersInSync,
    /// The operator is not done with the newest spec (kstatus).
    Reconciling,
    /// The operator cannot go on without a change by someone else (kstatus).
    Stalled,
}

macro_rules! reasons {
    ($($(#[doc = $doc:literal])+ $name:ident [$($kind:ident),+],)+) => {
        /// Why a condition has its status: a closed set of words.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
        pub enum ConditionReason {
            $($(#[doc = $doc])+ $name,)+
        }

        impl ConditionReason {
            /// Every reason.
            pub const ALL: &'static [Self] = &[$(Self::$name,)+];

            /// The word.
            pub fn as_str(self) -> &'static str {
                match self {
                    $(Self::$name => stringify!($name),)+
                }
            }

            /// What it means and what to do, for the documentation.
            pub fn doc(self) -> &'static str {
                match self {
                    $(Self::$name => concat!($($doc),+).trim_ascii(),)+
                }
            }

            /// The condition types that it may stand in.
            pub fn types(self) -> &'static [ConditionType] {
                match self {
                    $(Self::$name => &[$(ConditionType::$kind),+],)+
                }
            }
        }
    };
}

reasons! {
    /// As asked for; nothing to do.
    AsExpected [Degraded, Progressing, Reconciling, Stalled],
    /// All wished workers are routable.
    Serving [Ready],
    /// Requests are answered, by fewer workers than wished; see Progressing and Degraded.
    ServingWithFewer [Ready, Degraded],
    /// No worker is routable: requests are refused with 503; see the pods and `kubectl servingpool why`.
    NoRoutableWorkers [Ready],
    /// No router is Ready, so nobody can be asked; see the router Deployment.
    NoReadyRouters [Ready, RoutersInSync, DraftPlaced, ModelResolved],
    /// replicas is 0, as asked for; raise it to serve.
    ScaledToZero [Ready],
    /// The operator has not looked at the pool yet.
    Pending [Ready, Progressing, ModelResolved, DraftCompatible, DraftPlaced, RoutersInSync],
    /// The spec cannot be served as written; the message names field, value and what to write.
    InvalidSpec [Ready, Progressing, Degraded, Reconciling, Stalled],
    /// An object that the spec names does not exist or lacks a key; create it.
    MissingObject [Ready, Degraded, Stalled, ModelResolved],
    /// Kubernetes refuses an object of the pool (admission, quota, Pod Security); the message has its answer.
    Refused [Degraded, Progressing, Stalled],
    /// The operator lacks a right; the message names verb and resource to add to its role.
    Forbidden [Degraded, Stalled],
    /// The API server fails or does not answer; the operator tries again by itself.
    ApiUnavailable [Reconciling],
    /// Objects of the pool are being written.
    Applying [Reconciling],
    /// An object of the pool with another owner is in the way; rename or remove it.
    NameTaken [Degraded, Stalled],
    /// The pool is being deleted: streams end first.
    Deleting [Ready, Progressing, Reconciling],
    /// `paused` is set: what exists is repaired, nothing is rolled.
    Paused [Progressing],
    /// Workers are being replaced by newer ones.
    RollingOut [Progressing, Reconciling],
    /// Workers are being added or removed.
    Scaling [Progressing, Reconciling],
    /// The newest template runs everywhere.
    RolloutComplete [Progressing],
    /// Devices are missing for the next worker; the message has free, needed and who holds them.
    InsufficientAccelerators [Progressing, Degraded, DraftPlaced],
    /// The scheduler finds no node for a worker; the message has its answer.
    Unschedulable [Progressing, Degraded, DraftPlaced],
    /// A new worker is not routable yet; the message names it and what it waits for.
    WaitingForRoutable [Progressing, Reconciling],
    /// An old worker still has requests; it leaves when they end or at maxStreamDuration.
    WaitingForDrain [Progressing, Reconciling],
    /// Taking another worker away would leave fewer routable ones than rollout.maxUnavailable allows.
    BudgetExhausted [Progressing],
    /// Nothing moved for rollout.progressDeadline; fix the cause in the message, or revert the change.
    ProgressDeadlineExceeded [Progressing, Degraded, Stalled],
    /// Workers end again and again; see their logs.
    WorkersCrashing [Ready, Progressing, Degraded],
    /// An image cannot be pulled; correct its name or the pull secret.
    ImageUnavailable [Ready, Progressing, Degraded],
    /// The worker cannot do this yet; the message names the field. The pool is served without it.
    NotYetSupported [Degraded, DraftPlaced, DraftCompatible],
    /// An object was changed or deleted by someone else and has been put right; the message names it.
    DriftRepaired [Degraded],
    /// A HorizontalPodAutoscaler targets a pool whose scaling.owner is Operator; remove one of them.
    AutoscalerConflict [Degraded],
    /// The scaler has no trustworthy figures and holds the last number of workers.
    MissingMetrics [Degraded],
    /// The operator may not see nodes (namespaced installation), so rollouts never surge.
    DevicesUnknown [Progressing, Degraded],
    /// Workers serve the bytes that were asked for.
    Resolved [ModelResolved],
    /// Bytes are on their way; see status.model.fetchedPercent.
    Fetching [ModelResolved, Ready],
    /// No worker has reported a digest yet.
    Unreported [ModelResolved, DraftCompatible],
    /// Workers report another digest than model.digest; correct one of them.
    DigestMismatch [ModelResolved, Ready, DraftCompatible],
    /// The model cannot be read; the message has the worker's answer.
    ModelUnavailable [ModelResolved, Ready, DraftCompatible],
    /// No draft is asked for.
    NoDraft [DraftCompatible, DraftPlaced],
    /// Draft and target have one tokeniser.
    Compatible [DraftCompatible],
    /// Draft and target have different tokenisers; choose another draft.
    TokenizerDiffers [DraftCompatible, Degraded],
    /// The draft runs where it was asked to.
    Placed [DraftPlaced],
    /// No two free devices share the attribute of interconnect.matchAttribute; free some, or use another placement.
    NoLinkedDevices [DraftPlaced, Progressing, Degraded],
    /// The pool serves without its draft, as onFailure asks for.
    ServingWithoutDraft [DraftPlaced, Degraded],
    /// Every Ready router knows every ready worker and the newest tenants and secrets.
    InSync [RoutersInSync],
    /// A Ready router lags behind; the message names it and what it lacks.
    CatchingUp [RoutersInSync],
    /// A Ready router does not answer the operator; the message names it.
    RouterUnreachable [RoutersInSync, Degraded],
}

// === impl ConditionType ===

impl ConditionType {
    /// Every type, in the order of status.
    pub const ALL: [Self; 9] = [
        Self::Ready,
        Self::Progressing,
        Self::Degraded,
        Self::ModelResolved,
        Self::DraftCompatible,
        Self::DraftPlaced,
        Self::RoutersInSync,
        Self::Reconciling,
        Self::Stalled,
    ];

    /// The word.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ready => "Ready",
            Self::Progressing => "Progressing",
            Self::Degraded => "Degraded",
            Self::ModelResolved => "ModelResolved",
            Self::DraftCompatible => "DraftCompatible",
            Self::DraftPlaced => "DraftPlaced",
            Self::RoutersInSync => "RoutersInSync",
            Self::Reconciling => "Reconciling",
            Self::Stalled => "Stalled",
        }
    }
}

impl fmt::Display for ConditionType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Display for ConditionReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

// === impl Condition ===

impl Condition {
    /// A condition that became so at `now`; the message is cut to its limit.
    pub fn new(
        condition_type: ConditionType,
        status: ConditionStatus,
        reason: ConditionReason,
        message: impl Into<String>,
        generation: Option<i64>,
        now: Time,
    ) -> Self {
        debug_assert!(reason.types().contains(&condition_type), "{reason} is no reason of {condition_type}");
        let mut message: String = message.into();
        if message.len() > MESSAGE_BYTES_MAX {
            let cut = message.floor_char_boundary(MESSAGE_BYTES_MAX - '…'.len_utf8());
            message.truncate(cut);
            message.push('…');
        }
        Self {
            condition_type: condition_type.as_str().to_owned(),
            status,
            observed_generation: generation,
            last_transition_time: now,
            reason: reason.as_str().to_owned(),
            message,
        }
    }

    /// This condition with the transition time of the former one of its type, if the status is the same.
    #[must_use]
    pub fn merged(mut self, former: &[Self]) -> Self {
        let same = former.iter().find(|old| old.condition_type == self.condition_type && old.status == self.status);
        if let Some(old) = same {
            self.last_transition_time = old.last_transition_time.clone();
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_reason_is_one_word_with_a_sentence_that_ends_in_a_full_stop() {
        let mut seen = BTreeSet::new();
        for reason in ConditionReason::ALL {
            assert!(seen.insert(reason.as_str()));
            assert!(reason.as_str().bytes().all(|byte| byte.is_ascii_alphabetic()), "{reason}");
            assert!(reason.doc().ends_with('.') && reason.doc().len() > 10, "{reason}: {}", reason.doc());
            assert!(!reason.types().is_empty());
        }
        for kind in ConditionType::ALL {
            assert!(ConditionReason::ALL.iter().any(|reason| reason.types().contains(&kind)), "{kind}");
        }
    }

    #[test]
    fn the_transition_time_moves_with_the_status_alone() {
        let at = |second: i64| Time(k8s_openapi::jiff::Timestamp::from_second(second).unwrap());
        let ready = |status, reason, second| Condition::new(ConditionType::Ready, status, reason, "m", Some(1), at(second));
        let old = vec![ready(ConditionStatus::True, ConditionReason::Serving, 10)];
        let same = ready(ConditionStatus::True, ConditionReason::ServingWithFewer, 20).merged(&old);
        assert_eq!((same.last_transition_time, same.reason.as_str()), (at(10), "ServingWithFewer"));
        let other = ready(ConditionStatus::False, ConditionReason::NoRoutableWorkers, 20).merged(&old);
        assert_eq!(other.last_transition_time, at(20));
    }

    #[test]
    fn a_long_message_is_cut_between_characters() {
        let long = "ä".repeat(MESSAGE_BYTES_MAX);
        let now = Time(k8s_openapi::jiff::Timestamp::UNIX_EPOCH);
        let condition = Condition::new(ConditionType::Ready, ConditionStatus::True, ConditionReason::Serving, long, None, now);
        assert!(condition.message.len() <= MESSAGE_BYTES_MAX && condition.message.ends_with('…'));
    }
}
