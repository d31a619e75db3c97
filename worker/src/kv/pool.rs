//! The block pool: every transition of a KV block, in this file.
//!
//! Owns the states `Free → Held → published → Cached → Held again | evicted → Free`, the prefix index and its comparisons. Refuses to know
//! requests, time and bytes. Called only by the engine thread.
//!
//! Invariants
//! 1. `free + cached + held = total` after every call.
//! 2. A block is in the index iff it is published; a published block stores root, tokens and parent, and a hit compares all three.
//! 3. Who holds a published block holds its published parent: so whatever hangs below an unreferenced block is unreferenced, and
//!    everything that is cached can be evicted, leaf first.
//! 4. A published block is never written again; a sequence writes only into blocks that it alone holds and that are not published.
//!
//! Costs: lookup and publish O(blocks asked); reserve O(log cached) per evicted block; flush and snapshot O(total).

use super::event::SNAPSHOT_KEYS_MAX;
use super::history::History;
use crate::plan::BlockId;
use kvasir_core::{
    BlockKey, CacheEvent, MissReason, ModelIdentity, Prefix, RemovalCause, Root, SecretEpoch, TenantTag, Tier, TokenId,
};
use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

/// Size of a pool.
#[derive(Clone, Copy, Debug)]
pub struct PoolSettings {
    /// Blocks.
    pub blocks: u32,
    /// Tokens per block.
    pub block_size: u32,
}

/// Whose blocks a sequence publishes and may reuse.
#[derive(Clone, Debug)]
pub struct Owner {
    /// Roots of its key chain.
    pub prefix: Prefix,
    /// Identity that the KV was computed under.
    pub identity: ModelIdentity,
    /// For quotas, flushes and events.
    pub tenant: TenantTag,
    /// Epoch of the secret that its domain was derived under.
    pub secret_epoch: SecretEpoch,
    /// How long its blocks are wanted.
    pub retention: Retention,
}

/// How much a cached block is wanted; the order of eviction.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct Retention {
    /// Larger stays longer; 0 is normal.
    pub priority: i32,
}

/// Blocks by state.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct BlockCounts {
    /// Hold nothing.
    pub free: u32,
    /// Published and held by nobody.
    pub cached: u32,
    /// Held by at least one sequence.
    pub held: u32,
    /// All.
    pub total: u32,
}

/// What a published block remembers of itself.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Its name.
    pub key: BlockKey,
    /// Root that it is stored under.
    pub root: Root,
    /// Its tokens.
    pub tokens: Box<[TokenId]>,
    /// Block before it; `None` at a root.
    pub parent: Option<BlockId>,
    /// Number of blocks before it.
    pub depth: u32,
    /// Identity that its KV was computed under.
    pub identity: ModelIdentity,
    /// Whose.
    pub tenant: TenantTag,
    /// Secret that its domain was derived under.
    pub secret_epoch: SecretEpoch,
    /// How much it is wanted.
    pub retention: Retention,
    children: u32,
}

/// What a flush takes away.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum FlushScope {
    /// Everything.
    All,
    /// Blocks of a tenant, and what hangs below them.
    Tenant(TenantTag),
    /// Blocks of an identity.
    Identity(ModelIdentity),
    /// Blocks whose secret epoch is another one.
    SecretEpochNot(SecretEpoch),
}

/// What publishing a block did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Published {
    /// It is in the index now.
    New,
    /// An equal block was there: the table now holds that one.
    Duplicate,
    /// Not published: its parent is not, or its key belongs to other content.
    Refused,
}

/// No block is free or can be evicted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{needed} blocks are needed, {available} are available")]
pub struct Full {
    /// Asked for.
    pub needed: u32,
    /// Free or evictable.
    pub available: u32,
}

/// The pool. See the module's documentation.
pub struct Pool {
    settings: PoolSettings,
    blocks: Vec<Block>,
    free: Vec<BlockId>,
    index: HashMap<BlockKey, BlockId>,
    leaves: BTreeSet<(Retention, u64, BlockId)>,
    cached: u32,
    tick: u64,
    history: History,
    log: Log,
    shared_tag: TenantTag,
    faults: Faults,
}

#[derive(Default)]
struct Block {
    refs: u32,
    last_use: u64,
    entry: Option<Box<Entry>>,
}

/// What happened since it was last asked.
#[derive(Default)]
struct Log {
    events: Vec<CacheEvent>,
    freed: Vec<BlockId>,
    evictions: [u64; 5],
    collisions: u64,
}

/// Injected failures (tests).
#[derive(Default)]
struct Faults {
    allocations: u64,
    fail_at: Option<u64>,
}

// === impl Pool ===

impl Pool {
    /// Tag of blocks under the pool's shared domain: they belong to no tenant.
    pub const SHARED_TAG: &'static str = "_shared";

    /// A pool of free blocks.
    pub fn new(settings: PoolSettings) -> Self {
        Self {
            settings,
            blocks: (0..settings.blocks).map(|_| Block::default()).collect(),
            free: (0..settings.blocks).rev().collect(),
            index: HashMap::new(),
            leaves: BTreeSet::new(),
            cached: 0,
            tick: 0,
            history: History::default(),
            log: Log::default(),
            shared_tag: TenantTag(Arc::from(Self::SHARED_TAG)),
            faults: Faults::default(),
        }
    }

    /// Size.
    pub fn settings(&self) -> PoolSettings {
        self.settings
    }

    /// Blocks that `tokens` tokens need.
    pub fn blocks_for(&self, tokens: u32) -> u32 {
        tokens.div_ceil(self.settings.block_size)
    }

    /// Blocks by state.
    pub fn counts(&self) -> BlockCounts {
        let free = self.free.len() as u32;
        BlockCounts { free, cached: self.cached, held: self.settings.blocks - free - self.cached, total: self.settings.blocks }
    }

    /// Blocks that a reservation can get.
    pub fn available(&self) -> u32 {
        self.free.len() as u32 + self.cached
    }

    /// Whether nobody holds the block.
    pub fn is_unheld(&self, block: BlockId) -> bool {
        self.blocks[block as usize].refs == 0
    }

    /// Whether exactly one sequence holds the block.
    pub fn is_exclusive(&self, block: BlockId) -> bool {
        self.blocks[block as usize].refs == 1
    }

    /// The entry of a published block.
    pub fn entry(&self, block: BlockId) -> Option<&Entry> {
        self.blocks[block as usize].entry.as_deref()
    }

    /// Longest stored chain for a prompt: root, tokens and parent of each block are compared. Never covers the last token, whose
    /// logits are needed.
    pub fn lookup(&mut self, prefix: &Prefix, keys: &[BlockKey], tokens: &[TokenId]) -> Vec<BlockId> {
        let size = self.settings.block_size as usize;
        let usable = tokens.len().saturating_sub(1) / size;
        let mut found: Vec<BlockId> = Vec::new();
        for (number, (key, chunk)) in keys.iter().zip(tokens.chunks_exact(size)).take(usable).enumerate() {
            let Some(&block) = self.index.get(key) else { break };
            let root = prefix.root_of_block(number as u32, self.settings.block_size);
            if !self.matches(block, &root, chunk, found.last().copied()) {
                self.log.collisions += 1;
                break;
            }
            found.push(block);
        }
        found
    }

    /// Why a lookup that found `found` blocks did not find more; `None` when only the last token is left. From the domain's own history.
    pub fn miss_reason(&self, prefix: &Prefix, keys: &[BlockKey], tokens: u32, found: u32) -> Option<MissReason> {
        let size = self.settings.block_size;
        let usable = tokens.saturating_sub(1) / size;
        if found >= usable {
            return (found * size + 1 < tokens).then_some(MissReason::PartialBlock);
        }
        let shared = prefix.shared_blocks(size);
        if found < shared {
            // The shared prefix's past is made by all tenants together, so nothing is said of it.
            return Some(MissReason::Cold);
        }
        match keys.get(found as usize) {
            Some(key) if self.history.evicted(&prefix.root, key) => Some(MissReason::Evicted),
            _ if found > shared => Some(MissReason::Diverged),
            _ => Some(MissReason::Cold),
        }
    }

    /// Holds blocks that a lookup found: `Cached → Held`, or one holder more.
    pub fn acquire(&mut self, blocks: &[BlockId]) {
        for &block in blocks {
            self.hold(block);
        }
    }

    /// Takes `count` empty blocks, evicting what is wanted least: `Free → Held`. All or nothing.
    pub fn reserve(&mut self, count: u32) -> Result<Vec<BlockId>, Full> {
        self.faults.allocations += 1;
        let available = self.available();
        if self.faults.fail_at == Some(self.faults.allocations) {
            return Err(Full { needed: count, available: 0 });
        }
        if count > available {
            return Err(Full { needed: count, available });
        }
        let mut taken = Vec::with_capacity(count as usize);
        while taken.len() < count as usize {
            if self.free.is_empty() && !self.evict_one() {
                debug_assert!(false, "cached blocks can always be evicted");
                self.release(&taken);
                return Err(Full { needed: count, available });
            }
            if let Some(block) = self.free.pop() {
                self.blocks[block as usize].refs = 1;
                taken.push(block);
            }
        }
        Ok(taken)
    }

    /// Makes block `number` of a sequence's table visible to others. Its KV must be written and its tokens committed.
    pub fn publish(
        &mut self,
        owner: &Owner,
        table: &mut [BlockId],
        number: usize,
        key: BlockKey,
        tokens: &[TokenId],
    ) -> Published {
        let block = table[number];
        let parent = number.checked_sub(1).map(|before| table[before]);
        debug_assert!(self.blocks[block as usize].refs > 0, "only a held block is published");
        if self.blocks[block as usize].entry.is_some() {
            return Published::Duplicate;
        }
        if parent.is_some_and(|parent| self.blocks[parent as usize].entry.is_none()) {
            return Published::Refused;
        }
        let root = owner.prefix.root_of_block(number as u32, self.settings.block_size);
        if let Some(&present) = self.index.get(&key) {
            if !self.matches(present, &root, tokens, parent) {
                self.log.collisions += 1;
                return Published::Refused;
            }
            self.hold(present);
            table[number] = present;
            self.release(&[block]);
            return Published::Duplicate;
        }
        self.insert(owner, block, parent, number as u32, key, tokens);
        Published::New
    }

    /// Gives up one hold of each block, last first: `Held → Cached` if published, else `Held → Free`.
    pub fn release(&mut self, blocks: &[BlockId]) {
        for &block in blocks.iter().rev() {
            self.tick += 1;
            let tick = self.tick;
            let state = &mut self.blocks[block as usize];
            debug_assert!(state.refs > 0, "block {block} is released once more than it was held");
            state.refs = state.refs.saturating_sub(1);
            if state.refs > 0 {
                continue;
            }
            state.last_use = tick;
            match &state.entry {
                Some(entry) => {
                    self.cached += 1;
                    if entry.children == 0 {
                        self.leaves.insert((entry.retention, tick, block));
                    }
                }
                None => self.put_free(block),
            }
        }
    }

    /// Removes what the scope names and everything below it, leaf first. Held blocks lose their name at once and their memory when
    /// their holders end. Returns how many blocks lost their name.
    pub fn flush(&mut self, scope: &FlushScope) -> u32 {
        let mut doomed = self.published_by_depth();
        let mut names = HashSet::new();
        for &block in &doomed {
            let Some(entry) = self.entry(block) else { continue };
            if scope.covers(entry) || entry.parent.is_some_and(|parent| names.contains(&parent)) {
                names.insert(block);
            }
        }
        doomed.retain(|block| names.contains(block));
        let cause = match scope {
            FlushScope::SecretEpochNot(_) => RemovalCause::Rotated,
            FlushScope::All | FlushScope::Tenant(_) | FlushScope::Identity(_) => RemovalCause::Flushed,
        };
        for &block in doomed.iter().rev() {
            self.unpublish(block, cause, false);
        }
        doomed.len() as u32
    }

    /// Forgets every name at once: the device's memory is gone.
    pub fn clear(&mut self) {
        self.flush(&FlushScope::All);
        self.history.clear();
        self.log.events = vec![CacheEvent::Cleared { tenant: None }];
    }

    /// Events since the last call, in order.
    pub fn take_events(&mut self) -> Vec<CacheEvent> {
        std::mem::take(&mut self.log.events)
    }

    /// Blocks that became free since the last call (for poisoning).
    pub fn take_freed(&mut self) -> Vec<BlockId> {
        std::mem::take(&mut self.log.freed)
    }

    /// Blocks evicted so far, by [`RemovalCause`].
    pub fn evictions(&self) -> [u64; 5] {
        self.log.evictions
    }

    /// Hits refused because root, tokens or parent differed under an equal key.
    pub fn collisions(&self) -> u64 {
        self.log.collisions
    }

    /// Reservations so far.
    pub fn allocations(&self) -> u64 {
        self.faults.allocations
    }

    /// Makes the reservation with this number (counted from 1) fail once (tests).
    pub fn fail_allocation_at(&mut self, number: Option<u64>) {
        self.faults.fail_at = number;
    }

    /// Everything published, parents first, as `Stored` events.
    pub fn snapshot(&self) -> Vec<CacheEvent> {
        let mut events: Vec<CacheEvent> = Vec::new();
        for block in self.published_by_depth() {
            if let Some(entry) = self.entry(block) {
                let parent = entry.parent.and_then(|parent| self.entry(parent)).map(|parent| parent.key);
                push_stored(&mut events, entry.key, parent, &entry.tenant);
            }
        }
        events
    }

    /// Keys of everything published (tests and inspection).
    pub fn keys(&self) -> impl Iterator<Item = BlockKey> + '_ {
        self.index.keys().copied()
    }

    /// Published blocks by tenant: (cached, held).
    pub fn by_tenant(&self) -> Vec<(TenantTag, u32, u32)> {
        let mut tenants: std::collections::BTreeMap<TenantTag, (u32, u32)> = std::collections::BTreeMap::new();
        for block in &self.blocks {
            if let Some(entry) = &block.entry {
                let slot = tenants.entry(entry.tenant.clone()).or_default();
                if block.refs == 0 { slot.0 += 1 } else { slot.1 += 1 }
            }
        }
        tenants.into_iter().map(|(tenant, (cached, held))| (tenant, cached, held)).collect()
    }

    /// Checks the invariants by counting everything anew; O(total). Returns the first broken one.
    pub fn check(&self) -> Result<(), String> {
        let cached = self.blocks.iter().filter(|block| block.refs == 0 && block.entry.is_some()).count();
        let held = self.blocks.iter().filter(|block| block.refs > 0).count();
        let counts = self.counts();
        if (counts.cached as usize, counts.held as usize) != (cached, held) {
            return Err(format!("counted {cached} cached and {held} held blocks, the pool says {counts:?}"));
        }
        let published = self.blocks.iter().filter(|block| block.entry.is_some()).count();
        if published != self.index.len() {
            return Err(format!("{published} published blocks, {} names", self.index.len()));
        }
        let mut children = vec![0u32; self.blocks.len()];
        for (id, block) in self.blocks.iter().enumerate() {
            let Some(entry) = &block.entry else { continue };
            if self.index.get(&entry.key) != Some(&(id as BlockId)) {
                return Err(format!("block {id} is published but its name leads elsewhere"));
            }
            let Some(parent) = entry.parent else { continue };
            children[parent as usize] += 1;
            match &self.blocks[parent as usize] {
                parent if parent.entry.is_none() => return Err(format!("block {id} hangs below a nameless block")),
                parent if block.refs > parent.refs => return Err(format!("block {id} is held more often than its parent")),
                _ => {}
            }
        }
        for (id, block) in self.blocks.iter().enumerate() {
            let Some(entry) = &block.entry else { continue };
            if entry.children != children[id] {
                return Err(format!("block {id} counts {} children, has {}", entry.children, children[id]));
            }
            let leaf = self.leaves.contains(&(entry.retention, block.last_use, id as BlockId));
            if leaf != (block.refs == 0 && entry.children == 0) {
                return Err(format!("block {id} is in the wrong eviction list"));
            }
        }
        Ok(())
    }

    fn matches(&self, block: BlockId, root: &Root, tokens: &[TokenId], parent: Option<BlockId>) -> bool {
        self.entry(block).is_some_and(|entry| entry.root == *root && *entry.tokens == *tokens && entry.parent == parent)
    }

    fn hold(&mut self, block: BlockId) {
        let state = &mut self.blocks[block as usize];
        if state.refs == 0
            && let Some(entry) = &state.entry
        {
            self.leaves.remove(&(entry.retention, state.last_use, block));
            self.cached -= 1;
        }
        state.refs += 1;
    }

    fn insert(&mut self, owner: &Owner, block: BlockId, parent: Option<BlockId>, number: u32, key: BlockKey, tokens: &[TokenId]) {
        let shared = number < owner.prefix.shared_blocks(self.settings.block_size);
        let entry = Entry {
            key,
            root: owner.prefix.root_of_block(number, self.settings.block_size),
            tokens: tokens.into(),
            parent,
            depth: number,
            identity: owner.identity,
            tenant: if shared { self.shared_tag.clone() } else { owner.tenant.clone() },
            secret_epoch: owner.secret_epoch,
            retention: owner.retention,
            children: 0,
        };
        let mut parent_key = None;
        if let Some(parent) = parent
            && let Some(above) = self.blocks[parent as usize].entry.as_deref_mut()
        {
            above.children += 1;
            parent_key = Some(above.key);
        }
        self.history.remove(&entry.root, &key);
        self.index.insert(key, block);
        push_stored(&mut self.log.events, key, parent_key, &entry.tenant);
        self.blocks[block as usize].entry = Some(Box::new(entry));
    }

    fn evict_one(&mut self) -> bool {
        match self.leaves.first().copied() {
            Some((_, _, block)) => {
                self.unpublish(block, RemovalCause::Capacity, true);
                true
            }
            None => false,
        }
    }

    /// Takes a block's name away; an unheld one becomes free.
    fn unpublish(&mut self, block: BlockId, cause: RemovalCause, remember: bool) {
        let state = &mut self.blocks[block as usize];
        let Some(entry) = state.entry.take() else { return };
        debug_assert_eq!(entry.children, 0, "removals are leaf first");
        let unheld = state.refs == 0;
        if unheld {
            self.leaves.remove(&(entry.retention, state.last_use, block));
            self.cached -= 1;
        }
        self.index.remove(&entry.key);
        if remember {
            self.history.add(entry.root, entry.key);
        }
        self.log.evictions[cause as usize] += 1;
        push_removed(&mut self.log.events, entry.key, cause);
        if let Some(parent) = entry.parent {
            let above = &mut self.blocks[parent as usize];
            let (refs, last_use) = (above.refs, above.last_use);
            if let Some(parent_entry) = above.entry.as_deref_mut() {
                parent_entry.children -= 1;
                if refs == 0 && parent_entry.children == 0 {
                    self.leaves.insert((parent_entry.retention, last_use, parent));
                }
            }
        }
        if unheld {
            self.put_free(block);
        }
    }

    fn put_free(&mut self, block: BlockId) {
        self.free.push(block);
        self.log.freed.push(block);
    }

    fn published_by_depth(&self) -> Vec<BlockId> {
        let mut blocks: Vec<_> = self.index.values().copied().collect();
        blocks.sort_unstable_by_key(|block| (self.entry(*block).map_or(0, |entry| entry.depth), *block));
        blocks
    }
}

// === impl FlushScope ===

impl FlushScope {
    fn covers(&self, entry: &Entry) -> bool {
        match self {
            Self::All => true,
            Self::Tenant(tenant) => entry.tenant == *tenant,
            Self::Identity(identity) => entry.identity == *identity,
            Self::SecretEpochNot(epoch) => entry.secret_epoch != *epoch,
        }
    }

    /// Whether blocks that a sequence of `owner` holds without a name fall under the scope.
    pub fn covers_owner(&self, owner: &Owner) -> bool {
        match self {
            Self::All => true,
            Self::Tenant(tenant) => owner.tenant == *tenant,
            Self::Identity(identity) => owner.identity == *identity,
            Self::SecretEpochNot(epoch) => owner.secret_epoch != *epoch,
        }
    }
}

/// Appends a stored key, joined to the last event when it continues that chain.
fn push_stored(events: &mut Vec<CacheEvent>, key: BlockKey, parent: Option<BlockKey>, whose: &TenantTag) {
    if let Some(CacheEvent::Stored { keys, tenant, .. }) = events.last_mut()
        && parent.is_some()
        && keys.last().copied() == parent
        && *tenant == *whose
        && keys.len() < SNAPSHOT_KEYS_MAX
    {
        keys.push(key);
        return;
    }
    events.push(CacheEvent::Stored { keys: vec![key], parent, tier: Tier::Device, tenant: whose.clone() });
}

/// Appends a removed key, joined to the last event when that is a removal for the same cause.
fn push_removed(events: &mut Vec<CacheEvent>, key: BlockKey, why: RemovalCause) {
    if let Some(CacheEvent::Removed { keys, cause, .. }) = events.last_mut()
        && *cause == why
        && keys.len() < SNAPSHOT_KEYS_MAX
    {
        keys.push(key);
        return;
    }
    events.push(CacheEvent::Removed { keys: vec![key], tier: Tier::Device, cause: why });
}
