//! What is in force after each change, from whatever source, and that nothing secret is ever said.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]

mod files;
mod object;

use super::material::Raw;
use super::*;
use kvasir_door::Isolation;
use kvasir_telemetry::Registry;
use sha2::{Digest as _, Sha256};
use std::io;
use std::sync::Arc;
use tracing::subscriber::DefaultGuard;

const FIRST: &str = "first-pool-secret-of-this-test";
const SECOND: &str = "second-pool-secret-of-this-test";
const THIRD: &str = "third-pool-secret-of-this-test";
const KEY_A: &str = "sk-key-of-tenant-a";
const KEY_B: &str = "sk-key-of-tenant-b";
/// A key that someone wrote where it does not belong.
const PASTED: &str = "sk-pasted-by-mistake";

fn sha256_hex(key: &str) -> String {
    hex::encode(Sha256::digest(key))
}

/// A tenants file.
fn tenants(entries: &[(&str, &str)]) -> String {
    if entries.is_empty() {
        return "tenant = []\n".to_owned();
    }
    let entry = |(name, key): &(&str, &str)| format!("[[tenant]]\nname = \"{name}\"\nkey_sha256 = \"{}\"\n", sha256_hex(key));
    entries.iter().map(entry).collect::<Vec<_>>().concat()
}

fn both() -> String {
    tenants(&[("a", KEY_A), ("b", KEY_B)])
}

fn material(secrets: &[&str], tenants: &str) -> Result<Material, MaterialError> {
    let part = |(number, secret): (usize, &&str)| (format!("secret {number}"), secret.as_bytes().to_vec());
    let pool_secrets = secrets.iter().enumerate().map(part).collect();
    Material::parse(Raw { pool_secrets, tenants: Some(("tenants".to_owned(), tenants.into())) }, &Isolation::PerTenant)
}

fn epoch(secret: &str) -> SecretEpoch {
    PoolSecret::new(secret.as_bytes()).unwrap().epoch()
}

fn started(registry: &Registry, secrets: &[&str], tenants: &str) -> Secrets {
    Secrets::new(material(secrets, tenants).unwrap(), RouterMetrics::new(registry)).unwrap()
}

/// Who is let in by a key, or why nobody.
fn who(tenants: &Tenants, key: &str) -> Result<String, Reason> {
    let tenant = tenants.current().authenticate(Some(format!("Bearer {key}").as_bytes()));
    tenant.map(|tenant| tenant.tag().0.to_string()).map_err(|error| error.reason)
}

/// Everything that is logged on this thread while the guard lives.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    fn capture() -> (Self, DefaultGuard) {
        let log = Self::default();
        let writer = log.clone();
        let subscriber =
            tracing_subscriber::fmt().with_max_level(tracing::Level::TRACE).with_writer(move || writer.clone()).finish();
        (log, tracing::subscriber::set_default(subscriber))
    }

    fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }
}

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Nothing that could let someone in, in clear or as it travels, stands in `text`.
#[track_caller]
fn assert_silent(text: &str) {
    let base64 = |plain: &str| serde_json::to_value(k8s_openapi::ByteString(plain.into())).unwrap().as_str().unwrap().to_owned();
    for plain in [FIRST, SECOND, THIRD, KEY_A, KEY_B, PASTED] {
        let spelled = [plain.to_owned(), hex::encode(plain), sha256_hex(plain), base64(plain), format!("{:?}", plain.as_bytes())];
        for secret in spelled {
            assert!(!text.contains(&secret), "{secret} stands in: {text}");
        }
    }
    assert!(!text.contains(&base64(&both())), "the tenants stand in: {text}");
}

#[test]
fn a_withdrawn_key_is_refused_from_the_next_request_on_and_a_new_one_is_let_in() {
    let registry = Registry::default();
    let secrets = started(&registry, &[FIRST], &both());
    let door = secrets.tenants().clone();
    let running = door.current().authenticate(Some(format!("Bearer {KEY_A}").as_bytes())).unwrap();
    assert_eq!((who(&door, KEY_A).as_deref(), who(&door, KEY_B).as_deref()), (Ok("a"), Ok("b")));
    secrets.apply(material(&[FIRST], &tenants(&[("b", KEY_B), ("c", "sk-new")])).unwrap(), "2".to_owned()).unwrap();
    assert_eq!(who(&door, KEY_A), Err(Reason::Unauthenticated));
    assert_eq!((who(&door, KEY_B).as_deref(), who(&door, "sk-new").as_deref()), (Ok("b"), Ok("c")));
    // A request that was let in keeps its tenant to its end.
    assert_eq!((&*running.tag().0, running.secret_epoch()), ("a", epoch(FIRST)));
    assert_eq!((secrets.standing().version.as_str(), secrets.standing().tenants), ("2", 2));
    assert!(registry.render().contains("kvasir_router_tenants 2\n"), "{}", registry.render());
    secrets.apply(material(&[FIRST], &tenants(&[])).unwrap(), "3".to_owned()).unwrap();
    assert_eq!(who(&door, KEY_B), Err(Reason::Unauthenticated));
    assert!(registry.render().contains("kvasir_router_tenants 0\n"), "{}", registry.render());
}

#[test]
fn material_that_cannot_be_used_changes_nothing_and_is_told_until_it_is_mended() {
    let registry = Registry::default();
    let secrets = started(&registry, &[FIRST], &both());
    let before = secrets.standing();
    let error = material(&[FIRST], "[[tenant]]\nname = \"a\"\n").unwrap_err();
    secrets.refused(&error);
    let stale = secrets.standing().stale.unwrap();
    assert_eq!(stale.reason, Reason::InvalidArgument);
    assert!(stale.message.contains("tenants") && stale.message.contains("key_sha256"), "{}", stale.message);
    assert_eq!(Standing { stale: None, ..secrets.standing() }, before);
    assert_eq!((who(secrets.tenants(), KEY_A).as_deref(), secrets.ready()), (Ok("a"), Ok(())));
    let hint = secrets.hint().unwrap();
    assert!(hint.contains("admin service") && !hint.contains("key_sha256"), "{hint}");
    assert!(registry.render().contains("kvasir_router_secrets_stale 1\n"), "{}", registry.render());
    // That it can be read at all says nothing of what was refused.
    secrets.unchanged();
    assert_eq!(secrets.standing().stale, Some(stale));
    secrets.apply(material(&[FIRST], &both()).unwrap(), String::new()).unwrap();
    assert_eq!((secrets.standing().stale, secrets.hint()), (None, None));
    let shown = registry.render();
    for line in ["secrets_stale 0", "secrets_loads_total{outcome=\"refused\"} 1", "secrets_loads_total{outcome=\"applied\"} 2"] {
        assert!(shown.contains(&format!("kvasir_router_{line}\n")), "{line} is missing in {shown}");
    }
}

#[test]
fn a_source_that_cannot_be_read_leaves_everything_in_force_until_it_can() {
    let registry = Registry::default();
    let secrets = started(&registry, &[FIRST], &both());
    secrets.unreadable("the disk is gone");
    assert_eq!(secrets.standing().stale.unwrap().reason, Reason::NotReady);
    assert_eq!(secrets.hint().unwrap(), "the disk is gone");
    assert_eq!((who(secrets.tenants(), KEY_A).as_deref(), secrets.ready()), (Ok("a"), Ok(())));
    secrets.unchanged();
    assert_eq!(secrets.standing().stale, None);
    assert!(registry.render().contains("kvasir_router_secrets_stale 0\n"));
}

#[test]
fn before_the_first_material_everyone_is_told_to_come_back_and_why() {
    let secrets = Secrets::awaited(RouterMetrics::new(&Registry::default()));
    assert_eq!(who(secrets.tenants(), KEY_A), Err(Reason::NotReady));
    secrets.unreadable("nobody answers");
    let error = secrets.ready().unwrap_err();
    assert_eq!(error.reason, Reason::NotReady);
    assert!(error.message.contains("nobody answers"), "{error}");
    assert_eq!(secrets.activate(epoch(FIRST)).unwrap_err().reason, Reason::InvalidArgument);
    secrets.apply(material(&[FIRST], &both()).unwrap(), String::new()).unwrap();
    assert_eq!((who(secrets.tenants(), KEY_A).as_deref(), secrets.ready()), (Ok("a"), Ok(())));
}

#[test]
fn a_rotation_loads_activates_and_withdraws_and_only_activation_changes_domains() {
    let secrets = started(&Registry::default(), &[FIRST], &both());
    let domain = || {
        let table = secrets.tenants().current();
        (table.tenants()[0].secret_epoch(), table.tenants()[0].domain(None))
    };
    let put = |loaded: &[&str]| secrets.apply(material(loaded, &both()).unwrap(), String::new()).unwrap();
    let standing = || (secrets.standing().loaded, secrets.standing().active.unwrap());
    let old = domain();
    let unknown = secrets.activate(epoch(SECOND)).unwrap_err();
    assert!(unknown.message.contains(&hex::encode(epoch(SECOND).0)), "{unknown}");

    put(&[FIRST, SECOND, SECOND]);
    assert_eq!(standing(), (vec![epoch(FIRST), epoch(SECOND)], epoch(FIRST)));
    assert_eq!(domain(), old, "loading alone changes nothing");
    secrets.activate(epoch(SECOND)).unwrap();
    let new = domain();
    assert!(new.0 == epoch(SECOND) && new.1 != old.1);
    assert_eq!(who(secrets.tenants(), KEY_A).as_deref(), Ok("a"));

    // The active one stays so, wherever it stands, through changes of tenants and when the old one goes.
    put(&[FIRST, SECOND]);
    put(&[SECOND]);
    assert_eq!((standing(), domain()), ((vec![epoch(SECOND)], epoch(SECOND)), new));
    assert_eq!(secrets.activate(epoch(FIRST)).unwrap_err().reason, Reason::InvalidArgument);
    put(&[THIRD, FIRST]);
    assert_eq!(standing().1, epoch(THIRD), "what is withdrawn is active no longer");
    assert_eq!(domain().0, epoch(THIRD));
}

#[test]
fn each_mistake_names_its_place_and_never_what_stands_there() {
    let (log, _guard) = Log::capture();
    let secrets = started(&Registry::default(), &[FIRST], &both());
    let pasted = |line: &str| format!("{}{line}\n", both());
    let cases = [
        (material(&[], &both()), "no pool secret"),
        (material(&[FIRST, "short"], &both()), "secret 1: a pool secret has at least 16 bytes, not 5"),
        (material(&[FIRST], ""), "tenants: the tenants file lists no tenant"),
        (material(&[FIRST], &pasted(&format!("key_sha256 = \"{PASTED}\""))), "line 7"),
        (material(&[FIRST], &pasted(&format!("[[tenant]]\nname = \"c\"\nkey_sha256 = \"{PASTED}\""))), "64 hexadecimal digits"),
        (
            material(&[FIRST], &pasted(&format!("[[tenant]]\nname = \"c\"\nkey_sha256 = \"{}\"", sha256_hex(KEY_A)))),
            "already listed",
        ),
        (material(&[FIRST], &pasted(&format!("weight = \"{PASTED}\""))), "wrong type"),
        (material(&[FIRST], &pasted(PASTED)), "line 7"),
    ];
    for (parsed, wanted) in cases {
        let error = parsed.unwrap_err();
        secrets.refused(&error);
        let told = format!("{error} {error:?} {:?} {:?}", secrets.standing(), secrets.hint());
        assert!(told.contains(wanted), "{told} lacks {wanted:?}");
        assert_silent(&told);
    }
    let usable = material(&[FIRST, SECOND], &both()).unwrap();
    assert_silent(&format!("{usable:?} {:?}", TenantSource::File { text: both(), isolation: Isolation::PerTenant }));
    secrets.apply(usable, String::new()).unwrap();
    secrets.activate(epoch(SECOND)).unwrap();
    let logged = log.text();
    assert!(logged.contains("cannot be used") && logged.contains("another pool secret is active"), "{logged}");
    assert_silent(&logged);
}
