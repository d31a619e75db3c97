//! One Secret in an API server that is slow, silent, wrong or behind.

use super::*;
use crate::kubernetes::ObjectName;
use crate::secrets::object::{CHECK_EVERY, CHECK_MAX};
use crate::testing::{ApiServer, Asked, Reply, Verb, event};
use k8s_openapi::ByteString;
use serde_json::{Value, json};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

/// The bound that is promised for a withdrawn key.
const BOUND: Duration = Duration::from_secs(5);

/// A cluster with one Secret; clones are one.
#[derive(Clone, Default)]
struct Cluster(Arc<Mutex<World>>);

#[derive(Default)]
struct World {
    version: u64,
    data: Option<Value>,
    watches: Vec<mpsc::UnboundedSender<String>>,
    /// A watch is accepted and nothing ever comes.
    deaf: bool,
    /// How long a question takes.
    slow: Duration,
    /// What every question is answered with instead.
    fault: Option<Fault>,
}

type Fault = fn() -> Reply;

impl World {
    fn head(&self) -> Value {
        json!({"kind": "Secret", "apiVersion": "v1", "metadata": {"name": "keys", "namespace": "pools", "resourceVersion": self.version.to_string()}})
    }

    fn object(&self) -> Option<Value> {
        let mut object = self.head();
        object["data"] = self.data.clone()?;
        Some(object)
    }

    fn answer(&mut self, asked: &Asked) -> Reply {
        if let Some(fault) = self.fault {
            return fault();
        }
        match (asked.verb, self.object()) {
            (Verb::Watch, object) => {
                let (events, stream) = mpsc::unbounded_channel();
                if let Some(object) = object.filter(|_| !self.deaf) {
                    events.send(event("ADDED", &object)).unwrap();
                }
                self.watches.push(events);
                Reply::Events(stream)
            }
            (_, None) => Reply::Status(404),
            (Verb::Get, Some(object)) => Reply::Late(self.slow, object),
            (Verb::GetHead, Some(_)) => Reply::Late(self.slow, self.head()),
            (Verb::List, _) => panic!("nothing lists Secrets"),
        }
    }

    fn tell(&self, kind: &str, object: &Value) {
        if !self.deaf {
            // A watch that has ended hears nothing.
            self.watches.iter().for_each(|watch| drop(watch.send(event(kind, object))));
        }
    }
}

impl Cluster {
    fn new(data: Value) -> Self {
        let cluster = Self::default();
        cluster.put(data);
        cluster
    }

    fn with<T>(&self, change: impl FnOnce(&mut World) -> T) -> T {
        change(&mut self.0.lock().unwrap())
    }

    fn put(&self, data: Value) {
        self.with(|world| {
            world.version += 1;
            world.data = Some(data);
            world.tell("MODIFIED", &world.object().unwrap());
        });
    }

    fn server(&self) -> ApiServer {
        let world = Arc::clone(&self.0);
        ApiServer::new(move |asked| world.lock().unwrap().answer(asked))
    }

    fn fault(&self, fault: Option<Fault>) {
        self.with(|world| {
            world.fault = fault;
            world.watches.clear();
        });
    }
}

fn data(parts: &[(&str, &str)]) -> Value {
    parts
        .iter()
        .map(|(key, text)| ((*key).to_owned(), serde_json::to_value(ByteString(text.as_bytes().to_vec())).unwrap()))
        .collect()
}

fn keys(tenants: &str) -> Value {
    data(&[("pool-secret", FIRST), ("tenants.toml", tenants)])
}

fn name() -> ObjectName {
    ObjectName::parse("pools/keys").unwrap()
}

/// One router's secrets, followed as long as the tasks live.
fn router(server: &ApiServer, tasks: &mut JoinSet<()>) -> Arc<Secrets> {
    let secrets = Arc::new(Secrets::awaited(RouterMetrics::new(&Registry::default())));
    tasks.spawn(follow_object(server.client.clone(), name(), Isolation::PerTenant, Arc::clone(&secrets)));
    secrets
}

/// Virtual time until `wanted` holds.
async fn until(mut wanted: impl FnMut() -> bool) -> Duration {
    let began = Instant::now();
    while !wanted() {
        assert!(began.elapsed() < Duration::from_mins(5), "it never came about");
        sleep(Duration::from_millis(1)).await;
    }
    began.elapsed()
}

fn refused(secrets: &Secrets, key: &str) -> bool {
    who(secrets.tenants(), key) == Err(Reason::Unauthenticated)
}

fn stale(secrets: &Secrets) -> String {
    secrets.standing().stale.map(|error| error.to_string()).unwrap_or_default()
}

#[tokio::test(start_paused = true)]
async fn a_change_is_in_force_as_soon_as_the_watch_tells_it_and_only_one_secret_is_asked_for() {
    let cluster = Cluster::new(keys(&both()));
    let (server, mut tasks) = (cluster.server(), JoinSet::new());
    let secrets = router(&server, &mut tasks);
    secrets.loaded().await;
    until(|| cluster.with(|world| !world.watches.is_empty())).await;
    assert_eq!((who(secrets.tenants(), KEY_A).as_deref(), secrets.standing().version.as_str()), (Ok("a"), "1"));
    cluster.put(keys(&tenants(&[("b", KEY_B), ("c", "sk-new")])));
    let time = until(|| refused(&secrets, KEY_A) && who(secrets.tenants(), "sk-new").is_ok()).await;
    assert!(time < Duration::from_millis(50), "{time:?}");
    // At rest only versions are asked for.
    let before = server.asked().len();
    sleep(CHECK_EVERY * 5).await;
    let asked = server.asked();
    assert!(asked[before..].iter().all(|asked| asked.verb == Verb::GetHead) && asked.len() - before <= 6);
    for asked in asked {
        match asked.verb {
            Verb::Watch => {
                assert_eq!(asked.path, "/api/v1/namespaces/pools/secrets");
                assert!(asked.query.contains("fieldSelector=metadata.name%3Dkeys") && asked.query.contains("resourceVersion=0"));
            }
            _ => assert_eq!(asked.path, "/api/v1/namespaces/pools/secrets/keys"),
        }
    }
}

/// Field report R50: every router refuses a withdrawn key within the bound, whenever it is withdrawn and whatever its watch hears.
#[tokio::test(start_paused = true)]
async fn a_withdrawn_key_is_refused_by_every_router_within_the_bound_also_without_a_watch() {
    let cluster = Cluster::new(keys(&both()));
    let (server, mut tasks) = (cluster.server(), JoinSet::new());
    cluster.with(|world| {
        world.deaf = true;
        world.slow = CHECK_MAX * 9 / 20;
    });
    let first = router(&server, &mut tasks);
    sleep(CHECK_EVERY / 3).await;
    let second = router(&server, &mut tasks);
    first.loaded().await;
    second.loaded().await;
    let mut longest = Duration::ZERO;
    for step in 0..20 {
        cluster.put(keys(&both()));
        until(|| [&first, &second].iter().all(|router| who(router.tenants(), KEY_A).is_ok())).await;
        sleep(CHECK_EVERY * step / 20).await;
        cluster.put(keys(&tenants(&[("b", KEY_B), ("c", "sk-new")])));
        let time = until(|| refused(&first, KEY_A) && refused(&second, KEY_A)).await;
        assert!([&first, &second].iter().all(|router| who(router.tenants(), "sk-new").is_ok()), "a new key works as fast");
        longest = longest.max(time);
    }
    assert!(longest <= CHECK_EVERY + CHECK_MAX && CHECK_EVERY + CHECK_MAX < BOUND, "{longest:?}");
    assert!(longest > CHECK_EVERY, "the slow server was met: {longest:?}");
}

#[tokio::test(start_paused = true)]
async fn whatever_the_server_does_the_last_good_keys_stay_and_no_secret_is_told() {
    let (log, _guard) = Log::capture();
    let cluster = Cluster::new(keys(&both()));
    let (server, mut tasks) = (cluster.server(), JoinSet::new());
    let secrets = router(&server, &mut tasks);
    secrets.loaded().await;
    let faults: [(Fault, &str); 7] = [
        (|| Reply::Status(500), "refused"),
        (|| Reply::Status(403), "grant get and watch on this one Secret"),
        (|| Reply::Status(404), "whoever deploys this router"),
        (|| Reply::Broken, "cannot be reached"),
        (|| Reply::Silence, "does not answer"),
        (|| Reply::Garbage("{\"data\": {\"tenants.toml\": \"sk-pasted-by-mistake"), "cannot be read"),
        (|| Reply::Garbage("sk-pasted-by-mistake"), "cannot be read"),
    ];
    for (fault, wanted) in faults {
        cluster.fault(Some(fault));
        until(|| stale(&secrets).contains(wanted)).await;
        assert!(stale(&secrets).contains("Secret pools/keys: "), "{}", stale(&secrets));
        assert_eq!((who(secrets.tenants(), KEY_A).as_deref(), secrets.ready()), (Ok("a"), Ok(())));
        assert_silent(&format!("{:?} {:?}", secrets.standing(), secrets.hint()));
        cluster.fault(None);
        let time = until(|| stale(&secrets).is_empty()).await;
        assert!(time <= CHECK_EVERY + CHECK_MAX, "{time:?}");
    }
    // A change that was made while nobody answered is found afterwards, also by a watch that had backed off.
    cluster.fault(Some(|| Reply::Broken));
    cluster.put(keys(&tenants(&[("b", KEY_B)])));
    sleep(Duration::from_mins(2)).await;
    cluster.fault(None);
    let time = until(|| refused(&secrets, KEY_A)).await;
    assert!(time <= BOUND, "{time:?}");
    assert!(log.text().contains("secrets and tenants cannot be read"), "{}", log.text());
    assert_silent(&log.text());
}

#[tokio::test(start_paused = true)]
async fn a_secret_that_cannot_be_used_is_refused_whole_and_one_that_is_deleted_withdraws_nothing() {
    let (log, _guard) = Log::capture();
    let cluster = Cluster::new(keys(&both()));
    let (server, mut tasks) = (cluster.server(), JoinSet::new());
    let secrets = router(&server, &mut tasks);
    secrets.loaded().await;
    let cases = [
        (data(&[("tenants.toml", &both())]), "key pool-secret is missing; write the pool's secret there"),
        (data(&[("pool-secret", FIRST)]), "key tenants.toml is missing; write `open = true`"),
        (data(&[("pool-secret", "short"), ("tenants.toml", &both())]), "key pool-secret: a pool secret has at least 16 bytes"),
        (
            data(&[("pool-secret", FIRST), ("pool-secret-next", ""), ("tenants.toml", &both())]),
            "key pool-secret-next: a pool secret",
        ),
        (keys(PASTED), "key tenants.toml: the tenants file is not valid, line 1"),
        (keys(&format!("[[tenant]]\nname = \"a\"\nkey_sha256 = \"{PASTED}\"\n")), "64 hexadecimal digits"),
        (json!({"pool-secret": PASTED, "tenants.toml": 7}), "key pool-secret is not UTF-8 text"),
        (json!(PASTED), "key pool-secret is missing"),
        (Value::Null, "key pool-secret is missing"),
    ];
    for (broken, wanted) in cases {
        cluster.put(broken);
        until(|| stale(&secrets).contains(wanted)).await;
        assert!(stale(&secrets).contains("Secret pools/keys, "), "{}", stale(&secrets));
        assert_silent(&format!("{:?} {:?}", secrets.standing(), secrets.hint()));
        assert_eq!(who(secrets.tenants(), KEY_A).as_deref(), Ok("a"));
        // It is not looked at again while it stays as it is, and not forgotten either.
        sleep(CHECK_EVERY * 3).await;
        assert!(stale(&secrets).contains(wanted), "{}", stale(&secrets));
        cluster.put(keys(&both()));
        until(|| stale(&secrets).is_empty()).await;
    }
    cluster.with(|world| {
        let gone = world.object().unwrap();
        world.tell("DELETED", &gone);
        world.data = None;
    });
    until(|| stale(&secrets).contains("404")).await;
    assert_eq!((who(secrets.tenants(), KEY_A).as_deref(), secrets.ready()), (Ok("a"), Ok(())));
    cluster.put(keys(&tenants(&[("b", KEY_B)])));
    until(|| refused(&secrets, KEY_A)).await;
    assert!(log.text().contains("cannot be used"), "{}", log.text());
    assert_silent(&log.text());
}

#[tokio::test(start_paused = true)]
async fn a_router_waits_for_a_secret_that_is_not_there_yet_and_says_so() {
    let cluster = Cluster::default();
    let (server, mut tasks) = (cluster.server(), JoinSet::new());
    let secrets = router(&server, &mut tasks);
    until(|| secrets.ready().is_err_and(|error| error.message.contains("whoever deploys"))).await;
    assert_eq!(who(secrets.tenants(), KEY_A), Err(Reason::NotReady));
    cluster.put(keys(&both()));
    secrets.loaded().await;
    assert_eq!((who(secrets.tenants(), KEY_A).as_deref(), secrets.ready()), (Ok("a"), Ok(())));
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_comes_late_lets_no_withdrawn_key_in_again_but_a_restored_cluster_is_believed() {
    let cluster = Cluster::new(keys(&both()));
    let (server, mut tasks) = (cluster.server(), JoinSet::new());
    let secrets = router(&server, &mut tasks);
    secrets.loaded().await;
    until(|| cluster.with(|world| !world.watches.is_empty())).await;
    let before = cluster.with(|world| world.object().unwrap());
    cluster.put(keys(&tenants(&[("b", KEY_B)])));
    until(|| refused(&secrets, KEY_A)).await;
    for _ in 0..3 {
        cluster.with(|world| world.tell("MODIFIED", &before));
        sleep(CHECK_EVERY).await;
        assert!(refused(&secrets, KEY_A), "a watch that is behind is not believed");
    }
    // Restored from a backup: the server itself counts from an earlier version, and says so again and again.
    cluster.with(|world| {
        world.version = 1;
        world.data = Some(keys(&both()));
        world.deaf = true;
    });
    let time = until(|| who(secrets.tenants(), KEY_A).is_ok()).await;
    assert!(time > CHECK_EVERY / 2 && time <= CHECK_EVERY * 2, "{time:?}");
}

#[tokio::test(start_paused = true)]
async fn a_rotation_through_the_secret_keeps_what_was_activated() {
    let cluster = Cluster::new(keys(&both()));
    let (server, mut tasks) = (cluster.server(), JoinSet::new());
    let secrets = router(&server, &mut tasks);
    secrets.loaded().await;
    cluster.put(data(&[("pool-secret", FIRST), ("pool-secret-next", SECOND), ("tenants.toml", &both())]));
    until(|| secrets.standing().loaded == [epoch(FIRST), epoch(SECOND)]).await;
    assert_eq!(secrets.standing().active, Some(epoch(FIRST)));
    secrets.activate(epoch(SECOND)).unwrap();
    cluster.put(data(&[("pool-secret", SECOND), ("tenants.toml", &both())]));
    until(|| secrets.standing().loaded == [epoch(SECOND)]).await;
    assert_eq!(secrets.standing().active, Some(epoch(SECOND)));
    let table = secrets.tenants().current();
    assert_eq!(table.tenants()[0].secret_epoch(), epoch(SECOND));
}
