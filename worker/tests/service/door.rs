//! The worker's own door: the same engine without a wire between.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may stop at the first surprise")]

use super::rig::{Answer, prompt, rig, soon};
use futures::StreamExt as _;
use kvasir_core::{Reason, State, StateTimes};
use kvasir_door::{Prepared, ReceiptSlot, Serve as _};
use kvasir_worker::service::EngineServe;
use std::time::Duration;

#[tokio::test(flavor = "multi_thread")]
async fn both_ways_in_answer_the_same_and_the_doors_time_is_added() {
    let rig = rig().await;
    let request = rig.request("a", &prompt(1, 21), 9);
    let wire = rig.run(&request).await;

    let serve = EngineServe::new(rig.runtime().service().clone());
    assert!(serve.ready().is_ok());
    let catalog = serve.catalog();
    let model = catalog.find("tiny").unwrap();
    assert_eq!((model.identity, model.block_size, model.context, model.capacity), (rig.identity(), 4, 512, 2048));
    let mut states = StateTimes::default();
    states.add(State::Prepare, Duration::from_millis(5));
    let prepared = Prepared { request: request.clone(), states, receipt: ReceiptSlot::default() };
    let mut stream = serve.serve(prepared).await.unwrap();
    let mut answer = Answer::default();
    while let Some(chunk) = soon("the next chunk", stream.next()).await {
        answer.take(chunk);
    }
    assert_eq!((answer.ids, answer.text), (wire.ids, wire.text));
    let finished = answer.finished.unwrap();
    assert_eq!(finished.states.get(State::Prepare), Duration::from_millis(5));
    assert!(finished.states.total() > Duration::from_millis(5));

    rig.runtime().service().begin_drain(None);
    assert_eq!(serve.ready().unwrap_err().reason, Reason::Draining);
    let prepared = Prepared { request, states: StateTimes::default(), receipt: ReceiptSlot::default() };
    assert_eq!(serve.serve(prepared).await.err().unwrap().reason, Reason::Draining);
}
