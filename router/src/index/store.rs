//! The blocks behind the index: entries, who holds them, whose they are, and which leave when memory is short.
//!
//! Refuses to know about sequence numbers, incarnations and trust. Called by [`super::Index`] only.
//!
//! Invariants
//! 1. An entry leaves only when nothing in the index descends from it, so a chain never gets a hole by eviction.
//! 2. Exactly the entries without descendants are in their tenant's queue of leaves.
//! 3. `bytes` is the sum over tenants, each the sum over its entries; after every change it is at most the budget.
//! 4. Memory is taken from the tenant that holds most, so one that stays below its equal share loses nothing to a flooding one.

use super::slots::{Bits, Slots};
use kvasir_core::{BlockKey, TenantTag, Tier};
use std::collections::{BTreeSet, HashMap};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};

/// One block.
#[derive(Debug)]
pub(super) struct Entry {
    device: Slots,
    /// Host and disk, absent while no worker has such a tier.
    lower: Option<Box<[Slots; 2]>>,
    parent: Option<BlockKey>,
    /// Whether `parent` counts this entry among its children.
    linked: bool,
    /// Whether workers stored this block for different tenants (a registered shared prefix).
    mixed: bool,
    children: u32,
    tenant: u32,
    /// Clock of the last lookup or store.
    used: AtomicU64,
    /// Position in the tenant's queue of leaves.
    queued: Option<u64>,
}

/// All blocks, bounded in bytes.
#[derive(Debug)]
pub(super) struct Store {
    entries: HashMap<BlockKey, Entry, BuildHasherDefault<KeyHasher>>,
    tenants: Vec<Tenant>,
    tenant_ids: HashMap<TenantTag, u32>,
    bytes: usize,
    budget: usize,
    clock: AtomicU64,
    evicted: u64,
}

#[derive(Debug, Default)]
struct Tenant {
    bytes: usize,
    leaves: BTreeSet<(u64, BlockKey)>,
}

/// Block keys are digests already: their first eight bytes are the hash.
#[derive(Default)]
pub(super) struct KeyHasher(u64);

/// Bytes charged per entry: key and entry at a table load of 7/8 on average 2/3, plus the queue's node.
const ENTRY_BYTES: usize = (size_of::<(BlockKey, Entry)>() + 1) * 3 / 2 + 48;

/// Tenants accounted apart; any further ones share the account of the last.
const TENANTS_MAX: usize = 16_384;

/// Evictions between two looks for the tenant that holds most.
const EVICT_BATCH: usize = 64;

// === impl KeyHasher ===

impl Hasher for KeyHasher {
    fn write(&mut self, bytes: &[u8]) {
        if let Some(Ok(first)) = bytes.get(..8).map(<[u8; 8]>::try_from) {
            self.0 = u64::from_le_bytes(first);
        }
    }

    fn write_usize(&mut self, _length_prefix: usize) {}

    fn finish(&self) -> u64 {
        self.0
    }
}

// === impl Entry ===

impl Entry {
    fn slots(&self, tier: Tier) -> Option<&Slots> {
        match tier {
            Tier::Device => Some(&self.device),
            Tier::Host => self.lower.as_ref().map(|lower| &lower[0]),
            Tier::Disk => self.lower.as_ref().map(|lower| &lower[1]),
        }
    }

    fn slots_mut(&mut self, tier: Tier) -> &mut Slots {
        match tier {
            Tier::Device => &mut self.device,
            Tier::Host => &mut self.lower.get_or_insert_with(|| Box::new([Slots::new(), Slots::new()]))[0],
            Tier::Disk => &mut self.lower.get_or_insert_with(|| Box::new([Slots::new(), Slots::new()]))[1],
        }
    }

    fn unheld(&self) -> bool {
        self.device.is_empty() && self.lower.as_ref().is_none_or(|lower| lower.iter().all(Slots::is_empty))
    }

    fn forget(&mut self, slot: u32) {
        self.device.remove(slot);
        if let Some(lower) = &mut self.lower {
            lower.iter_mut().for_each(|slots| slots.remove(slot));
        }
    }

    fn bytes(&self) -> usize {
        let lower =
            self.lower.as_ref().map_or(0, |lower| size_of::<[Slots; 2]>() + lower.iter().map(Slots::heap_bytes).sum::<usize>());
        ENTRY_BYTES + self.device.heap_bytes() + lower
    }

    /// The fastest tier in which `slot` holds this block.
    pub(super) fn fastest(&self, slot: u32) -> Option<Tier> {
        Tier::ALL.into_iter().find(|tier| self.slots(*tier).is_some_and(|slots| slots.has(slot)))
    }

    /// Sets `out` to the members of `mask` that hold this block in any tier.
    pub(super) fn holders_within(&self, mask: &Bits, out: &mut Bits) {
        out.zero();
        for tier in Tier::ALL {
            if let Some(slots) = self.slots(tier) {
                slots.intersect_into(mask, out);
            }
        }
    }

    pub(super) fn touch(&self, clock: u64) {
        self.used.fetch_max(clock, Ordering::Relaxed);
    }
}

// === impl Store ===

impl Store {
    pub(super) fn new(budget: usize) -> Self {
        Self {
            entries: HashMap::default(),
            tenants: Vec::new(),
            tenant_ids: HashMap::new(),
            bytes: 0,
            budget,
            clock: AtomicU64::new(0),
            evicted: 0,
        }
    }

    pub(super) fn get(&self, key: &BlockKey) -> Option<&Entry> {
        self.entries.get(key)
    }

    pub(super) fn tick(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::Relaxed) + 1
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn evicted(&self) -> u64 {
        self.evicted
    }

    pub(super) fn tenant_bytes(&self, tag: &TenantTag) -> usize {
        self.tenant_ids.get(tag).map_or(0, |id| self.tenants[*id as usize].bytes)
    }

    /// Credits `slot` with `keys`, in chain order after `parent`.
    pub(super) fn stored(&mut self, slot: u32, tier: Tier, tag: &TenantTag, parent: Option<BlockKey>, keys: &[BlockKey]) {
        let tenant = self.tenant_id(tag);
        let clock = self.tick();
        let mut parent = parent;
        for key in keys {
            if !self.entries.contains_key(key) {
                self.add(*key, parent, tenant, clock);
            }
            self.change(key, |entry| {
                entry.mixed |= entry.tenant != tenant;
                entry.slots_mut(tier).insert(slot);
                entry.touch(clock);
            });
            parent = Some(*key);
        }
        self.shrink();
    }

    /// Takes `keys` of one tier away from `slot`.
    pub(super) fn removed(&mut self, slot: u32, tier: Tier, keys: &[BlockKey]) {
        for key in keys {
            self.change(key, |entry| {
                if entry.slots(tier).is_some() {
                    entry.slots_mut(tier).remove(slot);
                }
            });
            self.drop_if_unheld(*key);
        }
    }

    /// Takes everything of `tag` away from `slot`; `None` is everyone's.
    pub(super) fn cleared(&mut self, slot: u32, tag: Option<&TenantTag>) {
        let tenant = tag.map(|tag| self.tenant_id(tag));
        self.visit(|entry| {
            if tenant.is_none_or(|tenant| entry.mixed || entry.tenant == tenant) {
                entry.forget(slot);
            }
        });
    }

    /// Takes every slot of `dead` out of every entry, so that the slots can be given out again.
    pub(super) fn sweep(&mut self, dead: &Bits) {
        self.visit(|entry| {
            entry.device.subtract(dead);
            if let Some(lower) = &mut entry.lower {
                lower.iter_mut().for_each(|slots| slots.subtract(dead));
            }
        });
    }

    fn tenant_id(&mut self, tag: &TenantTag) -> u32 {
        if let Some(id) = self.tenant_ids.get(tag) {
            return *id;
        }
        if self.tenants.len() >= TENANTS_MAX {
            return TENANTS_MAX as u32 - 1;
        }
        let id = self.tenants.len() as u32;
        self.tenants.push(Tenant::default());
        self.tenant_ids.insert(tag.clone(), id);
        id
    }

    fn add(&mut self, key: BlockKey, parent: Option<BlockKey>, tenant: u32, clock: u64) {
        let mut linked = false;
        if let Some(parent) = parent
            && let Some(above) = self.entries.get_mut(&parent)
        {
            linked = true;
            above.children += 1;
            if let Some(at) = above.queued.take() {
                self.tenants[above.tenant as usize].leaves.remove(&(at, parent));
            }
        }
        let entry = Entry {
            device: Slots::new(),
            lower: None,
            parent,
            linked,
            mixed: false,
            children: 0,
            tenant,
            used: AtomicU64::new(clock),
            queued: Some(clock),
        };
        self.charge(tenant, entry.bytes() as isize);
        self.tenants[tenant as usize].leaves.insert((clock, key));
        self.entries.insert(key, entry);
    }

    /// Changes one entry and keeps the byte count right.
    fn change(&mut self, key: &BlockKey, change: impl FnOnce(&mut Entry)) {
        let Some(entry) = self.entries.get_mut(key) else { return };
        let before = entry.bytes();
        change(entry);
        let (after, tenant) = (entry.bytes(), entry.tenant);
        self.charge(tenant, after as isize - before as isize);
    }

    /// Changes every entry, then drops those that nobody holds any more.
    fn visit(&mut self, mut change: impl FnMut(&mut Entry)) {
        let mut unheld = Vec::new();
        for (key, entry) in &mut self.entries {
            let before = entry.bytes();
            change(entry);
            let delta = entry.bytes() as isize - before as isize;
            let tenant = &mut self.tenants[entry.tenant as usize];
            tenant.bytes = tenant.bytes.saturating_add_signed(delta);
            self.bytes = self.bytes.saturating_add_signed(delta);
            if entry.unheld() && entry.children == 0 {
                unheld.push(*key);
            }
        }
        for key in unheld {
            self.drop_if_unheld(key);
        }
    }

    fn charge(&mut self, tenant: u32, delta: isize) {
        let tenant = &mut self.tenants[tenant as usize];
        tenant.bytes = tenant.bytes.saturating_add_signed(delta);
        self.bytes = self.bytes.saturating_add_signed(delta);
    }

    /// Drops an entry that nobody holds and nothing descends from, and then its ancestors for which that became true.
    fn drop_if_unheld(&mut self, key: BlockKey) {
        let mut next = Some(key);
        while let Some(key) = next {
            next = match self.entries.get(&key) {
                Some(entry) if entry.unheld() && entry.children == 0 => self.take_out(&key),
                _ => None,
            };
        }
    }

    /// Takes a leaf out; returns its parent if it was linked to it.
    fn take_out(&mut self, key: &BlockKey) -> Option<BlockKey> {
        let entry = self.entries.remove(key)?;
        debug_assert_eq!(entry.children, 0, "only leaves leave");
        self.charge(entry.tenant, -(entry.bytes() as isize));
        if let Some(at) = entry.queued {
            self.tenants[entry.tenant as usize].leaves.remove(&(at, *key));
        }
        let parent = entry.parent.filter(|_| entry.linked)?;
        let above = self.entries.get_mut(&parent)?;
        above.children -= 1;
        if above.children == 0 {
            let at = above.used.load(Ordering::Relaxed);
            above.queued = Some(at);
            self.tenants[above.tenant as usize].leaves.insert((at, parent));
        }
        Some(parent)
    }

    /// Evicts least recently used leaves of the largest tenants until the budget holds.
    fn shrink(&mut self) {
        while self.bytes > self.budget {
            let largest = self.tenants.iter().enumerate().filter(|(_, tenant)| !tenant.leaves.is_empty());
            let Some((id, _)) = largest.max_by_key(|(_, tenant)| tenant.bytes) else { return };
            for _ in 0..EVICT_BATCH {
                if self.bytes <= self.budget || !self.evict_one(id) {
                    break;
                }
            }
        }
    }

    fn evict_one(&mut self, tenant: usize) -> bool {
        while let Some((at, key)) = self.tenants[tenant].leaves.pop_first() {
            let Some(entry) = self.entries.get_mut(&key) else { continue };
            let used = entry.used.load(Ordering::Relaxed);
            if used > at {
                // Looked up since it was queued: it goes to its true place.
                entry.queued = Some(used);
                self.tenants[tenant].leaves.insert((used, key));
                continue;
            }
            entry.queued = None;
            self.evicted += 1;
            if let Some(parent) = self.take_out(&key) {
                self.drop_if_unheld(parent);
            }
            return true;
        }
        false
    }

    /// Checks every invariant by recounting.
    #[cfg(test)]
    pub(super) fn check(&self) {
        let mut children: HashMap<BlockKey, u32> = HashMap::new();
        let mut bytes = vec![0usize; self.tenants.len()];
        for (key, entry) in &self.entries {
            bytes[entry.tenant as usize] += entry.bytes();
            if entry.linked {
                *children.entry(entry.parent.expect("a linked entry has a parent")).or_default() += 1;
            }
            let queued = entry.queued.is_some_and(|at| self.tenants[entry.tenant as usize].leaves.contains(&(at, *key)));
            assert_eq!(queued, entry.children == 0, "exactly the leaves are queued");
            assert!(!(entry.unheld() && entry.children == 0), "an unheld leaf stayed");
        }
        for (key, entry) in &self.entries {
            assert_eq!(entry.children, children.remove(key).unwrap_or(0), "children are counted right");
        }
        assert!(children.is_empty(), "a parent left before its child");
        for (tenant, counted) in self.tenants.iter().zip(&bytes) {
            assert_eq!(tenant.bytes, *counted, "a tenant's bytes are counted right");
        }
        let leaves: usize = self.tenants.iter().map(|tenant| tenant.leaves.len()).sum();
        assert_eq!(leaves, self.entries.values().filter(|entry| entry.children == 0).count());
        assert_eq!(self.bytes, bytes.iter().sum::<usize>());
        assert!(self.bytes <= self.budget, "{} bytes exceed the budget of {}", self.bytes, self.budget);
    }
}
