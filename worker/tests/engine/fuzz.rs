//! Model-based fuzz of the pool: random operations against a naive map, every law after each.
//!
//! The map knows blocks by (domain, identity, all tokens before and in the block): what a hit must mean. It learns of evictions from the
//! pool's events, and checks that those are leaf first.

use crate::rig::{Dice, identity, prompt, secret};
use kvasir_core::{BlockKey, CacheEvent, KeyChain, ModelIdentity, Prefix, ReuseDomain, TenantTag, TokenId};
use kvasir_worker::kv::{FlushScope, Owner, Pool, PoolSettings, Published, Retention, extend_keys};
use std::collections::HashMap;

/// Operations in the gate; the soak takes more through the environment.
const OPERATIONS: u64 = 1_000_000;
const BLOCK: u32 = 4;
/// Operations per pool.
const PER_POOL: u64 = 5_000;
/// Seeds that once failed.
const KEPT: &[u64] = &[];

/// Size of a long loop: the gate's, unless the soak asks for more.
pub fn from_environment(name: &str, gate: u64) -> u64 {
    #[expect(
        clippy::disallowed_methods,
        reason = "the soak passes the size of loops to test binaries, which have no arguments of their own"
    )]
    let value = std::env::var(name);
    value.ok().map_or(gate, |text| text.parse().unwrap())
}

/// What a block's memory holds, as the naive model sees it: owner and all tokens up to its end.
type Content = (usize, Vec<TokenId>);

struct Live {
    owner: usize,
    tokens: Vec<TokenId>,
    keys: Vec<BlockKey>,
    blocks: Vec<u32>,
    published: usize,
    publishes: bool,
    valid: usize,
}

struct Model {
    pool: Pool,
    dice: Dice,
    owners: Vec<Owner>,
    live: Vec<Live>,
    /// Written memory.
    memory: Vec<Option<Content>>,
    /// Published names, as events tell.
    stored: HashMap<BlockKey, Option<BlockKey>>,
    /// What each key stands for.
    meaning: HashMap<BlockKey, Content>,
    hits: u64,
}

fn owners() -> Vec<Owner> {
    let mut owners = Vec::new();
    for (tenant, model) in [("a", "m"), ("b", "m"), ("a", "n"), ("c", "m")] {
        let identity: ModelIdentity = identity(model);
        let domain = ReuseDomain::derive(&secret(), tenant, 0, None);
        let shared = (tenant != "c").then(|| (crate::rig::shared_domain(), 6));
        owners.push(Owner {
            prefix: Prefix::new(&identity, &domain, shared.as_ref().map(|(domain, tokens)| (domain, *tokens))),
            identity,
            tenant: TenantTag(tenant.into()),
            secret_epoch: secret().epoch(),
            retention: Retention::default(),
        });
    }
    owners
}

impl Model {
    fn new(seed: u64) -> Self {
        let mut dice = Dice(seed);
        let blocks = 8 + dice.below(40) as u32;
        Self {
            pool: Pool::new(PoolSettings { blocks, block_size: BLOCK }),
            dice,
            owners: owners(),
            live: Vec::new(),
            memory: vec![None; blocks as usize],
            stored: HashMap::new(),
            meaning: HashMap::new(),
            hits: 0,
        }
    }

    fn keys(&mut self, owner: usize, tokens: &[TokenId]) -> Vec<BlockKey> {
        let prefix = self.owners[owner].prefix;
        let mut keys = Vec::new();
        extend_keys(&mut KeyChain::new(prefix, BLOCK), &mut keys, BLOCK, tokens, |key| key);
        // Owners share the blocks of the registered prefix: those mean the same to all of one identity.
        for (number, key) in keys.iter().enumerate() {
            let shared = number < prefix.shared_blocks(BLOCK) as usize;
            let who = if shared { if self.owners[owner].identity == identity("n") { 101 } else { 100 } } else { owner };
            self.meaning.insert(*key, (who, tokens[..(number + 1) * BLOCK as usize].to_vec()));
        }
        keys
    }

    /// Index of the newest sequence, or any: operations are drawn over what lives.
    fn pick(&mut self) -> Option<usize> {
        (!self.live.is_empty()).then(|| self.dice.below(self.live.len() as u64) as usize)
    }

    fn step(&mut self) {
        match self.dice.below(16) {
            0..=3 => self.admit(),
            4..=9 => self.write(),
            10..=12 => self.release(),
            13 => self.fork(),
            14 if self.dice.chance(3) => self.flush(),
            _ => self.pool.fail_allocation_at(Some(self.pool.allocations() + 1 + self.dice.below(4))),
        }
        self.follow_events();
        self.check();
    }

    fn admit(&mut self) {
        let owner = self.dice.below(self.owners.len() as u64) as usize;
        let mut tokens = prompt(self.dice.below(2), 8);
        tokens.extend(prompt(50 + self.dice.below(8), self.dice.below(28) as usize));
        let keys = self.keys(owner, &tokens);
        let found = self.pool.lookup(&self.owners[owner].prefix, &keys, &tokens);
        let usable = (tokens.len() - 1) / BLOCK as usize;
        let naive = keys.iter().take(usable).take_while(|key| self.stored.contains_key(key)).count();
        assert_eq!(found.len(), naive, "a lookup finds exactly the longest stored chain");
        for (block, key) in found.iter().zip(&keys) {
            assert_eq!(self.memory[*block as usize].as_ref(), Some(&self.meaning[key]), "a hit is what it claims to be");
        }
        let reason = self.pool.miss_reason(&self.owners[owner].prefix, &keys, tokens.len() as u32, found.len() as u32);
        assert_eq!(reason.is_none(), found.len() * BLOCK as usize + 1 >= tokens.len());
        self.hits += found.len() as u64;
        self.pool.acquire(&found);
        let needed = tokens.len().div_ceil(BLOCK as usize) - found.len();
        let available = self.pool.available();
        match self.pool.reserve(needed as u32) {
            Ok(new) => {
                assert_eq!(new.len(), needed);
                for block in &new {
                    self.memory[*block as usize] = None;
                }
                let (published, valid) = (found.len(), found.len() * BLOCK as usize);
                let blocks = found.into_iter().chain(new).collect();
                self.live.push(Live { owner, tokens, keys, blocks, published, publishes: true, valid });
            }
            Err(full) => {
                assert!(full.available == 0 || needed as u32 > available, "refused only for lack of room or by injection");
                self.pool.release(&found);
            }
        }
    }

    /// Computes some further positions and publishes what is full.
    fn write(&mut self) {
        let Some(index) = self.pick() else { return };
        let more = 1 + self.dice.below(12) as usize;
        let live = &mut self.live[index];
        live.valid = (live.valid + more).min(live.tokens.len());
        for number in live.published..live.valid / BLOCK as usize {
            let end = (number + 1) * BLOCK as usize;
            let key = live.keys[number];
            self.memory[live.blocks[number] as usize] = Some(self.meaning[&key].clone());
            if !live.publishes {
                continue;
            }
            let tokens = &live.tokens[end - BLOCK as usize..end];
            match self.pool.publish(&self.owners[live.owner], &mut live.blocks, number, key, tokens) {
                Published::New => assert!(!self.stored.contains_key(&key), "published twice"),
                Published::Duplicate => {
                    assert_eq!(self.memory[live.blocks[number] as usize].as_ref(), Some(&self.meaning[&key]));
                }
                Published::Refused => {
                    live.publishes = false;
                    continue;
                }
            }
            live.published = number + 1;
        }
    }

    fn release(&mut self) {
        let Some(index) = self.pick() else { return };
        let live = self.live.swap_remove(index);
        self.pool.release(&live.blocks);
    }

    /// Shares the full written blocks and copies the tail.
    fn fork(&mut self) {
        let Some(index) = self.pick() else { return };
        let full = self.live[index].valid / BLOCK as usize;
        let shared = self.live[index].blocks[..full].to_vec();
        let rest = self.live[index].tokens.len().div_ceil(BLOCK as usize) - full;
        let Ok(new) = self.pool.reserve(rest as u32) else { return };
        for block in &new {
            self.memory[*block as usize] = None;
        }
        self.pool.acquire(&shared);
        let origin = &self.live[index];
        let fork = Live {
            owner: origin.owner,
            tokens: origin.tokens.clone(),
            keys: origin.keys.clone(),
            blocks: shared.into_iter().chain(new).collect(),
            published: origin.published.min(full),
            publishes: origin.publishes,
            valid: full * BLOCK as usize,
        };
        self.live.push(fork);
    }

    fn flush(&mut self) {
        let scope = match self.dice.below(4) {
            0 => FlushScope::All,
            1 => FlushScope::Tenant(TenantTag("a".into())),
            2 => FlushScope::Identity(identity("n")),
            _ => FlushScope::SecretEpochNot(secret().epoch()),
        };
        let before = self.stored.len();
        let gone = self.pool.flush(&scope);
        self.follow_events();
        assert_eq!(before - self.stored.len(), gone as usize);
        for live in self.live.iter_mut().filter(|live| scope.covers_owner(&self.owners[live.owner])) {
            live.publishes = false;
        }
    }

    fn follow_events(&mut self) {
        for event in self.pool.take_events() {
            match event {
                CacheEvent::Stored { keys, parent, .. } => {
                    let mut above = parent;
                    for key in keys {
                        assert!(above.is_none_or(|above| self.stored.contains_key(&above)));
                        assert!(self.stored.insert(key, above).is_none());
                        above = Some(key);
                    }
                }
                CacheEvent::Removed { keys, .. } => {
                    for key in keys {
                        assert!(self.stored.remove(&key).is_some());
                        assert!(!self.stored.values().any(|parent| *parent == Some(key)), "leaf first");
                    }
                }
                CacheEvent::Cleared { .. } => self.stored.clear(),
            }
        }
    }

    fn check(&mut self) {
        self.pool.check().unwrap();
        let counts = self.pool.counts();
        assert_eq!(counts.free + counts.cached + counts.held, counts.total);
        let mut held = vec![false; self.memory.len()];
        self.live.iter().flat_map(|live| &live.blocks).for_each(|block| held[*block as usize] = true);
        assert_eq!(held.iter().filter(|held| **held).count(), counts.held as usize, "held = blocks in tables");
        assert_eq!(self.stored.len(), self.pool.keys().count());
        if self.dice.chance(1) {
            assert!(self.pool.keys().all(|key| self.stored.contains_key(&key)), "events tell the whole index");
        }
    }
}

fn run(seed: u64) -> (u64, u64) {
    let mut model = Model::new(seed);
    for _ in 0..PER_POOL {
        model.step();
    }
    let evicted = model.pool.evictions().iter().sum();
    while let Some(live) = model.live.pop() {
        model.pool.release(&live.blocks);
    }
    model.check();
    assert_eq!(model.pool.counts().held, 0);
    let total = model.pool.counts().total;
    model.pool.fail_allocation_at(None);
    assert_eq!(model.pool.reserve(total).unwrap().len(), total as usize, "all of it can be had again");
    (model.hits, evicted)
}

#[test]
fn a_million_random_operations_keep_every_law() {
    let count = from_environment("KVASIR_FUZZ_OPERATIONS", OPERATIONS) / PER_POOL;
    let (mut hits, mut evicted) = (0, 0);
    for seed in KEPT.iter().copied().chain(1..=count) {
        match std::panic::catch_unwind(|| run(seed)) {
            Ok(counts) => {
                hits += counts.0;
                evicted += counts.1;
            }
            Err(cause) => {
                eprintln!("seed {seed} failed: add it to KEPT");
                std::panic::resume_unwind(cause);
            }
        }
    }
    assert!(hits > count * 500 && evicted > count * 100, "the paths are taken: {hits} hits, {evicted} evictions");
}
