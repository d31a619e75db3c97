//! What a worker says of itself. A receiver recomputes both identities from their components and refuses a worker that contradicts itself.

use super::request::{adapter_from_wire, adapter_to_wire};
use super::words::{contract_from_wire, contract_to_wire, tier_from_wire, tier_to_wire};
use super::{Malformed, bytes_from_wire, digest_from_wire, required};
use crate::describe::{
    ArtifactKind, ArtifactRef, BuildInfo, Description, DrafterInfo, DrafterKind, DrafterPlacement, DrafterState,
    ModelDescription, Phase, Role, TierCapacity,
};
use crate::worker as wire;
use kvasir_core::{Digest, Error, IdentityParts, Incarnation, ModelIdentity, NumericsMode, NumericsParts, WorkerUid};

/// Writes a description.
pub fn description_to_wire(description: &Description) -> wire::DescribeResponse {
    wire::DescribeResponse {
        worker_uid: description.uid.0.to_string(),
        incarnation: description.incarnation.0.to_vec(),
        role: match description.role {
            Role::Target => wire::Role::Target,
            Role::Draft => wire::Role::Draft,
        } as i32,
        models: description.models.iter().map(model_to_wire).collect(),
        block_size: description.block_size,
        tiers: description
            .tiers
            .iter()
            .map(|tier| wire::TierCapacity {
                tier: tier_to_wire(tier.tier) as i32,
                blocks: tier.blocks,
                block_bytes: tier.block_bytes,
            })
            .collect(),
        drafters: description.drafters.iter().map(drafter_to_wire).collect(),
        contracts: description.contracts.iter().map(|contract| contract_to_wire(*contract) as i32).collect(),
        phases: description.phases.iter().map(|phase| phase_to_wire(*phase) as i32).collect(),
        build: Some(wire::Build {
            version: description.build.version.clone(),
            commit: description.build.commit.clone(),
            backend: description.build.backend.clone(),
            device: description.build.device.clone(),
            driver: description.build.driver.clone(),
        }),
        request_bytes_max: description.request_bytes_max,
    }
}

/// Reads a description.
pub fn description_from_wire(response: wire::DescribeResponse) -> Result<Description, Error> {
    read(response).map_err(Malformed::into_internal)
}

fn read(response: wire::DescribeResponse) -> Result<Description, Malformed> {
    if response.worker_uid.is_empty() {
        return Err(Malformed::missing("worker_uid"));
    }
    if response.models.is_empty() {
        return Err(Malformed::new("models", "must name at least one model"));
    }
    let block_size = at_least_one("block_size", response.block_size)?;
    let build = required("build", response.build)?;
    Ok(Description {
        uid: WorkerUid(response.worker_uid.into()),
        incarnation: Incarnation(bytes_from_wire("incarnation", &response.incarnation)?),
        role: match wire::Role::try_from(response.role) {
            Ok(wire::Role::Target) => Role::Target,
            Ok(wire::Role::Draft) => Role::Draft,
            _ => return Err(unknown("role", response.role)),
        },
        models: response.models.into_iter().map(|model| model_from_wire(model, block_size)).collect::<Result<_, _>>()?,
        block_size,
        tiers: response
            .tiers
            .iter()
            .map(|tier| {
                let word = tier_from_wire("tiers.tier", tier.tier)?;
                Ok(TierCapacity { tier: word, blocks: tier.blocks, block_bytes: tier.block_bytes })
            })
            .collect::<Result<_, Malformed>>()?,
        drafters: response.drafters.into_iter().map(drafter_from_wire).collect::<Result<_, _>>()?,
        contracts: response.contracts.iter().map(|word| contract_from_wire("contracts", *word)).collect::<Result<_, _>>()?,
        phases: response.phases.iter().map(|word| phase_from_wire(*word)).collect::<Result<_, _>>()?,
        build: BuildInfo {
            version: build.version,
            commit: build.commit,
            backend: build.backend,
            device: build.device,
            driver: build.driver,
        },
        request_bytes_max: response.request_bytes_max,
    })
}

fn unknown(field: &str, value: i32) -> Malformed {
    Malformed::new(field, format!("has the unknown value {value}"))
}

fn at_least_one(field: &str, value: u32) -> Result<u32, Malformed> {
    if value == 0 { Err(Malformed::new(field, "must be at least 1")) } else { Ok(value) }
}

fn phase_to_wire(phase: Phase) -> wire::Phase {
    match phase {
        Phase::Unified => wire::Phase::Unified,
        Phase::Prefill => wire::Phase::Prefill,
        Phase::Decode => wire::Phase::Decode,
    }
}

fn phase_from_wire(value: i32) -> Result<Phase, Malformed> {
    match wire::Phase::try_from(value) {
        Ok(wire::Phase::Unified) => Ok(Phase::Unified),
        Ok(wire::Phase::Prefill) => Ok(Phase::Prefill),
        Ok(wire::Phase::Decode) => Ok(Phase::Decode),
        _ => Err(unknown("phases", value)),
    }
}

fn model_to_wire(model: &ModelDescription) -> wire::ServedModel {
    wire::ServedModel {
        name: model.name.clone(),
        identity: model.identity().0.as_bytes().to_vec(),
        components: Some(wire::IdentityComponents {
            weights_digest: model.parts.weights.as_bytes().to_vec(),
            architecture: model.parts.architecture.clone(),
            tokenizer_digest: model.parts.tokenizer.as_bytes().to_vec(),
            chat_template_digest: model.parts.chat_template.as_bytes().to_vec(),
            adapter: model.parts.adapter.as_ref().map(adapter_to_wire),
            numerics: Some(numerics_to_wire(&model.numerics)),
        }),
        context_tokens: model.context,
        vocab: model.vocab,
        capacity_tokens: model.capacity,
        created_unix_s: model.created,
        artifacts: model
            .artifacts
            .iter()
            .map(|artifact| wire::Artifact {
                kind: artifact_kind_to_wire(artifact.kind) as i32,
                digest: artifact.digest.as_bytes().to_vec(),
                size_bytes: artifact.size_bytes,
            })
            .collect(),
    }
}

fn model_from_wire(model: wire::ServedModel, block_size: u32) -> Result<ModelDescription, Malformed> {
    if model.name.is_empty() {
        return Err(Malformed::missing("models.name"));
    }
    let components = required("models.components", model.components)?;
    let numerics = numerics_from_wire(required("models.components.numerics", components.numerics)?)?;
    if numerics.block_size != block_size {
        let problem = format!("is {} but the worker's blocks hold {block_size} tokens", numerics.block_size);
        return Err(Malformed::new("models.components.numerics.block_size", problem));
    }
    let parts = IdentityParts {
        weights: digest_from_wire("models.components.weights_digest", &components.weights_digest)?,
        architecture: components.architecture,
        tokenizer: digest_from_wire("models.components.tokenizer_digest", &components.tokenizer_digest)?,
        chat_template: digest_from_wire("models.components.chat_template_digest", &components.chat_template_digest)?,
        adapter: components
            .adapter
            .as_ref()
            .map(|adapter| adapter_from_wire("models.components.adapter", adapter))
            .transpose()?,
        numerics: numerics.id(),
    };
    let identity = ModelIdentity(digest_from_wire("models.identity", &model.identity)?);
    if parts.id() != identity {
        return Err(Malformed::new("models.identity", "is not the identity of the components"));
    }
    Ok(ModelDescription {
        name: model.name,
        parts,
        numerics,
        context: at_least_one("models.context_tokens", model.context_tokens)?,
        vocab: at_least_one("models.vocab", model.vocab)?,
        capacity: model.capacity_tokens,
        created: model.created_unix_s,
        artifacts: model
            .artifacts
            .iter()
            .map(|artifact| {
                Ok(ArtifactRef {
                    kind: artifact_kind_from_wire("models.artifacts.kind", artifact.kind)?,
                    digest: digest_from_wire("models.artifacts.digest", &artifact.digest)?,
                    size_bytes: artifact.size_bytes,
                })
            })
            .collect::<Result<_, Malformed>>()?,
    })
}

fn numerics_to_wire(numerics: &NumericsParts) -> wire::Numerics {
    let (mode, compute_capability, kernels) = match &numerics.mode {
        NumericsMode::Cpu => (wire::NumericsMode::Cpu, 0, None),
        NumericsMode::Fake => (wire::NumericsMode::Fake, 0, None),
        NumericsMode::CudaInvariant { compute_capability, kernels } => {
            (wire::NumericsMode::CudaInvariant, *compute_capability, Some(kernels))
        }
        NumericsMode::CudaFast { compute_capability, kernels } => {
            (wire::NumericsMode::CudaFast, *compute_capability, Some(kernels))
        }
    };
    wire::Numerics {
        id: numerics.id().0.as_bytes().to_vec(),
        mode: mode as i32,
        revision: numerics.revision,
        compute_capability,
        kernel_digest: kernels.map(|digest: &Digest| digest.as_bytes().to_vec()).unwrap_or_default(),
        kv_dtype: numerics.kv_dtype.clone(),
        kv_layout: numerics.kv_layout.clone(),
        parallel_degree: numerics.parallel_degree,
        block_size: numerics.block_size,
    }
}

fn numerics_from_wire(numerics: wire::Numerics) -> Result<NumericsParts, Malformed> {
    const KERNELS: &str = "models.components.numerics.kernel_digest";
    let compute_capability = numerics.compute_capability;
    let mode = match wire::NumericsMode::try_from(numerics.mode) {
        Ok(wire::NumericsMode::Cpu) => NumericsMode::Cpu,
        Ok(wire::NumericsMode::Fake) => NumericsMode::Fake,
        Ok(wire::NumericsMode::CudaInvariant) => {
            NumericsMode::CudaInvariant { compute_capability, kernels: digest_from_wire(KERNELS, &numerics.kernel_digest)? }
        }
        Ok(wire::NumericsMode::CudaFast) => {
            NumericsMode::CudaFast { compute_capability, kernels: digest_from_wire(KERNELS, &numerics.kernel_digest)? }
        }
        _ => return Err(unknown("models.components.numerics.mode", numerics.mode)),
    };
    let id = digest_from_wire("models.components.numerics.id", &numerics.id)?;
    let parts = NumericsParts {
        mode,
        revision: numerics.revision,
        kv_dtype: numerics.kv_dtype,
        kv_layout: numerics.kv_layout,
        parallel_degree: numerics.parallel_degree,
        block_size: numerics.block_size,
    };
    if parts.id().0 != id {
        return Err(Malformed::new("models.components.numerics.id", "is not the id of the fields beside it"));
    }
    Ok(parts)
}

/// Kind of an artifact.
pub fn artifact_kind_to_wire(kind: ArtifactKind) -> wire::ArtifactKind {
    match kind {
        ArtifactKind::Tokenizer => wire::ArtifactKind::Tokenizer,
        ArtifactKind::ChatTemplate => wire::ArtifactKind::ChatTemplate,
        ArtifactKind::GenerationConfig => wire::ArtifactKind::GenerationConfig,
        ArtifactKind::Text => wire::ArtifactKind::Text,
    }
}

fn artifact_kind_from_wire(field: &str, value: i32) -> Result<ArtifactKind, Malformed> {
    match wire::ArtifactKind::try_from(value) {
        Ok(wire::ArtifactKind::Tokenizer) => Ok(ArtifactKind::Tokenizer),
        Ok(wire::ArtifactKind::ChatTemplate) => Ok(ArtifactKind::ChatTemplate),
        Ok(wire::ArtifactKind::GenerationConfig) => Ok(ArtifactKind::GenerationConfig),
        Ok(wire::ArtifactKind::Text) => Ok(ArtifactKind::Text),
        _ => Err(unknown(field, value)),
    }
}

fn drafter_to_wire(drafter: &DrafterInfo) -> wire::Drafter {
    wire::Drafter {
        name: drafter.name.clone(),
        kind: match drafter.kind {
            DrafterKind::Ngram => wire::DrafterKind::Ngram,
            DrafterKind::Model => wire::DrafterKind::Model,
            DrafterKind::Mtp => wire::DrafterKind::Mtp,
        } as i32,
        placement: match drafter.placement {
            DrafterPlacement::SameDevice => wire::DrafterPlacement::SameDevice,
            DrafterPlacement::OtherDevice => wire::DrafterPlacement::OtherDevice,
            DrafterPlacement::SeparatePod => wire::DrafterPlacement::SeparatePod,
        } as i32,
        state: match drafter.state {
            DrafterState::Starting => wire::DrafterState::Starting,
            DrafterState::Ready => wire::DrafterState::Ready,
            DrafterState::Failed => wire::DrafterState::Failed,
        } as i32,
        identity: drafter.identity.map(|identity| identity.0.as_bytes().to_vec()).unwrap_or_default(),
        max_draft_tokens: drafter.max_draft_tokens,
        message: drafter.message.clone(),
    }
}

fn drafter_from_wire(drafter: wire::Drafter) -> Result<DrafterInfo, Malformed> {
    Ok(DrafterInfo {
        name: drafter.name,
        kind: match wire::DrafterKind::try_from(drafter.kind) {
            Ok(wire::DrafterKind::Ngram) => DrafterKind::Ngram,
            Ok(wire::DrafterKind::Model) => DrafterKind::Model,
            Ok(wire::DrafterKind::Mtp) => DrafterKind::Mtp,
            _ => return Err(unknown("drafters.kind", drafter.kind)),
        },
        placement: match wire::DrafterPlacement::try_from(drafter.placement) {
            Ok(wire::DrafterPlacement::SameDevice) => DrafterPlacement::SameDevice,
            Ok(wire::DrafterPlacement::OtherDevice) => DrafterPlacement::OtherDevice,
            Ok(wire::DrafterPlacement::SeparatePod) => DrafterPlacement::SeparatePod,
            _ => return Err(unknown("drafters.placement", drafter.placement)),
        },
        state: match wire::DrafterState::try_from(drafter.state) {
            Ok(wire::DrafterState::Starting) => DrafterState::Starting,
            Ok(wire::DrafterState::Ready) => DrafterState::Ready,
            Ok(wire::DrafterState::Failed) => DrafterState::Failed,
            _ => return Err(unknown("drafters.state", drafter.state)),
        },
        identity: match drafter.identity.as_slice() {
            [] => None,
            bytes => Some(ModelIdentity(digest_from_wire("drafters.identity", bytes)?)),
        },
        max_draft_tokens: drafter.max_draft_tokens,
        message: drafter.message,
    })
}
