//! Programs of a cluster, built or installed once: Kubernetes and helm from the Go module proxy, the rest from Debian.
//!
//! Owns versions and places: binaries lie at `~/.cache/kvasir/bin/TOOL-VERSION`, and one folder links all of them under their plain names. A
//! lock lets one process build while others wait; a binary appears in one step, so a crash never leaves half of one. What
//! `KUBEBUILDER_ASSETS` holds is taken from there. Cost: 4–7 min on 2 cores the first time, a few ms after.

mod debian;
mod go;

use crate::args::{KUBERNETES_VERSION, Part, Settings};
use crate::{Error, process};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

const HELM_VERSION: &str = "v4.3.1";
const KUBERNETES: &[&str] = &["kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "kubectl"];
/// Where Debian and others put programs.
const SYSTEM_DIRS: &[&str] = &["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"];

/// Brings what is missing of a part and gives its path. `say` is told about each step that takes time.
pub fn ensure(part: Part, settings: &Settings, say: &dyn Fn(&str)) -> Result<PathBuf, Error> {
    let cache = settings.cache()?;
    let bin = cache.join("bin");
    fs::create_dir_all(&bin).map_err(Error::io("create", &bin))?;
    let lock_path = bin.join("cluster.lock");
    let lock = File::create(&lock_path).map_err(Error::io("create", &lock_path))?;
    // Given back when this function ends, or the process does.
    lock.lock().map_err(Error::io("lock", &lock_path))?;
    let folder = bin.join(format!("cluster-{KUBERNETES_VERSION}"));
    fs::create_dir_all(&folder).map_err(Error::io("create", &folder))?;
    let place = Place { cache: &cache, folder: &folder, settings };
    match part {
        Part::Kubernetes => {
            debian::install(&|name| place.asset(name).is_some(), say)?;
            for program in debian::LINKED {
                let path = place.asset(program).or_else(|| system(program));
                let hint = || format!("install the Debian package that has it; it is in none of {}", SYSTEM_DIRS.join(", "));
                let path = path.ok_or_else(|| Error::Missing { program: (*program).to_owned(), hint: hint() })?;
                link(&folder.join(program), &path)?;
            }
            place.build(KUBERNETES, go::kubernetes, say)?;
            Ok(folder)
        }
        Part::Helm => {
            place.build(&["helm"], |_| go::helm(), say)?;
            Ok(folder.join("helm"))
        }
    }
}

/// Where programs come from and go to.
struct Place<'a> {
    cache: &'a Path,
    folder: &'a Path,
    settings: &'a Settings,
}

// === impl Place ===

impl Place<'_> {
    fn asset(&self, name: &str) -> Option<PathBuf> {
        self.settings.assets.as_ref().map(|dir| dir.join(name)).filter(|path| path.exists())
    }

    /// Links what the assets hold and what else has to be built.
    fn build(&self, programs: &[&'static str], build: impl Fn(&[&str]) -> go::Build, say: &dyn Fn(&str)) -> Result<(), Error> {
        let missing: Vec<&str> = programs.iter().copied().filter(|name| self.asset(name).is_none()).collect();
        let built = if missing.is_empty() { Vec::new() } else { go::ensure(self.cache, &build(&missing), say)? };
        for (name, path) in built {
            link(&self.folder.join(name), &path)?;
        }
        for name in programs {
            if let Some(path) = self.asset(name) {
                link(&self.folder.join(name), &path)?;
            }
        }
        Ok(())
    }
}

/// A program of this machine.
fn system(name: &str) -> Option<PathBuf> {
    SYSTEM_DIRS.iter().map(|dir| Path::new(dir).join(name)).find(|path| path.exists())
}

/// Points a name at a program, in one step.
fn link(from: &Path, to: &Path) -> Result<(), Error> {
    if fs::read_link(from).is_ok_and(|now| now == to) {
        return Ok(());
    }
    let temporary = from.with_extension("partial");
    let _absent = fs::remove_file(&temporary);
    std::os::unix::fs::symlink(to, &temporary).map_err(Error::io("create", &temporary))?;
    fs::rename(&temporary, from).map_err(Error::io("replace", from))
}

/// Moves a finished binary to its place in one step.
fn place(from: &Path, to: &Path) -> Result<(), Error> {
    let temporary = to.with_extension("partial");
    fs::copy(from, &temporary).map_err(Error::io("write", &temporary))?;
    fs::rename(&temporary, to).map_err(Error::io("replace", to))
}

/// Runs a command that may take minutes.
fn run(command: &mut Command, hint: &str) -> Result<(), Error> {
    process::run(command).map(drop).map_err(|error| match error {
        Error::Missing { program, .. } => Error::Missing { program, hint: hint.to_owned() },
        other => other,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_follows_a_new_version() {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().join("kubelet");
        for version in ["1", "2", "2"] {
            let to = dir.path().join(format!("kubelet-{version}"));
            fs::write(&to, version).unwrap();
            link(&at, &to).unwrap();
            assert_eq!(fs::read_to_string(&at).unwrap(), version);
        }
    }
}
