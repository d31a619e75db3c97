//! Leaving (field reports R73, R74): running streams keep going, waiting requests are handed back at once, the rest at the deadline.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test may stop at the first surprise")]

use super::rig::{model, prompt, read, refused, rig, rig_with, settings, soon};
use kvasir_core::Reason;
use kvasir_proto::convert::{error_from_pb, error_from_status, load_from_wire, request_to_wire};
use kvasir_proto::worker as wire;
use kvasir_worker::backend::fake::FakeModel;
use kvasir_worker::start::KvSize;
use std::time::{Duration, Instant};
use tonic::Code;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

#[tokio::test(flavor = "multi_thread")]
async fn running_streams_end_well_while_everything_says_draining() {
    let mut rig = rig().await;
    let probe = rig.client().probe(wire::ProbeRequest {}).await.unwrap().into_inner();
    assert!(probe.ready && probe.reason.is_none());
    let whole = rig.run(&rig.request("a", &prompt(1, 12), 60)).await;

    rig.gate.close();
    let mut streams = Vec::new();
    for seed in 1..=5 {
        streams.push(rig.squeeze_in(&rig.request("a", &prompt(seed, 12), 60)).await);
    }
    let drained = rig.client().drain(wire::DrainRequest { deadline_ms: Some(60_000) }).await.unwrap().into_inner();
    assert_eq!(drained.in_flight, 5);
    let shorter = rig.client().drain(wire::DrainRequest { deadline_ms: Some(20_000) }).await.unwrap().into_inner();
    assert!(shorter.deadline_ms <= 20_000);
    let longer = rig.client().drain(wire::DrainRequest { deadline_ms: Some(90_000) }).await.unwrap().into_inner();
    assert!(longer.deadline_ms <= 20_000, "a deadline never moves away");

    let probe = rig.client().probe(wire::ProbeRequest {}).await.unwrap().into_inner();
    assert!(!probe.ready);
    assert_eq!(error_from_pb(probe.reason.unwrap()).reason, Reason::Draining);
    let (code, error) = refused(rig.client().generate(request_to_wire(&rig.request("a", &prompt(9, 12), 4))).await);
    assert_eq!((code, error.reason, error.retryable()), (Code::Unavailable, Reason::Draining, true));
    let mut health = HealthClient::new(rig.channel.clone());
    let mut watch = health.watch(HealthCheckRequest { service: String::new() }).await.unwrap().into_inner();
    while soon("health", watch.message()).await.unwrap().unwrap().status() != ServingStatus::NotServing {}
    drop(watch);

    rig.gate.open();
    for (index, stream) in streams.into_iter().enumerate() {
        let answer = read(stream).await;
        assert_eq!(answer.ids.len(), 60, "stream {index} was cut");
        assert!(answer.finished.is_some() && answer.failed.is_none());
        if index == 0 {
            assert_eq!(answer.ids, whole.ids);
        }
    }
    let mut load = rig.client().load(wire::LoadRequest {}).await.unwrap().into_inner();
    let mut draining = false;
    while !draining {
        draining = load_from_wire(soon("load", load.message()).await.unwrap().unwrap()).unwrap().0.draining;
    }
    // Empty long before its deadline: it ends as soon as it is empty, with the load stream still open.
    let began = Instant::now();
    soon("the end", rig.runtime.take().unwrap().shutdown(None)).await.unwrap();
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    assert!(load.message().await.is_ok_and(|end| end.is_none()), "an endless stream ends cleanly");
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_requests_go_at_once_and_running_ones_at_the_deadline() {
    let mut settings = settings();
    settings.step.rows_max = 3;
    settings.check = false;
    settings.kv = KvSize::Blocks(1 << 18);
    let mut rig = rig_with(settings, FakeModel { context: 1 << 18, ..model() }).await;
    rig.gate.close();
    let mut running = Vec::new();
    for seed in 1..=3 {
        running.push(rig.squeeze_in(&rig.request("a", &prompt(seed, 12), 1 << 17)).await);
    }
    let (mut client, request) = (rig.client(), rig.request("a", &prompt(9, 12), 4));
    let waiting = tokio::spawn(async move { client.generate(request_to_wire(&request)).await });
    let service = rig.runtime().service().clone();
    soon("the fourth to wait", async {
        while service.in_flight() < 4 {
            tokio::task::yield_now().await;
        }
    })
    .await;

    // The gate is still closed: the answer cannot come from a step.
    service.begin_drain(Some(Duration::from_millis(300)));
    let error = error_from_status(&soon("the waiting one", waiting).await.unwrap().unwrap_err());
    assert_eq!((error.reason, error.retryable()), (Reason::Draining, true));
    assert!(error.retry_after.is_some());

    rig.gate.open();
    let began = Instant::now();
    let running: Vec<_> = running.into_iter().map(|stream| tokio::spawn(read(stream))).collect();
    for stream in running {
        let answer = stream.await.unwrap();
        let error = answer.failed.unwrap_or_else(|| panic!("{} tokens and no end by the deadline", answer.ids.len()));
        assert_eq!((error.reason, error.retryable()), (Reason::Draining, true));
        assert!(!answer.ids.is_empty(), "it kept running until the deadline");
    }
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    soon("rest", service.idle()).await;
    soon("the end", rig.runtime.take().unwrap().shutdown(None)).await.unwrap();
    assert_eq!(service.engine().stats().failed(Reason::Draining), 3);
}
