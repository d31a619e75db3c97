//! A worker on the hash-model behind a loopback port, a gate that holds its steps back, and clients.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test may stop at the first surprise")]

use futures::StreamExt as _;
use kvasir_core::{
    CacheMode, CachePolicy, Chunk, Contract, Error, Finished, ModelIdentity, PoolSecret, Request, RequestId, ReuseDomain,
    Sampling, Speculation, Started, Stop, TenantTag, TokenId, WorkerLoad,
};
use kvasir_model::ModelFile;
use kvasir_model::synth::TinyModel;
use kvasir_proto::auth::{Access, BearerSecret, Credentials};
use kvasir_proto::convert::{chunk_from_wire, error_from_status, request_to_wire};
use kvasir_proto::worker as wire;
use kvasir_proto::worker::worker_admin_client::WorkerAdminClient;
use kvasir_proto::worker::worker_client::WorkerClient;
use kvasir_worker::backend::fake::{FakeBackend, FakeBytes, FakeControl, FakeModel};
use kvasir_worker::backend::{Backend, BackendError, BackendSpec};
use kvasir_worker::engine::VirtualClock;
use kvasir_worker::plan::{BlockId, Plan, StepOutput};
use kvasir_worker::service::{ServedParts, Telemetry};
use kvasir_worker::start::{KvSize, WorkerParts, WorkerRuntime, WorkerSettings};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, LazyLock, Mutex};
use std::time::Duration;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Channel, Endpoint};
use tonic::{Status, Streaming};

/// Longest that a test waits for something that must happen.
pub const SOON: Duration = Duration::from_secs(20);

pub const SECRET: &str = "service-test-secret";

pub type Caller = InterceptedService<Channel, Credentials>;

/// Lets steps of the backend through: all, or as many as are allowed.
#[derive(Clone, Default)]
pub struct Gate(Arc<(Mutex<Option<u64>>, Condvar)>);

impl Gate {
    pub fn close(&self) {
        *self.0.0.lock().unwrap() = Some(0);
    }

    pub fn open(&self) {
        *self.0.0.lock().unwrap() = None;
        self.0.1.notify_all();
    }

    /// Lets this many more steps through.
    pub fn allow(&self, steps: u64) {
        if let Some(left) = &mut *self.0.0.lock().unwrap() {
            *left += steps;
        }
        self.0.1.notify_all();
    }

    /// Lets one step through, but never two at once.
    pub fn allow_one(&self) {
        if let Some(left @ 0) = &mut *self.0.0.lock().unwrap() {
            *left = 1;
        }
        self.0.1.notify_all();
    }

    fn pass(&self) {
        let mut left = self.0.1.wait_while(self.0.0.lock().unwrap(), |left| *left == Some(0)).unwrap();
        if let Some(left) = &mut *left {
            *left -= 1;
        }
    }
}

struct GatedBackend {
    inner: FakeBackend,
    gate: Gate,
}

impl Backend for GatedBackend {
    fn spec(&self) -> &BackendSpec {
        self.inner.spec()
    }

    fn allocate(&mut self, blocks: u32) -> Result<(), BackendError> {
        self.inner.allocate(blocks)
    }

    fn run(&mut self, plan: &Plan) -> Result<StepOutput, BackendError> {
        self.gate.pass();
        self.inner.run(plan)
    }

    fn poison(&mut self, blocks: &[BlockId]) {
        self.inner.poison(blocks);
    }

    fn fingerprint(&self, block: BlockId, slots: u32) -> u64 {
        self.inner.fingerprint(block, slots)
    }
}

/// A worker and everything to talk to it.
pub struct Rig {
    pub runtime: Option<WorkerRuntime>,
    pub gate: Gate,
    pub channel: Channel,
}

impl Drop for Rig {
    fn drop(&mut self) {
        // The engine thread must not wait for a test that is over.
        self.gate.open();
        if let Some(runtime) = &self.runtime {
            runtime.service().engine().stop();
        }
    }
}

static SERVED: LazyLock<ServedParts> = LazyLock::new(|| {
    let bytes = TinyModel::default().to_gguf().unwrap();
    ServedParts::from_file("tiny", &ModelFile::from_gguf_bytes("tiny.gguf", bytes).unwrap()).unwrap()
});

pub fn model() -> FakeModel {
    FakeModel { vocab: 320, context: 512, ..FakeModel::default() }
}

pub fn settings() -> WorkerSettings {
    let access = Access::Bearer(BearerSecret::new(SECRET).unwrap());
    WorkerSettings { kv: KvSize::Blocks(512), check: true, ..WorkerSettings::new("worker-0", access) }
}

pub async fn rig() -> Rig {
    rig_with(settings(), model()).await
}

pub async fn rig_with(settings: WorkerSettings, model: FakeModel) -> Rig {
    let gate = Gate::default();
    let clock = VirtualClock::default();
    let backend = FakeBackend::new(model, clock.clone(), FakeControl::default());
    let parts = WorkerParts {
        backend: Box::new(GatedBackend { inner: backend, gate: gate.clone() }),
        model: SERVED.clone(),
        bytes: Arc::new(FakeBytes::new(model.vocab)),
        constraints: None,
        clock: Arc::new(clock),
        telemetry: Telemetry::default(),
    };
    let runtime = WorkerRuntime::start(settings, parts).await.unwrap();
    // A small window, so that a reader that does not read is felt by the worker and not hidden in buffers.
    let endpoint = Endpoint::from_shared(format!("http://{}", runtime.address())).unwrap();
    let channel = endpoint.initial_stream_window_size(65_535).connect().await.unwrap();
    Rig { runtime: Some(runtime), gate, channel }
}

impl Rig {
    pub fn runtime(&self) -> &WorkerRuntime {
        self.runtime.as_ref().unwrap()
    }

    pub fn client(&self) -> WorkerClient<Caller> {
        WorkerClient::with_interceptor(self.channel.clone(), credentials(SECRET))
    }

    pub fn admin(&self) -> WorkerAdminClient<Caller> {
        WorkerAdminClient::with_interceptor(self.channel.clone(), credentials(SECRET))
    }

    pub fn identity(&self) -> ModelIdentity {
        self.runtime().service().served().identity().unwrap()
    }

    pub fn request(&self, tenant: &str, prompt: &[TokenId], max_tokens: u32) -> Request {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let mut id = [0; 16];
        id[..8].copy_from_slice(&NEXT.fetch_add(1, Ordering::Relaxed).to_le_bytes());
        let secret = PoolSecret::new(&[3; 32]).unwrap();
        Request {
            id: RequestId(id),
            identity: self.identity(),
            adapter: None,
            prompt: prompt.into(),
            domain: ReuseDomain::derive(&secret, tenant, 0, None),
            shared: None,
            secret_epoch: secret.epoch(),
            tenant: TenantTag(tenant.into()),
            cache: CachePolicy { mode: CacheMode::On, ttl: None, pin: false },
            sampling: Sampling { seed: 7, ..Sampling::default() },
            stop: Stop { max_tokens, ignore_eos: true, ..Stop::default() },
            grammar: None,
            contract: Contract::Coupled,
            speculation: Speculation::default(),
            priority: 0,
            deadline: None,
            trace: None,
        }
    }

    /// Begins a request; the stream's first message is still to be read.
    pub async fn begin(&self, request: &Request) -> Result<Streaming<wire::GenerateResponse>, Error> {
        let answer = soon("`Started`", self.client().generate(request_to_wire(request))).await;
        answer.map(tonic::Response::into_inner).map_err(|status| error_from_status(&status))
    }

    /// Begins a request behind a closed gate where others run already: lets single steps through until it has started.
    pub async fn squeeze_in(&self, request: &Request) -> Streaming<wire::GenerateResponse> {
        let begun = self.begin(request);
        tokio::pin!(begun);
        let mut ticks = tokio::time::interval(Duration::from_millis(1));
        loop {
            tokio::select! {
                stream = &mut begun => return stream.unwrap(),
                _ = ticks.tick() => self.gate.allow_one(),
            }
        }
    }

    /// Runs a request to its end.
    pub async fn run(&self, request: &Request) -> Answer {
        read(self.begin(request).await.unwrap()).await
    }

    /// Waits until the engine's load is as wanted.
    pub async fn load_is(&self, what: &str, mut wanted: impl FnMut(&WorkerLoad) -> bool) {
        let mut load = self.runtime().service().engine().load();
        let seen = tokio::time::timeout(SOON, load.wait_for(|measured| wanted(&measured.load))).await;
        assert!(seen.is_ok(), "the load was never: {what}");
    }

    /// Waits until nothing is held any more: no request, no sequence, no block.
    pub async fn at_rest(&self) {
        soon("requests in flight", self.runtime().service().idle()).await;
        // The second report from now on is made after the last end was counted: an older one may show a rest that was before the work.
        let seen = self.runtime().service().engine().load().borrow().load.seq;
        self.load_is("at rest", |load| load.seq >= seen + 2 && load.running == 0 && load.waiting == 0 && load.tiers[0].held == 0)
            .await;
    }
}

pub fn credentials(secret: &str) -> Credentials {
    Credentials::new(&BearerSecret::new(secret).unwrap()).unwrap()
}

/// What a request gave.
#[derive(Debug, Default)]
pub struct Answer {
    pub started: Option<Started>,
    pub ids: Vec<TokenId>,
    pub text: String,
    pub finished: Option<Finished>,
    pub failed: Option<Error>,
}

pub async fn read(mut stream: Streaming<wire::GenerateResponse>) -> Answer {
    let mut answer = Answer::default();
    while let Some(message) = soon("the next chunk", stream.next()).await {
        answer.take(chunk_from_wire(message.unwrap()).unwrap());
    }
    answer
}

impl Answer {
    pub fn take(&mut self, chunk: Chunk) {
        assert!(self.finished.is_none() && self.failed.is_none(), "nothing follows the end");
        match chunk {
            Chunk::Started(started) => {
                assert!(self.started.replace(started).is_none(), "`Started` comes once");
            }
            Chunk::Tokens(tokens) => {
                assert!(self.started.is_some(), "`Started` comes first");
                self.ids.extend(tokens.ids);
                self.text.push_str(&tokens.text);
            }
            Chunk::Finished(finished) => self.finished = Some(*finished),
            Chunk::Failed { error, .. } => self.failed = Some(error),
        }
    }
}

/// Waits with a bound.
pub async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(SOON, future).await.unwrap_or_else(|_| panic!("waited too long for {what}"))
}

/// The error behind a refused call.
pub fn refused<T: std::fmt::Debug>(answer: Result<T, Status>) -> (tonic::Code, Error) {
    let status = answer.expect_err("the call is refused");
    (status.code(), error_from_status(&status))
}

/// Distinct prompts that share no block.
pub fn prompt(seed: u32, len: usize) -> Vec<TokenId> {
    (0..len as u32).map(|place| (seed.wrapping_mul(7919).wrapping_add(place * 31 + place / 7 * seed)) % 256).collect()
}
