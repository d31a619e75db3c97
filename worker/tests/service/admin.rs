//! Inspect, Flush, SetFlags.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may stop at the first surprise")]

use super::rig::{prompt, read, refused, rig};
use kvasir_core::{MissReason, Reason};
use kvasir_proto::pb;
use kvasir_proto::worker as wire;
use kvasir_proto::worker::flush_request::Scope;
use tonic::Code;

#[tokio::test(flavor = "multi_thread")]
async fn inspect_shows_what_runs_and_what_is_resident_by_tenant() {
    let rig = rig().await;
    rig.run(&rig.request("a", &prompt(1, 21), 1)).await;
    rig.gate.close();
    rig.gate.allow(2);
    let running = rig.request("b", &prompt(2, 9), 40);
    let mut stream = rig.begin(&running).await.unwrap();
    for _ in 0..2 {
        stream.message().await.unwrap();
    }
    rig.gate.open();
    let rest = tokio::spawn(read_rest(stream));
    let inspect =
        async |tenant_tag: Option<String>| rig.admin().inspect(wire::InspectRequest { tenant_tag }).await.unwrap().into_inner();
    let all = inspect(None).await;
    let tier = &all.tiers[0];
    assert_eq!(tier.free + tier.cached + tier.held, 512);
    assert_eq!(all.flags.unwrap().prefix_cache(), pb::CacheMode::Auto);
    rest.await.unwrap();
    rig.at_rest().await;
    let of_a = inspect(Some("a".into())).await;
    assert_eq!(of_a.tenants.len(), 1);
    assert_eq!((of_a.tenants[0].tenant_tag.as_str(), of_a.tenants[0].cached, of_a.tenants[0].held), ("a", 5, 0));
    assert!(of_a.requests.is_empty());
}

async fn read_rest(mut stream: tonic::Streaming<wire::GenerateResponse>) {
    while stream.message().await.unwrap().is_some() {}
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_in_flight_is_listed_with_its_progress() {
    let rig = rig().await;
    rig.gate.close();
    let request = rig.request("b", &prompt(2, 9), 4);
    let stream = rig.begin(&request).await.unwrap();
    let service = rig.runtime().service().clone();
    // Inspect asks the engine, whose step waits at the gate: let it through once the question is on its way.
    let asked = tokio::spawn({
        let mut admin = rig.admin();
        async move { admin.inspect(wire::InspectRequest::default()).await.unwrap().into_inner() }
    });
    assert_eq!(service.in_flight(), 1);
    rig.gate.open();
    let seen = asked.await.unwrap();
    for listed in &seen.requests {
        assert_eq!((listed.request_id.as_slice(), listed.tenant_tag.as_str(), listed.prompt_tokens), (&request.id.0[..], "b", 9));
    }
    assert!(read(stream).await.finished.is_some());
    rig.at_rest().await;
    assert!(rig.admin().inspect(wire::InspectRequest::default()).await.unwrap().into_inner().requests.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn flush_drops_exactly_its_scope() {
    let rig = rig().await;
    let [a, b] = ["a", "b"].map(|tenant| rig.request(tenant, &prompt(1, 21), 1));
    let scopes = [
        (Scope::TenantTag("a".into()), 5, false, true),
        (Scope::Identity(a.identity.0.as_bytes().to_vec()), 10, false, false),
        (Scope::SecretEpochNot(a.secret_epoch.0.to_vec()), 0, true, true),
        (Scope::All(true), 10, false, false),
        // Last: from then on nothing under the old secret is published again.
        (Scope::SecretEpochNot(vec![0; 8]), 10, false, false),
    ];
    for (scope, blocks, a_stays, b_stays) in scopes {
        rig.run(&a).await;
        rig.run(&b).await;
        let flushed = rig.admin().flush(wire::FlushRequest { scope: Some(scope.clone()) }).await.unwrap().into_inner();
        assert_eq!(flushed.flushed[0].blocks, blocks, "{scope:?}");
        assert_eq!(rig.run(&a).await.started.unwrap().cached() > 0, a_stays, "{scope:?}");
        assert_eq!(rig.run(&b).await.started.unwrap().cached() > 0, b_stays, "{scope:?}");
    }
    let wrong = [
        None,
        Some(Scope::TenantTag(String::new())),
        Some(Scope::Identity(vec![1])),
        Some(Scope::SecretEpochNot(vec![])),
        Some(Scope::All(false)),
    ];
    for scope in wrong {
        assert_eq!(refused(rig.admin().flush(wire::FlushRequest { scope }).await).0, Code::InvalidArgument);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn flags_change_what_can_change_and_name_what_cannot() {
    let rig = rig().await;
    let request = rig.request("a", &prompt(1, 21), 1);
    rig.run(&request).await;
    let set = async |flags: wire::Flags| rig.admin().set_flags(wire::SetFlagsRequest { flags: Some(flags) }).await;

    let off = wire::Flags { prefix_cache: Some(pb::CacheMode::Off as i32), drain_deadline_ms: Some(1234), ..Default::default() };
    let now = set(off).await.unwrap().into_inner().flags.unwrap();
    assert_eq!((now.prefix_cache(), now.drain_deadline_ms), (pb::CacheMode::Off, Some(1234)));
    let started = rig.run(&request).await.started.unwrap();
    assert_eq!((started.cached(), started.miss_reason), (0, Some(MissReason::Disabled)));

    let unbuilt = [
        ("flags.speculation", wire::Flags { speculation: Some(pb::SpeculationMode::Auto as i32), ..Default::default() }),
        ("flags.max_draft_tokens", wire::Flags { max_draft_tokens: Some(4), ..Default::default() }),
        ("flags.padded_output", wire::Flags { padded_output: Some(true), ..Default::default() }),
    ];
    for (field, flags) in unbuilt {
        // Set together with something that could be set: nothing of it may happen.
        let flags = wire::Flags { prefix_cache: Some(pb::CacheMode::On as i32), ..flags };
        let (code, error) = refused(set(flags).await);
        assert_eq!((code, error.reason, error.field.as_deref()), (Code::Unimplemented, Reason::Unimplemented, Some(field)));
    }
    let (_, error) = refused(set(wire::Flags { prefix_cache: Some(9), ..Default::default() }).await);
    assert_eq!(error.field.as_deref(), Some("flags.prefix_cache"));
    assert_eq!(rig.run(&request).await.started.unwrap().miss_reason, Some(MissReason::Disabled));

    set(wire::Flags { prefix_cache: Some(pb::CacheMode::On as i32), ..Default::default() }).await.unwrap();
    assert!(rig.run(&request).await.started.unwrap().cached() > 0);
}
