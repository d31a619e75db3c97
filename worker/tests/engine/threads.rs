//! The engine on its own thread, seen through handles from an async runtime.

use crate::rig::{Dice, prompt, request, settings, solo};
use kvasir_core::{Chunk, Reason};
use kvasir_worker::backend::fake::{FakeBackend, FakeBytes, FakeControl, FakeModel};
use kvasir_worker::engine::{Engine, EngineHandle, EngineParts, EngineThread, MonotonicClock, VirtualClock};
use std::sync::Arc;
use std::time::Duration;

/// No wait in these tests may take longer.
const BOUND: Duration = Duration::from_mins(1);

fn spawn(settings: kvasir_worker::engine::EngineSettings) -> (EngineHandle, EngineThread) {
    let model = FakeModel::default();
    let parts = EngineParts {
        backend: Box::new(FakeBackend::new(model, VirtualClock::default(), FakeControl::default())),
        bytes: Arc::new(FakeBytes::new(model.vocab)),
        constraints: None,
        clock: Arc::new(MonotonicClock::default()),
    };
    let (engine, handle) = Engine::new(settings, parts).unwrap();
    (handle, engine.spawn().unwrap())
}

async fn bounded<T>(work: impl Future<Output = T>) -> T {
    tokio::time::timeout(BOUND, work).await.expect("within the bound")
}

async fn ids(handle: &EngineHandle, asking: kvasir_core::Request) -> Vec<u32> {
    let mut reader = handle.submit(asking).unwrap();
    let mut ids = Vec::new();
    while let Some(chunk) = bounded(reader.recv()).await {
        match chunk {
            Chunk::Tokens(tokens) => ids.extend(tokens.ids),
            Chunk::Failed { error, .. } => panic!("{error}"),
            Chunk::Started(_) | Chunk::Finished(_) => {}
        }
    }
    assert!(reader.is_finished());
    ids
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_random_disconnects_leave_nothing_and_change_no_neighbour() {
    let mut open = settings(64);
    open.check_laws = false;
    let (handle, thread) = spawn(open);
    let steady = request("steady", &prompt(1, 20), 40);
    let expected = solo(&steady).ids().to_vec();
    let mut dice = Dice(5);
    for round in 0..100u64 {
        let neighbour = tokio::spawn({
            let (handle, steady) = (handle.clone(), steady.clone());
            async move { ids(&handle, steady).await }
        });
        let leavers = (0..10).map(|number| {
            let handle = handle.clone();
            let chunks = dice.below(12);
            tokio::spawn(async move {
                let mut reader = handle.submit(request("leaver", &prompt(round * 10 + number, 30), 400)).unwrap();
                for _ in 0..chunks {
                    drop(bounded(reader.recv()).await);
                }
            })
        });
        for leaver in leavers.collect::<Vec<_>>() {
            leaver.await.unwrap();
        }
        assert_eq!(neighbour.await.unwrap(), expected);
    }
    // A drain is answered after everything that came before it, and when nothing is left.
    bounded(handle.drain()).await.unwrap();
    let load = handle.load().borrow().load.clone();
    assert_eq!((load.running, load.waiting, load.tiers[0].held), (0, 0, 0));
    let stats = handle.stats();
    assert_eq!((stats.requests.cancelled + stats.requests.finished, stats.reconcile_violations), (1100, 0));
    assert!(stats.requests.cancelled > 500, "most left before the end: {}", stats.requests.cancelled);
    let inspection = bounded(handle.inspect()).await.unwrap();
    assert_eq!((inspection.requests, inspection.blocks.held), (0, 0));
    handle.stop();
    thread.join().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_refuses_new_work_and_lets_the_old_finish() {
    let (handle, thread) = spawn(settings(64));
    let mut reader = handle.submit(request("t", &prompt(1, 9), 200)).unwrap();
    bounded(reader.recv()).await.unwrap();
    let drained = tokio::spawn({
        let handle = handle.clone();
        async move { handle.drain().await }
    });
    let mut load = handle.load();
    bounded(load.wait_for(|measured| measured.load.draining)).await.unwrap();
    let error = handle.submit(request("t", &prompt(1, 9), 2)).map(|_| ()).unwrap_err();
    assert!(error.reason == Reason::Draining && error.retryable());
    let mut last = None;
    while let Some(chunk) = bounded(reader.recv()).await {
        last = Some(chunk);
    }
    assert!(matches!(last, Some(Chunk::Finished(finished)) if finished.usage.completion_tokens == 200));
    bounded(drained).await.unwrap().unwrap();
    handle.stop();
    thread.join().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_tells_every_reader_and_later_callers() {
    let mut slow = settings(64);
    slow.queue.chunks_max = 4;
    let (handle, thread) = spawn(slow);
    let events = bounded(handle.events()).await.unwrap();
    let mut readers: Vec<_> = (0..8).map(|seed| handle.submit(request("t", &prompt(seed, 9), 400)).unwrap()).collect();
    handle.stop();
    thread.join().unwrap();
    for reader in &mut readers {
        let mut last = None;
        while let Some(chunk) = bounded(reader.recv()).await {
            last = Some(chunk);
        }
        assert!(matches!(last, Some(Chunk::Failed { error, .. }) if error.retryable()));
    }
    while bounded(events.recv()).await.is_some() {}
    let error = handle.submit(request("t", &prompt(1, 9), 2)).map(|_| ()).unwrap_err();
    assert_eq!(error.reason, Reason::NotReady);
    assert_eq!(bounded(handle.inspect()).await.unwrap_err().reason, Reason::NotReady);
}
