//! Identity: what must be equal before any cached state may be reused.
//!
//! Owns the encoders of `contracts` §1: numerics, model, reuse domain, shared domain, root. Refuses to know where the parts come from
//! (files, authentication) and what is cached under them. One type partitions every reuse surface: KV pool, host and disk tiers, draft
//! KV, suffix tables, grammar caches, the router's index, tokeniser and template caches.
//!
//! Invariants
//! 1. Any changed component changes the identity; the table in `identity/tests.rs` has a row per component, and the vectors there are pinned.
//! 2. A domain is derived on the server from an authenticated tenant; a client's salt only narrows it.
//! 3. Domain ids are capabilities: they are never printed. `Debug` shows that there is one, not which.

use crate::frame::{Digest, Framer};
use crate::secret::PoolSecret;
use std::fmt;

/// How the arithmetic is done; a component of [`NumericsId`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NumericsMode {
    /// The CPU backend: one mode on every instruction set.
    Cpu,
    /// CUDA with results independent of neighbours, chunking and caching.
    CudaInvariant {
        /// Compute capability as `major * 10 + minor`.
        compute_capability: u32,
        /// Digest of the kernels' machine code.
        kernels: Digest,
    },
    /// CUDA with the fastest kernels; near-ties may differ.
    CudaFast {
        /// Compute capability as `major * 10 + minor`.
        compute_capability: u32,
        /// Digest of the kernels' machine code.
        kernels: Digest,
    },
    /// The deterministic hash-model used in simulation; its state never meets a real backend's.
    Fake,
}

/// The components of [`NumericsId`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NumericsParts {
    /// Arithmetic mode.
    pub mode: NumericsMode,
    /// Raised whenever a change could alter a bit.
    pub revision: u32,
    /// Element type of stored keys and values (`f32`, `f16`, `bf16`, `int8`).
    pub kv_dtype: String,
    /// Name of the memory layout inside a block.
    pub kv_layout: String,
    /// Ranks that share one model (never the rank itself).
    pub parallel_degree: u32,
    /// Tokens per block.
    pub block_size: u32,
}

/// Identity of the arithmetic and of the layout that KV is stored in.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct NumericsId(pub Digest);

/// A low-rank adapter by content, never by name.
#[derive(Clone, Debug, PartialEq)]
pub struct Adapter {
    /// Digest of the adapter's files.
    pub content: Digest,
    /// Scale that the adapter is applied with.
    pub scale: f32,
}

/// The components of [`ModelIdentity`].
#[derive(Clone, Debug, PartialEq)]
pub struct IdentityParts {
    /// Digest over the weight files, see [`weights_digest`].
    pub weights: Digest,
    /// Canonical bytes of architecture, rope and attention configuration.
    pub architecture: Vec<u8>,
    /// SHA-256 of the canonical `tokenizer.json`.
    pub tokenizer: Digest,
    /// Digest of the chat template, or of its absence.
    pub chat_template: Digest,
    /// The adapter, if one is selected.
    pub adapter: Option<Adapter>,
    /// Arithmetic and layout.
    pub numerics: NumericsId,
}

/// Identity of a served model in one arithmetic: equal identity means interchangeable KV and equal output bits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct ModelIdentity(pub Digest);

/// The set of requests that may reuse each other's state. A capability: never in spans, receipts or logs.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct ReuseDomain(Digest);

/// The pool's domain for prefixes that the operator registered for everyone.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct SharedDomain(Digest);

/// Where a chain of block keys starts: one model in one domain.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Root(Digest);

/// Digest of a model's weight files: over (name, SHA-256) ordered by name.
pub fn weights_digest<'a>(files: impl IntoIterator<Item = (&'a str, Digest)>) -> Digest {
    let mut files: Vec<_> = files.into_iter().collect();
    files.sort_unstable_by(|a, b| a.0.cmp(b.0));
    let mut framer = Framer::new("kvasir/weights/v1");
    framer.u32(files.len() as u32);
    for (name, sha256) in files {
        framer.bytes(name.as_bytes()).bytes(sha256.as_bytes());
    }
    framer.finish()
}

// === impl NumericsParts ===

impl NumericsParts {
    /// Encodes all components.
    pub fn id(&self) -> NumericsId {
        let mut framer = Framer::new("kvasir/numerics/v1");
        match &self.mode {
            NumericsMode::Cpu => framer.bytes(b"cpu").option(None),
            NumericsMode::Fake => framer.bytes(b"fake").option(None),
            NumericsMode::CudaInvariant { compute_capability, kernels } => {
                framer.bytes(b"cuda-invariant").option(Some(&device_bytes(*compute_capability, kernels)))
            }
            NumericsMode::CudaFast { compute_capability, kernels } => {
                framer.bytes(b"cuda-fast").option(Some(&device_bytes(*compute_capability, kernels)))
            }
        };
        framer
            .u32(self.revision)
            .bytes(self.kv_dtype.as_bytes())
            .bytes(self.kv_layout.as_bytes())
            .u32(self.parallel_degree)
            .u32(self.block_size);
        NumericsId(framer.finish())
    }
}

fn device_bytes(compute_capability: u32, kernels: &Digest) -> Vec<u8> {
    let mut bytes = compute_capability.to_le_bytes().to_vec();
    bytes.extend_from_slice(kernels.as_bytes());
    bytes
}

// === impl IdentityParts ===

impl IdentityParts {
    /// Encodes all components.
    pub fn id(&self) -> ModelIdentity {
        let adapter = self.adapter.as_ref().map(|adapter| {
            let mut bytes = adapter.content.as_bytes().to_vec();
            bytes.extend_from_slice(&adapter.scale.to_bits().to_le_bytes());
            bytes
        });
        let mut framer = Framer::new("kvasir/model/v1");
        framer
            .bytes(self.weights.as_bytes())
            .bytes(&self.architecture)
            .bytes(self.tokenizer.as_bytes())
            .bytes(self.chat_template.as_bytes())
            .option(adapter.as_deref())
            .bytes(self.numerics.0.as_bytes());
        ModelIdentity(framer.finish())
    }
}

// === impl ReuseDomain ===

impl ReuseDomain {
    /// Derives a tenant's domain; `sub_scope` is the client's own salt and can only narrow it.
    pub fn derive(secret: &PoolSecret, tenant_id: &str, cache_epoch: u64, sub_scope: Option<&str>) -> Self {
        let mut framer = Framer::keyed(secret.key(), "kvasir/domain/v1");
        framer.bytes(tenant_id.as_bytes()).u64(cache_epoch).option(sub_scope.map(str::as_bytes));
        Self(framer.finish())
    }

    /// Takes a domain id that came over an authenticated channel.
    pub const fn from_digest(digest: Digest) -> Self {
        Self(digest)
    }

    /// The id, for the wire and for keying caches only.
    pub const fn digest(&self) -> &Digest {
        &self.0
    }
}

impl fmt::Debug for ReuseDomain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ReuseDomain(..)")
    }
}

// === impl SharedDomain ===

impl SharedDomain {
    /// Derives the pool's shared domain.
    pub fn derive(secret: &PoolSecret, pool_uid: &str) -> Self {
        Self(Framer::keyed(secret.key(), "kvasir/shared/v1").bytes(pool_uid.as_bytes()).finish())
    }

    /// The shared domain as the domain of a request in a pool with `isolation: Pool`, narrowed by the client's salt if there is one.
    pub fn as_reuse_domain(&self, secret: &PoolSecret, sub_scope: Option<&str>) -> ReuseDomain {
        match sub_scope {
            None => ReuseDomain(self.0),
            Some(salt) => {
                let mut framer = Framer::keyed(secret.key(), "kvasir/shared-scope/v1");
                ReuseDomain(framer.bytes(self.0.as_bytes()).bytes(salt.as_bytes()).finish())
            }
        }
    }

    /// Takes a domain id that came over an authenticated channel.
    pub const fn from_digest(digest: Digest) -> Self {
        Self(digest)
    }

    /// The id, for the wire and for keying caches only.
    pub const fn digest(&self) -> &Digest {
        &self.0
    }
}

impl fmt::Debug for SharedDomain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SharedDomain(..)")
    }
}

// === impl Root ===

impl Root {
    /// The root of a model in a tenant's domain.
    pub fn of(identity: &ModelIdentity, domain: &ReuseDomain) -> Self {
        Self::from_parts(identity, &domain.0)
    }

    /// The root of a model in the pool's shared domain.
    pub fn of_shared(identity: &ModelIdentity, shared: &SharedDomain) -> Self {
        Self::from_parts(identity, &shared.0)
    }

    /// The digest, compared on every hit.
    pub const fn digest(&self) -> &Digest {
        &self.0
    }

    fn from_parts(identity: &ModelIdentity, domain: &Digest) -> Self {
        Self(Framer::new("kvasir/root/v1").bytes(identity.0.as_bytes()).bytes(domain.as_bytes()).finish())
    }
}

impl fmt::Debug for Root {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Root(..)")
    }
}

#[cfg(test)]
mod tests;
