//! KvEvents: a snapshot, then changes; a reader that is too slow gets a new snapshot and ends up with the same index.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test may stop at the first surprise")]

use super::rig::{Rig, prompt, rig, rig_with, settings, soon};
use kvasir_core::{BlockKey, CacheEvent, EventBatch, Tier, block_keys};
use kvasir_proto::convert::EventReader;
use kvasir_proto::worker as wire;
use kvasir_proto::worker::flush_request::Scope;
use std::collections::BTreeSet;
use tonic::Streaming;

/// An index that follows one worker.
struct Follower {
    stream: Streaming<wire::KvEventsResponse>,
    reader: EventReader,
    keys: BTreeSet<BlockKey>,
    seq: u64,
    in_snapshot: bool,
    snapshots: u32,
}

impl Follower {
    async fn new(rig: &Rig) -> Self {
        let stream = rig.client().kv_events(wire::KvEventsRequest {}).await.unwrap().into_inner();
        Self { stream, reader: EventReader::default(), keys: BTreeSet::new(), seq: 0, in_snapshot: false, snapshots: 0 }
    }

    /// Takes the next batch, checking its number.
    async fn next(&mut self) -> EventBatch {
        loop {
            let message = soon("an event", self.stream.message()).await.unwrap().expect("the stream goes on");
            let Some(batch) = self.reader.push(message).unwrap() else { continue };
            match batch.snapshot {
                Some(last) => {
                    if !self.in_snapshot || batch.seq != self.seq {
                        self.keys.clear();
                    }
                    self.in_snapshot = !last;
                    self.snapshots += u32::from(last);
                }
                None => assert_eq!(batch.seq, self.seq + 1, "a gap without a snapshot"),
            }
            self.seq = batch.seq;
            for event in &batch.events {
                self.apply(event);
            }
            return batch;
        }
    }

    fn apply(&mut self, event: &CacheEvent) {
        match event {
            CacheEvent::Stored { keys, parent, tier, .. } => {
                assert_eq!(*tier, Tier::Device);
                assert!(parent.is_none_or(|parent| self.keys.contains(&parent)), "a parent is stored before its children");
                self.keys.extend(keys);
            }
            CacheEvent::Removed { keys, .. } => {
                for key in keys {
                    assert!(self.keys.remove(key), "what was not there cannot leave");
                }
            }
            CacheEvent::Cleared { .. } => self.keys.clear(),
        }
    }

    async fn until_snapshot(&mut self) {
        while self.snapshots == 0 || self.in_snapshot {
            self.next().await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_follower_holds_exactly_the_keys_that_requests_have() {
    let rig = rig().await;
    let early = rig.request("a", &prompt(1, 21), 1);
    rig.run(&early).await;
    let mut follower = Follower::new(&rig).await;
    follower.until_snapshot().await;
    let early_keys = block_keys(early.prefix(), 4, &early.prompt);
    assert_eq!(follower.keys, early_keys.iter().copied().collect());

    let late = rig.request("b", &prompt(1, 21), 1);
    rig.run(&late).await;
    let late_keys = block_keys(late.prefix(), 4, &late.prompt);
    while follower.keys.len() < early_keys.len() + late_keys.len() {
        assert_eq!(follower.next().await.snapshot, None);
    }
    assert!(late_keys.iter().all(|key| follower.keys.contains(key)));

    let scope = Some(Scope::TenantTag("a".into()));
    let flushed = rig.admin().flush(wire::FlushRequest { scope }).await.unwrap().into_inner().flushed;
    assert_eq!(flushed[0].blocks as usize, early_keys.len());
    while follower.keys.len() > late_keys.len() {
        follower.next().await;
    }
    assert_eq!(follower.keys, late_keys.into_iter().collect());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_that_is_too_slow_gets_a_new_snapshot() {
    let mut settings = settings();
    settings.queue.events_max = 8;
    settings.check = false;
    let rig = rig_with(settings, super::rig::model()).await;
    let mut slow = Follower::new(&rig).await;
    slow.until_snapshot().await;
    // About 3.5 KB of events each, and as much again for evictions: far more than windows and buffers hold.
    for seed in 0..400 {
        rig.run(&rig.request("a", &prompt(seed, 401), 1)).await;
    }
    rig.at_rest().await;
    let mut fresh = Follower::new(&rig).await;
    fresh.until_snapshot().await;
    while slow.seq < fresh.seq || slow.in_snapshot {
        slow.next().await;
    }
    assert!(slow.snapshots >= 2, "the slow reader never lost anything: the test does not test");
    assert_eq!(slow.keys, fresh.keys);
    assert!(fresh.keys.len() > 400);
}

#[tokio::test(flavor = "multi_thread")]
async fn too_many_subscribers_are_refused_and_a_place_comes_back() {
    let mut settings = settings();
    settings.service.subscribers_max = 1;
    let rig = rig_with(settings, super::rig::model()).await;
    let first = rig.client().load(wire::LoadRequest {}).await.unwrap().into_inner();
    let (code, error) = super::rig::refused(rig.client().kv_events(wire::KvEventsRequest {}).await);
    assert_eq!((code, error.reason), (tonic::Code::Unavailable, kvasir_core::Reason::Overloaded));
    drop(first);
    soon("the place", async {
        while rig.client().kv_events(wire::KvEventsRequest {}).await.is_err() {
            tokio::task::yield_now().await;
        }
    })
    .await;
}
