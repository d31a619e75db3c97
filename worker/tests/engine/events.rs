//! An index rebuilt from events equals the pool's at every epoch, whatever the transport does.

use crate::rig::{Dice, Rig, prompt, request, rig, settings};
use kvasir_core::{BlockKey, CacheEvent, EventBatch, Tier};
use kvasir_worker::kv::{EventStream, FlushScope};
use std::collections::{HashMap, HashSet};

/// A consumer as a router would write it.
#[derive(Default)]
struct Index {
    keys: HashMap<BlockKey, Option<BlockKey>>,
    next: Option<u64>,
    snapshot: Option<HashMap<BlockKey, Option<BlockKey>>>,
    snapshots: u32,
}

impl Index {
    /// False if state was lost and a snapshot is needed.
    fn apply(&mut self, batch: &EventBatch) -> bool {
        if let Some(last) = batch.snapshot {
            let mut keys = self.snapshot.take().unwrap_or_default();
            batch.events.iter().for_each(|event| change(&mut keys, event));
            if last {
                self.keys = keys;
                self.next = Some(batch.seq + 1);
                self.snapshots += 1;
            } else {
                self.snapshot = Some(keys);
            }
            return true;
        }
        match self.next {
            Some(next) if batch.seq < next => true,
            Some(next) if batch.seq == next => {
                batch.events.iter().for_each(|event| change(&mut self.keys, event));
                self.next = Some(next + 1);
                true
            }
            _ => {
                self.next = None;
                false
            }
        }
    }

    fn exact(&self) -> bool {
        self.next.is_some()
    }
}

fn change(keys: &mut HashMap<BlockKey, Option<BlockKey>>, event: &CacheEvent) {
    match event {
        CacheEvent::Stored { keys: stored, parent, tier, .. } => {
            assert_eq!(*tier, Tier::Device);
            let mut above = *parent;
            for key in stored {
                assert!(above.is_none_or(|above| keys.contains_key(&above)), "a block is stored after its parent");
                assert!(keys.insert(*key, above).is_none(), "a block is stored once");
                above = Some(*key);
            }
        }
        CacheEvent::Removed { keys: removed, .. } => {
            for key in removed {
                assert!(keys.remove(key).is_some(), "only what was stored is removed");
                assert!(!keys.values().any(|parent| *parent == Some(*key)), "removals are leaf first");
            }
        }
        CacheEvent::Cleared { .. } => keys.clear(),
    }
}

fn equals_pool(rig: &Rig, index: &Index) -> bool {
    let keys: HashSet<_> = rig.engine.pool().keys().collect();
    keys.len() == index.keys.len() && keys.iter().all(|key| index.keys.contains_key(key))
}

/// One random thing that moves blocks.
fn stir(rig: &mut Rig, dice: &mut Dice, readers: &mut Vec<kvasir_worker::engine::ChunkReceiver>) {
    match dice.below(12) {
        0..=3 if rig.engine.requests() < 6 => {
            let mut tokens = prompt(dice.below(4), 12);
            tokens.extend(prompt(dice.below(20), dice.below(20) as usize + 1));
            let tenant = ["a", "b"][dice.below(2) as usize];
            readers.push(rig.submit(request(tenant, &tokens, dice.below(12) as u32 + 1)));
        }
        4 if !readers.is_empty() => drop(readers.swap_remove(dice.below(readers.len() as u64) as usize)),
        5 => {
            rig.engine.preempt_one();
        }
        6 if dice.chance(10) => {
            let handle = rig.handle.clone();
            let scope = if dice.chance(30) { FlushScope::All } else { FlushScope::Tenant(kvasir_core::TenantTag("a".into())) };
            rig.command(handle.flush(scope));
        }
        _ => {
            rig.engine.step();
        }
    }
}

fn subscribe(rig: &mut Rig) -> EventStream {
    let handle = rig.handle.clone();
    rig.command(async move { handle.events().await })
}

#[test]
fn a_faithful_transport_keeps_the_index_exact_at_every_epoch() {
    let mut rig = rig(settings(24));
    let mut dice = Dice(1);
    let mut readers = Vec::new();
    let stream = subscribe(&mut rig);
    let mut index = Index::default();
    let mut batches = 0;
    for _ in 0..20_000 {
        stir(&mut rig, &mut dice, &mut readers);
        rig.engine.step();
        while let Some(batch) = stream.try_recv() {
            batches += 1;
            assert!(index.apply(&batch), "no gap in the stream itself");
        }
        assert!(equals_pool(&rig, &index), "epoch {}", rig.engine.epoch());
    }
    assert!(batches > 2000 && rig.engine.stats().evictions.iter().sum::<u64>() > 1000, "the path is taken: {batches}");
    assert_eq!(index.snapshots, 1);
    rig.assert_lawful();
}

#[test]
fn drops_duplicates_and_reorderings_are_seen_and_repaired_by_a_snapshot() {
    let mut rig = rig(settings(24));
    let mut dice = Dice(2);
    let mut readers = Vec::new();
    let stream = subscribe(&mut rig);
    let mut index = Index::default();
    let (mut exact, mut lost) = (0, 0);
    for _ in 0..20_000 {
        stir(&mut rig, &mut dice, &mut readers);
        rig.engine.step();
        let mut batches: Vec<_> = std::iter::from_fn(|| stream.try_recv()).collect();
        if batches.iter().all(|batch| batch.snapshot.is_none()) && dice.chance(10) && !batches.is_empty() {
            match dice.below(3) {
                0 => drop(batches.remove(dice.below(batches.len() as u64) as usize)),
                1 => batches.insert(0, batches[0].clone()),
                _ => batches.reverse(),
            }
        }
        let whole = batches.iter().all(|batch| index.apply(batch));
        if !whole {
            lost += 1;
            stream.resync();
        }
        if index.exact() && index.next == Some(last_seq(&batches).map_or(index.next.unwrap(), |seq| seq + 1)) && whole {
            if equals_pool(&rig, &index) {
                exact += 1;
            } else {
                // A batch that was dropped last cannot be known yet; the next one shows the gap.
                assert!(index.next.is_some());
            }
        }
    }
    assert!(lost > 50 && exact > 10_000, "{lost} losses, {exact} exact epochs");
    // At rest, after one more event and a repair, the index is exact.
    drop(readers);
    rig.run_dry();
    rig.ask(request("z", &prompt(99, 9), 1));
    loop {
        let batches: Vec<_> = std::iter::from_fn(|| stream.try_recv()).collect();
        if batches.is_empty() {
            break;
        }
        if !batches.iter().all(|batch| index.apply(batch)) {
            stream.resync();
            rig.engine.step();
        }
    }
    assert!(index.exact() && equals_pool(&rig, &index));
}

fn last_seq(batches: &[EventBatch]) -> Option<u64> {
    batches.iter().map(|batch| batch.seq).max()
}

#[test]
fn a_slow_consumer_loses_its_queue_never_the_engines_time_and_gets_a_snapshot() {
    let mut narrow = settings(24);
    narrow.queue.events_max = 8;
    let mut rig = rig(narrow);
    let mut dice = Dice(3);
    let mut readers = Vec::new();
    let stream = subscribe(&mut rig);
    let mut index = Index::default();
    for round in 0..300 {
        for _ in 0..dice.below(60) {
            stir(&mut rig, &mut dice, &mut readers);
        }
        // Reads what is there; an empty lost queue asks for a snapshot, which comes with a step.
        for _ in 0..3 {
            while let Some(batch) = stream.try_recv() {
                assert!(index.apply(&batch), "what is read has no gap");
            }
            rig.engine.step();
        }
        while let Some(batch) = stream.try_recv() {
            assert!(index.apply(&batch));
        }
        assert!(equals_pool(&rig, &index), "round {round}");
    }
    assert!(index.snapshots > 20, "{}", index.snapshots);
}

#[test]
fn a_snapshot_is_cut_into_chunks_and_names_parents_first() {
    let mut rig = rig(settings(400));
    for seed in 0..60 {
        rig.ask(request("t", &prompt(seed, 21), 1));
    }
    let stream = subscribe(&mut rig);
    let batches: Vec<_> = std::iter::from_fn(|| stream.try_recv()).collect();
    assert!(batches.len() > 3);
    assert!(batches[..batches.len() - 1].iter().all(|batch| batch.snapshot == Some(false)));
    assert_eq!(batches.last().unwrap().snapshot, Some(true));
    let mut index = Index::default();
    assert!(batches.iter().all(|batch| index.apply(batch)));
    assert!(equals_pool(&rig, &index));
}
