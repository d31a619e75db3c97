//! The set against a naive one, and the watch against an API server that breaks in every way.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]

use super::*;
use crate::discover::Endpoint;
use crate::testing::{ApiServer, Asked, Reply, Verb, event, gone, list};
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::discovery::v1::{Endpoint as SliceEndpoint, EndpointConditions, EndpointPort};
use kube::core::ObjectMeta;
use proptest::prelude::*;
use serde_json::Value;
use set::ENDPOINTS_MAX;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use tokio::sync::mpsc;

/// One endpoint as a slice lists it.
#[derive(Clone, Debug)]
struct Listed {
    pod: Option<u8>,
    address: Option<u8>,
    terminating: Option<bool>,
    ready: Option<bool>,
}

fn pod(number: u8) -> Listed {
    Listed { pod: Some(number), address: Some(number), terminating: None, ready: Some(false) }
}

fn address(number: u8, ipv4: bool) -> String {
    if ipv4 { format!("10.0.0.{number}") } else { format!("fd00::{number}") }
}

fn uri(number: u8, ipv4: bool) -> String {
    if ipv4 { format!("http://10.0.0.{number}:7401") } else { format!("http://[fd00::{number}]:7401") }
}

fn slice(name: &str, version: u64, ipv4: bool, listed: &[Listed]) -> EndpointSlice {
    let endpoint = |listed: &Listed| SliceEndpoint {
        addresses: listed.address.map(|number| address(number, ipv4)).into_iter().collect(),
        conditions: Some(EndpointConditions { ready: listed.ready, terminating: listed.terminating, serving: listed.ready }),
        target_ref: listed.pod.map(|pod| ObjectReference { uid: Some(format!("uid-{pod}")), ..Default::default() }),
        ..Default::default()
    };
    let port = |name: &str, port| EndpointPort {
        name: Some(name.into()),
        port: Some(port),
        protocol: Some("TCP".into()),
        ..Default::default()
    };
    EndpointSlice {
        address_type: if ipv4 { "IPv4" } else { "IPv6" }.into(),
        endpoints: listed.iter().map(endpoint).collect(),
        metadata: ObjectMeta { name: Some(name.into()), resource_version: Some(version.to_string()), ..Default::default() },
        ports: Some(vec![port("metrics", 7402), port("grpc", 7401)]),
    }
}

fn v4(name: &str, listed: &[Listed]) -> EndpointSlice {
    slice(name, 1, true, listed)
}

fn grpc() -> PortChoice {
    PortChoice::parse("grpc").unwrap()
}

fn set_of(slices: Vec<EndpointSlice>) -> (SliceSet, Vec<Change>) {
    let mut set = SliceSet::new(grpc());
    let mut changes = set.apply(Event::Init);
    for slice in slices {
        changes.extend(set.apply(Event::InitApply(slice)));
    }
    changes.extend(set.apply(Event::InitDone));
    (set, changes)
}

fn join(number: u8) -> Change {
    Change::Join(Endpoint::parse(&uri(number, true)).unwrap())
}

fn leave(number: u8) -> Change {
    Change::Leave(Endpoint::parse(&uri(number, true)).unwrap())
}

#[test]
fn endpoints_join_ready_or_not_and_the_list_is_said_to_be_complete_also_when_it_is_empty() {
    let (_, changes) = set_of(vec![v4("a", &[pod(1)]), v4("b", &[Listed { ready: None, ..pod(2) }])]);
    assert_eq!(changes, [join(1), join(2), Change::Listed]);
    assert_eq!(set_of(Vec::new()).1, [Change::Listed]);
}

/// Field report R40: the endpoint goes with the first event that says that it goes, has no address, or is gone.
#[test]
fn an_endpoint_leaves_at_the_first_event_that_is_terminating_without_address_or_without_it() {
    let going = [
        vec![pod(1), Listed { terminating: Some(true), ..pod(2) }],
        vec![pod(1), Listed { address: None, ..pod(2) }],
        vec![pod(1)],
    ];
    for listed in going {
        let (mut set, _) = set_of(vec![v4("a", &[pod(1), pod(2)])]);
        assert_eq!(set.apply(Event::Apply(v4("a", &listed))), [leave(2)], "{listed:?}");
        assert_eq!(set.apply(Event::Apply(v4("a", &listed))), [], "said once");
    }
    let (mut set, _) = set_of(vec![v4("a", &[pod(1)]), v4("b", &[pod(2)])]);
    assert_eq!(set.apply(Event::Delete(v4("b", &[pod(2)]))), [leave(2)]);
}

/// Field report R40, its variants: a deletion that was never heard of, and another address under the same pod's name.
#[test]
fn a_new_list_yields_the_difference_and_repairs_what_was_missed() {
    let (mut set, _) = set_of(vec![v4("a", &[pod(1), pod(2)])]);
    set.apply(Event::Init);
    set.apply(Event::InitApply(v4("a", &[pod(1), Listed { address: Some(3), ..pod(2) }])));
    assert_eq!(set.apply(Event::InitDone), [leave(2), join(3), Change::Fresh]);
}

#[test]
fn a_list_that_breaks_off_changes_nothing() {
    let (mut set, _) = set_of(vec![v4("a", &[pod(1)])]);
    assert_eq!(set.apply(Event::Init), []);
    assert_eq!(set.apply(Event::InitApply(v4("a", &[]))), []);
    set.interrupted();
    assert_eq!(set.apply(Event::Apply(v4("b", &[pod(2)]))), [join(2)]);
}

#[test]
fn a_pod_that_moves_between_slices_never_leaves_and_one_that_goes_in_the_newer_slice_has_gone() {
    let (mut set, _) = set_of(vec![v4("a", &[pod(1)])]);
    assert_eq!(set.apply(Event::Apply(v4("b", &[pod(1)]))), []);
    assert_eq!(set.apply(Event::Apply(v4("a", &[]))), []);
    assert_eq!(set.apply(Event::Apply(v4("a", &[Listed { terminating: Some(true), ..pod(1) }]))), [leave(1)]);
    // Another pod under the same address waits until the old one is out of the slices.
    assert_eq!(set.apply(Event::Apply(v4("b", &[Listed { pod: Some(9), ..pod(1) }]))), []);
    assert_eq!(set.apply(Event::Delete(v4("a", &[]))), [join(1)]);
}

#[test]
fn a_pod_of_two_families_is_one_worker() {
    let (mut set, changes) = set_of(vec![v4("four", &[pod(1)]), slice("six", 1, false, &[pod(1), pod(2)])]);
    let six = Endpoint::parse(&uri(2, false)).unwrap();
    assert_eq!(changes, [join(1), Change::Join(six), Change::Listed]);
    assert_eq!(set.apply(Event::Apply(v4("four", &[pod(1), pod(2)]))).len(), 2, "it changes to its IPv4 address");
}

#[test]
fn the_port_is_found_by_name_or_given_by_number() {
    for (choice, wanted) in [("grpc", Some("7401")), ("metrics", Some("7402")), ("9", Some("9")), ("nothing", None)] {
        let mut set = SliceSet::new(PortChoice::parse(choice).unwrap());
        let changes = set.apply(Event::Apply(v4("a", &[pod(1)])));
        let joined = wanted.map(|port| Change::Join(Endpoint::parse(&format!("10.0.0.1:{port}")).unwrap()));
        assert_eq!(changes, joined.into_iter().collect::<Vec<_>>(), "{choice}");
    }
    for wrong in ["", "0", "65536", "Grpc", "a-name-that-is-too-long", "a_b"] {
        assert!(PortChoice::parse(wrong).is_err(), "{wrong:?}");
    }
}

#[test]
fn more_endpoints_than_a_router_links_to_are_left_out() {
    let many = |count: usize| {
        let endpoints = (0..count).map(|number| SliceEndpoint {
            addresses: vec![format!("10.1.{}.{}", number / 256, number % 256)],
            ..Default::default()
        });
        EndpointSlice { endpoints: endpoints.collect(), ..v4("a", &[]) }
    };
    let (mut set, _) = set_of(vec![many(ENDPOINTS_MAX + 10)]);
    assert_eq!(set.len(), ENDPOINTS_MAX);
    set.apply(Event::Apply(many(5)));
    assert_eq!(set.len(), 5);
}

#[derive(Clone, Debug)]
enum Step {
    Put(u8, bool, Vec<Listed>),
    Delete(u8),
    List(Vec<(u8, bool, Vec<Listed>)>),
    Broken(Vec<(u8, bool, Vec<Listed>)>),
}

fn listed() -> impl Strategy<Value = Vec<Listed>> {
    let one = (
        prop::option::weighted(0.8, 0u8..5),
        prop::option::weighted(0.9, 0u8..5),
        prop::option::of(any::<bool>()),
        prop::option::of(any::<bool>()),
    )
        .prop_map(|(pod, address, terminating, ready)| Listed { pod, address, terminating, ready });
    prop::collection::vec(one, 0..5)
}

fn step() -> impl Strategy<Value = Step> {
    let one = || (0u8..4, prop::bool::weighted(0.8), listed());
    prop_oneof![
        6 => one().prop_map(|(name, ipv4, listed)| Step::Put(name, ipv4, listed)),
        2 => (0u8..4).prop_map(Step::Delete),
        1 => prop::collection::vec(one(), 0..4).prop_map(Step::List),
        1 => prop::collection::vec(one(), 0..4).prop_map(Step::Broken),
    ]
}

/// Who is in, by looking at each pair of entries.
fn naive(slices: &BTreeMap<u8, (bool, Vec<Listed>)>) -> BTreeSet<String> {
    let all: Vec<(bool, &Listed)> = slices.values().flat_map(|(ipv4, listed)| listed.iter().map(|it| (*ipv4, it))).collect();
    let goes = |it: &Listed| it.terminating == Some(true) || it.address.is_none();
    let one = |(ipv4, it): &(bool, &Listed)| {
        let same_pod = |other: &Listed| it.pod.is_some() && other.pod == it.pod;
        let gone = all
            .iter()
            .any(|(other_v4, other)| goes(other) && (same_pod(other) || (other.address == it.address && other_v4 == ipv4)));
        let second = !ipv4 && all.iter().any(|(other_v4, other)| *other_v4 && other.address.is_some() && same_pod(other));
        let address = it.address.filter(|_| !gone && !second && !goes(it))?;
        Some(uri(address, *ipv4))
    };
    all.iter().filter_map(one).collect()
}

proptest! {
    #[test]
    fn after_any_events_exactly_those_are_in_whom_the_slices_name(steps in prop::collection::vec(step(), 1..40)) {
        let mut set = SliceSet::new(grpc());
        let mut slices: BTreeMap<u8, (bool, Vec<Listed>)> = BTreeMap::new();
        let mut world: BTreeSet<String> = BTreeSet::new();
        let make = |name: u8, ipv4: bool, listed: &[Listed]| slice(&format!("s{name}"), 1, ipv4, listed);
        for step in steps {
            let mut changes = Vec::new();
            match step {
                Step::Put(name, ipv4, listed) => {
                    changes = set.apply(Event::Apply(make(name, ipv4, &listed)));
                    slices.insert(name, (ipv4, listed));
                }
                Step::Delete(name) => {
                    changes = set.apply(Event::Delete(make(name, true, &[])));
                    slices.remove(&name);
                }
                Step::List(all) => {
                    set.apply(Event::Init);
                    slices.clear();
                    for (name, ipv4, listed) in all {
                        prop_assert!(set.apply(Event::InitApply(make(name, ipv4, &listed))).is_empty());
                        slices.insert(name, (ipv4, listed));
                    }
                    changes = set.apply(Event::InitDone);
                }
                Step::Broken(all) => {
                    set.apply(Event::Init);
                    for (name, ipv4, listed) in all {
                        changes.extend(set.apply(Event::InitApply(make(name, ipv4, &listed))));
                    }
                    set.interrupted();
                }
            }
            for change in changes {
                match change {
                    Change::Join(endpoint) => prop_assert!(world.insert(endpoint.uri().to_owned()), "joined twice"),
                    Change::Leave(endpoint) => prop_assert!(world.remove(endpoint.uri()), "left without being in"),
                    Change::Listed | Change::Fresh => {}
                    Change::Stale(stale) => prop_assert!(false, "{stale:?}"),
                }
            }
            prop_assert_eq!(&world, &naive(&slices));
            prop_assert_eq!(set.len(), world.len());
        }
    }
}

/// Answers of the server in the order in which they are asked for; without one it is silent.
#[derive(Clone, Default)]
struct Script(Arc<Mutex<(VecDeque<Reply>, VecDeque<Reply>)>>);

impl Script {
    fn lists(self, replies: impl IntoIterator<Item = Reply>) -> Self {
        self.0.lock().unwrap().0.extend(replies);
        self
    }

    fn watch(&self) -> mpsc::UnboundedSender<String> {
        let (events, stream) = mpsc::unbounded_channel();
        self.0.lock().unwrap().1.push_back(Reply::Events(stream));
        events
    }

    fn refused_watch(&self, code: u16) {
        self.0.lock().unwrap().1.push_back(Reply::Status(code));
    }

    fn serve(&self) -> (ApiServer, BoxStream<'static, Change>) {
        let script = Arc::clone(&self.0);
        let server = ApiServer::new(move |asked: &Asked| {
            let mut script = script.lock().unwrap();
            let queue = if asked.verb == Verb::Watch { &mut script.1 } else { &mut script.0 };
            queue.pop_front().unwrap_or(Reply::Silence)
        });
        let service = ObjectName::parse_service("pools/workers").unwrap();
        let changes = Box::new(Slices::new(server.client.clone(), service, grpc())).changes();
        (server, changes)
    }
}

fn slices(version: u64, all: &[EndpointSlice]) -> Reply {
    let items: Vec<Value> = all.iter().map(|slice| serde_json::to_value(slice).unwrap()).collect();
    list("EndpointSliceList", version, &items)
}

fn told(kind: &str, slice: &EndpointSlice) -> String {
    event(kind, &serde_json::to_value(slice).unwrap())
}

async fn next(changes: &mut BoxStream<'static, Change>) -> Change {
    timeout(Duration::from_mins(1), changes.next()).await.unwrap().unwrap()
}

fn code(change: &Change) -> &'static str {
    match change {
        Change::Stale(stale) => stale.code,
        other => panic!("{other:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn the_slices_of_one_service_are_listed_and_then_followed() {
    let script = Script::default().lists([slices(7, &[v4("a", &[pod(1)])])]);
    let events = script.watch();
    let (server, mut changes) = script.serve();
    assert_eq!([next(&mut changes).await, next(&mut changes).await], [join(1), Change::Listed]);
    events.send(told("ADDED", &slice("b", 8, true, &[pod(2)]))).unwrap();
    assert_eq!(next(&mut changes).await, join(2));
    events.send(told("MODIFIED", &slice("b", 9, true, &[Listed { terminating: Some(true), ..pod(2) }]))).unwrap();
    assert_eq!(next(&mut changes).await, leave(2));
    events.send(told("DELETED", &slice("a", 10, true, &[pod(1)]))).unwrap();
    assert_eq!(next(&mut changes).await, leave(1));

    // A watch that the server ends goes on where it was, without a new list and without a word.
    let again = script.watch();
    drop(events);
    again.send(told("ADDED", &slice("c", 11, true, &[pod(3)]))).unwrap();
    assert_eq!(next(&mut changes).await, join(3));
    let asked = server.asked();
    assert_eq!(asked.iter().map(|asked| asked.verb).collect::<Vec<_>>(), [Verb::List, Verb::Watch, Verb::Watch]);
    for asked in &asked {
        assert_eq!(asked.path, "/apis/discovery.k8s.io/v1/namespaces/pools/endpointslices");
        assert!(asked.query.contains("labelSelector=kubernetes.io%2Fservice-name%3Dworkers"), "{}", asked.query);
    }
    assert!(asked[2].query.contains("resourceVersion=10") && asked[2].query.contains("timeoutSeconds=30"), "{}", asked[2].query);
}

#[tokio::test(start_paused = true)]
async fn a_version_that_is_too_old_costs_a_new_list_and_nobody_who_is_still_there() {
    let script = Script::default().lists([slices(1, &[v4("a", &[pod(1), pod(2)])]), slices(20, &[v4("a", &[pod(2), pod(3)])])]);
    let (first, second) = (script.watch(), script.watch());
    let (server, mut changes) = script.serve();
    for wanted in [join(1), join(2), Change::Listed] {
        assert_eq!(next(&mut changes).await, wanted);
    }
    first.send(gone()).unwrap();
    assert_eq!(code(&next(&mut changes).await), "expired");
    for wanted in [leave(1), join(3), Change::Fresh] {
        assert_eq!(next(&mut changes).await, wanted);
    }
    second.send(told("DELETED", &slice("a", 21, true, &[]))).unwrap();
    assert_eq!([next(&mut changes).await, next(&mut changes).await], [leave(2), leave(3)]);
    assert_eq!(server.asked().len(), 4);
}

#[tokio::test(start_paused = true)]
async fn whatever_goes_wrong_is_said_and_makes_nobody_leave() {
    let script = Script::default().lists([
        slices(1, &[v4("a", &[pod(1)])]),
        Reply::Status(500),
        Reply::Status(403),
        Reply::Broken,
        Reply::Garbage("<html>"),
        Reply::Silence,
        slices(9, &[v4("a", &[pod(1)])]),
    ]);
    script.refused_watch(503);
    let (server, mut changes) = script.serve();
    assert_eq!([next(&mut changes).await, next(&mut changes).await], [join(1), Change::Listed]);
    let mut said = Vec::new();
    let mut at = Vec::new();
    loop {
        match next(&mut changes).await {
            Change::Fresh => break,
            Change::Stale(stale) => {
                if stale.code == "forbidden" {
                    assert!(stale.message.contains("grant list and watch on endpointslices"), "{}", stale.message);
                }
                at.push(Instant::now());
                said.push(stale.code);
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(said, ["refused", "refused", "forbidden", "unreachable", "malformed", "timeout"]);
    let pauses: Vec<Duration> = at.windows(2).map(|pair| pair[1] - pair[0]).collect();
    for (number, pause) in pauses.iter().enumerate().take(4) {
        let whole = PAUSE_MIN * (1 << number);
        assert!(*pause >= whole / 2 && *pause <= whole + Duration::from_millis(5), "{pauses:?}");
    }
    assert!(pauses[4] >= LIST_MAX && pauses[4] <= LIST_MAX + PAUSE_MAX, "{pauses:?}");
    assert_eq!(server.asked().len(), 8);
}

#[tokio::test(start_paused = true)]
async fn a_server_that_is_away_is_asked_ever_more_rarely() {
    let script = Script::default().lists((0..200).map(|_| Reply::Broken));
    let (server, mut changes) = script.serve();
    let until = Instant::now() + Duration::from_mins(2);
    while Instant::now() < until {
        assert_eq!(code(&next(&mut changes).await), "unreachable");
    }
    let asked = server.asked().len();
    // Five tries while the pause doubles, then one in 4 to 8 s.
    assert!((18..=38).contains(&asked), "{asked} in two minutes");
}

#[tokio::test(start_paused = true)]
async fn a_server_that_ends_every_watch_at_once_is_not_asked_in_a_circle_and_nobody_leaves() {
    let script = Script::default().lists([slices(1, &[v4("a", &[pod(1)])])]);
    for _ in 0..200 {
        drop(script.watch());
    }
    let (server, mut changes) = script.serve();
    assert_eq!([next(&mut changes).await, next(&mut changes).await], [join(1), Change::Listed]);
    let said = timeout(Duration::from_mins(2), changes.next()).await;
    assert!(said.is_err(), "{said:?}");
    let asked = server.asked();
    assert!((18..=38).contains(&asked.len()), "{} in two minutes", asked.len());
    assert!(asked[2..].iter().all(|asked| asked.verb == Verb::Watch && asked.query.contains("resourceVersion=1")));
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_died_without_a_word_is_opened_again_and_a_list_of_many_pages_is_taken_whole() {
    let page = |token: &str, slice: EndpointSlice| {
        let items = [serde_json::to_value(slice).unwrap()];
        Reply::Object(serde_json::json!({"kind": "EndpointSliceList", "apiVersion": "v1", "items": items,
            "metadata": {"resourceVersion": "5", "continue": token}}))
    };
    let script = Script::default().lists([page("more", v4("a", &[pod(1)])), page("", v4("b", &[pod(2)]))]);
    let (dead, alive) = (script.watch(), script.watch());
    let (server, mut changes) = script.serve();
    for wanted in [join(1), join(2), Change::Listed] {
        assert_eq!(next(&mut changes).await, wanted);
    }
    alive.send(told("DELETED", &slice("a", 6, true, &[]))).unwrap();
    let began = Instant::now();
    assert_eq!(next(&mut changes).await, leave(1));
    assert!(began.elapsed() <= SILENCE_MAX + PAUSE_MIN, "{:?}", began.elapsed());
    drop(dead);
    let asked = server.asked();
    assert_eq!(asked.iter().map(|asked| asked.verb).collect::<Vec<_>>(), [Verb::List, Verb::List, Verb::Watch, Verb::Watch]);
    assert!(asked[1].query.contains("continue=more") && asked[3].query.contains("resourceVersion=5"), "{asked:?}");
}
