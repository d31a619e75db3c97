//! The cgroup folders of nodes: made before a kubelet starts (it refuses a root that is not there), removed after it.
//!
//! Works on the v1 hierarchies of old kernels' defaults and on the unified one.

use crate::Error;
use crate::process::{kill_pid, wait_gone};
use std::fs;
use std::path::{Path, PathBuf};

const MOUNT: &str = "/sys/fs/cgroup";

/// Makes the folder `name` in every hierarchy.
pub(crate) fn create(name: &str) -> Result<(), Error> {
    for hierarchy in hierarchies(Path::new(MOUNT)) {
        let dir = hierarchy.join(name);
        fs::create_dir_all(&dir).map_err(Error::io("create", &dir))?;
    }
    Ok(())
}

/// Kills what is left in folders whose name begins with `prefix`, and removes them. What does not go is left to the next sweep.
pub(crate) fn remove(prefix: &str) {
    for hierarchy in hierarchies(Path::new(MOUNT)) {
        for dir in children(&hierarchy) {
            if dir.file_name().is_some_and(|name| name.to_string_lossy().starts_with(prefix)) {
                remove_tree(&dir);
            }
        }
    }
}

fn remove_tree(dir: &Path) {
    for child in children(dir) {
        remove_tree(&child);
    }
    // A process that was killed keeps its folder busy until the kernel has let go of it.
    wait_gone(|| {
        for pid in fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default().lines() {
            if let Ok(pid) = pid.parse() {
                kill_pid(pid);
            }
        }
        fs::remove_dir(dir).is_ok() || !dir.exists()
    });
}

fn hierarchies(mount: &Path) -> Vec<PathBuf> {
    if mount.join("cgroup.controllers").exists() {
        return vec![mount.to_owned()];
    }
    // Links such as `cpu,cpuacct` name hierarchies that are listed by themselves. In a hybrid layout runc uses `unified` too.
    children(mount).into_iter().filter(|dir| !dir.is_symlink() && dir.join("cgroup.procs").exists()).collect()
}

fn children(dir: &Path) -> Vec<PathBuf> {
    fs::read_dir(dir)
        .map(|entries| entries.flatten().map(|entry| entry.path()).filter(|path| path.is_dir()).collect())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hierarchies_are_found_in_both_layouts() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["cpu", "memory", "unified", "empty"] {
            fs::create_dir(dir.path().join(name)).unwrap();
            if name != "empty" {
                fs::write(dir.path().join(name).join("cgroup.procs"), "").unwrap();
            }
        }
        let mut found = hierarchies(dir.path());
        found.sort();
        assert_eq!(found, ["cpu", "memory", "unified"].map(|name| dir.path().join(name)));
        fs::write(dir.path().join("cgroup.controllers"), "").unwrap();
        assert_eq!(hierarchies(dir.path()), [dir.path()]);
    }
}
