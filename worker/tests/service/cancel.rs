//! A reader that leaves: work stops, blocks come back, neighbours go on (field report R19).
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may stop at the first surprise")]

use super::rig::{Rig, model, prompt, read, rig, rig_with, settings, soon};
use kvasir_core::Chunk;
use kvasir_proto::convert::{chunk_from_wire, request_to_wire};

async fn tokens_read(rig: &Rig, seed: u32, wanted: usize) -> tonic::Streaming<kvasir_proto::worker::GenerateResponse> {
    let mut stream = rig.begin(&rig.request("a", &prompt(seed, 40), 400)).await.unwrap();
    let mut seen = 0;
    while seen < wanted {
        let message = soon("a token", stream.message()).await.unwrap().unwrap();
        if let Chunk::Tokens(tokens) = chunk_from_wire(message).unwrap() {
            seen += tokens.ids.len();
        }
    }
    stream
}

#[tokio::test(flavor = "multi_thread")]
async fn dropping_the_stream_in_decode_stops_the_work_and_frees_its_blocks() {
    let rig = rig().await;
    rig.gate.close();
    rig.gate.allow(4);
    let stream = tokens_read(&rig, 1, 3).await;
    let neighbour = rig.squeeze_in(&rig.request("b", &prompt(2, 9), 20)).await;
    drop(stream);
    // The cancel travels while the gate is closed, so that how fast it travels decides nothing.
    let service = rig.runtime().service().clone();
    soon("the cancel to arrive", async {
        while service.in_flight() > 1 {
            tokio::task::yield_now().await;
        }
    })
    .await;
    rig.gate.open();
    let neighbour = read(neighbour).await;
    rig.at_rest().await;
    let stats = rig.runtime().service().engine().stats();
    assert_eq!((stats.requests.cancelled, stats.requests.finished), (1, 1));
    assert!(stats.output.committed < 100, "{} tokens were generated for a reader that left", stats.output.committed);
    assert_eq!(stats.reconcile_violations, 0);

    let alone = super::rig::rig().await;
    let same = alone.run(&alone.request("b", &prompt(2, 9), 20)).await;
    assert_eq!((neighbour.ids, neighbour.text), (same.ids, same.text), "a neighbour's cancel changes nothing");
}

#[tokio::test(flavor = "multi_thread")]
async fn giving_up_while_queued_or_in_prefill_frees_the_place() {
    let mut settings = settings();
    settings.step.rows_max = 1;
    let rig = rig_with(settings, model()).await;
    rig.gate.close();
    // In prefill: started, but its first step never ends while the gate is closed.
    let prefill = rig.begin(&rig.request("a", &prompt(1, 40), 4)).await.unwrap();
    let (mut client, request) = (rig.client(), rig.request("a", &prompt(2, 40), 4));
    let queued = tokio::spawn(async move { client.generate(request_to_wire(&request)).await.map(|_| ()) });
    let service = rig.runtime().service().clone();
    soon("both to be held", async {
        while service.in_flight() < 2 {
            tokio::task::yield_now().await;
        }
    })
    .await;
    queued.abort();
    drop(prefill);
    soon("both to be let go", service.idle()).await;
    rig.gate.open();
    rig.at_rest().await;
    assert_eq!(rig.runtime().service().engine().stats().requests.finished, 0);
    let next = rig.run(&rig.request("a", &prompt(3, 9), 4)).await;
    assert_eq!(next.ids.len(), 4);
    let text = service.render_metrics();
    assert!(text.contains(r#"kvasir_engine_requests_total{outcome="cancelled"} 2"#), "{text}");
    assert!(text.contains(r#"kvasir_engine_requests_total{outcome="ok"} 1"#), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hundred_disconnects_leave_nothing_behind() {
    let rig = rig().await;
    let quiet = rig.run(&rig.request("q", &prompt(1, 30), 30)).await;
    for round in 0..20u32 {
        let mut streams = Vec::new();
        for seed in 0..5 {
            streams.push(rig.begin(&rig.request("a", &prompt(round * 5 + seed + 10, 24), 200)).await.unwrap());
        }
        let beside = rig.begin(&rig.request("q", &prompt(1, 30), 30)).await.unwrap();
        drop(streams);
        assert_eq!(read(beside).await.ids, quiet.ids, "round {round}");
    }
    rig.at_rest().await;
    let stats = rig.runtime().service().engine().stats();
    assert_eq!(stats.requests.received, 121);
    assert_eq!(stats.requests.finished + stats.requests.cancelled, 121);
    assert_eq!(stats.reconcile_violations, 0);
}

/// All clients of a router share its connection: those that leave at once must not take the others' streams with them.
#[tokio::test]
async fn a_burst_of_requests_that_are_given_up_at_once_leaves_the_neighbour_alone() {
    let rig = rig().await;
    rig.gate.close();
    let neighbour = rig.squeeze_in(&rig.request("b", &prompt(1, 9), 20)).await;
    // How far a request has come when it is given up differs by round: on one thread the server looks at them only in between.
    for yields in 0..16 {
        let calls: Vec<_> = (0..200)
            .map(|number| {
                let (mut client, request) = (rig.client(), rig.request("a", &prompt(number + 2, 40), 4));
                tokio::spawn(async move { client.generate(request_to_wire(&request)).await.map(drop) })
            })
            .collect();
        for _ in 0..yields {
            tokio::task::yield_now().await;
        }
        calls.iter().for_each(tokio::task::JoinHandle::abort);
    }
    rig.gate.open();
    assert_eq!(read(neighbour).await.ids.len(), 20);
    rig.at_rest().await;
}
