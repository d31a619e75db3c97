//! Cache events: how an index elsewhere follows what a pool holds.
//!
//! Keys only, never tokens or domain ids. A stream begins with a snapshot at (incarnation, seq); any gap in `seq` means lost state and
//! asks for a new snapshot. `Stored{host}` comes before `Removed{device}`; removals are leaf first.

use crate::block::BlockKey;
use crate::load::Incarnation;
use crate::request::TenantTag;

/// Where a block's KV lives, fastest first.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Tier {
    /// The compute device's pool.
    Device,
    /// Host memory.
    Host,
    /// Local disk.
    Disk,
}

/// Why a block left a tier.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum RemovalCause {
    /// Its memory was needed.
    Capacity,
    /// Its time to live ended.
    Expired,
    /// An administrator flushed it.
    Flushed,
    /// Its secret epoch is no longer valid.
    Rotated,
    /// A check failed.
    Corrupt,
}

/// One change of a tier's contents.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum CacheEvent {
    /// Blocks became visible, in chain order.
    Stored {
        /// Their keys.
        keys: Vec<BlockKey>,
        /// Key before the first of them; `None` at a root.
        parent: Option<BlockKey>,
        /// Where.
        tier: Tier,
        /// Whose.
        tenant: TenantTag,
    },
    /// Blocks left, leaf first.
    Removed {
        /// Their keys.
        keys: Vec<BlockKey>,
        /// Where.
        tier: Tier,
        /// Why.
        cause: RemovalCause,
    },
    /// Everything of a tenant, or everything, left every tier.
    Cleared {
        /// Whose; `None` is everyone's.
        tenant: Option<TenantTag>,
    },
}

/// Events of one engine step, or a chunk of a snapshot.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct EventBatch {
    /// Which life of the worker.
    pub incarnation: Incarnation,
    /// Number of this batch; consecutive within an incarnation.
    pub seq: u64,
    /// Engine step that the batch belongs to.
    pub epoch: u64,
    /// Whether this batch is part of a snapshot, and whether it is the last part.
    pub snapshot: Option<bool>,
    /// The changes, in order.
    pub events: Vec<CacheEvent>,
}

// === impl Tier ===

impl Tier {
    /// Every tier, fastest first.
    pub const ALL: [Self; 3] = [Self::Device, Self::Host, Self::Disk];

    /// The word in reports and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Host => "host",
            Self::Disk => "disk",
        }
    }
}

// === impl RemovalCause ===

impl RemovalCause {
    /// The word in metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Capacity => "capacity",
            Self::Expired => "expired",
            Self::Flushed => "flushed",
            Self::Rotated => "rotated",
            Self::Corrupt => "corrupt",
        }
    }
}
