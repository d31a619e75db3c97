//! Who may call: each method without and with a wrong secret; health and reflection without any.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test may stop at the first surprise")]

use super::rig::{Rig, credentials, refused, rig, soon};
use futures::stream;
use kvasir_core::{Error, Reason};
use kvasir_proto::worker as wire;
use kvasir_proto::worker::draft_client::DraftClient;
use kvasir_proto::worker::worker_admin_client::WorkerAdminClient;
use kvasir_proto::worker::worker_client::WorkerClient;
use tonic::Code;
use tonic::codegen::{Body, Bytes, StdError};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

/// Calls every method of every service; the outcome of each by name.
async fn call_all<T>(channel: T) -> Vec<(&'static str, (Code, Error))>
where
    T: tonic::client::GrpcService<tonic::body::Body> + Clone,
    T::Error: Into<StdError>,
    T::ResponseBody: Body<Data = Bytes> + Send + 'static,
    <T::ResponseBody as Body>::Error: Into<StdError> + Send,
{
    let mut worker = WorkerClient::new(channel.clone());
    let mut draft = DraftClient::new(channel.clone());
    let mut admin = WorkerAdminClient::new(channel);
    let speak = stream::iter([wire::DraftSpeakRequest::default()]);
    vec![
        ("Describe", refused(worker.describe(wire::DescribeRequest {}).await)),
        ("Generate", refused(worker.generate(wire::GenerateRequest::default()).await)),
        ("KvEvents", refused(worker.kv_events(wire::KvEventsRequest {}).await)),
        ("Artifacts", refused(worker.artifacts(wire::ArtifactsRequest::default()).await)),
        ("Load", refused(worker.load(wire::LoadRequest {}).await)),
        ("FetchBlocks", refused(worker.fetch_blocks(wire::FetchBlocksRequest::default()).await)),
        ("Probe", refused(worker.probe(wire::ProbeRequest {}).await)),
        ("Drain", refused(worker.drain(wire::DrainRequest::default()).await)),
        ("Open", refused(draft.open(wire::DraftOpenRequest::default()).await)),
        ("Speak", refused(draft.speak(speak).await)),
        ("Close", refused(draft.close(wire::DraftCloseRequest::default()).await)),
        ("Inspect", refused(admin.inspect(wire::InspectRequest::default()).await)),
        ("Flush", refused(admin.flush(wire::FlushRequest::default()).await)),
        ("SetFlags", refused(admin.set_flags(wire::SetFlagsRequest::default()).await)),
    ]
}

/// Methods in the descriptor set that reflection serves, for the three services.
fn methods() -> usize {
    use prost::Message as _;
    let set = prost_types::FileDescriptorSet::decode(kvasir_proto::FILE_DESCRIPTOR_SET).unwrap();
    let worker = set.file.iter().find(|file| file.package() == "kvasir.worker.v1").unwrap();
    worker.service.iter().map(|service| service.method.len()).sum()
}

#[tokio::test(flavor = "multi_thread")]
async fn no_method_is_open_without_the_secret() {
    let rig = rig().await;
    let wrong = tonic::service::interceptor::InterceptedService::new(rig.channel.clone(), credentials("not-the-right-secret"));
    for (sent, outcomes) in [("none", call_all(rig.channel.clone()).await), ("wrong", call_all(wrong).await)] {
        assert_eq!(outcomes.len(), methods(), "a method is missing from the table");
        for (method, (code, error)) in outcomes {
            assert_eq!((code, error.reason), (Code::Unauthenticated, Reason::Unauthenticated), "{method} with {sent} secret");
        }
    }
    assert!(!rig.runtime().service().drain().is_draining(), "a refused Drain has no effect");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_path_that_no_service_has_is_closed_too() {
    let rig = rig().await;
    let mut grpc = tonic::client::Grpc::new(rig.channel.clone());
    grpc.ready().await.unwrap();
    let path = http::uri::PathAndQuery::from_static("/kvasir.worker.v1.Later/Method");
    let codec = tonic_prost::ProstCodec::<wire::ProbeRequest, wire::ProbeResponse>::default();
    let answer = grpc.unary(tonic::Request::new(wire::ProbeRequest {}), path, codec).await;
    assert_eq!(refused(answer).1.reason, Reason::Unauthenticated);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_reserved_says_so() {
    let rig = rig().await;
    let mut draft = DraftClient::with_interceptor(rig.channel.clone(), credentials(super::rig::SECRET));
    let outcomes = [
        refused(rig.client().fetch_blocks(wire::FetchBlocksRequest::default()).await),
        refused(draft.open(wire::DraftOpenRequest::default()).await),
        refused(draft.close(wire::DraftCloseRequest::default()).await),
        refused(draft.speak(stream::iter([wire::DraftSpeakRequest::default()])).await),
    ];
    for (code, error) in outcomes {
        assert_eq!((code, error.reason), (Code::Unimplemented, Reason::Unimplemented));
        assert!(!error.message.is_empty());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn health_and_both_reflections_are_open() {
    let rig = rig().await;
    let mut health = HealthClient::new(rig.channel.clone());
    for service in ["", "kvasir.worker.v1.Worker"] {
        let mut watch = health.watch(HealthCheckRequest { service: service.into() }).await.unwrap().into_inner();
        let mut status = ServingStatus::Unknown;
        while status != ServingStatus::Serving {
            status = soon("health", watch.message()).await.unwrap().unwrap().status();
        }
    }
    assert!(reflects_v1(&rig).await.contains(&"kvasir.worker.v1.Worker".to_owned()));
    assert!(reflects_v1alpha(&rig).await.contains(&"kvasir.worker.v1.WorkerAdmin".to_owned()));
}

async fn reflects_v1(rig: &Rig) -> Vec<String> {
    use tonic_reflection::pb::v1::ServerReflectionRequest;
    use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
    use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
    use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;
    let ask = ServerReflectionRequest { host: String::new(), message_request: Some(MessageRequest::ListServices(String::new())) };
    let mut client = ServerReflectionClient::new(rig.channel.clone());
    let mut answers = client.server_reflection_info(stream::iter([ask])).await.unwrap().into_inner();
    match answers.message().await.unwrap().unwrap().message_response {
        Some(MessageResponse::ListServicesResponse(list)) => list.service.into_iter().map(|service| service.name).collect(),
        other => panic!("{other:?}"),
    }
}

async fn reflects_v1alpha(rig: &Rig) -> Vec<String> {
    use tonic_reflection::pb::v1alpha::ServerReflectionRequest;
    use tonic_reflection::pb::v1alpha::server_reflection_client::ServerReflectionClient;
    use tonic_reflection::pb::v1alpha::server_reflection_request::MessageRequest;
    use tonic_reflection::pb::v1alpha::server_reflection_response::MessageResponse;
    let ask = ServerReflectionRequest { host: String::new(), message_request: Some(MessageRequest::ListServices(String::new())) };
    let mut client = ServerReflectionClient::new(rig.channel.clone());
    let mut answers = client.server_reflection_info(stream::iter([ask])).await.unwrap().into_inner();
    match answers.message().await.unwrap().unwrap().message_response {
        Some(MessageResponse::ListServicesResponse(list)) => list.service.into_iter().map(|service| service.name).collect(),
        other => panic!("{other:?}"),
    }
}
