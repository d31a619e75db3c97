//! Which bytes a worker serves and where it finds them.

use super::Settings;
use super::findings::Findings;
use crate::api::{ModelSource, ModelSpec, SecretKeyRef};

/// A model.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Model {
    /// Where its bytes come from.
    pub source: Source,
    /// Revision of the source.
    pub revision: Option<String>,
    /// Digest that its weights must have.
    pub digest: Option<String>,
}

/// Where a model's bytes come from.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Source {
    /// A repository; the worker fetches it into its cache.
    HuggingFace {
        /// Owner and name.
        repo: String,
        /// Forty digits of a commit.
        commit: String,
        /// One file, or all safetensors.
        file: Option<String>,
        /// Access token.
        token: Option<SecretKeyRef>,
    },
    /// One file; the worker fetches it into its cache.
    Https {
        /// Address.
        url: String,
        /// SHA-256 of the file.
        sha256: String,
        /// Access token.
        token: Option<SecretKeyRef>,
    },
    /// A path on a volume.
    Claim {
        /// Name of the claim.
        claim: String,
        /// Path below its root.
        path: String,
    },
    /// A path in an image that is mounted.
    Image {
        /// Pinned by digest.
        image: String,
        /// Path below its root.
        path: String,
    },
    /// A path that the container has.
    File {
        /// Absolute.
        path: String,
    },
}

/// Reads a model; `field` is where it stands in the spec.
pub(super) fn read(field: &str, spec: &ModelSpec, settings: &Settings, findings: &mut Findings) -> Model {
    let digest = spec.digest.clone();
    if let Some(digest) = digest.as_deref().filter(|digest| !is_hex(digest, 64)) {
        findings.refuse(&format!("{field}.digest"), digest, "write 64 hexadecimal digits, as status.model.digest shows them");
    }
    Model { source: source(field, spec, settings, findings), revision: spec.revision.clone(), digest }
}

fn source(field: &str, spec: &ModelSpec, settings: &Settings, findings: &mut Findings) -> Source {
    match &spec.source {
        ModelSource { hugging_face: Some(hub), https: None, pvc: None, oci: None, file: None } => {
            let commit = spec.revision.clone().unwrap_or_default();
            if !is_hex(&commit, 40) {
                let fix = "a model from Hugging Face needs the 40 digits of a commit here, because a branch or tag can move";
                findings.refuse(&format!("{field}.revision"), or_absent(&commit), fix);
            }
            Source::HuggingFace { repo: hub.repo.clone(), commit, file: hub.file.clone(), token: hub.token_secret_ref.clone() }
        }
        ModelSource { hugging_face: None, https: Some(https), pvc: None, oci: None, file: None } => {
            let sha256 = spec.file_sha256.clone().unwrap_or_default();
            if !is_hex(&sha256, 64) {
                let fix = "a model from an https address needs the SHA-256 of its file here; use `sha256sum FILE`";
                findings.refuse(&format!("{field}.fileSha256"), or_absent(&sha256), fix);
            }
            Source::Https { url: https.url.clone(), sha256, token: https.token_secret_ref.clone() }
        }
        ModelSource { hugging_face: None, https: None, pvc: Some(pvc), oci: None, file: None } => {
            stays_below(&format!("{field}.source.pvc.path"), &pvc.path, findings);
            Source::Claim { claim: pvc.claim_name.clone(), path: pvc.path.clone() }
        }
        ModelSource { hugging_face: None, https: None, pvc: None, oci: Some(oci), file: None } => {
            stays_below(&format!("{field}.source.oci.path"), &oci.path, findings);
            if !settings.image_volumes {
                let fix = "start the operator with --image-volumes=on (chart value operator.imageVolumes) if the cluster's feature ImageVolume is on, or use a pvc source";
                findings.refuse(&format!("{field}.source.oci.image"), &oci.image, fix);
            }
            Source::Image { image: oci.image.clone(), path: oci.path.clone() }
        }
        ModelSource { hugging_face: None, https: None, pvc: None, oci: None, file: Some(file) } => {
            if !file.path.starts_with('/') {
                findings.refuse(&format!("{field}.source.file.path"), &file.path, "write an absolute path");
            }
            Source::File { path: file.path.clone() }
        }
        _ => {
            let fix = "set exactly one of huggingFace, https, pvc, oci and file";
            findings.refuse(&format!("{field}.source"), "not one source", fix);
            Source::File { path: String::new() }
        }
    }
}

fn stays_below(field: &str, path: &str, findings: &mut Findings) {
    if path.starts_with('/') || path.split('/').any(|part| part == "..") {
        findings.refuse(field, path, "write a path below the root of the volume, without `..`");
    }
}

fn or_absent(text: &str) -> &str {
    if text.is_empty() { "absent" } else { text }
}

pub(super) fn is_hex(text: &str, digits: usize) -> bool {
    text.len() == digits && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

// === impl Source ===

impl Source {
    /// Whether the worker brings the bytes to its node itself.
    pub fn is_fetched(&self) -> bool {
        matches!(self, Self::HuggingFace { .. } | Self::Https { .. })
    }

    /// The access token that fetching needs.
    pub fn token(&self) -> Option<&SecretKeyRef> {
        match self {
            Self::HuggingFace { token, .. } | Self::Https { token, .. } => token.as_ref(),
            Self::Claim { .. } | Self::Image { .. } | Self::File { .. } => None,
        }
    }
}
