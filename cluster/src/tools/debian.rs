//! Programs from Debian's archive.

use super::{run, system};
use crate::Error;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

/// Programs that the harness starts itself.
pub(super) const LINKED: &[&str] = &["etcd", "containerd", "ctr", "containerd-shim-runc-v2", "runc"];

/// A program that shows whether a package is there, and the package.
const PACKAGES: &[(&str, &str)] = &[
    ("etcd", "etcd-server"),
    ("containerd", "containerd"),
    ("runc", "runc"),
    ("iptables", "iptables"),
    ("conntrack", "conntrack"),
    ("socat", "socat"),
    ("ip", "iproute2"),
    ("nsenter", "util-linux"),
    ("mount", "mount"),
    ("cc", "gcc"),
];
/// Not a program that anybody calls by name.
const CNI: (&str, &str) = ("/usr/lib/cni/ptp", "containernetworking-plugins");
/// Says whether packages may start their services.
const POLICY: &str = "/usr/sbin/policy-rc.d";

/// Installs what is missing.
pub(super) fn install(has_asset: &dyn Fn(&str) -> bool, say: &dyn Fn(&str)) -> Result<(), Error> {
    let mut missing: Vec<&str> = PACKAGES
        .iter()
        .filter(|(program, _)| !has_asset(program) && system(program).is_none())
        .map(|(_, package)| *package)
        .collect();
    if !Path::new(CNI.0).exists() {
        missing.push(CNI.1);
    }
    if missing.is_empty() {
        return Ok(());
    }
    let packages = missing.join(" ");
    if system("apt-get").is_none() || !rustix::process::geteuid().is_root() {
        let hint = format!("install the Debian packages `{packages}`, or run as root on Debian so that they can be installed");
        return Err(Error::Missing { program: missing[0].to_owned(), hint });
    }
    say(&format!("installing {packages}"));
    let _policy = NoServices::enter();
    if apt(&["install"], &missing).is_err() {
        // The lists may be older than the archive.
        apt(&["update"], &[])?;
        apt(&["install"], &missing)?;
    }
    Ok(())
}

fn apt(verb: &[&str], packages: &[&str]) -> Result<(), Error> {
    let mut command = Command::new("apt-get");
    command.env("DEBIAN_FRONTEND", "noninteractive").args(verb).args(["-y", "-q"]);
    if !packages.is_empty() {
        command.arg("--no-install-recommends").args(packages);
    }
    run(&mut command, "run on Debian")
}

/// Keeps packages from starting a second etcd or containerd on this machine, where no policy says so already.
struct NoServices(bool);

// === impl NoServices ===

impl NoServices {
    fn enter() -> Self {
        let path = Path::new(POLICY);
        if path.exists() {
            return Self(false);
        }
        let written =
            fs::write(path, "#!/bin/sh\nexit 101\n").and_then(|()| fs::set_permissions(path, fs::Permissions::from_mode(0o755)));
        Self(written.is_ok())
    }
}

impl Drop for NoServices {
    fn drop(&mut self) {
        if self.0 {
            let _gone = fs::remove_file(POLICY);
        }
    }
}
