//! One choice of a request: its tokens, its KV and what of it was said.
//!
//! Invariants
//! 1. `kv_valid < tokens_committed` while it is alive: the last token has no KV yet, and is the next row's input.
//! 2. `kv_valid ≤ kv_allocated`; both are 0 while it waits.
//! 3. Blocks below `published` are in the index and are never written again.

use super::constraint::Constraint;
use super::request::JobId;
use crate::kv::{KeyMap, extend_keys};
use crate::plan::{BlockCopy, BlockId, SequenceId, TokenCounts};
use crate::scheduler::Rank;
use crate::text::Text;
use kvasir_core::{BlockKey, KeyChain, Prefix, TokenId, TokenLogprob};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

/// A choice under generation.
pub(super) struct Sequence {
    pub(super) id: SequenceId,
    pub(super) job: JobId,
    pub(super) choice: u32,
    pub(super) rank: Rank,
    /// Prompt and committed output.
    pub(super) tokens: Vec<TokenId>,
    pub(super) lengths: Lengths,
    pub(super) table: Table,
    pub(super) output: Output,
    pub(super) join: Join,
    /// Epoch of the step that has a row of it.
    pub(super) in_flight: Option<u64>,
    /// Lost its blocks to others and has not run since.
    pub(super) preempted: bool,
}

/// The three lengths of a sequence, and how far it ever came.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Lengths {
    /// Tokens that are decided.
    pub(super) tokens_committed: u32,
    /// Leading positions whose KV is written for committed tokens.
    pub(super) kv_valid: u32,
    /// Positions that its blocks have room for.
    pub(super) kv_allocated: u32,
    /// Largest `kv_valid` so far: computing below it again is recompute.
    pub(super) kv_ever: u32,
}

/// Its blocks and their names.
pub(super) struct Table {
    pub(super) blocks: Vec<BlockId>,
    chain: KeyChain,
    pub(super) keys: Vec<BlockKey>,
    /// Leading blocks that are published.
    pub(super) published: u32,
    /// Whether further blocks may be published.
    pub(super) publishes: bool,
    /// Copy to make before its first row; the source is held until then.
    pub(super) copy: Option<BlockCopy>,
}

/// What it has said.
pub(super) struct Output {
    /// Tokens generated.
    pub(super) tokens: u32,
    pub(super) counts: Arc<TokenCounts>,
    pub(super) text: Text,
    /// Committed tokens whose visibility is open, each with whether it was drafted.
    pub(super) held: VecDeque<(TokenLogprob, bool)>,
    /// Tokens given out.
    pub(super) visible: u32,
    pub(super) constraint: Option<Box<dyn Constraint>>,
}

/// Its wait for a prefix that another computes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Join {
    /// Moment at which it stops waiting.
    pub(super) until: Option<Duration>,
    /// It waited too long once and computes by itself.
    pub(super) given_up: bool,
}

// === impl Table ===

impl Table {
    pub(super) fn new(prefix: Prefix, block_size: u32, publishes: bool) -> Self {
        Self {
            blocks: Vec::new(),
            chain: KeyChain::new(prefix, block_size),
            keys: Vec::new(),
            published: 0,
            publishes,
            copy: None,
        }
    }

    /// Names all full blocks of `tokens`.
    pub(super) fn extend_keys(&mut self, block_size: u32, tokens: &[TokenId], map: KeyMap) {
        extend_keys(&mut self.chain, &mut self.keys, block_size, tokens, map);
    }

    /// A table without blocks and with the names of `other`.
    pub(super) fn named_as(other: &Self) -> Self {
        Self {
            blocks: Vec::new(),
            chain: other.chain.clone(),
            keys: other.keys.clone(),
            published: 0,
            publishes: other.publishes,
            copy: None,
        }
    }
}

// === impl Sequence ===

impl Sequence {
    /// Positions without KV.
    pub(super) fn missing(&self) -> u32 {
        self.lengths.tokens_committed - self.lengths.kv_valid
    }

    /// Forgets that it ever held blocks.
    pub(super) fn reset(&mut self) {
        self.lengths.kv_valid = 0;
        self.lengths.kv_allocated = 0;
        self.table.published = 0;
        self.in_flight = None;
        self.join = Join { until: None, ..self.join };
    }
}
