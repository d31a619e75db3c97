//! Pool secrets and tenants of one version, as bytes come in and as they are used.
//!
//! Pure. Owns the reading of both. Refuses to print either.

use kvasir_core::{Digest, Framer, PoolSecret, SecretEpoch};
use kvasir_door::{Isolation, TenantFileError, TenantTable};
use std::fmt;

/// Pool secrets (at least one, each once) and tenants that belong together.
#[derive(Clone)]
pub struct Material {
    first: PoolSecret,
    others: Vec<PoolSecret>,
    tenants: TenantSource,
}

/// Where tenants come from.
#[derive(Clone, PartialEq, Eq)]
pub enum TenantSource {
    /// Everyone is the tenant `default`; no key is asked for.
    Open,
    /// The text of a tenants file.
    File {
        /// Its TOML.
        text: String,
        /// Who may reuse whose state.
        isolation: Isolation,
    },
}

/// Material as it was read: names for messages, and bytes.
pub(super) struct Raw {
    /// The first derives domains unless another one was made active.
    pub(super) pool_secrets: Vec<(String, Vec<u8>)>,
    pub(super) tenants: Option<(String, Vec<u8>)>,
}

/// Why material cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum MaterialError {
    /// No pool secret at all.
    #[error("no pool secret is named; name one at least")]
    NoPoolSecret,
    /// A part is not there.
    #[error("{what} is missing; {fix}")]
    Missing {
        /// Which.
        what: String,
        /// What to do.
        fix: &'static str,
    },
    /// A part cannot be read.
    #[error("{what}: {source}")]
    Unreadable {
        /// Which.
        what: String,
        /// Why.
        source: std::io::Error,
    },
    /// Too few bytes to resist guessing.
    #[error("{what}: a pool secret has at least {min} bytes, not {len}", min = PoolSecret::LEN_MIN)]
    TooShort {
        /// Which.
        what: String,
        /// How many there are.
        len: usize,
    },
    /// Larger than anything that is meant.
    #[error("{what} has more than {max} bytes; check that the right one is named")]
    TooLarge {
        /// Which.
        what: String,
        /// Limit.
        max: usize,
    },
    /// No text.
    #[error("{what} is not UTF-8 text")]
    NotText {
        /// Which.
        what: String,
    },
    /// The tenants.
    #[error("{what}: {source}")]
    Tenants {
        /// Which.
        what: String,
        /// Why.
        source: TenantFileError,
    },
}

/// Largest pool secret, in bytes.
pub(super) const SECRET_BYTES_MAX: usize = 64 << 10;
/// Largest tenants file, in bytes: all the keys that one table may hold, with room for names.
pub(super) const TENANTS_BYTES_MAX: usize = 16 << 20;

// === impl Material ===

impl Material {
    /// These secrets, the first of which is active at the beginning, and these tenants. A secret that is named twice counts once.
    pub fn new(first: PoolSecret, others: Vec<PoolSecret>, tenants: TenantSource) -> Self {
        let mut kept: Vec<PoolSecret> = Vec::with_capacity(others.len());
        for secret in others {
            if secret.epoch() != first.epoch() && kept.iter().all(|other| other.epoch() != secret.epoch()) {
                kept.push(secret);
            }
        }
        Self { first, others: kept, tenants }
    }

    /// Reads material; the tenants are checked too.
    pub(super) fn parse(raw: Raw, isolation: &Isolation) -> Result<Self, MaterialError> {
        let mut secrets = raw.pool_secrets.into_iter().map(|(what, bytes)| {
            // What was written by an editor ends in a newline that is no part of the secret.
            let bytes = bytes.trim_ascii_end();
            PoolSecret::new(bytes).ok_or(MaterialError::TooShort { what, len: bytes.len() })
        });
        let first = secrets.next().ok_or(MaterialError::NoPoolSecret)??;
        let others = secrets.collect::<Result<_, _>>()?;
        let tenants = match raw.tenants {
            None => TenantSource::Open,
            Some((what, bytes)) => {
                let text = String::from_utf8(bytes).map_err(|_not_text| MaterialError::NotText { what: what.clone() })?;
                TenantTable::parse(&text, &first, isolation).map_err(|source| MaterialError::Tenants { what, source })?;
                TenantSource::File { text, isolation: isolation.clone() }
            }
        };
        Ok(Self::new(first, others, tenants))
    }

    pub(super) fn first(&self) -> &PoolSecret {
        &self.first
    }

    pub(super) fn secret(&self, epoch: SecretEpoch) -> Option<&PoolSecret> {
        std::iter::once(&self.first).chain(&self.others).find(|secret| secret.epoch() == epoch)
    }

    pub(super) fn epochs(&self) -> Vec<SecretEpoch> {
        std::iter::once(&self.first).chain(&self.others).map(PoolSecret::epoch).collect()
    }

    /// The tenants with domains under `secret`.
    pub(super) fn table(&self, secret: &PoolSecret) -> Result<TenantTable, MaterialError> {
        match &self.tenants {
            TenantSource::Open => Ok(TenantTable::open(secret.clone())),
            TenantSource::File { text, isolation } => TenantTable::parse(text, secret, isolation)
                .map_err(|source| MaterialError::Tenants { what: "tenants".to_owned(), source }),
        }
    }
}

impl fmt::Debug for Material {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Material({} pool secrets, ..)", 1 + self.others.len())
    }
}

impl fmt::Debug for TenantSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Open => "Open",
            Self::File { .. } => "File(..)",
        })
    }
}

// === impl Raw ===

impl Raw {
    /// Tells two readings apart without keeping either.
    pub(super) fn digest(&self) -> Digest {
        let mut framer = Framer::new("kvasir/router/secret-files/v1");
        for (_, bytes) in self.pool_secrets.iter().chain(&self.tenants) {
            framer.bytes(bytes);
        }
        framer.finish()
    }
}
