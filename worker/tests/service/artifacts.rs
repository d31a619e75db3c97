//! Describe and Artifacts: a router can rebuild the text from them, and the parts make the identity.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may stop at the first surprise")]

use super::rig::{Rig, refused, rig};
use kvasir_core::{Contract, Digest, Reason, Tier};
use kvasir_model::{Artifacts, Text};
use kvasir_proto::convert::description_from_wire;
use kvasir_proto::worker as wire;
use kvasir_proto::{ArtifactKind, Description, Phase, Role};

async fn describe(rig: &Rig) -> Description {
    description_from_wire(rig.client().describe(wire::DescribeRequest {}).await.unwrap().into_inner()).unwrap()
}

async fn fetch(rig: &Rig, digest: Digest) -> Vec<u8> {
    let request = wire::ArtifactsRequest { digest: digest.as_bytes().to_vec() };
    let mut pieces = rig.client().artifacts(request).await.unwrap().into_inner();
    let mut bytes = Vec::new();
    while let Some(piece) = pieces.message().await.unwrap() {
        assert_eq!(piece.offset, bytes.len() as u64);
        bytes.extend(piece.data);
        assert!(bytes.len() as u64 <= piece.size_bytes);
    }
    bytes
}

#[tokio::test(flavor = "multi_thread")]
async fn a_description_is_whole_and_new_with_each_start() {
    let rig = rig().await;
    let seen = describe(&rig).await;
    assert_eq!((&*seen.uid.0, seen.role, seen.block_size), ("worker-0", Role::Target, 4));
    let model = &seen.models[0];
    assert_eq!((model.name.as_str(), model.context, model.vocab, model.capacity), ("tiny", 512, 320, 2048));
    assert_eq!(model.identity(), rig.identity());
    assert_eq!((seen.tiers[0].tier, seen.tiers[0].blocks), (Tier::Device, 512));
    assert!(seen.contracts.contains(&Contract::Coupled) && seen.phases == [Phase::Unified]);
    assert_eq!(seen.build.backend, "fake");
    assert!(!seen.build.version.is_empty());

    let again = describe(&super::rig::rig().await).await;
    assert_ne!(seen.incarnation, again.incarnation);
    assert_eq!(model.identity(), again.models[0].identity());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_text_is_rebuilt_from_what_was_fetched() {
    let rig = rig().await;
    let model = describe(&rig).await.models.remove(0);
    for artifact in &model.artifacts {
        assert_eq!(fetch(&rig, artifact.digest).await.len() as u64, artifact.size_bytes);
    }
    let whole = model.artifact(ArtifactKind::Text).unwrap();
    let artifacts = Artifacts::decode(&fetch(&rig, whole.digest).await).unwrap();
    assert_eq!(artifacts.digest(), whole.digest);
    let text = Text::from_artifacts(&artifacts).unwrap();
    assert_eq!(text.tokenizer_digest(), model.parts.tokenizer);
    assert_eq!(text.chat_template_digest(), model.parts.chat_template);
    let tokenizer = model.artifact(ArtifactKind::Tokenizer).unwrap();
    assert_eq!(fetch(&rig, tokenizer.digest).await, artifacts.tokenizer_json);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_there_is_not_found() {
    let rig = rig().await;
    let (_, error) = refused(rig.client().artifacts(wire::ArtifactsRequest { digest: vec![7; 32] }).await);
    assert_eq!(error.reason, Reason::NotFound);
    let (_, error) = refused(rig.client().artifacts(wire::ArtifactsRequest { digest: vec![7; 31] }).await);
    assert_eq!((error.reason, error.field.as_deref()), (Reason::InvalidArgument, Some("digest")));
}
