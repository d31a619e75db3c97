//! Generate: output, refusals with their reasons, limits.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test may stop at the first surprise")]

use super::rig::{model, prompt, read, refused, rig, rig_with, settings};
use kvasir_core::{Adapter, Digest, FinishReason, Grammar, MissReason, ModelIdentity, Reason, State, Tier};
use kvasir_proto::convert::request_to_wire;
use kvasir_proto::worker as wire;
use std::time::Duration;
use tonic::Code;

#[tokio::test(flavor = "multi_thread")]
async fn a_second_equal_prompt_is_reused_and_answers_the_same() {
    let rig = rig().await;
    let request = rig.request("a", &prompt(1, 21), 9);
    let cold = rig.run(&request).await;
    let started = cold.started.unwrap();
    assert_eq!((started.cached(), started.computed, started.miss_reason), (0, 21, Some(MissReason::Cold)));
    let finished = cold.finished.unwrap();
    assert_eq!(finished.reasons, [FinishReason::Length]);
    assert_eq!((finished.usage.prompt_tokens, finished.usage.completion_tokens), (21, 9));
    assert_eq!(cold.ids.len(), 9);
    assert!(finished.states.get(State::Prefill) > Duration::ZERO);

    let warm = rig.run(&request).await;
    let started = warm.started.unwrap();
    // Five full blocks of four tokens; the last token is always computed.
    assert_eq!((started.hits[0].tier, started.cached(), started.computed), (Tier::Device, 20, 1));
    assert_eq!((warm.ids, warm.text), (cold.ids, cold.text));
    assert_eq!(warm.finished.unwrap().usage.cached_tokens, 20);
    rig.at_rest().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn another_identity_is_refused_before_any_lookup() {
    let rig = rig().await;
    let request = rig.request("a", &prompt(1, 21), 4);
    rig.run(&request).await;
    let before = rig.runtime().service().engine().stats();

    let mut other = request.clone();
    other.identity = ModelIdentity(Digest::new([9; 32]));
    other.adapter = Some(Adapter { content: Digest::new([1; 32]), scale: 1.0 });
    let (code, error) = refused(rig.client().generate(request_to_wire(&other)).await);
    assert_eq!((code, error.reason, error.retryable()), (Code::FailedPrecondition, Reason::IdentityMismatch, true));
    let after = rig.runtime().service().engine().stats();
    assert_eq!(after.requests.received, before.requests.received, "the engine never saw it");
    assert_eq!(after.prompt, before.prompt, "nothing was looked up");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_cannot_be_meant_is_refused_with_its_field() {
    let rig = rig().await;
    let good = request_to_wire(&rig.request("a", &prompt(1, 5), 4));
    let (code, error) = refused(rig.client().generate(wire::GenerateRequest { domain_id: vec![1; 3], ..good.clone() }).await);
    assert_eq!((code, error.field.as_deref()), (Code::InvalidArgument, Some("domain_id")));
    let (code, error) = refused(rig.client().generate(wire::GenerateRequest { prompt_tokens: vec![320], ..good }).await);
    assert_eq!((code, error.field.as_deref()), (Code::InvalidArgument, Some("prompt")));

    let long = rig.request("a", &prompt(1, 600), 4);
    let (code, error) = refused(rig.client().generate(request_to_wire(&long)).await);
    assert_eq!((code, error.reason), (Code::InvalidArgument, Reason::ContextLengthExceeded));
    assert!(error.message.contains("600") && error.message.contains("512"), "{}", error.message);

    let mut structured = rig.request("a", &prompt(1, 5), 4);
    structured.grammar = Some(Grammar::JsonObject);
    let (_, error) = refused(rig.client().generate(request_to_wire(&structured)).await);
    assert_eq!(error.reason, Reason::UnsupportedCombination, "this worker was started without structured output");
    assert_eq!(rig.runtime().service().in_flight(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_above_the_limit_is_refused_by_its_size() {
    let mut settings = settings();
    settings.service.request_bytes_max = 4096;
    let rig = rig_with(settings, model()).await;
    let described = rig.client().describe(wire::DescribeRequest {}).await.unwrap().into_inner();
    assert_eq!(described.request_bytes_max, 4096);

    let mut below = request_to_wire(&rig.request("a", &prompt(1, 5), 2));
    let mut above = below.clone();
    let fill = |message: &wire::GenerateRequest, bytes: usize| bytes - prost::Message::encoded_len(message) - 8;
    below.stop.as_mut().unwrap().strings = vec!["x".repeat(fill(&below, 4096))];
    above.stop.as_mut().unwrap().strings = vec!["x".repeat(fill(&above, 4096) + 16)];
    assert!(prost::Message::encoded_len(&below) <= 4096 && prost::Message::encoded_len(&above) > 4096);
    assert!(read(rig.client().generate(below).await.unwrap().into_inner()).await.finished.is_some());
    let (code, error) = refused(rig.client().generate(above).await);
    assert_eq!((code, error.reason, error.retryable()), (Code::ResourceExhausted, Reason::PayloadTooLarge, false));
    assert!(error.message.contains("4096"), "{}", error.message);
    assert_eq!(rig.runtime().service().engine().stats().requests.received, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_queue_refuses_at_once_and_says_when_to_come_back() {
    let mut settings = settings();
    settings.step.rows_max = 1;
    settings.queue.sequences_max = 2;
    let rig = rig_with(settings, model()).await;
    rig.gate.close();
    let running = rig.begin(&rig.request("a", &prompt(1, 5), 4)).await.unwrap();
    let wait = |seed| {
        let (mut client, request) = (rig.client(), rig.request("a", &prompt(seed, 5), 4));
        tokio::spawn(async move { client.generate(request_to_wire(&request)).await })
    };
    let waiting = [wait(2), wait(3)];
    let service = rig.runtime().service().clone();
    super::rig::soon("both to wait", async {
        while service.in_flight() < 3 {
            tokio::task::yield_now().await;
        }
    })
    .await;
    // Both hold a place in the queue once the engine has taken or queued them; a third finds it full.
    let third = rig.begin(&rig.request("a", &prompt(4, 5), 4)).await.expect_err("the queue is full");
    assert_eq!((third.reason, third.retryable()), (Reason::Overloaded, true));
    assert!(third.retry_after.is_some());
    rig.gate.open();
    assert!(read(running).await.finished.is_some());
    for waiting in waiting {
        assert!(read(waiting.await.unwrap().unwrap().into_inner()).await.finished.is_some());
    }
    rig.at_rest().await;
}
