//! The pool secret: the key under which tenants become reuse domains.
//!
//! Knows how the secret becomes a hashing key and which epoch it stands for. Refuses to print itself. Held by routers (never by workers).

use crate::frame::Framer;
use std::fmt;

/// Context string of the key derivation; changing it changes every domain.
const DERIVE_CONTEXT: &str = "kvasir pool secret v1";

/// The pool's secret as the hashing key derived from it.
#[derive(Clone)]
pub struct PoolSecret {
    key: [u8; 32],
    epoch: SecretEpoch,
}

/// Names one secret without revealing it; stored with every block in every tier.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct SecretEpoch(pub [u8; 8]);

// === impl PoolSecret ===

impl PoolSecret {
    /// Fewest bytes that count as a secret.
    pub const LEN_MIN: usize = 16;

    /// Derives the key from raw secret bytes; `None` when fewer than [`Self::LEN_MIN`] bytes are given.
    pub fn new(secret: &[u8]) -> Option<Self> {
        if secret.len() < Self::LEN_MIN {
            return None;
        }
        let digest = Framer::new("kvasir/secret-epoch/v1").bytes(secret).finish();
        let mut epoch = [0u8; 8];
        epoch.copy_from_slice(&digest.as_bytes()[..8]);
        Some(Self { key: blake3::derive_key(DERIVE_CONTEXT, secret), epoch: SecretEpoch(epoch) })
    }

    /// The epoch that this secret stands for.
    pub fn epoch(&self) -> SecretEpoch {
        self.epoch
    }

    pub(crate) fn key(&self) -> &[u8; 32] {
        &self.key
    }
}

impl fmt::Debug for PoolSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PoolSecret(epoch {:02x?})", self.epoch.0)
    }
}
