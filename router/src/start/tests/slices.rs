//! A router that finds its workers in a cluster: when it is ready, whom it leaves, and what it tells meanwhile.

use super::*;
use crate::testing::{ApiServer, Asked, Reply, Verb, event, gone, list};
use kvasir_core::Error;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Mutex;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep};

/// The slices of one Service; clones are one.
#[derive(Clone, Default)]
struct Service(Arc<Mutex<World>>);

#[derive(Default)]
struct World {
    version: u64,
    slices: BTreeMap<String, Value>,
    watches: Vec<mpsc::UnboundedSender<String>>,
    down: bool,
}

impl Service {
    fn world<T>(&self, change: impl FnOnce(&mut World) -> T) -> T {
        change(&mut self.0.lock().unwrap())
    }

    fn client(&self) -> Client {
        let service = self.clone();
        ApiServer::new(move |asked: &Asked| service.world(|world| world.answer(asked))).client
    }

    /// A slice with one pod, whose worker listens on this port.
    fn put(&self, name: &str, port: u16, terminating: bool, address: Option<&str>) {
        self.world(|world| {
            world.version += 1;
            let endpoint = json!({
                "addresses": address.into_iter().collect::<Vec<_>>(),
                "conditions": {"ready": false, "serving": false, "terminating": terminating},
                "targetRef": {"kind": "Pod", "name": name, "uid": format!("uid-of-{name}")},
            });
            let slice = json!({
                "metadata": {"name": name, "resourceVersion": world.version.to_string()},
                "addressType": "IPv4",
                "endpoints": [endpoint],
                "ports": [{"name": "grpc", "port": port, "protocol": "TCP"}],
            });
            let kind = if world.slices.contains_key(name) { "MODIFIED" } else { "ADDED" };
            world.tell(&event(kind, &slice));
            world.slices.insert(name.to_owned(), slice);
        });
    }

    fn delete(&self, name: &str) {
        self.world(|world| {
            world.version += 1;
            let mut slice = world.slices.remove(name).unwrap();
            slice["metadata"]["resourceVersion"] = world.version.to_string().into();
            world.tell(&event("DELETED", &slice));
        });
    }
}

impl World {
    fn answer(&mut self, asked: &Asked) -> Reply {
        match asked.verb {
            _ if self.down => Reply::Status(503),
            Verb::List => list("EndpointSliceList", self.version, &self.slices.values().cloned().collect::<Vec<_>>()),
            Verb::Watch => {
                let (events, stream) = mpsc::unbounded_channel();
                self.watches.push(events);
                Reply::Events(stream)
            }
            Verb::Get | Verb::GetHead => panic!("{asked:?}"),
        }
    }

    fn tell(&self, line: &str) {
        // A watch that has ended hears nothing.
        self.watches.iter().for_each(|watch| drop(watch.send(line.to_owned())));
    }
}

async fn start_in(service: &Service) -> RouterRuntime {
    let workers = WorkerSource::Service(ObjectName::parse_service("pools/workers").unwrap(), PortChoice::parse("grpc").unwrap());
    RouterRuntime::start_with(Some(service.client()), settings(workers, open())).await.unwrap()
}

/// Status and text of one GET of the metrics port.
pub(super) async fn get(router: &RouterRuntime, path: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(router.metrics.unwrap()).await.unwrap();
    stream.write_all(format!("GET {path} HTTP/1.1\r\nhost: router\r\nconnection: close\r\n\r\n").as_bytes()).await.unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).await.unwrap();
    let status = text.split(' ').nth(1).unwrap().parse().unwrap();
    (status, text)
}

/// Asks until the answer is wanted.
pub(super) async fn until_get(router: &RouterRuntime, path: &str, wanted: impl Fn(u16, &str) -> bool) -> String {
    let began = Instant::now();
    loop {
        let (status, text) = get(router, path).await;
        if wanted(status, &text) {
            return text;
        }
        assert!(began.elapsed() < Duration::from_secs(20), "{path} still says {status}: {text}");
        sleep(Duration::from_millis(5)).await;
    }
}

async fn until_view(router: &RouterRuntime, wanted: impl FnMut(&crate::View) -> bool) -> Arc<crate::View> {
    tokio::time::timeout(Duration::from_secs(20), router.serve().fleet().until(wanted)).await.expect("in time")
}

fn uids(view: &crate::View) -> Vec<String> {
    view.workers().iter().map(|worker| worker.uid.to_string()).collect()
}

/// A port where nobody listens, and nobody else can while the socket is kept.
fn closed_port() -> (tokio::net::TcpSocket, u16) {
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind(loopback()).unwrap();
    let port = socket.local_addr().unwrap().port();
    (socket, port)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_router_is_ready_when_every_endpoint_of_the_first_list_was_probed_whatever_it_answered() {
    let (service, mocks) = (Service::default(), mocks(2));
    let (_kept, dead) = closed_port();
    let silent = std::net::TcpListener::bind(loopback()).unwrap();
    mocks[1].set_refusal(Some(Error::new(Reason::NotReady, "loading weights")));
    service.put("slice-0", mocks[0].address().port(), false, Some("127.0.0.1"));
    service.put("slice-1", mocks[1].address().port(), false, Some("127.0.0.1"));
    service.put("slice-2", dead, false, Some("127.0.0.1"));
    service.put("slice-3", silent.local_addr().unwrap().port(), false, Some("127.0.0.1"));
    service.world(|world| world.down = true);
    let router = start_in(&service).await;
    let text = until_get(&router, "/readyz", |_, text| text.contains("refused")).await;
    assert!(text.contains("503") && text.contains("the first list of workers is not complete: the API server refused"), "{text}");
    let mut admin = admin(&router).await;
    let workers = admin.workers(wire::WorkersRequest {}).await.unwrap().into_inner();
    assert!(!workers.listed && !workers.complete && workers.stale.is_some(), "{workers:?}");

    service.world(|world| world.down = false);
    ready(&router).await;
    assert_eq!(get(&router, "/readyz").await.0, 200);
    let workers = admin.workers(wire::WorkersRequest {}).await.unwrap().into_inner();
    assert!(workers.listed && workers.complete && workers.stale.is_none(), "{workers:?}");
    let states: BTreeMap<_, _> = workers.workers.iter().map(|worker| (worker.uid.clone(), worker.state())).collect();
    let wanted = [
        (format!("http://127.0.0.1:{dead}"), wire::WorkerState::Lost),
        (format!("http://{}", silent.local_addr().unwrap()), wire::WorkerState::Lost),
        ("mock-0".to_owned(), wire::WorkerState::Ready),
        ("mock-1".to_owned(), wire::WorkerState::Unready),
    ];
    assert_eq!(states, wanted.into());

    // A worker becomes routable by the router's own probe: no slice has changed.
    let mut client = client(&router).await;
    generate(&mut client).await;
    mocks[1].set_refusal(None);
    until_view(&router, |view| view.pool(&mocks[1].identity()).len() == 2).await;
    let (_, metrics) = get(&router, "/metrics").await;
    assert!(metrics.contains("kvasir_router_discovery_endpoints{component=\"router\"} 4\n"), "{metrics}");
    router.shutdown().await;
}

/// Field report R40: an endpoint goes at the first event that is terminating, has no address, or says that it is gone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_endpoint_that_goes_gets_no_request_any_more_and_without_any_the_router_stays_ready() {
    let (service, mocks) = (Service::default(), mocks(3));
    for (number, mock) in mocks.iter().enumerate() {
        service.put(&format!("slice-{number}"), mock.address().port(), false, Some("127.0.0.1"));
    }
    let router = start_in(&service).await;
    ready(&router).await;
    until_view(&router, |view| view.pool(&mocks[0].identity()).len() == 3).await;
    let mut client = client(&router).await;
    generate(&mut client).await;

    service.put("slice-0", mocks[0].address().port(), true, Some("127.0.0.1"));
    service.put("slice-1", mocks[1].address().port(), false, None);
    until_view(&router, |view| uids(view) == ["mock-2"]).await;
    let before = mocks.iter().map(|mock| mock.levels().taken).collect::<Vec<_>>();
    for _ in 0..20 {
        generate(&mut client).await;
    }
    let taken: Vec<_> = mocks.iter().zip(before).map(|(mock, before)| mock.levels().taken - before).collect();
    assert_eq!(taken, [0, 0, 20]);

    service.delete("slice-2");
    until_view(&router, |view| view.workers().is_empty()).await;
    assert_eq!(get(&router, "/readyz").await.0, 200);
    let refused = client.generate(request(4)).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable, "{refused:?}");
    // One that joins later and does not answer is not probed yet, and takes the router away from nobody.
    let silent = std::net::TcpListener::bind(loopback()).unwrap();
    service.put("slice-3", silent.local_addr().unwrap().port(), false, Some("127.0.0.1"));
    until_view(&router, |view| view.workers().len() == 1 && !view.complete).await;
    assert_eq!(get(&router, "/readyz").await.0, 200);
    // The same pod name with another address: a worker that comes back is taken in again.
    service.put("slice-1", mocks[1].address().port(), false, Some("127.0.0.1"));
    until_view(&router, |view| !view.pool(&mocks[1].identity()).is_empty()).await;
    generate(&mut client).await;
    router.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_the_api_server_the_last_list_serves_on_and_what_was_missed_is_found_afterwards() {
    let (service, mocks) = (Service::default(), mocks(2));
    service.put("slice-0", mocks[0].address().port(), false, Some("127.0.0.1"));
    let router = start_in(&service).await;
    ready(&router).await;
    let mut client = client(&router).await;
    service.world(|world| {
        world.down = true;
        world.tell(&gone());
    });
    let text = until_get(&router, "/readyz", |_, text| text.contains("workers: ")).await;
    assert!(text.starts_with("HTTP/1.1 200") && text.contains("the last list stays in force"), "{text}");
    generate(&mut client).await;
    assert!(get(&router, "/metrics").await.1.contains("kvasir_router_discovery_stale{component=\"router\"} 1\n"));
    let mut admin = admin(&router).await;
    let stale = admin.workers(wire::WorkersRequest {}).await.unwrap().into_inner().stale.unwrap();
    assert!(stale.message.contains("the API server refused"), "{stale:?}");

    service.put("slice-1", mocks[1].address().port(), false, Some("127.0.0.1"));
    service.delete("slice-0");
    service.world(|world| world.down = false);
    until_view(&router, |view| uids(view) == ["mock-1"] && view.source.stale.is_none() && view.complete).await;
    generate(&mut client).await;
    until_get(&router, "/readyz", |status, text| status == 200 && !text.contains("workers: ")).await;
    router.shutdown().await;
}

#[tokio::test]
async fn without_a_cluster_nothing_can_be_watched() {
    let service = ObjectName::parse_service("pools/workers").unwrap();
    for settings in [
        settings(WorkerSource::Service(service.clone(), PortChoice::Number(1)), open()),
        settings(WorkerSource::Listed(Vec::new()), SecretSource::Object(service, Isolation::PerTenant)),
    ] {
        assert!(settings.needs_cluster());
        let error = RouterRuntime::start_with(None, settings).await.err().unwrap();
        assert!(matches!(error, StartError::NoCluster), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cordoned_life_gets_nothing_new_until_the_cordon_is_lifted_or_ends() {
    let slow = |number| MockSettings {
        uid: format!("mock-{number}"),
        decode_token: Duration::from_millis(10),
        ..MockSettings::default()
    };
    let mocks: Vec<_> = (0..2).map(|number| MockWorker::start(slow(number), loopback(), Some(bearer())).unwrap()).collect();
    let router = start(&mocks).await;
    let (mut admin, mut client) = (admin(&router).await, client(&router).await);
    let running = client.generate(request(1_000)).await.unwrap();
    let held = mocks.iter().position(|mock| mock.levels().open == 1).unwrap();
    let life = mocks[held].incarnation().0.to_vec();
    let cordon = |incarnation: Vec<u8>, cordon_ms| wire::CordonRequest { uid: format!("mock-{held}"), incarnation, cordon_ms };

    let answer = admin.cordon(cordon(life.clone(), 60_000)).await.unwrap().into_inner();
    assert_eq!(answer.in_flight, 1, "what runs goes on");
    for _ in 0..20 {
        generate(&mut client).await;
    }
    assert_eq!(mocks[held].levels().taken, 1, "from the answer on nothing is placed there");
    let workers = admin.workers(wire::WorkersRequest {}).await.unwrap().into_inner().workers;
    let (there, other) = (&workers[held], &workers[1 - held]);
    assert_eq!((there.state(), there.in_flight, other.state()), (wire::WorkerState::Draining, 1, wire::WorkerState::Ready));
    assert!(there.cordoned_ms.is_some_and(|left| left > 30_000) && other.cordoned_ms.is_none());
    assert!(there.reason.as_ref().unwrap().message.contains("cordoned"));
    drop(running);

    admin.cordon(cordon(life.clone(), 0)).await.unwrap();
    let back = |view: &crate::View| view.pool(&mocks[0].identity()).len() == 2;
    assert!(back(&router.serve().fleet().view()), "lifted when it is answered");
    admin.cordon(cordon(life.clone(), 200)).await.unwrap();
    assert!(!back(&router.serve().fleet().view()));
    until_view(&router, back).await;

    let unknown = admin.cordon(cordon(vec![0; 8], 1_000)).await.unwrap_err();
    assert_eq!(unknown.code(), Code::NotFound, "{unknown:?}");
    for (incarnation, time) in [(life, 3_600_001), (vec![1, 2], 1)] {
        assert_eq!(admin.cordon(cordon(incarnation, time)).await.unwrap_err().code(), Code::InvalidArgument);
    }
    router.shutdown().await;
}
