//! The index against an oracle: real pools, a faulty channel, restarts on the same address.

use super::*;
use kvasir_core::{Digest, RemovalCause, Tier};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

const BUDGET: usize = 64 << 20;
const T0: Duration = Duration::ZERO;

fn key(chain: u8, depth: u8) -> BlockKey {
    let mut bytes = [0u8; 32];
    // The first bytes are the table's hash: let several keys collide in them.
    bytes[0] = chain % 3;
    bytes[9] = chain;
    bytes[10] = depth + 1;
    BlockKey::from_digest(Digest::new(bytes))
}

fn chain(number: u8, len: u8) -> Vec<BlockKey> {
    (0..len).map(|depth| key(number, depth)).collect()
}

fn tag(name: &str) -> TenantTag {
    TenantTag(name.into())
}

fn batch(life: u8, seq: u64, snapshot: Option<bool>, events: Vec<CacheEvent>) -> EventBatch {
    EventBatch { incarnation: Incarnation([life; 8]), seq, epoch: seq, snapshot, events }
}

fn stored(keys: &[BlockKey], tenant: &str) -> CacheEvent {
    CacheEvent::Stored { keys: keys.to_vec(), parent: None, tier: Tier::Device, tenant: tag(tenant) }
}

fn removed(keys: &[BlockKey], tier: Tier) -> CacheEvent {
    CacheEvent::Removed { keys: keys.to_vec(), tier, cause: RemovalCause::Capacity }
}

/// A member that is exact and holds `keys`.
fn member(index: &mut Index, life: u8, keys: &[BlockKey]) -> MemberId {
    let id = index.attach(u64::from(life) << 40, Incarnation([life; 8]));
    assert_eq!(index.apply(id, &batch(life, 1, Some(true), vec![stored(keys, "t")]), T0), Applied::Applied);
    id
}

fn depth(index: &Index, id: MemberId, keys: &[BlockKey]) -> u32 {
    index.matches(keys, 0, &[id], 0, T0).asked[0].total()
}

#[test]
fn the_longest_holders_come_first_and_each_tier_is_told_apart() {
    let mut index = Index::new(BUDGET);
    let keys = chain(1, 10);
    let short = member(&mut index, 1, &keys[..4]);
    let long = member(&mut index, 2, &keys[..8]);
    let other = member(&mut index, 3, &chain(2, 10));
    let demote = vec![
        CacheEvent::Stored { keys: keys[6..8].to_vec(), parent: Some(keys[5]), tier: Tier::Host, tenant: tag("t") },
        removed(&keys[6..8], Tier::Device),
    ];
    index.apply(long, &batch(2, 2, None, demote), T0);
    let matches = index.matches(&keys, 7, &[other, short], 8, T0);
    assert_eq!(matches.holders.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [long, short]);
    assert_eq!(matches.holders[0].1, Match { blocks: [6, 2, 0], confidence: 1.0 });
    assert_eq!(matches.asked.iter().map(Match::total).collect::<Vec<_>>(), [0, 4]);
    assert_eq!(index.matches(&keys, 7, &[], 1, T0).holders.len(), 1);
}

#[test]
fn events_of_another_life_are_fenced_even_when_their_numbers_have_overtaken() {
    let mut index = Index::new(BUDGET);
    let keys = chain(1, 4);
    let old = member(&mut index, 1, &keys);
    index.detach(old);
    let new = index.attach(1 << 40, Incarnation([2; 8]));
    assert_eq!(depth(&index, new, &keys), 0, "the old life's blocks are gone at once");
    assert_eq!(index.apply(new, &batch(1, 900, Some(true), vec![stored(&keys, "t")]), T0), Applied::Fenced);
    assert_eq!(index.apply(old, &batch(1, 2, None, vec![stored(&keys, "t")]), T0), Applied::Fenced);
    assert_eq!(index.trust(new, T0), Trust::Fallback);
    assert_eq!(index.apply(new, &batch(2, 0, Some(true), vec![]), T0), Applied::Applied);
    assert_eq!((index.trust(new, T0), depth(&index, new, &keys)), (Trust::Exact, 0));
}

#[test]
fn a_gap_degrades_decays_and_a_snapshot_repairs() {
    let mut index = Index::new(BUDGET);
    let keys = chain(1, 4);
    let id = member(&mut index, 1, &keys);
    assert_eq!(index.apply(id, &batch(1, 3, None, vec![stored(&chain(2, 2), "t")]), T0), Applied::Gap);
    assert_eq!(index.trust(id, T0), Trust::Degraded);
    assert_eq!(depth(&index, id, &chain(2, 2)), 0, "after a gap nothing new is believed");
    let half = index.matches(&keys, 0, &[id], 1, DEGRADED_CREDIT_MAX / 2);
    assert!((half.asked[0].confidence - 0.5).abs() < 1e-3);
    assert_eq!(index.trust(id, DEGRADED_CREDIT_MAX), Trust::Fallback);
    assert!(index.matches(&keys, 0, &[], 8, DEGRADED_CREDIT_MAX).holders.is_empty());
    assert_eq!(index.apply(id, &batch(1, 2, Some(true), vec![]), T0), Applied::Gap, "older than what was seen");
    assert_eq!(index.apply(id, &batch(1, 3, Some(true), vec![stored(&keys[..1], "t")]), T0), Applied::Applied);
    assert_eq!((index.trust(id, T0), depth(&index, id, &keys)), (Trust::Exact, 1));
}

#[test]
fn losses_count_even_while_degraded() {
    let mut index = Index::new(BUDGET);
    let keys = chain(1, 4);
    let id = member(&mut index, 1, &keys);
    index.apply(id, &batch(1, 9, None, vec![removed(&keys[2..], Tier::Device)]), T0);
    assert_eq!(depth(&index, id, &keys), 2);
    index.apply(id, &batch(1, 10, None, vec![CacheEvent::Cleared { tenant: None }]), T0);
    assert_eq!(depth(&index, id, &keys), 0);
}

#[test]
fn clearing_a_tenant_takes_its_blocks_and_those_of_shared_prefixes_only() {
    let mut index = Index::new(BUDGET);
    let (mine, yours, shared) = (chain(1, 2), chain(2, 2), chain(3, 2));
    let id = member(&mut index, 1, &[]);
    let events = vec![stored(&mine, "a"), stored(&yours, "b"), stored(&shared, "b"), stored(&shared, "a")];
    index.apply(id, &batch(1, 2, None, events), T0);
    index.apply(id, &batch(1, 3, None, vec![CacheEvent::Cleared { tenant: Some(tag("a")) }]), T0);
    assert_eq!([&mine, &yours, &shared].map(|keys| depth(&index, id, keys)), [0, 2, 0]);
    index.store.check();
}

#[test]
fn half_a_snapshot_whose_stream_broke_leaves_nothing() {
    let mut index = Index::new(BUDGET);
    let keys = chain(1, 4);
    let id = index.attach(0, Incarnation([1; 8]));
    index.apply(id, &batch(1, 5, Some(false), vec![stored(&keys, "t")]), T0);
    assert_eq!(index.trust(id, T0), Trust::Degraded);
    index.interrupted(id, T0);
    assert_eq!((index.trust(id, T0), depth(&index, id, &keys)), (Trust::Fallback, 0));
    let exact = member(&mut index, 2, &keys);
    index.interrupted(exact, T0);
    assert_eq!((index.trust(exact, T0), depth(&index, exact, &keys)), (Trust::Degraded, 4));
}

#[test]
fn memory_is_bounded_and_a_flooding_tenant_evicts_only_itself() {
    let budget = 256 << 10;
    let mut index = Index::new(budget);
    let quiet: Vec<Vec<BlockKey>> = (0..4).map(|number| chain(number, 8)).collect();
    let id = member(&mut index, 1, &[]);
    let events = quiet.iter().map(|keys| stored(keys, "quiet")).collect();
    index.apply(id, &batch(1, 2, None, events), T0);
    for number in 0..20_000u64 {
        let digest = blake3::hash(&number.to_le_bytes());
        let flood = BlockKey::from_digest(Digest::new(*digest.as_bytes()));
        index.apply(id, &batch(1, 3 + number, None, vec![stored(&[flood], "flood")]), T0);
        assert!(index.stats().bytes as usize <= budget);
    }
    index.store.check();
    assert!(index.stats().evicted > 15_000);
    assert!(quiet.iter().all(|keys| depth(&index, id, keys) == 8), "the quiet tenant lost blocks");
    assert!(index.tenant_bytes(&tag("flood")) > index.tenant_bytes(&tag("quiet")));
}

#[test]
fn what_is_looked_up_stays_and_leaves_go_before_their_roots() {
    let mut index = Index::new(64 << 10);
    let id = member(&mut index, 1, &[]);
    let used = chain(200, 6);
    index.apply(id, &batch(1, 2, None, vec![stored(&used, "t")]), T0);
    for number in 0..3_000u64 {
        let digest = blake3::hash(&number.to_le_bytes());
        let pair: Vec<BlockKey> = (0..2u8)
            .map(|depth| {
                let mut bytes = *digest.as_bytes();
                bytes[31] = depth;
                BlockKey::from_digest(Digest::new(bytes))
            })
            .collect();
        index.apply(id, &batch(1, 3 + number, None, vec![stored(&pair, "t")]), T0);
        assert_eq!(depth(&index, id, &used), 6, "a chain in use was evicted after {number} others");
        let (root, leaf) = (index.store.get(&pair[0]).is_some(), index.store.get(&pair[1]).is_some());
        assert!(root || !leaf);
    }
    index.store.check();
}

#[test]
fn slots_of_detached_members_are_swept_and_given_out_again() {
    let mut index = Index::new(BUDGET);
    let keys = chain(1, 4);
    for life in 0..(SWEEP_DEAD_MIN as u64 * 5) {
        let id = index.attach(life, Incarnation([7; 8]));
        index.apply(id, &batch(7, 1, Some(true), vec![stored(&keys, "t")]), T0);
        assert_eq!(index.matches(&keys, 0, &[], 1_000, T0).holders, vec![(id, Match { blocks: [4, 0, 0], confidence: 1.0 })]);
        index.detach(id);
        assert_eq!(depth(&index, id, &keys), 0);
    }
    assert!(index.by_slot.len() <= SWEEP_DEAD_MIN * 2 + 2, "{} slots for one member at a time", index.by_slot.len());
    index.store.check();
}

// === oracle ===

#[derive(Default)]
struct Worker {
    life: u8,
    seq: u64,
    pool: BTreeMap<(u8, u8), BTreeSet<Tier>>,
    /// Messages on their way: one batch each, or a whole snapshot, whose parts arrive together or (with their stream) not at all.
    channel: Vec<Vec<EventBatch>>,
    member: Option<MemberId>,
}

#[derive(Clone, Debug)]
enum Step {
    Store { worker: usize, chain: u8, len: u8 },
    Demote { worker: usize, chain: u8 },
    Evict { worker: usize, chain: u8 },
    Clear { worker: usize },
    Next { worker: usize },
    Deliver { worker: usize, at: prop::sample::Index },
    Drop { worker: usize, at: prop::sample::Index },
    Twice { worker: usize, at: prop::sample::Index },
    Snapshot { worker: usize },
    Restart { worker: usize, overtake: u64 },
    Break { worker: usize },
}

const WORKERS: usize = 3;

fn step() -> impl Strategy<Value = Step> {
    let (worker, chain) = (0..WORKERS, 0u8..5);
    let at = any::<prop::sample::Index>();
    prop_oneof![
        4 => (worker.clone(), chain.clone(), 1u8..6).prop_map(|(worker, chain, len)| Step::Store { worker, chain, len }),
        1 => (worker.clone(), chain.clone()).prop_map(|(worker, chain)| Step::Demote { worker, chain }),
        2 => (worker.clone(), chain).prop_map(|(worker, chain)| Step::Evict { worker, chain }),
        1 => worker.clone().prop_map(|worker| Step::Clear { worker }),
        6 => worker.clone().prop_map(|worker| Step::Next { worker }),
        1 => (worker.clone(), at.clone()).prop_map(|(worker, at)| Step::Deliver { worker, at }),
        1 => (worker.clone(), at.clone()).prop_map(|(worker, at)| Step::Drop { worker, at }),
        1 => (worker.clone(), at).prop_map(|(worker, at)| Step::Twice { worker, at }),
        1 => worker.clone().prop_map(|worker| Step::Snapshot { worker }),
        1 => (worker.clone(), 0u64..50).prop_map(|(worker, overtake)| Step::Restart { worker, overtake }),
        1 => worker.prop_map(|worker| Step::Break { worker }),
    ]
}

impl Worker {
    fn emit(&mut self, events: Vec<CacheEvent>) {
        self.seq += 1;
        self.channel.push(vec![batch(self.life, self.seq, None, events)]);
    }

    fn snapshot(&self) -> Vec<EventBatch> {
        let mut parts = Vec::new();
        for ((number, depth), tiers) in self.pool.iter().rev() {
            for tier in tiers {
                let parent = depth.checked_sub(1).map(|above| key(*number, above));
                let event = CacheEvent::Stored { keys: vec![key(*number, *depth)], parent, tier: *tier, tenant: tag("t") };
                parts.push(batch(self.life, self.seq, Some(false), vec![event]));
            }
        }
        parts.push(batch(self.life, self.seq, Some(true), vec![]));
        parts
    }

    /// Leading blocks by fastest tier.
    fn truth(&self, number: u8) -> [u32; 3] {
        let mut blocks = [0; 3];
        for depth in 0..6 {
            let Some(fastest) = self.pool.get(&(number, depth)).and_then(|tiers| tiers.first().copied()) else { break };
            blocks[fastest as usize] += 1;
        }
        blocks
    }

    fn mutate(&mut self, step: &Step) {
        match *step {
            Step::Store { chain: number, len, .. } => {
                for depth in 0..len {
                    self.pool.entry((number, depth)).or_default().insert(Tier::Device);
                }
                self.emit(vec![stored(&chain(number, len), "t")]);
            }
            Step::Demote { chain: number, .. } => {
                let device = self.deepest(number, |tiers| tiers.contains(&Tier::Device));
                if let Some(depth) = device {
                    self.pool.entry((number, depth)).or_default().insert(Tier::Host);
                    self.pool.entry((number, depth)).or_default().remove(&Tier::Device);
                    let parent = depth.checked_sub(1).map(|above| key(number, above));
                    let host = CacheEvent::Stored { keys: vec![key(number, depth)], parent, tier: Tier::Host, tenant: tag("t") };
                    self.emit(vec![host, removed(&[key(number, depth)], Tier::Device)]);
                }
            }
            Step::Evict { chain: number, .. } => {
                if let Some(depth) = self.deepest(number, |_| true) {
                    let tiers = self.pool.remove(&(number, depth)).unwrap_or_default();
                    self.emit(tiers.into_iter().map(|tier| removed(&[key(number, depth)], tier)).collect());
                }
            }
            Step::Clear { .. } => {
                self.pool.clear();
                self.emit(vec![CacheEvent::Cleared { tenant: None }]);
            }
            _ => {}
        }
    }

    fn deepest(&self, number: u8, wanted: impl Fn(&BTreeSet<Tier>) -> bool) -> Option<u8> {
        self.pool.iter().filter(|((chain, _), tiers)| *chain == number && wanted(tiers)).map(|((_, depth), _)| *depth).max()
    }
}

/// Applies one message as the fleet would: a gap asks for a new stream, which begins with a snapshot and loses what was on its way.
fn feed(index: &mut Index, worker: &mut Worker, message: &[EventBatch]) {
    let id = worker.member.expect("attached");
    if message.iter().any(|batch| index.apply(id, batch, T0) == Applied::Gap) {
        worker.channel.clear();
        index.interrupted(id, T0);
        for part in worker.snapshot() {
            assert_eq!(index.apply(id, &part, T0), Applied::Applied);
        }
    }
}

fn run_step(index: &mut Index, workers: &mut [Worker], step: &Step) {
    match step {
        Step::Store { worker, .. } | Step::Demote { worker, .. } | Step::Evict { worker, .. } | Step::Clear { worker } => {
            workers[*worker].mutate(step);
        }
        Step::Deliver { worker, at } => {
            let worker = &mut workers[*worker];
            if !worker.channel.is_empty() {
                let batch = worker.channel.remove(at.index(worker.channel.len()));
                feed(index, worker, &batch);
            }
        }
        Step::Next { worker } => {
            let worker = &mut workers[*worker];
            if !worker.channel.is_empty() {
                let batch = worker.channel.remove(0);
                feed(index, worker, &batch);
            }
        }
        Step::Drop { worker, at } => {
            let worker = &mut workers[*worker];
            if !worker.channel.is_empty() {
                worker.channel.remove(at.index(worker.channel.len()));
            }
        }
        Step::Twice { worker, at } => {
            let worker = &mut workers[*worker];
            if !worker.channel.is_empty() {
                let batch = worker.channel[at.index(worker.channel.len())].clone();
                feed(index, worker, &batch);
            }
        }
        Step::Snapshot { worker } => {
            let parts = workers[*worker].snapshot();
            workers[*worker].channel.push(parts);
        }
        Step::Restart { worker, overtake } => {
            let worker = &mut workers[*worker];
            index.detach(worker.member.expect("attached"));
            // The channel keeps what the old life sent: it arrives late.
            *worker = Worker {
                life: worker.life + 1,
                seq: worker.seq + overtake - overtake.min(&30),
                channel: std::mem::take(&mut worker.channel),
                ..Worker::default()
            };
            worker.member = Some(index.attach(0, Incarnation([worker.life; 8])));
        }
        Step::Break { worker } => index.interrupted(workers[*worker].member.expect("attached"), T0),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]
    #[test]
    fn exact_means_equal_to_the_pool_whatever_the_channel_did(steps in prop::collection::vec(step(), 0..120)) {
        let mut index = Index::new(BUDGET);
        let mut workers: Vec<Worker> = (0..WORKERS).map(|_| Worker { life: 1, ..Worker::default() }).collect();
        for worker in &mut workers {
            worker.member = Some(index.attach(0, Incarnation([1; 8])));
        }
        for step in &steps {
            run_step(&mut index, &mut workers, step);
            for worker in &workers {
                let id = worker.member.expect("attached");
                let quiet = worker.channel.is_empty() && matches!(index.members[&id].stage, Stage::Exact { next } if next == worker.seq + 1);
                if quiet {
                    for number in 0..5 {
                        let credit = index.matches(&chain(number, 6), 0, &[id], 0, T0).asked[0];
                        prop_assert_eq!(credit.blocks, worker.truth(number));
                    }
                }
            }
        }
        // Rest: what is on its way arrives, and each worker says one more thing, so that a lost last batch shows.
        for worker in &mut workers {
            worker.emit(vec![]);
            while !worker.channel.is_empty() {
                let batch = worker.channel.remove(0);
                feed(&mut index, worker, &batch);
            }
            let id = worker.member.expect("attached");
            prop_assert_eq!(index.trust(id, T0), Trust::Exact);
            for number in 0..5 {
                let matches = index.matches(&chain(number, 6), 0, &[id], WORKERS, T0);
                prop_assert_eq!(matches.asked[0].blocks, worker.truth(number), "chain {} of {:?}", number, id);
            }
        }
        index.store.check();
    }
}
