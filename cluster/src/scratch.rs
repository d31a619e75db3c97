//! The one folder of a cluster, and what a crashed run left in it.
//!
//! A cluster takes a free place under the base folder by a file lock, which the kernel gives back when its process dies, however it dies. So
//! a place whose lock can be taken is dead: whatever its pid files, cgroups, bridge and files still hold is swept away. Every start sweeps all
//! dead places, not only its own.
//!
//! A watchdog process kills the servers within moments when the harness is killed: it waits for the end of a pipe that the harness holds.

use crate::plan::{NODES_MAX, PLACES, Plan};
use crate::process::{self, kill_recorded};
use crate::{Error, cgroup};
use std::fs::{self, File};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// Waits for the end of its input, then kills whoever the pid files name. A cluster that stops in order has removed them before.
const WATCHDOG: &str = r#"read -r _; for file in "$0"/*; do read -r pid _ < "$file" && kill -9 "$pid"; done"#;

/// Marks a place whose cluster has a bridge and cgroups: their names hold only the place, so a sweep has to know that they are its own.
const NODES: &str = "nodes";

/// A claimed place.
pub(crate) struct Scratch {
    plan: Plan,
    dir: PathBuf,
    watchdog: Child,
    _lock: File,
}

// === impl Scratch ===

impl Scratch {
    /// Takes a free place and sweeps every dead one.
    pub(crate) fn claim(base: &Path) -> Result<Self, Error> {
        fs::create_dir_all(base).map_err(Error::io("create", base))?;
        let mut claimed = None;
        for place in 0..PLACES {
            if claimed.is_some() && !folder(base, place).exists() {
                continue;
            }
            let Some(lock) = lock(base, place)? else { continue };
            sweep(&folder(base, place), Plan::new(place));
            claimed.get_or_insert((place, lock));
        }
        let Some((place, lock)) = claimed else {
            return Err(Error::Full { places: PLACES, base: base.to_owned() });
        };
        let dir = folder(base, place);
        for name in ["pids", "logs", "users"] {
            let path = dir.join(name);
            fs::create_dir_all(&path).map_err(Error::io("create", &path))?;
        }
        let watchdog = Command::new("/bin/sh")
            .args(["-c", WATCHDOG])
            .arg(dir.join("pids"))
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .map_err(Error::io("run", Path::new("/bin/sh")))?;
        Ok(Self { plan: Plan::new(place), dir, watchdog, _lock: lock })
    }

    pub(crate) const fn plan(&self) -> Plan {
        self.plan
    }

    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Notes that a bridge and cgroups will be made, so that a sweep looks for them.
    pub(crate) fn will_have_nodes(&self) -> Result<(), Error> {
        let path = self.path(NODES);
        fs::write(&path, "").map_err(Error::io("write", &path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        sweep(&self.dir, self.plan);
        drop(self.watchdog.stdin.take());
        // Its pid files are gone, so it only has to end.
        let _reaped = self.watchdog.wait();
    }
}

/// Sweeps every dead place under `base` and gives how many there were.
pub fn clean(base: &Path) -> Result<usize, Error> {
    let mut swept = 0;
    for place in 0..PLACES {
        let dir = folder(base, place);
        if !dir.exists() {
            continue;
        }
        let Some(_lock) = lock(base, place)? else { continue };
        sweep(&dir, Plan::new(place));
        swept += 1;
    }
    Ok(swept)
}

fn folder(base: &Path, place: u8) -> PathBuf {
    base.join(place.to_string())
}

/// `None` while a running cluster holds it.
fn lock(base: &Path, place: u8) -> Result<Option<File>, Error> {
    let path = base.join(format!("{place}.lock"));
    let file = File::options().create(true).truncate(false).write(true).open(&path).map_err(Error::io("open", &path))?;
    match file.try_lock() {
        Ok(()) => Ok(Some(file)),
        Err(fs::TryLockError::WouldBlock) => Ok(None),
        Err(fs::TryLockError::Error(source)) => Err(Error::Io { what: "lock", path, source }),
    }
}

/// Ends and removes everything of a place. Nodes' mounts go with their namespaces, when their first process dies.
fn sweep(dir: &Path, plan: Plan) {
    if !dir.exists() {
        return;
    }
    for entry in fs::read_dir(dir.join("pids")).into_iter().flatten().flatten() {
        kill_recorded(&entry.path());
    }
    if dir.join(NODES).exists() {
        cgroup::remove(&plan.cgroup_prefix());
        // A cable would go with its namespace, but sockets that wait for answers keep a namespace for minutes after its last process.
        let interfaces = (0..NODES_MAX).map(|node| plan.cable(node)).chain([plan.bridge()]);
        for interface in interfaces.filter(|name| Path::new("/sys/class/net").join(name).exists()) {
            // If it does not go, a new one of that name tells: it fails loudly.
            let _left = process::run(Command::new("ip").args(["link", "delete", &interface]));
        }
    }
    if let Err(error) = fs::remove_dir_all(dir) {
        tracing::warn!(%error, dir = %dir.display(), "a folder of a cluster stays until the next start");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sleeper_recorded(dir: &Path) -> Child {
        let child = Command::new("sleep").arg("1000").spawn().unwrap();
        let stat = fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap();
        let started = stat.rsplit_once(')').unwrap().1.split_whitespace().nth(19).unwrap().to_owned();
        fs::create_dir_all(dir.join("pids")).unwrap();
        fs::write(dir.join("pids/sleep"), format!("{} {started}\n", child.id())).unwrap();
        child
    }

    #[test]
    fn a_start_ends_what_a_crashed_run_left_in_any_place() {
        let base = tempfile::tempdir().unwrap();
        let mut dead: Vec<Child> = [0, 2].map(|place| sleeper_recorded(&folder(base.path(), place))).into();
        let scratch = Scratch::claim(base.path()).unwrap();
        for child in &mut dead {
            assert!(!process::is_running(child.id()));
            child.wait().unwrap();
        }
        assert!(scratch.dir().join("pids").read_dir().unwrap().next().is_none(), "a fresh folder");
        assert!(!folder(base.path(), 2).exists());
    }

    #[test]
    fn a_running_cluster_keeps_its_place() {
        let base = tempfile::tempdir().unwrap();
        let first = Scratch::claim(base.path()).unwrap();
        let mut child = sleeper_recorded(first.dir());
        let second = Scratch::claim(base.path()).unwrap();
        assert_ne!(first.dir(), second.dir());
        assert!(process::is_running(child.id()), "another start does not touch it");
        drop(first);
        assert!(!process::is_running(child.id()), "its own end does");
        child.wait().unwrap();
    }

    #[test]
    fn the_watchdog_kills_when_the_harness_is_gone() {
        let base = tempfile::tempdir().unwrap();
        let mut scratch = Scratch::claim(base.path()).unwrap();
        let mut child = sleeper_recorded(scratch.dir());
        drop(scratch.watchdog.stdin.take());
        let status = child.wait().unwrap();
        assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(9));
    }

    #[test]
    fn more_clusters_than_places_are_refused() {
        let base = tempfile::tempdir().unwrap();
        let locks: Vec<_> = (0..PLACES).map(|place| lock(base.path(), place).unwrap().unwrap()).collect();
        let error = Scratch::claim(base.path()).err().unwrap();
        assert!(matches!(error, Error::Full { places: PLACES, .. }), "{error}");
        drop(locks);
    }
}
