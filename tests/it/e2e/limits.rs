//! Limits over a real fleet: the pool, the context, the queue, and whose prefixes a request may meet (field reports R28, R76, R77).

use super::support::{metric, model_file, until, with_fleet};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Bytes;
use hyper_util::client::legacy::Client as Hyper;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use kvasir_cli::args::LocalArgs;
use kvasir_cli::client::Client;
use kvasir_cli::local::Fleet;
use kvasir_core::{
    CachePolicy, Chunk, Contract, Digest, ModelIdentity, PoolSecret, Reason, Request, RequestId, ReuseDomain, Sampling,
    Speculation, Stop, TenantTag,
};
use kvasir_kernels::Pool;
use kvasir_proto::auth::{Access, BearerSecret, Credentials};
use kvasir_proto::convert::{chunk_from_wire, description_from_wire, error_from_status, request_to_wire};
use kvasir_proto::worker::DescribeRequest;
use kvasir_proto::worker::worker_client::WorkerClient;
use kvasir_worker::service::Telemetry;
use kvasir_worker::start::{KvSize, LoadedModel, WorkerRuntime, WorkerSettings};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tonic::service::interceptor::InterceptedService;
use tonic::transport::Channel;

const BLOCK: u32 = 16;

/// A fleet of one worker with random weights.
fn args(context: usize, kv_mib: u64, state: &Path) -> LocalArgs {
    let path = model_file(context, state);
    LocalArgs { kv_mib, ..LocalArgs::for_measurement(path.to_str().unwrap(), 1, state) }
}

/// Tokens that the only worker's pool holds.
fn pool_tokens(fleet: &Fleet) -> u32 {
    let load = fleet.workers()[0].service().engine().load();
    let tier = load.borrow().load.tiers[0];
    (tier.free + tier.cached + tier.held) * BLOCK
}

fn tokens(seed: u32, len: u32) -> Vec<u32> {
    (0..len).map(|i| (seed * 31 + i * i * 7 + i) % 250).collect()
}

/// A whole answer with its status.
struct Reply {
    status: u16,
    retry_after: Option<u64>,
    body: Value,
    took: Duration,
}

#[derive(Clone)]
struct Door {
    http: Hyper<HttpConnector, Full<Bytes>>,
    base: String,
    model: String,
}

impl Door {
    fn of(fleet: &Fleet) -> Self {
        let http = Hyper::builder(TokioExecutor::new()).build_http();
        Self { http, base: format!("http://{}", fleet.http()), model: fleet.model().to_owned() }
    }

    async fn complete(&self, mut body: Value) -> Reply {
        body["model"] = self.model.clone().into();
        let request = http::Request::post(format!("{}/v1/completions", self.base)).header("content-type", "application/json");
        let began = Instant::now();
        let response = self.http.request(request.body(Full::from(body.to_string())).unwrap()).await.unwrap();
        let status = response.status().as_u16();
        let retry_after = response.headers().get("retry-after").and_then(|value| value.to_str().ok()?.parse().ok());
        let bytes = response.into_body().collect().await.unwrap().to_bytes();
        let body = serde_json::from_slice(&bytes).unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&bytes)));
        Reply { status, retry_after, body, took: began.elapsed() }
    }
}

impl Reply {
    fn error(&self) -> (u16, &str, &str) {
        let error = &self.body["error"];
        (self.status, error["code"].as_str().unwrap_or_default(), error["message"].as_str().unwrap_or_default())
    }

    /// Finish reason, prompt tokens, output tokens.
    fn ended(&self) -> (&str, u64, u64) {
        assert_eq!(self.status, 200, "{}", self.body);
        let usage = |name: &str| self.body["usage"][name].as_u64().unwrap();
        (self.body["choices"][0]["finish_reason"].as_str().unwrap(), usage("prompt_tokens"), usage("completion_tokens"))
    }
}

/// Waits until nothing is in flight anywhere.
async fn at_rest(client: &Client) {
    until("all gauges are 0", || async move {
        let text = client.get_text("/metrics").await.unwrap().1;
        let gauges = [
            "kvasir_door_in_flight",
            "kvasir_router_leases",
            "kvasir_router_queued_requests",
            "kvasir_running_sequences",
            "kvasir_waiting_requests",
        ];
        gauges.iter().all(|name| text.contains(&format!("\n{name}")) && metric(&text, name, &[]) == 0.0)
            && metric(&text, "kvasir_blocks", &["state=\"held\""]) == 0.0
    })
    .await;
    let text = client.get_text("/metrics").await.unwrap().1;
    assert_eq!(metric(&text, "kvasir_reconcile_violations_total", &[]), 0.0);
}

#[test]
fn r77_what_cannot_fit_the_pool_is_refused_and_those_behind_are_served() {
    let state = tempfile::tempdir().unwrap();
    with_fleet(&args(32_768, 1, state.path()), state.path(), |fleet| async move {
        let client = Client::new(&format!("http://{}", fleet.http()), None).unwrap();
        let door = Door::of(&fleet);
        let pool = pool_tokens(&fleet);
        assert!(pool < 16_384, "the pool of {pool} tokens is smaller than the context");
        let ask =
            |seed, len, output| door.complete(json!({"prompt": tokens(seed, len), "max_tokens": output, "ignore_eos": true}));
        // All at once, so that the small ones stand behind what is refused and behind what fills the pool.
        let big = [ask(1, pool + 1, 4), ask(2, pool + 1, 4), ask(3, pool, 4), ask(4, pool - 40, 400)];
        let small = (10..18).map(|seed| ask(seed, 20, 3));
        let (big, small) = tokio::join!(futures::future::join_all(big), futures::future::join_all(small));
        for reply in &big[..3] {
            let (status, code, message) = reply.error();
            assert_eq!((status, code), (Reason::CapacityExceeded.http_status(), "capacity_exceeded"), "{message}");
            assert!(message.contains(&pool.to_string()), "{message}");
            assert_eq!(reply.retry_after, None, "it will never fit");
        }
        assert!(big[0].error().2.contains(&(pool + 1).to_string()));
        assert_eq!(big[3].ended(), ("length", u64::from(pool - 40), 40), "it ends where the pool does");
        for reply in &small {
            assert_eq!(reply.ended(), ("length", 20, 3));
        }
        at_rest(&client).await;
    });
}

#[test]
fn r76_a_burst_gets_answers_or_typed_refusals_and_leaves_nothing_behind() {
    const BURST: u32 = 320;
    const CHOICES: u32 = 8;
    let state = tempfile::tempdir().unwrap();
    with_fleet(&args(2048, 1, state.path()), state.path(), |fleet| async move {
        let client = Client::new(&format!("http://{}", fleet.http()), None).unwrap();
        let door = Door::of(&fleet);
        let ask = |seed| {
            let (door, prompt) = (door.clone(), tokens(seed, 300));
            let body =
                json!({"prompt": prompt, "max_tokens": 32, "n": CHOICES, "temperature": 1, "seed": seed, "ignore_eos": true});
            tokio::spawn(async move { door.complete(body).await })
        };
        let mut load = fleet.workers()[0].service().engine().load();
        let burst: Vec<_> = (0..BURST).map(ask).collect();
        let mut replies = futures::future::join_all(burst);
        let mut deepest = 0;
        let replies = loop {
            tokio::select! {
                replies = &mut replies => break replies,
                changed = load.changed() => {
                    changed.unwrap();
                    deepest = deepest.max(load.borrow().load.waiting);
                }
            }
        };
        let (mut served, mut refused) = (0, 0);
        let mut slowest_refusal = Duration::ZERO;
        for reply in replies.into_iter().map(Result::unwrap) {
            if reply.status == 200 {
                served += 1;
                assert_eq!(reply.ended().2, u64::from(CHOICES) * 32);
                continue;
            }
            refused += 1;
            let (status, code, message) = reply.error();
            assert!(status == 503 && ["overloaded", "no_worker"].contains(&code), "{status} {code}: {message}");
            assert!(reply.retry_after.is_some_and(|seconds| seconds >= 1), "{}", reply.body);
            slowest_refusal = slowest_refusal.max(reply.took);
        }
        println!("{served} served, {refused} refused (the slowest after {slowest_refusal:?}), {deepest} waiting at most");
        assert!(refused > 0 && served >= 1024 / CHOICES, "{served} served, {refused} refused: n choices count as n");
        assert!(deepest > 0 && deepest <= 1024, "{deepest} waited");
        at_rest(&client).await;
        assert_eq!(
            door.complete(json!({"prompt": tokens(1, 20), "max_tokens": 2, "ignore_eos": true})).await.ended(),
            ("length", 20, 2)
        );
    });
}

#[test]
fn r28_the_context_is_a_limit_that_is_told_and_nothing_is_cut() {
    const CONTEXT: u32 = 512;
    let state = tempfile::tempdir().unwrap();
    with_fleet(&args(CONTEXT as usize, 8, state.path()), state.path(), |fleet| async move {
        let client = Client::new(&format!("http://{}", fleet.http()), None).unwrap();
        let door = Door::of(&fleet);
        let body = |len, output: Option<u32>| {
            let mut body = json!({"prompt": tokens(1, len), "ignore_eos": true, "temperature": 0, "logprobs": 1});
            if let Some(output) = output {
                body["max_tokens"] = output.into();
            }
            body
        };
        for output in [None, Some(1), Some(10)] {
            for len in [CONTEXT + 1, CONTEXT] {
                let reply = door.complete(body(len, output)).await;
                let (status, code, message) = reply.error();
                assert_eq!((status, code), (400, "context_length_exceeded"), "{len} tokens: {message}");
                assert!(message.contains(&len.to_string()) && message.contains(&CONTEXT.to_string()), "{message}");
                assert_eq!(reply.body["error"]["param"], "prompt");
            }
            let last = door.complete(body(CONTEXT - 1, output)).await;
            assert_eq!(last.ended(), ("length", u64::from(CONTEXT - 1), 1), "{output:?}");
        }
        // What stands at the very start still counts in the longest prompt that is served.
        let mut other = body(CONTEXT - 1, Some(1));
        let first = other["prompt"][0].as_u64().unwrap();
        other["prompt"][0] = (first + 1).into();
        let (this, other) = (door.complete(body(CONTEXT - 1, Some(1))).await, door.complete(other).await);
        let logprob = |reply: &Reply| reply.body["choices"][0]["logprobs"]["token_logprobs"][0].as_f64().unwrap();
        assert!((logprob(&this) - logprob(&other)).abs() > 0.0, "the first token reaches the last");
        // The client's own count is the one that is billed and limited.
        let text = "and the world said hello to the user ".repeat(12);
        let counted = client.post("/tokenize", &json!({"model": door.model, "prompt": text})).await.unwrap();
        let counted = counted["tokens"].as_array().unwrap().len() as u64;
        assert_eq!(
            door.complete(json!({"prompt": text, "max_tokens": 2, "ignore_eos": true})).await.ended(),
            ("length", counted, 2)
        );
        at_rest(&client).await;
    });
}

fn request(identity: ModelIdentity, prompt: &[u32]) -> Request {
    let secret = PoolSecret::new(&[3; 32]).unwrap();
    Request {
        id: RequestId([1; 16]),
        identity,
        adapter: None,
        prompt: prompt.into(),
        domain: ReuseDomain::derive(&secret, "t", 0, None),
        shared: None,
        secret_epoch: secret.epoch(),
        tenant: TenantTag("t".into()),
        cache: CachePolicy::default(),
        sampling: Sampling { seed: 1, ..Sampling::default() },
        stop: Stop { max_tokens: 3, ignore_eos: true, ..Stop::default() },
        grammar: None,
        contract: Contract::Coupled,
        speculation: Speculation::default(),
        priority: 0,
        deadline: None,
        trace: None,
    }
}

type Caller = WorkerClient<InterceptedService<Channel, Credentials>>;

/// Runs a request to its end; the prompt tokens that it reused.
async fn cached(client: &mut Caller, request: &Request) -> u32 {
    let mut stream = client.generate(request_to_wire(request)).await.unwrap().into_inner();
    let mut cached = 0;
    while let Some(message) = stream.message().await.unwrap() {
        match chunk_from_wire(message).unwrap() {
            Chunk::Started(started) => cached = started.cached(),
            Chunk::Failed { error, .. } => panic!("{error}"),
            _ => {}
        }
    }
    cached
}

#[test]
fn another_identity_is_refused_over_the_wire_before_any_lookup() {
    let state = tempfile::tempdir().unwrap();
    let path = model_file(512, state.path());
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let secret = BearerSecret::new("a-secret-of-the-worker-pool-0123456789").unwrap();
        let telemetry = Telemetry::default();
        let registry = telemetry.registry.clone();
        let parts =
            LoadedModel::open("tiny", &path, None, Arc::new(Pool::new(1))).unwrap().parts(BLOCK, None, telemetry).unwrap();
        let settings =
            WorkerSettings { kv: KvSize::Blocks(64), ..WorkerSettings::new("worker-0", Access::Bearer(secret.clone())) };
        let worker = WorkerRuntime::start(settings, parts).await.unwrap();
        let endpoint = tonic::transport::Endpoint::from_shared(format!("http://{}", worker.address())).unwrap();
        let channel = endpoint.connect().await.unwrap();
        let mut client: Caller = WorkerClient::with_interceptor(channel, Credentials::new(&secret).unwrap());
        let described = client.describe(DescribeRequest::default()).await.unwrap().into_inner();
        let identity = description_from_wire(described).unwrap().models[0].identity();

        let prompt = tokens(1, 100);
        let asked = request(identity, &prompt);
        assert_eq!((cached(&mut client, &asked).await, cached(&mut client, &asked).await), (0, 96), "there is something to meet");
        let counters = || {
            let text = registry.render();
            let prefix = ["kvasir_prompt_tokens_total", "kvasir_prefix_requests_total", "kvasir_prefix_misses_total"];
            (worker.service().engine().stats(), prefix.map(|name| metric(&text, name, &[])))
        };
        // Counters are told at the end of a step, after the last chunk was.
        worker.service().idle().await;
        worker.service().engine().inspect().await.unwrap();
        let before = counters();
        assert!(before.1[0] > 0.0, "the counters move when something is looked up: {:?}", before.1);
        let mut flipped = *identity.0.as_bytes();
        flipped[31] ^= 1;
        for other in [Digest::new(flipped), Digest::new([9; 32])] {
            let status = client.generate(request_to_wire(&request(ModelIdentity(other), &prompt))).await.unwrap_err();
            let error = error_from_status(&status);
            assert_eq!((status.code(), error.reason), (tonic::Code::FailedPrecondition, Reason::IdentityMismatch));
            assert!(error.retryable(), "another worker may serve it");
        }
        assert_eq!(counters(), before, "nothing was looked up, counted as a miss, or begun");
        assert_eq!(cached(&mut client, &asked).await, 96, "and nothing was lost");
        worker.shutdown(Some(Duration::from_secs(5))).await.unwrap();
    });
}
