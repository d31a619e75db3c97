//! The prefix index: which worker holds which block in which tier, as far as its cache events can be trusted.
//!
//! Owns blocks by key, trust per worker, and the memory bound. Refuses to know addresses, requests, tokens and clocks: time is passed in as a
//! duration since some start. The fleet writes it; placement reads it. It only steers: a wrong entry costs a worse pick, never a wrong answer.
//!
//! Invariants
//! 1. Events count only for the incarnation that the member was attached with; those of another life are fenced off.
//! 2. A member is [`Trust::Exact`] only after a whole snapshot and every batch since, in order; then its credit equals its pool.
//! 3. Detaching a member, or starting a new snapshot, takes all its old credit at once, whatever the size of the index.
//! 4. Bytes stay within the budget; the tenant that holds most pays first.
//!
//! Costs: lookup O(prompt blocks × members / 64) words and one table probe per block; an event O(keys); detach O(1), with a sweep over all
//! entries once per [`SWEEP_DEAD_MIN`] detached slots.

mod slots;
mod store;
#[cfg(test)]
mod tests;

use crate::rendezvous::rank;
use kvasir_core::{BlockKey, CacheEvent, EventBatch, Incarnation, TenantTag};
use slots::Bits;
use std::collections::HashMap;
use std::time::Duration;
use store::{Entry, Store};

/// Names one life of one worker in the index; never given out twice.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct MemberId(pub u64);

/// How far a worker's entries can be believed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Trust {
    /// A whole snapshot and no gap since.
    Exact,
    /// A gap, or the stream is away: credit decays until a new snapshot is complete.
    Degraded,
    /// Nothing is known: placed by rendezvous only.
    Fallback,
}

/// What became of one batch of events.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Applied {
    /// It counts.
    Applied,
    /// It was seen before.
    Duplicate,
    /// It belongs to another life of the worker, or to no member.
    Fenced,
    /// Something before it is missing: the caller asks for a new snapshot.
    Gap,
}

/// Reusable prefix of one prompt on one worker.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Match {
    /// Leading blocks that the worker holds, by fastest tier: device, host, disk.
    pub blocks: [u32; 3],
    /// 1 for an exact worker, less the longer a degraded one has been so.
    pub confidence: f32,
}

/// What the index says about one prompt.
#[derive(Clone, Debug, Default)]
pub struct Matches {
    /// Members that hold a leading part, longest first, then by rendezvous rank; at most as many as asked for.
    pub holders: Vec<(MemberId, Match)>,
    /// Credit of the members that were asked about by name, in the order asked.
    pub asked: Vec<Match>,
}

/// Figures for metrics.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct IndexStats {
    /// Blocks known.
    pub blocks: u64,
    /// Bytes charged.
    pub bytes: u64,
    /// Blocks dropped for memory since start.
    pub evicted: u64,
}

/// The prefix index.
#[derive(Debug)]
pub struct Index {
    store: Store,
    members: HashMap<MemberId, Member>,
    by_slot: Vec<Option<MemberId>>,
    /// Slots whose credit counts.
    live: Bits,
    free: Vec<u32>,
    dead: Vec<u32>,
    next_member: u64,
}

#[derive(Debug)]
struct Member {
    /// Salt of this worker in rendezvous ranks.
    salt: u64,
    incarnation: Incarnation,
    slot: u32,
    stage: Stage,
    /// Highest batch number seen in this life; an older snapshot is stale.
    seen: Option<u64>,
}

/// Where a member stands between "nothing" and "exact".
#[derive(Clone, Copy, Debug)]
enum Stage {
    /// No snapshot yet.
    Empty,
    /// Parts of a snapshot have come; `at` is the number of the last.
    Loading { at: u64, since: Duration },
    /// Complete up to `next` − 1.
    Exact { next: u64 },
    /// Lost track at `since`.
    Degraded { since: Duration },
}

/// Whether `Stored` counts.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Gains {
    Count,
    Ignore,
}

/// A degraded worker's credit falls to nothing over this time: ten times the interval in which a snapshot normally arrives.
pub const DEGRADED_CREDIT_MAX: Duration = Duration::from_secs(10);

/// Detached slots that make a sweep worth its pass over all entries.
pub const SWEEP_DEAD_MIN: usize = 64;

// === impl Match ===

impl Match {
    /// Leading blocks in any tier.
    pub fn total(&self) -> u32 {
        self.blocks.iter().sum()
    }
}

// === impl Trust ===

impl Trust {
    /// The word in metrics and receipts.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Degraded => "degraded",
            Self::Fallback => "fallback",
        }
    }
}

// === impl Index ===

impl Index {
    /// An empty index that uses at most about `budget_bytes`.
    pub fn new(budget_bytes: usize) -> Self {
        Self {
            store: Store::new(budget_bytes),
            members: HashMap::new(),
            by_slot: Vec::new(),
            live: Bits::default(),
            free: Vec::new(),
            dead: Vec::new(),
            next_member: 0,
        }
    }

    /// Adds one life of a worker; `salt` is the worker's in rendezvous ranks.
    pub fn attach(&mut self, salt: u64, incarnation: Incarnation) -> MemberId {
        let id = MemberId(self.next_member);
        self.next_member += 1;
        let slot = self.new_slot(id);
        self.members.insert(id, Member { salt, incarnation, slot, stage: Stage::Empty, seen: None });
        id
    }

    /// Takes a member and all its credit away.
    pub fn detach(&mut self, id: MemberId) {
        if let Some(member) = self.members.remove(&id) {
            self.retire(member.slot);
        }
    }

    /// Applies one batch.
    pub fn apply(&mut self, id: MemberId, batch: &EventBatch, now: Duration) -> Applied {
        let Some(member) = self.members.get(&id) else { return Applied::Fenced };
        if member.incarnation != batch.incarnation {
            return Applied::Fenced;
        }
        let applied = match batch.snapshot {
            Some(last) => self.snapshot_part(id, batch, last, now),
            None => self.delta(id, batch, now),
        };
        if let Some(member) = self.members.get_mut(&id) {
            member.seen = Some(member.seen.map_or(batch.seq, |seen| seen.max(batch.seq)));
        }
        applied
    }

    /// The event stream of a member broke off: its credit decays until a new snapshot is complete.
    pub fn interrupted(&mut self, id: MemberId, now: Duration) {
        let Some(member) = self.members.get_mut(&id) else { return };
        match member.stage {
            Stage::Empty | Stage::Degraded { .. } => {}
            Stage::Exact { .. } => member.stage = Stage::Degraded { since: now },
            // Half a snapshot is no ground to stand on once its stream is gone.
            Stage::Loading { .. } => {
                member.stage = Stage::Empty;
                self.renew_slot(id);
            }
        }
    }

    /// How far a member can be believed at `now`.
    pub fn trust(&self, id: MemberId, now: Duration) -> Trust {
        match self.members.get(&id).map(|member| member.stage) {
            None | Some(Stage::Empty) => Trust::Fallback,
            Some(Stage::Exact { .. }) => Trust::Exact,
            Some(Stage::Loading { since, .. } | Stage::Degraded { since }) => {
                if now.saturating_sub(since) < DEGRADED_CREDIT_MAX {
                    Trust::Degraded
                } else {
                    Trust::Fallback
                }
            }
        }
    }

    /// Looks a prompt's keys up: the `holders_max` members with the longest leading part, ties by rendezvous rank under `affinity`, and the
    /// credit of `asked`. Marks what it passes as used.
    pub fn matches(&self, keys: &[BlockKey], affinity: u64, asked: &[MemberId], holders_max: usize, now: Duration) -> Matches {
        let mut chain: Vec<&Entry> = Vec::with_capacity(keys.len());
        // Members that got to a depth and not beyond it, as nested sets, shallowest first.
        let mut levels: Vec<(usize, Bits)> = Vec::new();
        let mut active = self.live.clone();
        let mut next = Bits::with_len(self.by_slot.len());
        let clock = self.store.tick();
        for key in keys {
            let Some(entry) = self.store.get(key) else { break };
            entry.holders_within(&active, &mut next);
            if !chain.is_empty() && !next.same(&active) {
                levels.push((chain.len(), active.clone()));
            }
            if next.is_empty() {
                active.zero();
                break;
            }
            entry.touch(clock);
            std::mem::swap(&mut active, &mut next);
            chain.push(entry);
        }
        if !chain.is_empty() && !active.is_empty() {
            levels.push((chain.len(), active));
        }
        let holders = self.longest(&chain, &levels, affinity, holders_max, now);
        let asked = asked.iter().map(|id| self.credit(&chain, *id, now)).collect();
        Matches { holders, asked }
    }

    /// Figures for metrics.
    pub fn stats(&self) -> IndexStats {
        IndexStats { blocks: self.store.len() as u64, bytes: self.store.bytes() as u64, evicted: self.store.evicted() }
    }

    /// Bytes charged to one tenant.
    pub fn tenant_bytes(&self, tenant: &TenantTag) -> usize {
        self.store.tenant_bytes(tenant)
    }

    fn longest(
        &self,
        chain: &[&Entry],
        levels: &[(usize, Bits)],
        affinity: u64,
        max: usize,
        now: Duration,
    ) -> Vec<(MemberId, Match)> {
        let mut holders: Vec<(MemberId, Match)> = Vec::new();
        let mut deeper: Option<&Bits> = None;
        for (_, reached) in levels.iter().rev() {
            if holders.len() >= max {
                break;
            }
            let fresh = reached.iter().filter(|slot| deeper.is_none_or(|deeper| !deeper.has(*slot)));
            let mut fresh: Vec<(u64, MemberId)> = fresh
                .filter_map(|slot| {
                    let id = (*self.by_slot.get(slot as usize)?)?;
                    Some((rank(self.members.get(&id)?.salt, affinity), id))
                })
                .collect();
            let wanted = max - holders.len();
            if fresh.len() > wanted {
                fresh.select_nth_unstable_by(wanted - 1, |a, b| b.cmp(a));
                fresh.truncate(wanted);
            }
            fresh.sort_unstable_by(|a, b| b.cmp(a));
            holders.extend(fresh.into_iter().map(|(_, id)| (id, self.credit(chain, id, now))));
            deeper = Some(reached);
        }
        holders.retain(|(_, credit)| credit.confidence > 0.0);
        holders
    }

    fn credit(&self, chain: &[&Entry], id: MemberId, now: Duration) -> Match {
        let Some(member) = self.members.get(&id) else { return Match::default() };
        let confidence = match member.stage {
            Stage::Empty => 0.0,
            Stage::Exact { .. } => 1.0,
            Stage::Loading { since, .. } | Stage::Degraded { since } => {
                let age = now.saturating_sub(since).as_secs_f32() / DEGRADED_CREDIT_MAX.as_secs_f32();
                (1.0 - age).max(0.0)
            }
        };
        let mut credit = Match { blocks: [0; 3], confidence };
        if confidence > 0.0 {
            for entry in chain {
                let Some(tier) = entry.fastest(member.slot) else { break };
                credit.blocks[tier as usize] += 1;
            }
        }
        credit
    }

    fn snapshot_part(&mut self, id: MemberId, batch: &EventBatch, last: bool, now: Duration) -> Applied {
        let Some(member) = self.members.get(&id) else { return Applied::Fenced };
        let continues = match member.stage {
            // Every part of one snapshot carries its position.
            Stage::Loading { at, .. } => batch.seq == at,
            _ => false,
        };
        if !continues {
            if member.seen.is_some_and(|seen| batch.seq < seen) {
                // It describes a pool older than events that were already seen.
                return if matches!(member.stage, Stage::Exact { .. }) { Applied::Duplicate } else { Applied::Gap };
            }
            self.renew_slot(id);
        }
        self.write(id, batch, Gains::Count);
        let Some(member) = self.members.get_mut(&id) else { return Applied::Fenced };
        let since = match member.stage {
            Stage::Loading { since, .. } => since,
            _ => now,
        };
        member.stage = if last { Stage::Exact { next: batch.seq + 1 } } else { Stage::Loading { at: batch.seq, since } };
        Applied::Applied
    }

    fn delta(&mut self, id: MemberId, batch: &EventBatch, now: Duration) -> Applied {
        let Some(member) = self.members.get_mut(&id) else { return Applied::Fenced };
        match member.stage {
            Stage::Exact { next } if batch.seq == next => {
                member.stage = Stage::Exact { next: next + 1 };
                self.write(id, batch, Gains::Count);
                Applied::Applied
            }
            Stage::Exact { next } if batch.seq < next => Applied::Duplicate,
            Stage::Exact { .. } => {
                member.stage = Stage::Degraded { since: now };
                self.write(id, batch, Gains::Ignore);
                Applied::Gap
            }
            Stage::Degraded { .. } => {
                self.write(id, batch, Gains::Ignore);
                Applied::Gap
            }
            Stage::Loading { .. } => {
                // A snapshot that breaks off leaves nothing to build on.
                member.stage = Stage::Empty;
                self.renew_slot(id);
                Applied::Gap
            }
            Stage::Empty => Applied::Gap,
        }
    }

    /// Writes the changes of a batch. After a gap only losses count: what is stored may have left again unseen.
    fn write(&mut self, id: MemberId, batch: &EventBatch, gains: Gains) {
        let Some(slot) = self.members.get(&id).map(|member| member.slot) else { return };
        for event in &batch.events {
            match event {
                CacheEvent::Stored { keys, parent, tier, tenant } => {
                    if gains == Gains::Count {
                        self.store.stored(slot, *tier, tenant, *parent, keys);
                    }
                }
                CacheEvent::Removed { keys, tier, .. } => self.store.removed(slot, *tier, keys),
                CacheEvent::Cleared { tenant } => self.store.cleared(slot, tenant.as_ref()),
            }
        }
    }

    fn new_slot(&mut self, id: MemberId) -> u32 {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.by_slot.push(None);
            self.by_slot.len() as u32 - 1
        });
        self.by_slot[slot as usize] = Some(id);
        self.live.set(slot);
        slot
    }

    fn renew_slot(&mut self, id: MemberId) {
        let Some(old) = self.members.get(&id).map(|member| member.slot) else { return };
        self.retire(old);
        let slot = self.new_slot(id);
        if let Some(member) = self.members.get_mut(&id) {
            member.slot = slot;
        }
    }

    fn retire(&mut self, slot: u32) {
        self.live.clear(slot);
        self.by_slot[slot as usize] = None;
        self.dead.push(slot);
        if self.dead.len() >= SWEEP_DEAD_MIN.max(self.members.len()) {
            let mut dead = Bits::default();
            self.dead.iter().for_each(|slot| dead.set(*slot));
            self.store.sweep(&dead);
            self.free.append(&mut self.dead);
        }
    }
}
