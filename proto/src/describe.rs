//! What a worker says of itself, in the words of core. Made by a worker at start, read by routers; the wire form is `DescribeResponse`.

use kvasir_core::{Contract, Digest, IdentityParts, Incarnation, ModelIdentity, NumericsParts, Tier, WorkerUid};

/// A worker.
#[derive(Clone, PartialEq, Debug)]
pub struct Description {
    /// Stable name.
    pub uid: WorkerUid,
    /// Which life.
    pub incarnation: Incarnation,
    /// What it does.
    pub role: Role,
    /// Served models, at least one.
    pub models: Vec<ModelDescription>,
    /// Tokens per block, the same for every model.
    pub block_size: u32,
    /// Memory per tier.
    pub tiers: Vec<TierCapacity>,
    /// Drafters.
    pub drafters: Vec<DrafterInfo>,
    /// Contracts that can be asked for.
    pub contracts: Vec<Contract>,
    /// Phases that can be asked for.
    pub phases: Vec<Phase>,
    /// What was built and on what it runs.
    pub build: BuildInfo,
    /// Largest request message, in bytes.
    pub request_bytes_max: u64,
}

/// What a worker does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// Generates for clients.
    Target,
    /// Drafts for targets.
    Draft,
}

/// Which part of a request a worker does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    /// Prefill and decode.
    Unified,
    /// Prefill only.
    Prefill,
    /// Decode only.
    Decode,
}

/// One served model.
#[derive(Clone, PartialEq, Debug)]
pub struct ModelDescription {
    /// Name that clients use.
    pub name: String,
    /// What its identity is made of; `parts.numerics` is the id of `numerics`.
    pub parts: IdentityParts,
    /// Arithmetic and layout.
    pub numerics: NumericsParts,
    /// Longest prompt plus output, in tokens.
    pub context: u32,
    /// Entries of the logits.
    pub vocab: u32,
    /// Most tokens that one request can hold in the worker's pool.
    pub capacity: u32,
    /// Unix seconds since which the model is served.
    pub created: u64,
    /// What a router needs to prepare requests.
    pub artifacts: Vec<ArtifactRef>,
}

/// One content-addressed file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ArtifactRef {
    /// What it is.
    pub kind: ArtifactKind,
    /// The name to fetch it by.
    pub digest: Digest,
    /// Length in bytes.
    pub size_bytes: u64,
}

/// What an artifact is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ArtifactKind {
    /// The canonical `tokenizer.json`.
    Tokenizer,
    /// The chat template's source.
    ChatTemplate,
    /// Default sampling parameters and end tokens, JSON.
    GenerationConfig,
    /// All of the above in one file (`kvasir/artifacts/v1`): what routers fetch.
    Text,
}

/// Memory of one tier.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TierCapacity {
    /// Which tier.
    pub tier: Tier,
    /// Blocks.
    pub blocks: u32,
    /// Bytes per block.
    pub block_bytes: u64,
}

/// One drafter.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DrafterInfo {
    /// Name in metrics and replies.
    pub name: String,
    /// How it drafts.
    pub kind: DrafterKind,
    /// Where it computes.
    pub placement: DrafterPlacement,
    /// Whether it can draft now.
    pub state: DrafterState,
    /// Identity of a model drafter.
    pub identity: Option<ModelIdentity>,
    /// Most tokens per proposal.
    pub max_draft_tokens: u32,
    /// Why it is not ready; empty when it is.
    pub message: String,
}

/// How a drafter drafts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DrafterKind {
    /// Prompt lookup and a suffix index.
    Ngram,
    /// A smaller model.
    Model,
    /// Heads of the target model.
    Mtp,
}

/// Where a drafter computes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DrafterPlacement {
    /// The target's device.
    SameDevice,
    /// Another device of the same host.
    OtherDevice,
    /// Another pod.
    SeparatePod,
}

/// Whether a drafter can draft.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DrafterState {
    /// Loading or measuring.
    Starting,
    /// Drafts when asked.
    Ready,
    /// Failed; serving goes on without it.
    Failed,
}

/// What was built and on what it runs.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct BuildInfo {
    /// Version of the program.
    pub version: String,
    /// Commit that it was built from; empty if unknown.
    pub commit: String,
    /// `cpu`, `cuda` or `fake`.
    pub backend: String,
    /// Instruction set or compute capability.
    pub device: String,
    /// Driver version; empty on CPU.
    pub driver: String,
}

// === impl ModelDescription ===

impl ModelDescription {
    /// The identity that the parts make.
    pub fn identity(&self) -> ModelIdentity {
        self.parts.id()
    }

    /// One of its artifacts.
    pub fn artifact(&self, kind: ArtifactKind) -> Option<&ArtifactRef> {
        self.artifacts.iter().find(|artifact| artifact.kind == kind)
    }
}
