//! One call against a door that says what it is told to.

use super::*;
use crate::args::{Cli, Command};
use clap::Parser as _;
use futures::Stream;
use kvasir_proto::convert::error_to_status;
use kvasir_proto::inference::inference_server::{Inference, InferenceServer};
use kvasir_proto::inference::{
    ChatRequest, Delta, GenerateEvent, Model, ModelsResponse, Started, TokenizeRequest, TokenizeResponse,
};
use kvasir_proto::pb::Usage;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use tokio::task::JoinHandle;
use tonic::Response;
use tonic::transport::server::TcpIncoming;

/// What the door says next.
type Said = Result<GenerateEvent, Status>;
type Events = Pin<Box<dyn Stream<Item = Said> + Send>>;

/// What the door has been asked.
#[derive(Clone, Default)]
struct Asked {
    key: Option<String>,
    request: Option<GenerateRequest>,
}

struct Door {
    models: Vec<&'static str>,
    events: Vec<Said>,
    /// Whether the stream stays open after the events.
    hangs: bool,
    asked: Arc<Mutex<Asked>>,
}

#[tonic::async_trait]
impl Inference for Door {
    type GenerateStream = Events;
    type ChatStream = Events;

    async fn generate(&self, request: Request<GenerateRequest>) -> Result<Response<Events>, Status> {
        let key = request.metadata().get("authorization").map(|value| value.to_str().unwrap().to_owned());
        *self.asked.lock().unwrap() = Asked { key, request: Some(request.into_inner()) };
        let events = futures::stream::iter(self.events.clone());
        let end: Events = if self.hangs { Box::pin(futures::stream::pending()) } else { Box::pin(futures::stream::empty()) };
        Ok(Response::new(Box::pin(futures::StreamExt::chain(events, end))))
    }

    async fn models(&self, _request: Request<ModelsRequest>) -> Result<Response<ModelsResponse>, Status> {
        let models = self.models.iter().map(|id| Model { id: (*id).to_owned(), ..Model::default() }).collect();
        Ok(Response::new(ModelsResponse { models }))
    }

    async fn chat(&self, _request: Request<ChatRequest>) -> Result<Response<Events>, Status> {
        Err(Status::unimplemented("not asked here"))
    }

    async fn tokenize(&self, _request: Request<TokenizeRequest>) -> Result<Response<TokenizeResponse>, Status> {
        Err(Status::unimplemented("not asked here"))
    }
}

/// A door that runs until it is dropped.
struct Running {
    url: String,
    asked: Arc<Mutex<Asked>>,
    task: JoinHandle<Result<(), tonic::transport::Error>>,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn event(event: Event) -> GenerateEvent {
    GenerateEvent { id: "a".to_owned(), model: "m".to_owned(), event: Some(event) }
}

fn text(text: &str) -> GenerateEvent {
    event(Event::Delta(Delta { text: text.to_owned(), ids: vec![1], ..Delta::default() }))
}

fn finished() -> GenerateEvent {
    let usage = Usage { prompt_tokens: 20, cached_tokens: 16, completion_tokens: 2, recomputed_tokens: 0 };
    event(Event::Finished(Finished { usage: Some(usage), ..Finished::default() }))
}

fn whole() -> Vec<Said> {
    [event(Event::Started(Started { prompt_tokens: 20, cached_tokens: 16 })), text("The "), text("Rhine"), finished()]
        .map(Ok)
        .into()
}

fn door(models: &[&'static str], events: Vec<Said>, hangs: bool) -> Running {
    let asked = Arc::new(Mutex::new(Asked::default()));
    let incoming = TcpIncoming::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let url = format!("http://{}", incoming.local_addr().unwrap());
    let service = InferenceServer::new(Door { models: models.to_vec(), events, hangs, asked: Arc::clone(&asked) });
    let task = tokio::spawn(tonic::transport::Server::builder().add_service(service).serve_with_incoming(incoming));
    Running { url, asked, task }
}

fn args(url: &str, more: &[&str]) -> GenerateArgs {
    let given = [&["kvasir", "generate", "--url", url], more, &["Name a river."]].concat();
    let Command::Generate(args) = Cli::try_parse_from(given).unwrap().command else { panic!("another command") };
    args
}

async fn refusal(url: &str, more: &[&str]) -> (u8, String, String) {
    let mut out = Vec::new();
    let error = run(&args(url, more), &mut out).await.unwrap_err();
    (error.exit_code(), error.to_string(), String::from_utf8(out).unwrap())
}

#[tokio::test]
async fn a_whole_answer_is_its_text_and_what_it_cost() {
    let door = door(&["only"], whole(), false);
    let mut out = Vec::new();
    let more = ["--key", "\n a-key \nanother\n", "--max-tokens", "8", "--min-tokens", "1", "--seed", "7", "--temperature", "0.5"];
    let summary = run(&args(&door.url, &more), &mut out).await.unwrap();
    assert_eq!(out, b"The Rhine\n");
    assert_eq!((summary.prompt_tokens, summary.cached_tokens, summary.completion_tokens), (20, 16, 2));
    assert!(summary.to_string().starts_with("[only: 16 cached + 4 computed · first text "), "{summary}");
    let asked = door.asked.lock().unwrap().clone();
    assert_eq!(asked.key.as_deref(), Some("Bearer a-key"), "the first key of several");
    let request = asked.request.unwrap();
    assert_eq!((request.model.as_str(), request.prompt), ("only", Some(Prompt::Text("Name a river.".to_owned()))));
    let parameters = request.parameters.unwrap();
    assert_eq!((parameters.max_tokens, parameters.min_tokens, parameters.seed), (Some(8), 1, Some(7)));
    assert_eq!(parameters.temperature, Some(0.5));
}

#[tokio::test]
async fn without_a_key_none_is_shown_and_a_named_model_is_asked_for_without_looking() {
    let door = door(&[], whole(), false);
    run(&args(&door.url, &["--model", "named", "--key", " \n"]), &mut Vec::new()).await.unwrap();
    let asked = door.asked.lock().unwrap().clone();
    assert_eq!((asked.key, asked.request.unwrap().model.as_str()), (None, "named"));
}

#[tokio::test]
async fn a_choice_of_models_is_left_to_the_caller() {
    let (code, said, _) = refusal(&door(&["a", "b"], whole(), false).url, &[]).await;
    assert!(code == 1 && said.contains("--model: a, b"), "{said}");
    let (code, said, _) = refusal(&door(&[], whole(), false).url, &[]).await;
    assert!(code == 1 && said.starts_with("not_ready"), "{said}");
}

#[tokio::test]
async fn a_refusal_names_reason_field_and_when_to_come_back() {
    let error =
        Error::new(Reason::Overloaded, "the queue is full").with_field("priority").with_retry_after(Duration::from_millis(1_500));
    let (code, said, out) = refusal(&door(&["m"], vec![Err(error_to_status(&error))], false).url, &[]).await;
    assert_eq!((code, &*said), (1, "overloaded: the queue is full (field `priority`) (retry after 2 s)"));
    assert_eq!(out, "");
    let lost = error_to_status(&Error::new(Reason::WorkerLost, "the worker is gone"));
    let (code, said, out) = refusal(&door(&["m"], vec![Ok(text("The ")), Err(lost)], false).url, &[]).await;
    assert_eq!((code, &*said, &*out), (1, "worker_lost: the worker is gone", "The "));
}

#[tokio::test]
async fn text_without_a_last_event_is_no_answer() {
    let (code, said, out) = refusal(&door(&["m"], vec![Ok(text("The "))], false).url, &[]).await;
    assert!(code == 1 && said.contains("not whole"), "{said}");
    assert_eq!(out, "The ");
}

#[tokio::test]
async fn a_door_that_says_nothing_is_left_in_time() {
    let door = door(&["m"], vec![Ok(text("The "))], true);
    let (code, said, out) = refusal(&door.url, &["--timeout-seconds", "1"]).await;
    assert_eq!((code, &*out), (4, "The "));
    assert!(said.contains("within 1s") && said.contains("--timeout-seconds"), "{said}");
}

#[tokio::test]
async fn no_way_there_is_told_from_a_refusal() {
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let (code, said, _) = refusal(&format!("http://{closed}"), &[]).await;
    assert!(code == 3 && said.contains(&closed.to_string()) && said.contains("refused"), "{said}");
    // Another service that speaks gRPC, as an ingress or a mesh would.
    let incoming = TcpIncoming::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let url = format!("http://{}", incoming.local_addr().unwrap());
    let empty = tonic::transport::Server::builder().add_routes(tonic::service::Routes::default());
    let task = tokio::spawn(empty.serve_with_incoming(incoming));
    let (code, said, _) = refusal(&url, &["--model", "m"]).await;
    task.abort();
    assert!(code == 3 && said.contains("Unimplemented"), "{said}");
}

#[tokio::test]
async fn addresses_and_keys_that_cannot_be_sent_are_refused_before_anything_is() {
    for (url, wanted) in
        [("https://h:1", "no TLS"), ("h:1", "http://HOST:PORT"), ("http://h:1/%zz ", "--url"), ("ftp://h", "http://HOST:PORT")]
    {
        let (code, said, _) = refusal(url, &[]).await;
        assert!(code == 2 && said.contains(wanted), "{url}: {said}");
    }
    let (code, said, _) = refusal("http://127.0.0.1:1", &["--key", "käy"]).await;
    assert!(code == 2 && said.starts_with("--key: ") && !said.contains("kä"), "{said}");
}
