//! Builders for this crate's tests: a tiny model, a scripted [`Serve`], a door around it, and calls through its router.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]

use crate::{Catalog, ChunkStream, Door, DoorSettings, Prepared, Receipt, Serve, ServedModel, TenantTable, Tenants};
use axum::body::Body;
use futures::future::BoxFuture;
use futures::{FutureExt as _, StreamExt as _, stream};
use http::{HeaderMap, Request as HttpRequest, StatusCode};
use http_body_util::BodyExt as _;
use kvasir_core::{
    Chunk, Contract, Counters, Digest, Error, FinishReason, Finished, MissReason, ModelIdentity, PoolSecret, Request, Started,
    State, StateTimes, Tier, TierHit, TokenLogprob, Tokens, Usage,
};
use kvasir_model::synth::TinyModel;
use kvasir_model::{ModelFile, Text};
use kvasir_telemetry::{DoorMetrics, Registry, Tracer};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;
use tokio::sync::watch;
use tower::ServiceExt as _;

pub(crate) const MODEL: &str = "tiny";

/// What a scripted request does next.
#[derive(Clone, Debug)]
#[expect(clippy::large_enum_variant, reason = "a script is a handful of steps")]
pub(crate) enum Step {
    Send(Chunk),
    Wait(Duration),
    Until(watch::Receiver<bool>),
    Hang,
}

type Script = dyn Fn(&Request) -> Result<Vec<Step>, Error> + Send + Sync;

/// A [`Serve`] that plays a script and counts the streams that are alive.
pub(crate) struct Scripted {
    catalog: Arc<Catalog>,
    script: Box<Script>,
    pub(crate) seen: Mutex<Vec<Request>>,
    pub(crate) live: watch::Sender<usize>,
    pub(crate) ready: Mutex<Result<(), Error>>,
    receipt: Option<Receipt>,
}

struct Alive(watch::Sender<usize>);

impl Drop for Alive {
    fn drop(&mut self) {
        self.0.send_modify(|live| *live -= 1);
    }
}

impl Serve for Scripted {
    fn serve(&self, prepared: Prepared) -> BoxFuture<'static, Result<ChunkStream, Error>> {
        self.live.send_modify(|live| *live += 1);
        let alive = Alive(self.live.clone());
        if let Some(receipt) = &self.receipt {
            prepared.receipt.set(receipt.clone()).unwrap();
        }
        let steps = (self.script)(&prepared.request);
        self.seen.lock().unwrap().push(prepared.request);
        async move {
            let chunks = stream::iter(steps?).filter_map(|step| async move {
                match step {
                    Step::Send(chunk) => Some(chunk),
                    Step::Wait(time) => {
                        tokio::time::sleep(time).await;
                        None
                    }
                    Step::Until(mut flag) => {
                        flag.wait_for(|flag| *flag).await.unwrap();
                        None
                    }
                    Step::Hang => std::future::pending().await,
                }
            });
            let chunks = chunks.map(move |chunk| {
                let _held = &alive;
                chunk
            });
            Ok(chunks.boxed())
        }
        .boxed()
    }

    fn catalog(&self) -> Arc<Catalog> {
        self.catalog.clone()
    }

    fn ready(&self) -> Result<(), Error> {
        self.ready.lock().unwrap().clone()
    }
}

impl Scripted {
    pub(crate) fn new(
        models: Vec<ServedModel>,
        script: impl Fn(&Request) -> Result<Vec<Step>, Error> + Send + Sync + 'static,
    ) -> Arc<Self> {
        Self::placing(models, script, None)
    }

    fn placing(
        models: Vec<ServedModel>,
        script: impl Fn(&Request) -> Result<Vec<Step>, Error> + Send + Sync + 'static,
        receipt: Option<Receipt>,
    ) -> Arc<Self> {
        Arc::new(Self {
            receipt,
            catalog: Arc::new(Catalog { models }),
            script: Box::new(script),
            seen: Mutex::default(),
            live: watch::Sender::new(0),
            ready: Mutex::new(Ok(())),
        })
    }

    pub(crate) fn last(&self) -> Request {
        self.seen.lock().unwrap().last().cloned().expect("a request was served")
    }

    /// Waits until no stream is alive.
    pub(crate) async fn idle(&self) {
        let mut live = self.live.subscribe();
        let idle = live.wait_for(|live| *live == 0);
        tokio::time::timeout(Duration::from_secs(10), idle).await.expect("every stream was dropped").unwrap();
    }
}

/// A tiny model's text; `add_bos` as its settings say.
pub(crate) fn text(add_bos: bool) -> Arc<Text> {
    static TEXTS: [OnceLock<Arc<Text>>; 2] = [OnceLock::new(), OnceLock::new()];
    TEXTS[usize::from(add_bos)].get_or_init(|| build_text(add_bos)).clone()
}

fn build_text(add_bos: bool) -> Arc<Text> {
    let mut writer = TinyModel::default().writer().unwrap();
    writer.bool("tokenizer.ggml.add_bos_token", add_bos);
    Arc::new(ModelFile::from_gguf_bytes("tiny.gguf", writer.finish()).unwrap().text().unwrap())
}

pub(crate) fn model(name: &str) -> ServedModel {
    ServedModel {
        name: name.to_owned(),
        identity: ModelIdentity(Digest::new([7; 32])),
        text: text(false),
        block_size: 16,
        context: 512,
        vocab: 320,
        capacity: 4096,
        created: 1_700_000_000,
    }
}

pub(crate) fn secret() -> PoolSecret {
    PoolSecret::new(b"0123456789abcdef").unwrap()
}

/// A door, its server and its tenants.
pub(crate) struct Rig {
    pub(crate) door: Door,
    pub(crate) serve: Arc<Scripted>,
    pub(crate) tenants: Tenants,
}

pub(crate) fn rig_with(serve: Arc<Scripted>, table: TenantTable, settings: DoorSettings) -> Rig {
    let registry = Registry::default();
    let metrics = DoorMetrics::new(&registry);
    let tenants = Tenants::new(table);
    let door = Door::new(serve.clone(), tenants.clone(), settings, metrics, vec![registry], Tracer::disabled());
    Rig { door, serve, tenants }
}

/// An open door over a script.
pub(crate) fn rig(script: impl Fn(&Request) -> Result<Vec<Step>, Error> + Send + Sync + 'static) -> Rig {
    rig_with(Scripted::new(vec![model(MODEL)], script), TenantTable::open(secret()), DoorSettings::default())
}

/// An open door over a script that also places requests.
pub(crate) fn placing_rig(script: impl Fn(&Request) -> Result<Vec<Step>, Error> + Send + Sync + 'static) -> Rig {
    let receipt = Receipt {
        worker_uid: "w-1".into(),
        candidates: 2,
        score_s: 0.5,
        terms: vec![("wait".into(), 0.2), ("prefill".into(), 0.3)],
        attempts: 1,
        predicted_cached_tokens: 16,
    };
    let serve = Scripted::placing(vec![model(MODEL)], script, Some(receipt));
    rig_with(serve, TenantTable::open(secret()), DoorSettings::default())
}

/// Token ids of a text under the tiny model.
pub(crate) fn ids(text: &str) -> Vec<u32> {
    self::text(false).tokenizer().encode_plain(text).unwrap()
}

/// A script that answers each choice with `parts`, with log-probabilities when asked, and ends with `reason`.
pub(crate) fn speak(
    parts: &'static [&'static str],
    reason: FinishReason,
) -> impl Fn(&Request) -> Result<Vec<Step>, Error> + Send + Sync {
    let known = text(false);
    move |request| {
        let mut steps = vec![Step::Send(Chunk::Started(Started {
            hits: vec![TierHit { tier: Tier::Device, tokens: 1 }],
            computed: request.prompt.len() as u32 - 1,
            miss_reason: Some(MissReason::PartialBlock),
        }))];
        let mut count = 0;
        for part in parts {
            for choice in 0..request.sampling.n {
                let ids = known.tokenizer().encode_plain(part).unwrap();
                count += ids.len() as u32;
                let top = request.sampling.logprobs.unwrap_or(0);
                let entry =
                    |id: &u32| TokenLogprob { id: *id, logprob: -0.25, top: (0..top).map(|rank| (rank + 40, -1.5)).collect() };
                let logprobs = if request.sampling.logprobs.is_some() { ids.iter().map(entry).collect() } else { Vec::new() };
                steps.push(Step::Send(Chunk::Tokens(Tokens {
                    choice,
                    ids,
                    text: (*part).to_owned(),
                    logprobs,
                    ..Tokens::default()
                })));
            }
        }
        steps.push(Step::Send(finished(request, reason, count)));
        Ok(steps)
    }
}

pub(crate) fn finished(request: &Request, reason: FinishReason, completion_tokens: u32) -> Chunk {
    let mut states = StateTimes::default();
    states.add(State::Prepare, Duration::from_millis(1));
    states.add(State::Prefill, Duration::from_millis(4));
    Chunk::Finished(Box::new(Finished {
        reasons: vec![reason; request.sampling.n as usize],
        usage: Usage { prompt_tokens: request.prompt.len() as u32, cached_tokens: 1, completion_tokens, recomputed_tokens: 0 },
        states,
        counters: Counters { proposed: 5, accepted: 3, ..Counters::default() },
        contract: Contract::Coupled,
    }))
}

pub(crate) struct Reply {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: String,
}

impl Reply {
    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error} in {:?}", self.body))
    }

    /// The data lines of a stream, without `[DONE]`; panics if that is not where it belongs.
    pub(crate) fn events(&self) -> Vec<serde_json::Value> {
        let lines: Vec<&str> = self.body.split("\n\n").filter(|line| !line.is_empty() && !line.starts_with(':')).collect();
        let (last, events) = lines.split_last().expect("a stream has events");
        assert_eq!(*last, "data: [DONE]", "{}", self.body);
        events.iter().map(|line| serde_json::from_str(line.strip_prefix("data: ").unwrap()).unwrap()).collect()
    }
}

pub(crate) async fn call(rig: &Rig, request: HttpRequest<Body>) -> Reply {
    let response = rig.door.router().oneshot(request).await.unwrap();
    let (parts, body) = response.into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    Reply { status: parts.status, headers: parts.headers, body: String::from_utf8(body.to_vec()).unwrap() }
}

pub(crate) async fn post(rig: &Rig, path: &str, body: impl Into<Body>) -> Reply {
    call(rig, HttpRequest::post(path).header("content-type", "application/json").body(body.into()).unwrap()).await
}

pub(crate) async fn chat(rig: &Rig, body: &serde_json::Value) -> Reply {
    post(rig, "/v1/chat/completions", body.to_string()).await
}

pub(crate) async fn complete(rig: &Rig, body: &serde_json::Value) -> Reply {
    post(rig, "/v1/completions", body.to_string()).await
}

pub(crate) async fn get(rig: &Rig, path: &str) -> Reply {
    call(rig, HttpRequest::get(path).body(Body::empty()).unwrap()).await
}

/// Puts fixed values where each run has its own.
pub(crate) fn still(mut value: serde_json::Value) -> serde_json::Value {
    for (member, fixed) in [("id", serde_json::json!("ID")), ("created", serde_json::json!(0))] {
        if let Some(slot) = value.get_mut(member) {
            *slot = fixed;
        }
    }
    value
}

/// A server on a loopback port; stops when told.
pub(crate) struct Running {
    pub(crate) address: std::net::SocketAddr,
    stop: Option<tokio::sync::oneshot::Sender<()>>,
    server: tokio::task::JoinHandle<std::io::Result<()>>,
}

impl Running {
    pub(crate) async fn start(router: axum::Router) -> Self {
        Self::with_grace(router, Duration::from_secs(5)).await
    }

    pub(crate) async fn with_grace(router: axum::Router, grace: Duration) -> Self {
        Self::with(router, crate::ServerSettings { grace, ..crate::ServerSettings::default() }).await
    }

    pub(crate) async fn with(router: axum::Router, settings: crate::ServerSettings) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = tokio::sync::oneshot::channel();
        let server = tokio::spawn(crate::serve(listener, router, settings, async {
            let _either = stopped.await;
        }));
        Self { address, stop: Some(stop), server }
    }

    /// Begins the graceful end.
    pub(crate) fn stop(&mut self) {
        self.stop.take().expect("stopped once").send(()).expect("the server runs");
    }

    /// Waits for the end.
    pub(crate) async fn ended(self) {
        tokio::time::timeout(Duration::from_secs(10), self.server).await.expect("the server ends").unwrap().unwrap();
    }
}
