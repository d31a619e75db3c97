//! Pure vocabulary of Kvasir: what a request is, what may be reused, what a worker reports, why something was refused.
//!
//! Owns the meaning of words that more than one crate needs. Refuses to know about IO, async, serialisation formats, Kubernetes or
//! the wire: doors convert into these types and never the other way round inside a decision.
//!
//! Glossary
//! - *identity*: everything that must be equal before cached state may be reused ([`ModelIdentity`], [`ReuseDomain`], [`Root`]).
//! - *block*: a fixed number of consecutive tokens whose KV is stored and reused as one ([`BlockKey`]).
//! - *domain*: the set of requests that may reuse each other's state; derived on the server from the tenant.
//! - *reason*: the one vocabulary of refusals and failures ([`Reason`]).

mod block;
mod error;
mod event;
mod frame;
mod identity;
mod load;
mod output;
mod reason;
mod request;
mod secret;

pub use block::{BlockKey, KeyChain, Prefix, block_keys};
pub use error::Error;
pub use event::{CacheEvent, EventBatch, RemovalCause, Tier};
pub use frame::{Digest, Framer};
pub use identity::{
    Adapter, IdentityParts, ModelIdentity, NumericsId, NumericsMode, NumericsParts, ReuseDomain, Root, SharedDomain,
    weights_digest,
};
pub use load::{CostPoint, Incarnation, TierLoad, WorkerLoad, WorkerUid};
pub use output::{
    Choice, Chunk, Counters, FinishReason, Finished, MissReason, Started, State, StateTimes, TierHit, TokenLogprob, Tokens, Usage,
};
pub use reason::Reason;
pub use request::{
    CHOICES_PER_REQUEST_MAX, CacheMode, CachePolicy, Contract, Grammar, LogitBias, Request, RequestId, Sampling, Speculation,
    SpeculationMode, Stop, TenantTag, TraceContext,
};
pub use secret::{PoolSecret, SecretEpoch};

/// A token id of the served model's vocabulary.
pub type TokenId = u32;
