//! The load stream over the wire; its timing is tested beside it on paused time.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may stop at the first surprise")]

use super::rig::{prompt, rig, soon};
use kvasir_core::WorkerLoad;
use kvasir_proto::convert::load_from_wire;
use kvasir_proto::worker as wire;

#[tokio::test(flavor = "multi_thread")]
async fn reports_follow_what_runs() {
    let rig = rig().await;
    rig.gate.close();
    let mut reports = rig.client().load(wire::LoadRequest {}).await.unwrap().into_inner();
    let mut last = 0;
    let mut until = async |what: &str, wanted: fn(&WorkerLoad) -> bool| loop {
        let message = soon(what, reports.message()).await.unwrap().unwrap();
        let (load, age) = load_from_wire(message).unwrap();
        assert!(load.seq >= last, "numbers only grow");
        last = load.seq;
        assert!(age <= WorkerLoad::AGE_MAX, "a live engine is never stale: {age:?}");
        let tier = load.tiers[0];
        assert_eq!(tier.free + tier.cached + tier.held, 512);
        if wanted(&load) {
            break load;
        }
    };
    let first = until("the first report", |_| true).await;
    assert_eq!(first.incarnation, rig.runtime().service().incarnation());
    let stream = rig.begin(&rig.request("a", &prompt(1, 40), 200)).await.unwrap();
    // A step takes about a millisecond of virtual time, and the engine reports every 50.
    rig.gate.allow(80);
    let busy = until("a running sequence", |load| load.running == 1).await;
    assert!(busy.tiers[0].held > 0);
    rig.gate.open();
    super::rig::read(stream).await;
    let idle = until("rest", |load| load.running == 0 && load.tiers[0].held == 0).await;
    assert!(idle.prefill_tokens_per_second > 0.0 && idle.decode_tokens_per_second > 0.0, "rates are measured");
}
