//! The gRPC door over a real connection, and beside the HTTP door.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]

use crate::testing::{MODEL, Rig, Running, Scripted, Step, chat, get, model, rig, rig_with, secret, speak};
use crate::{DoorSettings, Isolation, TenantTable};
use kvasir_core::{Chunk, Error, FinishReason, Reason, Request as CoreRequest, StateTimes, Tokens, Usage};
use kvasir_proto::convert::error_from_status;
use kvasir_proto::inference as wire;
use kvasir_proto::inference::generate_event::Event;
use kvasir_proto::inference::generate_request::Prompt;
use kvasir_proto::inference::inference_client::InferenceClient;
use serde_json::json;
use std::time::Duration;
use tokio_stream::StreamExt as _;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

async fn connect(server: &Running) -> Channel {
    Endpoint::from_shared(format!("http://{}", server.address)).unwrap().connect().await.unwrap()
}

async fn client(rig: &Rig) -> (Running, InferenceClient<Channel>) {
    let server = Running::start(rig.door.router()).await;
    let channel = connect(&server).await;
    (server, InferenceClient::new(channel))
}

fn talk() -> wire::ChatRequest {
    wire::ChatRequest {
        model: MODEL.into(),
        messages: vec![wire::Message { role: "user".into(), content: "hi".into(), ..Default::default() }],
        ..Default::default()
    }
}

async fn collect(stream: tonic::Streaming<wire::GenerateEvent>) -> Result<Vec<Event>, tonic::Status> {
    stream.map(|event| event.map(|event| event.event.unwrap())).collect::<Result<Vec<_>, _>>().await
}

/// The same script, asked for the same thing through both doors, gives the same request, texts, log-probabilities, usage and report.
#[tokio::test]
async fn both_doors_ask_for_and_say_the_same() {
    let rig = rig(speak(&["hello", " wörld", " the"], FinishReason::Length));
    let (_server, mut client) = client(&rig).await;
    let request = wire::ChatRequest {
        parameters: Some(wire::Parameters {
            max_tokens: Some(9),
            temperature: Some(0.3),
            top_p: Some(0.9),
            top_k: Some(40),
            min_p: Some(0.05),
            repetition_penalty: Some(1.1),
            presence_penalty: Some(0.5),
            frequency_penalty: Some(-0.5),
            logit_bias: [(7, -1.5), (3, 2.0)].into(),
            seed: Some(-4),
            n: Some(2),
            stop: vec!["END".into()],
            stop_token_ids: vec![9],
            ignore_eos: true,
            min_tokens: 2,
            top_logprobs: Some(1),
            response_format: Some(wire::ResponseFormat { kind: Some(wire::response_format::Kind::Regex("a+".into())) }),
            ..Default::default()
        }),
        kvasir: Some(wire::Extensions {
            report: true,
            cache: Some(wire::Cache { mode: 2, ttl_s: Some(60), pin: true }),
            speculation: Some(wire::Speculation { mode: 2, max_draft_tokens: Some(4) }),
            contract: 2,
            priority: 3,
            deadline_ms: None,
        }),
        cache_salt: "mine".into(),
        ..talk()
    };
    let events = collect(client.chat(request).await.unwrap().into_inner()).await.unwrap();
    let grpc_request = rig.serve.last();
    let body = json!({
        "model": MODEL, "messages": [{ "role": "user", "content": "hi" }], "max_tokens": 9, "temperature": 0.3, "top_p": 0.9, "top_k": 40,
        "min_p": 0.05, "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": -0.5, "logit_bias": { "7": -1.5, "3": 2 },
        "seed": -4, "n": 2, "stop": "END", "stop_token_ids": [9], "ignore_eos": true, "min_tokens": 2, "logprobs": true, "top_logprobs": 1,
        "guided_regex": "a+", "cache_salt": "mine",
        "kvasir": { "report": true, "cache": { "mode": "on", "ttl_s": 60, "pin": true }, "speculation": { "mode": "fixed", "max_draft_tokens": 4 },
                    "contract": "rejection", "priority": 3 }
    });
    let whole = chat(&rig, &body).await.json();
    let http_request = rig.serve.last();
    let comparable = |request: &CoreRequest| {
        let mut request = request.clone();
        request.id = kvasir_core::RequestId([0; 16]);
        (format!("{request:?}"), request.domain)
    };
    assert_eq!(comparable(&grpc_request), comparable(&http_request));

    assert!(matches!(&events[0], Event::Started(started) if started.cached_tokens == 1));
    let Some(Event::Finished(finished)) = events.last() else { panic!("{events:?}") };
    let usage = finished.usage.unwrap();
    assert_eq!(whole["usage"]["prompt_tokens"], usage.prompt_tokens);
    assert_eq!(whole["usage"]["completion_tokens"], usage.completion_tokens);
    assert_eq!(whole["usage"]["prompt_tokens_details"]["cached_tokens"], usage.cached_tokens);
    let report = finished.report.as_ref().unwrap();
    assert_eq!((&whole["kvasir"]["drafted"], &whole["kvasir"]["accepted"]), (&json!(report.drafted), &json!(report.accepted)));
    assert_eq!(whole["kvasir"]["computed"], report.computed);
    for choice in 0..2u32 {
        let deltas = events.iter().filter_map(|event| match event {
            Event::Delta(delta) if delta.choice == choice => Some(delta),
            _ => None,
        });
        let text: String = deltas.clone().map(|delta| delta.text.as_str()).collect();
        let shown = &whole["choices"][choice as usize];
        assert_eq!(shown["message"]["content"], text);
        let logprobs: Vec<f32> = deltas.flat_map(|delta| delta.logprobs.iter().map(|entry| entry.logprob)).collect();
        let over_http: Vec<f32> = shown["logprobs"]["content"]
            .as_array()
            .unwrap()
            .iter()
            .map(|entry| entry["logprob"].as_f64().unwrap() as f32)
            .collect();
        assert_eq!(logprobs, over_http);
    }
}

#[tokio::test]
async fn generate_takes_text_and_tokens_and_echoes() {
    let rig = rig(speak(&[" the"], FinishReason::Stop));
    let (_server, mut client) = client(&rig).await;
    let request = wire::GenerateRequest { prompt: Some(Prompt::Text("hello".into())), echo: true, ..Default::default() };
    let events = collect(client.generate(request).await.unwrap().into_inner()).await.unwrap();
    let text: String = events
        .iter()
        .filter_map(|event| if let Event::Delta(delta) = event { Some(delta.text.as_str()) } else { None })
        .collect();
    assert_eq!(text, "hello the");
    let tokens = Prompt::Tokens(wire::TokenIds { ids: vec![5, 6] });
    let request = wire::GenerateRequest { model: MODEL.into(), prompt: Some(tokens), ..Default::default() };
    collect(client.generate(request).await.unwrap().into_inner()).await.unwrap();
    assert_eq!(*rig.serve.last().prompt, [5, 6]);
    let none = client.generate(wire::GenerateRequest::default()).await.unwrap_err();
    assert_eq!((none.code(), error_from_status(&none).field.as_deref()), (Code::InvalidArgument, Some("prompt")));
}

#[tokio::test]
async fn tokenize_and_models_agree_with_http() {
    let rig = rig(speak(&[], FinishReason::Stop));
    let (_server, mut client) = client(&rig).await;
    let tokenize = async |body: serde_json::Value| crate::testing::post(&rig, "/tokenize", body.to_string()).await.json();
    let input = wire::tokenize_request::Input::Chat(talk());
    let reply = client.tokenize(wire::TokenizeRequest { input: Some(input), ..Default::default() }).await.unwrap().into_inner();
    let http = tokenize(json!({ "messages": [{ "role": "user", "content": "hi" }] })).await;
    assert_eq!((&http["tokens"], &http["count"]), (&json!(reply.tokens), &json!(reply.count)));
    let prompt = tokenize(json!({ "prompt": "hello the", "return_token_strs": true })).await;
    assert_eq!(
        prompt["token_strs"].as_array().unwrap().iter().map(|text| text.as_str().unwrap()).collect::<String>(),
        "hello the"
    );
    let back = crate::testing::post(&rig, "/detokenize", json!({ "tokens": prompt["tokens"] }).to_string()).await.json();
    assert_eq!(back["prompt"], "hello the");
    let models = client.models(wire::ModelsRequest {}).await.unwrap().into_inner().models;
    assert_eq!((models.len(), models[0].id.as_str(), models[0].max_model_len), (1, MODEL, 512));
}

/// R22 over gRPC: a failure is the call's status, with its reason in the detail, before and after the first event.
#[tokio::test]
async fn failures_are_statuses_with_their_reason() {
    let tokens = Step::Send(Chunk::Tokens(Tokens { ids: vec![5], text: "hello".into(), ..Tokens::default() }));
    let lost = Error::new(Reason::WorkerLost, "the worker went away");
    let failed = Step::Send(Chunk::Failed { error: lost.clone(), usage: Usage::default(), states: StateTimes::default() });
    let steps = vec![tokens, failed];
    let late = rig(move |_| Ok(steps.clone()));
    let (_server, mut over) = client(&late).await;
    let status = collect(over.chat(talk()).await.unwrap().into_inner()).await.unwrap_err();
    assert_eq!(error_from_status(&status), lost);
    let full = Error::new(Reason::Overloaded, "full").with_retry_after(Duration::from_secs(2));
    let wanted = full.clone();
    let early = rig(move |_| Err(full.clone()));
    let (_server, mut over) = client(&early).await;
    let status = over.chat(talk()).await.unwrap_err();
    assert_eq!((status.code(), error_from_status(&status)), (Code::Unavailable, wanted));
    let unknown = over.chat(wire::ChatRequest { model: "nope".into(), ..talk() }).await.unwrap_err();
    assert_eq!(error_from_status(&unknown).reason, Reason::ModelNotFound);
}

/// R79: a message over the limit is RESOURCE_EXHAUSTED, names the limit, and is not worth a retry.
#[tokio::test]
async fn a_message_over_the_limit_is_refused_by_name() {
    let serve = Scripted::new(vec![model(MODEL)], speak(&["x"], FinishReason::Stop));
    let rig = rig_with(serve, TenantTable::open(secret()), DoorSettings { body_bytes_max: 1000, ..DoorSettings::default() });
    let (_server, mut client) = client(&rig).await;
    let request = wire::GenerateRequest { prompt: Some(Prompt::Text("x".repeat(2000))), ..Default::default() };
    let status = client.generate(request).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted);
    let error = error_from_status(&status);
    assert_eq!((error.reason, error.retryable()), (Reason::PayloadTooLarge, false));
    assert!(error.message.contains("1000 bytes"), "{}", error.message);
}

/// R19 over gRPC: dropping the stream cancels, and so does a call that waits for its first event.
#[tokio::test]
async fn dropping_a_stream_cancels_it() {
    let tokens = Step::Send(Chunk::Tokens(Tokens { ids: vec![5], text: "hello".into(), ..Tokens::default() }));
    let rig = rig(move |request| Ok(if request.sampling.n == 1 { vec![tokens.clone(), Step::Hang] } else { vec![Step::Hang] }));
    let (_server, mut client) = client(&rig).await;
    let mut stream = client.chat(talk()).await.unwrap().into_inner();
    assert!(stream.next().await.unwrap().is_ok());
    drop(stream);
    rig.serve.idle().await;
    let parameters = Some(wire::Parameters { n: Some(2), ..Default::default() });
    let mut other = client.clone();
    let waiting = tokio::spawn(async move { other.chat(wire::ChatRequest { parameters, ..talk() }).await });
    rig.serve.live.subscribe().wait_for(|live| *live == 1).await.unwrap();
    waiting.abort();
    rig.serve.idle().await;
    let metrics = get(&rig, "/metrics").await.body;
    let cancelled = "kvasir_door_requests_total{door=\"grpc\",route=\"chat\",model=\"tiny\",outcome=\"cancelled\"} 2";
    assert!(metrics.contains(cancelled), "{metrics}");
    assert!(metrics.contains("kvasir_door_in_flight{door=\"grpc\"} 0"), "{metrics}");
}

#[tokio::test]
async fn a_key_travels_in_metadata_and_a_timeout_becomes_the_deadline() {
    let digest = hex::encode(<sha2::Sha256 as sha2::Digest>::digest("key-a"));
    let file = format!("[[tenant]]\nname = \"a\"\nkey_sha256 = \"{digest}\"\n");
    let table = TenantTable::parse(&file, &secret(), &Isolation::PerTenant).unwrap();
    let serve = Scripted::new(vec![model(MODEL)], speak(&["x"], FinishReason::Stop));
    let rig = rig_with(serve, table, DoorSettings::default());
    let (_server, mut client) = client(&rig).await;
    assert_eq!(client.chat(talk()).await.unwrap_err().code(), Code::Unauthenticated);
    let mut request = Request::new(talk());
    request.metadata_mut().insert("authorization", "Bearer key-a".parse().unwrap());
    request.set_timeout(Duration::from_secs(30));
    collect(client.chat(request).await.unwrap().into_inner()).await.unwrap();
    let served = rig.serve.last();
    assert_eq!(&*served.tenant.0, "a");
    assert!(
        served.deadline.is_some_and(|left| left <= Duration::from_secs(30) && left > Duration::from_secs(20)),
        "{:?}",
        served.deadline
    );
}

#[tokio::test]
async fn a_trace_context_reaches_the_request() {
    const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let rig = rig(speak(&["x"], FinishReason::Stop));
    let (_server, mut client) = client(&rig).await;
    for (sent, seen) in [(PARENT, Some(PARENT)), ("malformed", None)] {
        let mut request = Request::new(talk());
        request.metadata_mut().insert("traceparent", sent.parse().unwrap());
        collect(client.chat(request).await.unwrap().into_inner()).await.unwrap();
        assert_eq!(rig.serve.last().trace.map(|trace| trace.traceparent).as_deref(), seen);
    }
}

#[tokio::test]
async fn health_follows_readiness_and_reflection_lists_the_services() {
    use tonic_reflection::pb::{v1, v1alpha};
    let rig = rig(speak(&[], FinishReason::Stop));
    let server = Running::start(rig.door.grpc_router()).await;
    let channel = connect(&server).await;
    let mut health = HealthClient::new(channel.clone());
    let ask = |service: &str| HealthCheckRequest { service: service.into() };
    for service in ["", "kvasir.inference.v1.Inference"] {
        assert_eq!(health.check(ask(service)).await.unwrap().into_inner().status(), ServingStatus::Serving);
    }
    assert_eq!(health.check(ask("nothing")).await.unwrap_err().code(), Code::NotFound);
    let mut watched = health.watch(ask("")).await.unwrap().into_inner();
    assert_eq!(watched.next().await.unwrap().unwrap().status(), ServingStatus::Serving);
    *rig.serve.ready.lock().unwrap() = Err(Error::new(Reason::Draining, "draining"));
    assert_eq!(health.check(ask("")).await.unwrap().into_inner().status(), ServingStatus::NotServing);
    assert_eq!(watched.next().await.unwrap().unwrap().status(), ServingStatus::NotServing);

    let request = v1::ServerReflectionRequest {
        host: String::new(),
        message_request: Some(v1::server_reflection_request::MessageRequest::ListServices(String::new())),
    };
    let mut reflection = v1::server_reflection_client::ServerReflectionClient::new(channel.clone());
    let mut replies = reflection.server_reflection_info(tokio_stream::iter([request])).await.unwrap().into_inner();
    let reply = replies.next().await.unwrap().unwrap().message_response.unwrap();
    let v1::server_reflection_response::MessageResponse::ListServicesResponse(list) = reply else { panic!("{reply:?}") };
    let names: Vec<_> = list.service.into_iter().map(|service| service.name).collect();
    assert!(names.iter().any(|name| name == "kvasir.inference.v1.Inference"), "{names:?}");
    let symbol = v1alpha::server_reflection_request::MessageRequest::FileContainingSymbol("kvasir.inference.v1.Inference".into());
    let request = v1alpha::ServerReflectionRequest { host: String::new(), message_request: Some(symbol) };
    let mut reflection = v1alpha::server_reflection_client::ServerReflectionClient::new(channel);
    let mut replies = reflection.server_reflection_info(tokio_stream::iter([request])).await.unwrap().into_inner();
    let reply = replies.next().await.unwrap().unwrap().message_response.unwrap();
    assert!(matches!(reply, v1alpha::server_reflection_response::MessageResponse::FileDescriptorResponse(_)), "{reply:?}");
}

/// R74 over gRPC: the status says that the server stops and that another try is right.
#[tokio::test]
async fn after_the_grace_period_a_stream_ends_with_a_status() {
    let rig = rig(|_| {
        Ok(vec![Step::Send(Chunk::Tokens(Tokens { ids: vec![5], text: "hello".into(), ..Tokens::default() })), Step::Hang])
    });
    let mut server = Running::with_grace(rig.door.router(), Duration::from_millis(20)).await;
    let mut client = InferenceClient::new(connect(&server).await);
    let mut events = client.chat(talk()).await.unwrap().into_inner();
    assert!(matches!(events.next().await.unwrap().unwrap().event, Some(Event::Delta(_))));
    server.stop();
    let status = tokio::time::timeout(Duration::from_secs(10), events.next()).await.expect("in time").unwrap().unwrap_err();
    assert_eq!(status.code(), Code::Unavailable, "{status}");
    assert_eq!(error_from_status(&status).reason, Reason::Draining);
    server.ended().await;
}
