//! Files that are edited, half written, swapped and lost while a router follows them.

use super::*;
use crate::secrets::files::{Found, POLL_EVERY, Settle, poll};
use kvasir_core::Digest;
use proptest::prelude::*;
use std::fs;
use std::path::Path;
use std::time::Duration;
use tempfile::TempDir;
use tokio::time::{Instant, sleep};

struct Folder {
    dir: TempDir,
    files: SecretFiles,
}

impl Folder {
    fn new() -> Self {
        let dir = TempDir::new().unwrap();
        let path = |name: &str| dir.path().join(name);
        let files = SecretFiles {
            pool_secrets: vec![path("pool"), path("next")],
            tenants: Some(path("tenants.toml")),
            isolation: Isolation::PerTenant,
        };
        let folder = Self { dir, files };
        folder.write("pool", &format!("{FIRST}\n"));
        folder.write("next", SECOND);
        folder.write("tenants.toml", &both());
        folder
    }

    fn path(&self) -> &Path {
        self.dir.path()
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.path().join(name), text).unwrap();
    }

    fn remove(&self, name: &str) {
        fs::remove_file(self.path().join(name)).unwrap();
    }

    fn start(&self) -> (Arc<Secrets>, Settle) {
        let (material, settle) = self.files.first().unwrap();
        (Arc::new(Secrets::new(material, RouterMetrics::new(&Registry::default())).unwrap()), settle)
    }
}

/// How long a key is still let in, in steps of the paused clock.
async fn let_in(secrets: &Secrets, key: &str) -> Duration {
    let began = Instant::now();
    while who(secrets.tenants(), key).is_ok() {
        assert!(began.elapsed() < Duration::from_mins(1), "never refused");
        sleep(Duration::from_millis(10)).await;
    }
    began.elapsed()
}

#[tokio::test(start_paused = true)]
async fn a_key_is_refused_at_most_two_seconds_after_its_line_is_gone_from_the_file() {
    let folder = Folder::new();
    let (secrets, settle) = folder.start();
    let _followed = tokio::spawn(follow_files(folder.files.clone(), settle, Arc::clone(&secrets)));
    assert_eq!(secrets.standing().loaded, [epoch(FIRST), epoch(SECOND)]);
    for offset in 0..10 {
        folder.write("tenants.toml", &both());
        sleep(POLL_EVERY * 3 + POLL_EVERY / 10 * offset).await;
        assert_eq!(who(secrets.tenants(), KEY_A).as_deref(), Ok("a"));
        folder.write("tenants.toml", &tenants(&[("b", KEY_B)]));
        let time = let_in(&secrets, KEY_A).await;
        assert!(time <= POLL_EVERY * 2 + Duration::from_millis(20), "{time:?} at offset {offset}");
        assert_eq!(who(secrets.tenants(), KEY_B).as_deref(), Ok("b"));
    }
}

#[test]
fn files_that_belong_together_are_never_taken_half() {
    let folder = Folder::new();
    let (secrets, mut settle) = folder.start();
    let mut look = || poll(&folder.files, &mut settle, &secrets);
    look();
    folder.write("pool", SECOND);
    look();
    assert_eq!(secrets.standing().active, Some(epoch(FIRST)), "seen once");
    folder.write("next", THIRD);
    look();
    assert_eq!(secrets.standing().active, Some(epoch(FIRST)), "still moving");
    look();
    assert_eq!(secrets.standing().loaded, [epoch(SECOND), epoch(THIRD)]);
}

#[test]
fn what_cannot_be_used_or_read_is_told_without_a_secret_and_a_mended_file_counts_again() {
    let (log, _guard) = Log::capture();
    let folder = Folder::new();
    let (secrets, mut settle) = folder.start();
    let mut look = || (0..2).for_each(|_| poll(&folder.files, &mut settle, &secrets));
    let told = || secrets.standing().stale.map(|error| error.to_string()).unwrap_or_default();
    for broken in [PASTED.to_owned(), String::new(), format!("[[tenant]]\nname = \"{PASTED}!\"\nkey_sha256 = \"{PASTED}\"\n")] {
        folder.write("tenants.toml", &broken);
        look();
        assert!(told().contains("tenants.toml: "), "{}", told());
        assert_silent(&told());
        assert_eq!(who(secrets.tenants(), KEY_A).as_deref(), Ok("a"));
        folder.write("tenants.toml", &both());
        look();
        assert_eq!(told(), "");
    }
    folder.write("next", "short");
    look();
    assert!(told().contains("next: a pool secret has at least 16 bytes, not 5"), "{}", told());
    folder.remove("next");
    look();
    assert!(told().contains("next: ") && told().contains("No such file"), "{}", told());
    folder.write("next", &"x".repeat((64 << 10) + 1));
    look();
    assert!(told().contains("more than 65536 bytes"), "{}", told());
    fs::write(folder.path().join("tenants.toml"), [0xff, 0xfe]).unwrap();
    folder.write("next", SECOND);
    look();
    assert!(told().contains("not UTF-8"), "{}", told());
    folder.write("tenants.toml", &tenants(&[("b", KEY_B)]));
    look();
    assert_eq!((told(), who(secrets.tenants(), KEY_A)), (String::new(), Err(Reason::Unauthenticated)));
    assert!(log.text().contains("cannot be used") && log.text().contains("cannot be read"), "{}", log.text());
    assert_silent(&log.text());
}

#[test]
fn a_start_with_files_that_cannot_be_used_is_refused_by_name() {
    let folder = Folder::new();
    folder.write("tenants.toml", &format!("[[tenant]]\nname = \"a\"\nkey_sha256 = \"{PASTED}\"\n"));
    let error = folder.files.read().unwrap_err().to_string();
    assert!(error.contains("tenants.toml") && error.contains("tenant \"a\""), "{error}");
    assert_silent(&error);
    folder.remove("pool");
    let error = folder.files.read().unwrap_err().to_string();
    assert!(error.contains("pool: "), "{error}");
    let none = SecretFiles { pool_secrets: Vec::new(), tenants: None, ..folder.files.clone() };
    assert!(none.read().unwrap_err().to_string().contains("name one at least"));
}

fn found(number: u8) -> Found {
    if number == 0 { Found::Nothing("gone".to_owned()) } else { Found::Bytes(Digest::new([number; 32])) }
}

proptest! {
    /// A reading counts when the one before found the same and what was taken last is another.
    #[test]
    fn a_change_counts_once_and_only_when_it_stands_still(readings in prop::collection::vec(0u8..4, 0..40)) {
        let mut settle = Settle::new(found(1));
        let (mut last, mut taken) = (1, 1);
        for reading in readings {
            let counts = reading == last && reading != taken;
            prop_assert_eq!(settle.counts(found(reading)), counts);
            last = reading;
            if counts {
                taken = reading;
            }
        }
    }
}
