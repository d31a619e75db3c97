#![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]
//! Elections on the mock API server, in paused time.

use super::*;
use crate::testing::{Fault, MockApi};
use k8s_openapi::jiff::Timestamp;
use kube::client::ClientBuilder;
use serde_json::json;

fn elect(api: &MockApi, identity: &str) -> (Gate, CancellationToken, tokio::task::JoinHandle<()>) {
    let (gate, stop) = (Gate::closed(), CancellationToken::new());
    let settings = LeadSettings::new("ns", "kvasir-operator", identity);
    let clock = Clock::from_runtime(Timestamp::UNIX_EPOCH);
    let elector = Elector::new(api.client(), settings, clock, gate.clone());
    (gate, stop.clone(), tokio::spawn(elector.run(stop)))
}

fn holder(api: &MockApi) -> String {
    let lease = api.get("leases", "ns", "kvasir-operator").unwrap();
    lease["spec"]["holderIdentity"].as_str().unwrap_or_default().to_owned()
}

async fn seconds(seconds: u64) {
    tokio::time::sleep(Duration::from_secs(seconds)).await;
}

#[tokio::test(start_paused = true)]
async fn one_of_two_leads_and_the_other_follows_when_the_lease_is_given_up() {
    let api = MockApi::new();
    let (first, stop, task) = elect(&api, "a");
    first.opened().await;
    let (second, _stop, _task) = elect(&api, "b");
    seconds(60).await;
    assert!(first.is_open() && !second.is_open());
    assert_eq!(holder(&api), "a");
    stop.cancel();
    task.await.unwrap();
    assert!(!first.is_open());
    seconds(4).await;
    assert!(second.is_open(), "a lease that was given up is taken at the next attempt");
    let lease = api.get("leases", "ns", "kvasir-operator").unwrap();
    assert_eq!(lease["spec"]["leaseTransitions"], json!(1));
}

#[tokio::test(start_paused = true)]
async fn a_leader_that_vanishes_is_followed_after_its_lease_has_stood_still() {
    let api = MockApi::new();
    let (first, _stop, task) = elect(&api, "a");
    first.opened().await;
    let (second, _stop, _task) = elect(&api, "b");
    seconds(5).await;
    task.abort();
    seconds(8).await;
    assert!(!second.is_open());
    seconds(12).await;
    assert!(second.is_open());
    assert_eq!(holder(&api), "b");
}

#[tokio::test(start_paused = true)]
async fn the_gate_closes_at_the_renew_deadline_whatever_the_network_does() {
    let api = MockApi::new();
    let (gate, _stop, _task) = elect(&api, "a");
    gate.opened().await;
    api.lose_leases(true);
    let lost = Instant::now();
    gate.shut().await;
    let after = lost.elapsed();
    assert!(after <= Duration::from_secs(10) && after >= Duration::from_secs(5), "{after:?}");
    // The lease is still ours on the server, and still nothing is written.
    assert_eq!(holder(&api), "a");
    api.lose_leases(false);
    gate.opened().await;
}

#[tokio::test(start_paused = true)]
async fn behind_a_closed_gate_reads_pass_and_writes_do_not() {
    let api = MockApi::new();
    let gate = Gate::closed();
    let service = api.service();
    let client = ClientBuilder::new(service, "default").with_layer(&GateLayer::new(gate.clone())).build();
    let leases: Api<Lease> = Api::namespaced(client, "ns");
    assert!(leases.get_opt("x").await.unwrap().is_none());
    let lease = Lease { metadata: ObjectMeta { name: Some("x".to_owned()), ..ObjectMeta::default() }, spec: None };
    let refused = crate::apply::answered(leases.create(&PostParams::default(), &lease)).await.unwrap_err();
    assert!(refused.is_not_leading(), "{refused}");
    assert!(api.get("leases", "ns", "x").is_none());
    gate.open_until(Instant::now() + Duration::from_secs(1));
    leases.create(&PostParams::default(), &lease).await.unwrap();
    seconds(2).await;
    assert!(leases.replace("x", &PostParams::default(), &lease).await.is_err());
}

#[tokio::test(start_paused = true)]
async fn a_renewal_whose_answer_is_lost_keeps_the_lease() {
    let api = MockApi::new();
    let (gate, _stop, _task) = elect(&api, "a");
    gate.opened().await;
    api.lease_fault(1, Fault::LosesAnswer);
    for _ in 0..20 {
        seconds(1).await;
        assert!(gate.is_open());
    }
}
