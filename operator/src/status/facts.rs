//! What a status is computed from: plain data that the shell has gathered.

use crate::api::{ConditionReason, ScalingStatus};
use crate::rollout::{Goal, Plan, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use std::time::Duration;

/// Everything that status depends on but its former self.
#[derive(Clone, Debug)]
pub struct Observed<'a> {
    /// Generation of the spec.
    pub generation: Option<i64>,
    /// Whether the pool is being deleted.
    pub deleting: bool,
    /// What the plan was made for.
    pub goal: &'a Goal,
    /// The plan that was carried out; absent when the pool could not be looked at.
    pub plan: Option<&'a Plan>,
    /// The pods that the plan saw.
    pub pods: &'a [Pod],
    /// Pods whose containers are ready and that are not leaving.
    pub ready: usize,
    /// Label selector of the worker pods.
    pub selector: &'a str,
    /// Hash of the newest template.
    pub template_hash: String,
    /// Attribute that the devices of a worker and of its draft have to share.
    pub link: Option<&'a str>,
    /// What a change in place keeps, for people.
    pub survives: Option<&'a str>,
    /// Time without a move after which a rollout counts as failed.
    pub progress_deadline: Duration,
    /// The model.
    pub model: ModelFacts,
    /// The draft; absent when none is asked for.
    pub draft: Option<DraftFacts>,
    /// The routers.
    pub routers: RouterFacts,
    /// What the pool's own scaler says.
    pub scaling: Option<ScalingStatus>,
    /// What went wrong, worst first.
    pub faults: Vec<Fault>,
    /// What is less than was asked for without anything having gone wrong, most telling first.
    pub notes: Vec<Note>,
    /// Now.
    pub now: Time,
}

/// The model, as asked for and as reported.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ModelFacts {
    /// Name that clients use.
    pub name: String,
    /// Revision that was asked for.
    pub revision: Option<String>,
    /// Digest that was asked for.
    pub expected: Option<String>,
    /// Digest that workers report.
    pub digest: Option<String>,
    /// Why a worker cannot read it.
    pub trouble: Option<String>,
    /// Progress of the slowest fetch, 0 to 100; absent when nothing is being fetched.
    pub fetched_percent: Option<u32>,
}

/// The draft, as reported.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DraftFacts {
    /// Digest that workers report.
    pub digest: Option<String>,
    /// Whether draft and target have one tokeniser, once it is known.
    pub same_tokenizer: Option<bool>,
    /// Whether it runs where it was asked to.
    pub placed: bool,
    /// Why it does not.
    pub misplaced: Option<(ConditionReason, String)>,
    /// Draft pods that stay.
    pub replicas: u32,
    /// Of these the ready ones.
    pub ready: u32,
}

/// The routers, as counted and asked.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RouterFacts {
    /// Wanted.
    pub desired: u32,
    /// Ready.
    pub ready: u32,
    /// What the Ready ones answered.
    pub sync: RouterSync,
}

/// Whether every Ready router knows what there is to know.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum RouterSync {
    /// No router is Ready.
    NoneReady,
    /// One cannot be asked.
    Unreachable(String),
    /// One lags behind; says which and what it lacks.
    CatchingUp(String),
    /// All do.
    InSync,
}

/// Something that went wrong.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Fault {
    /// Its word.
    pub reason: ConditionReason,
    /// What happened, to which object, and what to do.
    pub message: String,
}

/// Something that is less than was asked for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Note {
    /// Its word.
    pub reason: ConditionReason,
    /// Which field, and what happens instead.
    pub message: String,
}

// === impl Fault ===

impl Fault {
    /// A fault.
    pub fn new(reason: ConditionReason, message: impl Into<String>) -> Self {
        Self { reason, message: message.into() }
    }

    /// Whether it stays until a person changes something. The others go away by themselves.
    pub fn lasting(&self) -> bool {
        self.reason != ConditionReason::ApiUnavailable
    }
}
