//! A whole router on its ports, in front of mock workers.

mod keys;
mod slices;

use super::*;
use crate::TenantSource;
use crate::mock::{MockSettings, MockWorker};
use kvasir_core::PoolSecret;
use kvasir_proto::auth::{BearerSecret, Credentials};
use kvasir_proto::inference::inference_client::InferenceClient;
use kvasir_proto::inference::{self, generate_event};
use kvasir_proto::router as wire;
use kvasir_proto::router::router_admin_client::RouterAdminClient;
use tonic::Code;
use tonic::transport::Channel;

const BEARER: &str = "0123456789abcdef-workers";

fn loopback() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 0))
}

fn bearer() -> BearerSecret {
    BearerSecret::new(BEARER).unwrap()
}

fn endpoint(mock: &MockWorker) -> Endpoint {
    Endpoint::parse(&mock.address().to_string()).unwrap()
}

fn settings(workers: WorkerSource, secrets: SecretSource) -> StartSettings {
    StartSettings {
        router: RouterSettings { credentials: Some(Credentials::new(&bearer()).unwrap()), ..RouterSettings::default() },
        door: DoorSettings::default(),
        server: ServerSettings::default(),
        workers,
        http: loopback(),
        grpc: Some(loopback()),
        admin: Some((loopback(), Access::Bearer(bearer()))),
        metrics: Some(loopback()),
        secrets,
        tracer: Tracer::disabled(),
        registries: Vec::new(),
        settle: Duration::ZERO,
    }
}

fn open() -> SecretSource {
    let secret = |text: &str| PoolSecret::new(text.as_bytes()).unwrap();
    let others = vec![secret("the second pool secret")];
    SecretSource::Fixed(Material::new(secret("the first pool secret"), others, TenantSource::Open))
}

fn listed(mocks: &[MockWorker]) -> WorkerSource {
    WorkerSource::Listed(mocks.iter().map(endpoint).collect())
}

async fn ready(router: &RouterRuntime) {
    tokio::time::timeout(Duration::from_secs(20), router.ready()).await.expect("ready in time");
}

async fn start(mocks: &[MockWorker]) -> RouterRuntime {
    let mut settings = settings(listed(mocks), open());
    settings.router.ready_workers_min = mocks.len();
    let router = RouterRuntime::start(settings).await.unwrap();
    ready(&router).await;
    router
}

async fn admin(router: &RouterRuntime) -> RouterAdminClient<InterceptedService<Channel, Credentials>> {
    let channel = Channel::from_shared(format!("http://{}", router.admin.unwrap())).unwrap().connect().await.unwrap();
    RouterAdminClient::with_interceptor(channel, Credentials::new(&bearer()).unwrap())
}

async fn client(router: &RouterRuntime) -> InferenceClient<Channel> {
    InferenceClient::connect(format!("http://{}", router.grpc)).await.unwrap()
}

fn mocks(count: usize) -> Vec<MockWorker> {
    let settings = |number| MockSettings { uid: format!("mock-{number}"), ..MockSettings::default() };
    (0..count).map(|number| MockWorker::start(settings(number), loopback(), Some(bearer())).unwrap()).collect()
}

fn request(max_tokens: u32) -> inference::GenerateRequest {
    inference::GenerateRequest {
        model: "mock".to_owned(),
        prompt: Some(inference::generate_request::Prompt::Text("the same words again and again ".repeat(8))),
        parameters: Some(inference::Parameters { max_tokens: Some(max_tokens), ..Default::default() }),
        kvasir: Some(inference::Extensions { report: true, ..Default::default() }),
        ..Default::default()
    }
}

async fn generate(client: &mut InferenceClient<Channel>) -> inference::Finished {
    let mut events = client.generate(request(4)).await.unwrap().into_inner();
    loop {
        let event = events.message().await.unwrap().expect("an end");
        if let Some(generate_event::Event::Finished(finished)) = event.event {
            return finished;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_admins_and_probes_are_served_each_on_its_port() {
    let mocks = mocks(2);
    let router = start(&mocks).await;
    let mut client = client(&router).await;
    let finished = generate(&mut client).await;
    let report = finished.report.unwrap();
    let placement = report.placement.unwrap();
    let sum: f64 = placement.terms.iter().map(|term| term.seconds).sum();
    assert!((sum - placement.score_s).abs() < 1e-9 && placement.attempts == 1, "{placement:?}");

    let channel = Channel::from_shared(format!("http://{}", router.admin.unwrap())).unwrap().connect().await.unwrap();
    let refused = RouterAdminClient::new(channel.clone()).workers(wire::WorkersRequest {}).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unauthenticated);
    let mut admin = admin(&router).await;
    let workers = admin.workers(wire::WorkersRequest {}).await.unwrap().into_inner();
    assert!(workers.complete);
    let names: Vec<&str> = workers.workers.iter().map(|worker| worker.uid.as_str()).collect();
    assert_eq!(names, ["mock-0", "mock-1"]);
    for (worker, mock) in workers.workers.iter().zip(&mocks) {
        assert_eq!(worker.state(), wire::WorkerState::Ready);
        assert_eq!(worker.incarnation, mock.incarnation().0);
        assert_eq!((worker.in_flight, worker.models.as_slice()), (0, ["mock".to_owned()].as_slice()));
    }
    let open = admin.in_flight(wire::InFlightRequest { uid: None }).await.unwrap().into_inner();
    assert_eq!((open.workers.len(), open.waiting), (0, 0));

    let secrets = admin.secrets(wire::SecretsRequest {}).await.unwrap().into_inner();
    assert_eq!((secrets.loaded.len(), &secrets.active), (2, &secrets.loaded[0]));
    let warm = generate(&mut client).await.usage.unwrap();
    assert!(warm.cached_tokens > 0, "{warm:?}");
    admin.activate(wire::ActivateRequest { epoch: secrets.loaded[1].clone() }).await.unwrap();
    assert_eq!(generate(&mut client).await.usage.unwrap().cached_tokens, 0, "another secret is another domain");
    let unknown = admin.activate(wire::ActivateRequest { epoch: vec![0; 8] }).await.unwrap_err();
    assert_eq!(unknown.code(), Code::InvalidArgument);
    router.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shutdown_lets_running_streams_finish_and_refuses_new_ones() {
    let slow = MockSettings { decode_token: Duration::from_millis(10), ..MockSettings::default() };
    let mocks = vec![MockWorker::start(slow, loopback(), Some(bearer())).unwrap()];
    let router = start(&mocks).await;
    let mut client = client(&router).await;
    let request = inference::GenerateRequest {
        model: "mock".to_owned(),
        prompt: Some(inference::generate_request::Prompt::Text("hello".to_owned())),
        parameters: Some(inference::Parameters { max_tokens: Some(50), ..Default::default() }),
        ..Default::default()
    };
    let mut events = client.generate(request).await.unwrap().into_inner();
    let mut first = events.message().await.unwrap().unwrap();
    let serve = router.serve().clone();
    let ending = tokio::spawn(router.shutdown());
    let mut tokens = 0;
    let usage = loop {
        match first.event.take() {
            Some(generate_event::Event::Finished(finished)) => break finished.usage.unwrap(),
            Some(generate_event::Event::Delta(delta)) => tokens += delta.ids.len(),
            _ => {}
        }
        first = events.message().await.unwrap().expect("the stream goes on to its end");
    };
    assert_eq!((tokens, usage.completion_tokens), (50, 50));
    drop(events);
    drop(client);
    tokio::time::timeout(Duration::from_secs(20), ending).await.expect("it ends").unwrap();
    assert_eq!(serve.ready().unwrap_err().reason, Reason::Draining);
    assert_eq!((serve.fleet().total().attempts(), serve.admission().running()), (0, 0));
}
