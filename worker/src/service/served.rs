//! What a worker serves: its description, the files that routers fetch, and the catalog of its own door. Made once at start.

use crate::backend::BackendSpec;
use kvasir_core::{Contract, Digest, IdentityParts, Incarnation, ModelIdentity, Reason, Tier, WorkerUid};
use kvasir_door::{Catalog, ServedModel};
use kvasir_model::{Artifacts, FileError, ModelFile, Text, TextError};
use kvasir_proto::{ArtifactKind, ArtifactRef, BuildInfo, Description, ModelDescription, Phase, Role, TierCapacity};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// A worker's offer; cheap to clone.
#[derive(Clone)]
pub struct Served(Arc<Inner>);

struct Inner {
    description: Description,
    artifacts: Vec<ArtifactBlob>,
    catalog: Arc<Catalog>,
}

/// One file that can be fetched.
#[derive(Clone, Debug)]
pub struct ArtifactBlob {
    /// What it is, under which name, how long.
    pub reference: ArtifactRef,
    /// Its bytes.
    pub bytes: Arc<[u8]>,
}

/// What is known of a model before a backend computes it; shared by all workers of a process.
#[derive(Clone)]
pub struct ServedParts {
    /// Name that clients use.
    pub name: String,
    /// Digest of the weight files.
    pub weights: Digest,
    /// Canonical bytes of the architecture.
    pub architecture: Vec<u8>,
    /// Tokeniser and chat template.
    pub text: Arc<Text>,
    /// Files that can be fetched.
    pub artifacts: Vec<ArtifactBlob>,
}

/// Why a model cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ServedError {
    /// Its files are broken.
    #[error(transparent)]
    File(#[from] FileError),
    /// Its tokeniser or template is broken.
    #[error(transparent)]
    Text(#[from] TextError),
}

// === impl ServedError ===

impl ServedError {
    /// The public word for this failure.
    pub fn reason(&self) -> Reason {
        match self {
            Self::File(error) => error.reason(),
            Self::Text(error) => error.reason(),
        }
    }
}

// === impl ServedParts ===

impl ServedParts {
    /// Reads text and digests of a model file; hashing takes about a second per GB unless the file knows a digest cache.
    pub fn from_file(name: &str, file: &ModelFile) -> Result<Self, ServedError> {
        let artifacts = file.artifacts()?;
        let text = Arc::new(Text::from_artifacts(&artifacts)?);
        Ok(Self {
            name: name.to_owned(),
            weights: file.weights_digest(),
            architecture: file.config().architecture_bytes(),
            artifacts: blobs(&artifacts, &text),
            text,
        })
    }

    /// Identity under a backend's arithmetic.
    pub fn identity_parts(&self, spec: &BackendSpec) -> IdentityParts {
        IdentityParts {
            weights: self.weights,
            architecture: self.architecture.clone(),
            tokenizer: self.text.tokenizer_digest(),
            chat_template: self.text.chat_template_digest(),
            adapter: None,
            numerics: spec.numerics.id(),
        }
    }
}

/// The whole and its pieces, each under the digest by which it is known.
fn blobs(artifacts: &Artifacts, text: &Text) -> Vec<ArtifactBlob> {
    let blob = |kind, digest, bytes: Vec<u8>| ArtifactBlob {
        reference: ArtifactRef { kind, digest, size_bytes: bytes.len() as u64 },
        bytes: bytes.into(),
    };
    let mut all = vec![
        blob(ArtifactKind::Text, artifacts.digest(), artifacts.encode()),
        blob(ArtifactKind::Tokenizer, text.tokenizer_digest(), artifacts.tokenizer_json.clone()),
    ];
    if let Some(template) = &artifacts.chat_template {
        all.push(blob(ArtifactKind::ChatTemplate, text.chat_template_digest(), template.clone().into_bytes()));
    }
    let generation = artifacts.generation_config_json.clone();
    let digest = kvasir_core::Framer::new("kvasir/generation-config/v1").bytes(&generation).finish();
    all.push(blob(ArtifactKind::GenerationConfig, digest, generation));
    all
}

// === impl Served ===

impl Served {
    /// Describes one model on one backend with a pool of `blocks` blocks.
    pub fn new(
        uid: WorkerUid,
        incarnation: Incarnation,
        parts: &ServedParts,
        spec: &BackendSpec,
        blocks: u32,
        request_bytes_max: usize,
    ) -> Self {
        let identity_parts = parts.identity_parts(spec);
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |age| age.as_secs());
        let capacity = blocks.saturating_mul(spec.block_size);
        let model = ServedModel {
            name: parts.name.clone(),
            identity: identity_parts.id(),
            text: Arc::clone(&parts.text),
            block_size: spec.block_size,
            context: spec.context,
            vocab: spec.vocab,
            capacity,
            created,
        };
        let description = Description {
            uid,
            incarnation,
            role: Role::Target,
            models: vec![ModelDescription {
                name: parts.name.clone(),
                parts: identity_parts,
                numerics: spec.numerics.clone(),
                context: spec.context,
                vocab: spec.vocab,
                capacity,
                created,
                artifacts: parts.artifacts.iter().map(|blob| blob.reference).collect(),
            }],
            block_size: spec.block_size,
            tiers: vec![TierCapacity { tier: Tier::Device, blocks, block_bytes: spec.block_bytes }],
            drafters: Vec::new(),
            contracts: vec![Contract::Coupled, Contract::Rejection],
            phases: vec![Phase::Unified],
            build: BuildInfo {
                version: env!("CARGO_PKG_VERSION").to_owned(),
                commit: option_env!("KVASIR_COMMIT").unwrap_or_default().to_owned(),
                backend: spec.name.to_owned(),
                device: spec.device.clone(),
                driver: String::new(),
            },
            request_bytes_max: request_bytes_max as u64,
        };
        Self(Arc::new(Inner {
            description,
            artifacts: parts.artifacts.clone(),
            catalog: Arc::new(Catalog { models: vec![model] }),
        }))
    }

    /// The same with another role.
    #[must_use]
    pub fn with_role(self, role: Role) -> Self {
        let Inner { description, artifacts, catalog } = &*self.0;
        let description = Description { role, ..description.clone() };
        Self(Arc::new(Inner { description, artifacts: artifacts.clone(), catalog: Arc::clone(catalog) }))
    }

    /// What the worker says of itself.
    pub fn description(&self) -> &Description {
        &self.0.description
    }

    /// What its own door offers.
    pub fn catalog(&self) -> Arc<Catalog> {
        Arc::clone(&self.0.catalog)
    }

    /// Identity of the served model.
    pub fn identity(&self) -> Option<ModelIdentity> {
        self.0.catalog.models.first().map(|model| model.identity)
    }

    /// A file by its digest.
    pub fn artifact(&self, digest: &Digest) -> Option<&ArtifactBlob> {
        self.0.artifacts.iter().find(|blob| blob.reference.digest == *digest)
    }
}
