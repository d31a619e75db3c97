//! The router over loopback, in front of mock workers: every test goes through [`Serve`] as a door does.

use super::*;
use crate::breaker::FAILURES_MAX;
use crate::discover::{Change, Discover, Endpoint, Fixed};
use crate::fleet::FleetTask;
use crate::index::Trust;
use crate::lease::InFlight;
use crate::mock::{Fault, MockSettings, MockWorker};
use futures::stream::BoxStream;
use futures::{StreamExt as _, stream};
use kvasir_core::{
    CachePolicy, Chunk, Contract, Finished, ModelIdentity, PoolSecret, RequestId, ReuseDomain, Sampling, Speculation, Started,
    State, StateTimes, Stop, TenantTag, Usage,
};
use kvasir_door::{Receipt, ReceiptSlot};
use kvasir_telemetry::Registry;
use std::net::SocketAddr;
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(20);
const BLOCK: u32 = 16;

/// Waits for a condition, within [`PATIENCE`].
async fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < until, "not within {PATIENCE:?}: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

struct Rig {
    router: RouterServe,
    mocks: Vec<Option<MockWorker>>,
    identity: ModelIdentity,
    secret: PoolSecret,
    _task: FleetTask,
}

#[derive(Debug)]
struct Outcome {
    started: Option<Started>,
    text: String,
    messages: usize,
    finished: Option<Finished>,
    failed: Option<(Error, Usage, StateTimes)>,
    receipt: Option<Receipt>,
}

fn mock(number: usize) -> MockSettings {
    MockSettings { uid: format!("mock-{number}"), ..MockSettings::default() }
}

fn any_port() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 0))
}

impl Rig {
    async fn of(count: usize) -> Self {
        Self::with((0..count).map(mock).collect(), RouterSettings::default()).await
    }

    async fn with(mocks: Vec<MockSettings>, settings: RouterSettings) -> Self {
        let mocks: Vec<MockWorker> =
            mocks.into_iter().map(|settings| MockWorker::start(settings, any_port(), None).unwrap()).collect();
        let endpoints = mocks.iter().map(|mock| Endpoint::parse(&mock.address().to_string()).unwrap()).collect();
        let rig = Self::over(Box::new(Fixed::new(endpoints)), mocks, settings);
        let exact = rig.mocks.len();
        eventually("every worker is ready and exact", || rig.exact() == exact).await;
        rig
    }

    fn over(discover: Box<dyn Discover>, mocks: Vec<MockWorker>, settings: RouterSettings) -> Self {
        let metrics = RouterMetrics::new(&Registry::default());
        let (fleet, task) = Fleet::start(discover, settings.index_bytes, None, metrics.clone());
        let router = RouterServe::new(fleet, settings, metrics, Tracer::disabled());
        let identity = mocks.first().map_or(ModelIdentity(kvasir_core::Digest::new([0; 32])), MockWorker::identity);
        let secret = PoolSecret::new(b"a secret of more than sixteen bytes").unwrap();
        Self { router, mocks: mocks.into_iter().map(Some).collect(), identity, secret, _task: task }
    }

    fn exact(&self) -> usize {
        let now = Instant::now();
        let fleet = self.router.fleet();
        let (view, index) = (fleet.view(), fleet.index().read());
        let usable = |worker: &&Arc<WorkerView>| {
            let exact = |member| index.trust(member, fleet.index().time(now)) == Trust::Exact;
            worker.readiness == Readiness::Ready
                && worker.fresh_load(now).is_some_and(|report| !report.load.draining)
                && worker.described.as_ref().is_some_and(|it| exact(it.member))
        };
        view.workers().iter().filter(usable).count()
    }

    fn mock(&self, number: usize) -> &MockWorker {
        self.mocks[number].as_ref().unwrap()
    }

    fn request(&self, tenant: &str, prompt: &[u32], max_tokens: u32) -> Prepared {
        let mut states = StateTimes::default();
        states.add(State::Prepare, Duration::from_millis(3));
        let request = Request {
            id: RequestId([7; 16]),
            identity: self.identity,
            adapter: None,
            prompt: prompt.into(),
            domain: ReuseDomain::derive(&self.secret, tenant, 0, None),
            shared: None,
            secret_epoch: self.secret.epoch(),
            tenant: TenantTag(tenant.into()),
            cache: CachePolicy::default(),
            sampling: Sampling::default(),
            stop: Stop { max_tokens, ..Stop::default() },
            grammar: None,
            contract: Contract::Coupled,
            speculation: Speculation::default(),
            priority: 0,
            deadline: None,
            trace: None,
        };
        Prepared { request, states, receipt: ReceiptSlot::default() }
    }

    async fn ask(&self, tenant: &str, prompt: &[u32], max_tokens: u32) -> Result<Outcome, Error> {
        self.finish(self.request(tenant, prompt, max_tokens)).await
    }

    async fn finish(&self, prepared: Prepared) -> Result<Outcome, Error> {
        let receipt = prepared.receipt.clone();
        let chunks = self.router.serve(prepared).await?;
        let mut outcome = read(chunks).await;
        outcome.receipt = receipt.get().cloned();
        Ok(outcome)
    }

    /// Waits until the index knows what a worker has committed for this prompt.
    async fn indexed(&self, tenant: &str, prompt: &[u32]) {
        let request = self.request(tenant, prompt, 1).request;
        let keys = Inner::keys(&request, &self.router.0.work(&request));
        eventually("the prompt's blocks are in the index", || {
            let fleet = self.router.fleet();
            let matches = fleet.index().read().matches(&keys, 0, &[], 8, fleet.index().time(Instant::now()));
            matches.holders.first().is_some_and(|(_, credit)| credit.total() as usize == keys.len())
        })
        .await;
    }

    /// Mocks that the index credits with any block of this prompt.
    fn holders(&self, tenant: &str, prompt: &[u32]) -> Vec<usize> {
        let request = self.request(tenant, prompt, 1).request;
        let keys = Inner::keys(&request, &self.router.0.work(&request));
        let fleet = self.router.fleet();
        let matches = fleet.index().read().matches(&keys, 0, &[], 8, fleet.index().time(Instant::now()));
        let view = fleet.view();
        let named = |member| view.member(member).map(|worker| named_mock(&worker.uid.0));
        matches.holders.iter().filter(|(_, credit)| credit.total() > 0).filter_map(|(member, _)| named(*member)).collect()
    }

    fn in_flight(&self) -> Vec<InFlight> {
        self.router.fleet().view().workers().iter().map(|worker| worker.live.gauge.read()).collect()
    }

    async fn at_rest(&self) {
        let total = self.router.fleet().total();
        eventually("the mocks are idle", || self.mocks.iter().flatten().all(|mock| mock.levels().open == 0)).await;
        assert_eq!((total.attempts(), total.tokens()), (0, 0));
        assert!(self.in_flight().iter().all(|worker| *worker == InFlight::default()), "{:?}", self.in_flight());
        let gate = self.router.admission();
        assert_eq!((gate.running(), gate.running_tokens(), gate.waiting()), (0, 0, 0));
    }
}

fn named_mock(name: &str) -> usize {
    name.strip_prefix("mock-").unwrap().parse().unwrap()
}

async fn read(mut chunks: ChunkStream) -> Outcome {
    let mut outcome = Outcome { started: None, text: String::new(), messages: 0, finished: None, failed: None, receipt: None };
    while let Some(chunk) = tokio::time::timeout(PATIENCE, chunks.next()).await.expect("a chunk in time") {
        assert!(outcome.finished.is_none() && outcome.failed.is_none(), "nothing follows the end");
        match chunk {
            Chunk::Started(started) => {
                assert!(outcome.started.replace(started).is_none() && outcome.messages == 0, "started once and first");
            }
            Chunk::Tokens(tokens) => {
                assert!(outcome.started.is_some());
                outcome.text.push_str(&tokens.text);
                outcome.messages += 1;
            }
            Chunk::Finished(finished) => outcome.finished = Some(*finished),
            Chunk::Failed { error, usage, states } => outcome.failed = Some((error, usage, states)),
        }
    }
    assert!(outcome.finished.is_some() != outcome.failed.is_some(), "exactly one end: {outcome:?}");
    outcome
}

fn prompt(number: u32, len: u32) -> Vec<u32> {
    (0..len).map(|at| (number * 7 + at * (number + 1)) % 251).collect()
}

#[tokio::test]
async fn follow_ups_land_where_their_prefix_is_and_the_prediction_is_exact() {
    let rig = Rig::of(4).await;
    for conversation in 0..8 {
        let mut tokens = prompt(conversation, 200);
        let first = rig.ask("a", &tokens, 4).await.unwrap();
        let home = first.receipt.unwrap();
        assert_eq!((first.started.unwrap().cached(), home.predicted_cached_tokens), (0, 0));
        for _ in 0..3 {
            rig.indexed("a", &tokens).await;
            let known = tokens.len() as u32 / BLOCK * BLOCK;
            tokens.extend(prompt(conversation + 50, 40));
            let next = rig.ask("a", &tokens, 4).await.unwrap();
            let receipt = next.receipt.unwrap();
            assert_eq!(receipt.worker_uid, home.worker_uid);
            assert_eq!((receipt.predicted_cached_tokens, next.started.unwrap().cached()), (known, known));
            assert_eq!(receipt.terms.iter().map(|(_, seconds)| seconds).sum::<f64>(), receipt.score_s);
        }
    }
    let foreign = rig.ask("b", &prompt(0, 200), 4).await.unwrap();
    assert_eq!((foreign.started.unwrap().cached(), foreign.receipt.unwrap().predicted_cached_tokens), (0, 0), "another tenant");
    rig.at_rest().await;
}

#[tokio::test]
async fn the_states_partition_the_time_and_keep_what_the_door_spent() {
    let slow = MockSettings { prefill_token: Duration::from_micros(500), ..mock(0) };
    let rig = Rig::with(vec![slow], RouterSettings::default()).await;
    let began = Instant::now();
    let outcome = rig.ask("a", &prompt(1, 100), 20).await.unwrap();
    let wall = began.elapsed() + Duration::from_millis(3);
    let states = outcome.finished.unwrap().states;
    assert_eq!(states.get(State::Prepare), Duration::from_millis(3));
    assert!(states.get(State::Prefill) >= Duration::from_millis(50));
    assert!(states.total() <= wall, "{states:?} against {wall:?}");
    assert!(states.total() + Duration::from_millis(20) >= wall, "{states:?} against {wall:?}");
}

#[tokio::test]
async fn a_worker_killed_in_mid_stream_is_an_error_and_the_next_request_goes_elsewhere() {
    let slow = |number| MockSettings { decode_token: Duration::from_millis(5), ..mock(number) };
    let mut rig = Rig::with(vec![slow(0), slow(1)], RouterSettings::default()).await;
    let tokens = prompt(3, 100);
    let prepared = rig.request("a", &tokens, 2_000);
    let receipt = prepared.receipt.clone();
    let mut chunks = rig.router.serve(prepared).await.unwrap();
    assert!(matches!(chunks.next().await, Some(Chunk::Started(_))));
    assert!(matches!(chunks.next().await, Some(Chunk::Tokens(_))));
    let home = named_mock(&receipt.get().unwrap().worker_uid);
    rig.mocks[home].take().unwrap().kill();
    let last = loop {
        match tokio::time::timeout(PATIENCE, chunks.next()).await.expect("the end comes soon") {
            Some(Chunk::Tokens(_)) => {}
            last => break last,
        }
    };
    let Some(Chunk::Failed { error, usage, .. }) = last else { panic!("{last:?}") };
    assert_eq!(error.reason, Reason::WorkerLost);
    assert!(error.message.contains(&format!("mock-{home}")), "{error}");
    assert!(usage.prompt_tokens == 100 && usage.completion_tokens > 0, "{usage:?}");
    assert!(chunks.next().await.is_none());
    drop(chunks);
    for number in 0..10 {
        let outcome = rig.ask("a", &prompt(number, 100), 2).await.unwrap();
        assert_eq!(named_mock(&outcome.receipt.unwrap().worker_uid), 1 - home);
    }
    rig.at_rest().await;
}

#[tokio::test]
async fn a_restart_on_the_same_address_takes_the_old_credit_at_once_and_is_served_again() {
    let mut rig = Rig::of(1).await;
    let tokens = prompt(1, 160);
    rig.ask("a", &tokens, 2).await.unwrap();
    rig.indexed("a", &tokens).await;
    let old = rig.mocks[0].take().unwrap();
    let (address, life) = (old.address(), old.incarnation());
    old.kill();
    let mut again = None;
    eventually("the port is free", || {
        again = MockWorker::start(mock(0), address, None).ok();
        again.is_some()
    })
    .await;
    rig.mocks[0] = again;
    assert_ne!(rig.mock(0).incarnation(), life);
    let new_life = rig.mock(0).incarnation();
    eventually("the new life is known and exact", || {
        let view = rig.router.fleet().view();
        rig.exact() == 1 && view.workers()[0].described.as_ref().is_some_and(|it| it.incarnation == new_life)
    })
    .await;
    let outcome = rig.ask("a", &tokens, 2).await.unwrap();
    assert_eq!((outcome.receipt.unwrap().predicted_cached_tokens, outcome.started.unwrap().cached()), (0, 0));
    rig.at_rest().await;
}

/// Field report R41: the cache is cleared while the worker stays ready, with the event and with the event lost.
#[tokio::test]
async fn after_a_cleared_cache_prediction_and_truth_agree_again() {
    for announced in [true, false] {
        let rig = Rig::of(2).await;
        let tokens = prompt(5, 200);
        let home = rig.ask("a", &tokens, 2).await.unwrap().receipt.unwrap().worker_uid;
        rig.indexed("a", &tokens).await;
        let warm = rig.ask("a", &tokens, 2).await.unwrap();
        assert!(warm.started.unwrap().cached() > 0, "the path was taken");
        let worker = named_mock(&home);
        rig.mock(worker).clear_cache(announced);
        // A lost event shows with the next batch of that worker, whoever causes it.
        let mut agreed = false;
        for number in 0..60 {
            let outcome = rig.ask("a", &tokens, 2).await.unwrap();
            let (predicted, real) = (outcome.receipt.unwrap().predicted_cached_tokens, outcome.started.unwrap().cached());
            agreed = predicted == real && real > 0;
            if agreed {
                break;
            }
            rig.ask("a", &prompt(100 + number, 40), 1).await.unwrap();
        }
        assert!(agreed, "announced: {announced}");
    }
}

/// Field reports R43 and R71 (leaks): aborted requests at every point, then exact zeroes and an even spread.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_storm_of_disconnects_leaks_nothing_and_a_restarted_worker_gets_its_share_only() {
    let slow = |number| MockSettings { decode_token: Duration::from_millis(1), ..mock(number) };
    let mut rig = Rig::with((0..4).map(slow).collect(), RouterSettings::default()).await;
    let aborted = stream::iter(0..500u32).for_each_concurrent(64, |number| {
        let rig = &rig;
        async move {
            let prepared = rig.request("a", &prompt(number, 64 + number % 64), 400);
            let patience = Duration::from_micros(u64::from(number % 20) * 700);
            // Dropped while waiting, before headers, after the first chunk, or in mid-stream.
            let _gone = tokio::time::timeout(patience, async {
                let mut chunks = rig.router.serve(prepared).await.unwrap();
                while chunks.next().await.is_some() {}
            })
            .await;
        }
    });
    aborted.await;
    rig.at_rest().await;
    let cancelled: u64 = rig.mocks.iter().flatten().map(|mock| mock.levels().cancelled).sum();
    assert!(cancelled > 50, "only {cancelled} were cancelled in the engine: the path was not taken");
    let old = rig.mocks[0].take().unwrap();
    let address = old.address();
    old.kill();
    let mut again = None;
    eventually("the port is free", || {
        again = MockWorker::start(slow(0), address, None).ok();
        again.is_some()
    })
    .await;
    rig.mocks[0] = again;
    let new_life = rig.mock(0).incarnation();
    eventually("all four are exact again", || {
        let view = rig.router.fleet().view();
        rig.exact() == 4 && view.workers().iter().any(|it| it.described.as_ref().is_some_and(|it| it.incarnation == new_life))
    })
    .await;
    // A worker that was slow in the storm may be spared for some seconds; a leaked count would spare or flood one for good.
    let until = Instant::now() + PATIENCE;
    for round in 0.. {
        let mut share = [0u32; 4];
        for number in 0..100 {
            let outcome = rig.ask(&format!("tenant-{round}-{number}"), &prompt(7, 80), 1).await.unwrap();
            share[named_mock(&outcome.receipt.unwrap().worker_uid)] += 1;
        }
        // Binomial(100, 1/4): mean 25, sigma 4.3; more than four sigmas either way.
        if share.iter().all(|share| (5..=45).contains(share)) {
            break;
        }
        assert!(Instant::now() < until, "{share:?}");
    }
    rig.at_rest().await;
}

/// A list that a test changes while the router runs.
struct Scripted(tokio::sync::mpsc::UnboundedReceiver<Change>);

impl Discover for Scripted {
    fn changes(self: Box<Self>) -> BoxStream<'static, Change> {
        stream::unfold(self.0, |mut inbox| async move { inbox.recv().await.map(|change| (change, inbox)) }).boxed()
    }
}

/// Field report R71: a worker leaves and rejoins while its streams run.
#[tokio::test]
async fn flapping_keeps_in_flight_counts_true_and_never_negative() {
    let slow = MockSettings { decode_token: Duration::from_millis(2), ..mock(0) };
    let worker = MockWorker::start(slow, any_port(), None).unwrap();
    let endpoint = Endpoint::parse(&worker.address().to_string()).unwrap();
    let (script, changes) = tokio::sync::mpsc::unbounded_channel();
    script.send(Change::Join(endpoint.clone())).unwrap();
    script.send(Change::Listed).unwrap();
    let rig = Rig::over(Box::new(Scripted(changes)), vec![worker], RouterSettings::default());
    eventually("the worker is ready", || rig.exact() == 1).await;
    let mut open: Vec<ChunkStream> = Vec::new();
    for number in 0..20 {
        let mut chunks = rig.router.serve(rig.request("a", &prompt(number, 40), 3_000)).await.unwrap();
        assert!(matches!(chunks.next().await, Some(Chunk::Started(_))));
        open.push(chunks);
    }
    for round in 0..3 {
        script.send(Change::Leave(endpoint.clone())).unwrap();
        eventually("it has left", || rig.router.fleet().view().workers().is_empty()).await;
        let error = rig.ask("a", &prompt(1, 40), 1).await.unwrap_err();
        assert_eq!(error.reason, Reason::NoWorker, "nothing new goes to a worker that left");
        assert_eq!(rig.router.fleet().total().attempts(), open.len() as u64);
        drop(open.split_off(open.len() - 4));
        script.send(Change::Join(endpoint.clone())).unwrap();
        eventually("it is back", || rig.exact() == 1).await;
        assert_eq!(rig.in_flight()[0].attempts, open.len() as u64, "round {round}: the gauge is the client's own count");
        rig.mock(0).set_refusal(Some(Error::new(Reason::NotReady, "flapping")));
        eventually("it is not ready", || rig.exact() == 0).await;
        assert_eq!(rig.in_flight()[0].attempts, open.len() as u64);
        rig.mock(0).set_refusal(None);
        eventually("it is ready", || rig.exact() == 1).await;
    }
    drop(open);
    rig.at_rest().await;
}

/// Field report R44: a port that is closed, and one that is open and silent.
#[tokio::test]
async fn a_worker_that_is_not_ready_gets_nothing_and_alone_gives_a_typed_refusal() {
    let silent = tokio::net::TcpListener::bind(any_port()).await.unwrap();
    let closed = {
        let listener = std::net::TcpListener::bind(any_port()).unwrap();
        listener.local_addr().unwrap()
    };
    let silent_address = silent.local_addr().unwrap();
    let endpoints = |extra: Option<SocketAddr>| {
        let all = [silent_address, closed].into_iter().chain(extra);
        all.map(|address| Endpoint::parse(&address.to_string()).unwrap()).collect::<Vec<_>>()
    };
    let rig = Rig::over(Box::new(Fixed::new(endpoints(None))), Vec::new(), RouterSettings::default());
    assert_eq!(rig.router.ready().unwrap_err().reason, Reason::NotReady, "not probed yet");
    let began = Instant::now();
    let error = rig.ask("a", &prompt(1, 40), 1).await.unwrap_err();
    assert_eq!((error.reason, error.retry_after.is_some()), (Reason::NoWorker, true));
    assert!(began.elapsed() < Duration::from_secs(1), "refused at once");
    eventually("each was probed once, whatever the answer", || rig.router.ready().is_ok()).await;

    let worker = MockWorker::start(mock(0), any_port(), None).unwrap();
    let fixed = Fixed::new(endpoints(Some(worker.address())));
    let rig = Rig::over(Box::new(fixed), vec![worker], RouterSettings::default());
    eventually("the good one is ready", || rig.exact() == 1).await;
    for number in 0..20 {
        let outcome = rig.ask("a", &prompt(number, 40), 1).await.unwrap();
        let receipt = outcome.receipt.unwrap();
        assert_eq!((receipt.worker_uid.as_str(), receipt.attempts), ("mock-0", 1));
    }
    drop(silent);
}

/// A worker that asks for another secret than the router shows is no silent absence: `/readyz` names the worker and the reason.
#[tokio::test]
async fn readiness_says_which_worker_is_not_usable_and_why() {
    let worker = MockWorker::start(mock(0), any_port(), None).unwrap();
    let address = worker.address().to_string();
    let refusal = Error::new(Reason::NotReady, "the model is loading");
    worker.set_refusal(Some(refusal));
    let fixed = Fixed::new(vec![Endpoint::parse(&address).unwrap()]);
    let settings = RouterSettings { ready_workers_min: 1, ..RouterSettings::default() };
    let rig = Rig::over(Box::new(fixed), vec![worker], settings);
    let told =
        |words: &str| rig.router.ready().is_err_and(|error| error.message.contains(&address) && error.message.contains(words));
    eventually("the worker's own words are passed on", || told("the model is loading")).await;
    rig.mock(0).set_refusal(None);
    eventually("nothing is left to say", || rig.router.ready().is_ok()).await;
}

/// Field report R22 and DESIGN §6: another worker before the first token, an error after it.
#[tokio::test]
async fn a_failed_attempt_is_retried_elsewhere_only_before_the_first_token() {
    let rig = Rig::of(2).await;
    let tokens = prompt(9, 100);
    let home = named_mock(&rig.ask("a", &tokens, 2).await.unwrap().receipt.unwrap().worker_uid);
    rig.indexed("a", &tokens).await;

    for fault in [
        Fault::CloseBeforeFirst,
        Fault::CloseAfter(0),
        Fault::Refuse(Error::new(Reason::Overloaded, "full")),
        Fault::Refuse(Error::new(Reason::Draining, "draining")),
    ] {
        rig.mock(home).set_fault(fault.clone());
        let outcome = rig.ask("a", &tokens, 5).await.unwrap();
        let receipt = outcome.receipt.unwrap();
        assert_eq!((named_mock(&receipt.worker_uid), receipt.attempts), (1 - home, 2), "{fault:?}");
        assert_eq!(outcome.text.len(), 5);
        rig.mock(home).set_fault(Fault::None);
        rig.ask("a", &tokens, 1).await.unwrap();
        // The other worker's copy is dropped, so that the next round begins at home again.
        rig.mock(1 - home).clear_cache(true);
        eventually("only home holds it", || rig.exact() == 2 && rig.holders("a", &tokens) == [home]).await;
    }

    rig.mock(home).set_fault(Fault::CloseAfter(3));
    let outcome = rig.ask("a", &tokens, 5).await.unwrap();
    let (error, ..) = outcome.failed.unwrap();
    assert_eq!((error.reason, outcome.messages, outcome.receipt.unwrap().attempts), (Reason::WorkerLost, 3, 1));
    rig.at_rest().await;
}

#[tokio::test]
async fn a_refusal_is_passed_on_in_the_workers_words_and_a_4xx_neither_retries_nor_opens_the_breaker() {
    let rig = Rig::of(1).await;
    let refusal = Error::invalid("max_tokens", "max_tokens is 0").with_retry_after(Duration::from_secs(7));
    rig.mock(0).set_fault(Fault::Refuse(refusal.clone()));
    for _ in 0..(FAILURES_MAX * 3) {
        assert_eq!(rig.ask("a", &prompt(1, 40), 5).await.unwrap_err(), refusal);
    }
    let busy = Error::new(Reason::Overloaded, "full").with_retry_after(Duration::from_secs(9));
    rig.mock(0).set_fault(Fault::Refuse(busy.clone()));
    assert_eq!(rig.ask("a", &prompt(1, 40), 5).await.unwrap_err(), busy, "nobody else is there: the worker's word stands");
    rig.mock(0).set_fault(Fault::None);
    assert!(rig.ask("a", &prompt(1, 40), 5).await.is_ok());
    rig.at_rest().await;
}

#[tokio::test]
async fn broken_connections_open_the_breaker_and_a_trial_closes_it() {
    let rig = Rig::of(1).await;
    rig.mock(0).set_fault(Fault::CloseBeforeFirst);
    for _ in 0..FAILURES_MAX {
        assert_eq!(rig.ask("a", &prompt(1, 40), 5).await.unwrap_err().reason, Reason::WorkerLost);
    }
    let taken = rig.mock(0).levels().taken;
    assert_eq!(rig.ask("a", &prompt(1, 40), 5).await.unwrap_err().reason, Reason::NoWorker);
    assert_eq!(rig.mock(0).levels().taken, taken, "nothing was sent");
    rig.mock(0).set_fault(Fault::None);
    let live = Arc::clone(&rig.router.fleet().view().workers()[0].live);
    eventually("the gate lets a trial through", || live.breaker.allows(Instant::now())).await;
    assert!(rig.ask("a", &prompt(1, 40), 5).await.is_ok());
    assert!(live.breaker.allows(Instant::now()));
}

#[tokio::test]
async fn a_draining_worker_gets_nothing_new_and_finishes_what_it_has() {
    let slow = |number| MockSettings { decode_token: Duration::from_millis(2), ..mock(number) };
    let rig = Rig::with(vec![slow(0), slow(1)], RouterSettings::default()).await;
    let tokens = prompt(2, 100);
    let prepared = rig.request("a", &tokens, 200);
    let receipt = prepared.receipt.clone();
    let mut chunks = rig.router.serve(prepared).await.unwrap();
    assert!(matches!(chunks.next().await, Some(Chunk::Started(_))));
    let home = named_mock(&receipt.get().unwrap().worker_uid);
    rig.mock(home).set_refusal(Some(Error::new(Reason::Draining, "draining")));
    eventually("the router knows", || rig.exact() == 1).await;
    let taken = rig.mock(home).levels().taken;
    for number in 0..10 {
        let outcome = rig.ask("a", &prompt(number, 100), 1).await.unwrap();
        assert_eq!(named_mock(&outcome.receipt.unwrap().worker_uid), 1 - home);
    }
    assert_eq!(rig.mock(home).levels().taken, taken);
    let mut text = 0;
    while let Some(chunk) = chunks.next().await {
        match chunk {
            Chunk::Tokens(tokens) => text += tokens.ids.len(),
            Chunk::Finished(finished) => assert_eq!(finished.usage.completion_tokens, 200),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(text, 200);
}

#[tokio::test]
async fn a_deadline_ends_a_request_whose_worker_is_silent() {
    let settings = RouterSettings { deadline_grace: Duration::from_millis(50), ..RouterSettings::default() };
    let rig = Rig::with(vec![mock(0)], settings).await;
    rig.mock(0).set_fault(Fault::Silent);
    let mut prepared = rig.request("a", &prompt(1, 40), 5);
    prepared.request.deadline = Some(Duration::from_millis(100));
    let outcome = rig.finish(prepared).await.unwrap();
    assert_eq!(outcome.failed.unwrap().0.reason, Reason::DeadlineExceeded);
    rig.at_rest().await;
}

#[tokio::test]
async fn a_request_for_another_identity_is_refused_before_any_worker_sees_it() {
    let rig = Rig::of(1).await;
    let mut prepared = rig.request("a", &prompt(1, 40), 5);
    prepared.request.identity = ModelIdentity(kvasir_core::Digest::new([9; 32]));
    assert_eq!(rig.finish(prepared).await.unwrap_err().reason, Reason::NoWorker);
    assert_eq!(rig.mock(0).levels().taken, 0);
}

#[tokio::test]
async fn the_catalog_comes_from_the_workers_and_one_text_serves_all_of_them() {
    let rig = Rig::of(3).await;
    let catalog = rig.router.catalog();
    let model = catalog.find("mock").unwrap();
    assert_eq!((model.identity, model.block_size, catalog.models.len()), (rig.identity, BLOCK, 1));
    let segments = model.text.prompt("hello", false).unwrap();
    assert_eq!(model.text.encode_segments(&segments, None).unwrap(), b"hello".map(u32::from));
}
