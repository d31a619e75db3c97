//! Namespaces of one real node: own mounts, own network, own process ids, joined to the host by a cable into the cluster's bridge.
//!
//! Invariant: everything a node starts (servers, shims, containers) dies with the node's first process, and its mounts and iptables chains
//! vanish with the namespaces. Nothing of a node is left to be cleaned by name but its cable and its cgroups.

use crate::plan::Plan;
use crate::process::{Process, Spec, is_running, only_child, run, wait_gone};
use crate::{Error, cgroup, probe};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const INIT: &str = include_str!("node-init.sh");
const UP_MAX: Duration = Duration::from_secs(20);

/// A node's namespaces, alive as long as this.
pub(crate) struct Space {
    process: Process,
    init: u32,
}

// === impl Space ===

impl Space {
    /// Makes the namespaces and plugs the cable in. The bridge must be there.
    pub(crate) async fn create(plan: Plan, node: usize, nodes: usize, scratch: &Path) -> Result<Self, Error> {
        cgroup::create(&plan.cgroup(node))?;
        let dir = folder(scratch, node);
        std::fs::create_dir_all(&dir).map_err(Error::io("create", &dir))?;
        let args = ["--mount", "--propagation", "private", "--net", "--pid", "--fork", "--kill-child", "--mount-proc", "--"];
        let init = ["/bin/sh", "-c", INIT, "node-init"];
        let spec = Spec {
            name: format!("node-{node}"),
            program: PathBuf::from("unshare"),
            args: args.into_iter().chain(init).map(str::to_owned).chain([dir.display().to_string()]).collect(),
            inside: None,
        };
        let mut process = Process::spawn(&spec, scratch).await?;
        let up = dir.join("up");
        let made = probe::until("the node's namespaces", UP_MAX, || {
            let ended = process.check();
            let there = up.exists();
            async move {
                ended.map_err(|error| error.to_string())?;
                there.then_some(()).ok_or_else(|| "its first process is still mounting".to_owned())
            }
        });
        made.await?;
        let init = only_child(process.pid()).await?;
        let space = Self { process, init };
        space.plug_in(plan, node, nodes)?;
        Ok(space)
    }

    /// The node's first process, for `nsenter`.
    pub(crate) const fn init(&self) -> u32 {
        self.init
    }

    fn plug_in(&self, plan: Plan, node: usize, nodes: usize) -> Result<(), Error> {
        let (cable, bridge, init) = (plan.cable(node), plan.bridge(), self.init.to_string());
        let (address, host) = (plan.node(node), plan.host().to_string());
        ip(&["link", "add", &cable, "type", "veth", "peer", "name", "eth0", "netns", &init])?;
        ip(&["link", "set", &cable, "master", &bridge, "up"])?;
        self.ip(&["link", "set", "lo", "up"])?;
        self.ip(&["address", "add", &format!("{address}/24"), "dev", "eth0"])?;
        self.ip(&["link", "set", "eth0", "up"])?;
        self.ip(&["route", "add", "default", "via", &host])?;
        for other in (0..nodes).filter(|other| *other != node) {
            self.ip(&["route", "add", &plan.node_pods(other), "via", &plan.node(other).to_string()])?;
        }
        // From the host, pods answer under their own address, and Services through the first node's kube-proxy.
        ip(&["route", "add", &plan.node_pods(node), "via", &address.to_string()])?;
        if node == 0 {
            ip(&["route", "add", &plan.services(), "via", &address.to_string()])?;
        }
        Ok(())
    }

    fn ip(&self, args: &[&str]) -> Result<(), Error> {
        run(Command::new("nsenter").args(["--net", "--target", &self.init.to_string(), "--", "ip"]).args(args)).map(drop)
    }
}

impl Drop for Space {
    /// Ends the node and all that runs on it.
    fn drop(&mut self) {
        self.process.kill();
        // It is killed with its parent, and takes the whole namespace along before it is gone.
        wait_gone(|| !is_running(self.init));
    }
}

/// The folder of a node.
pub(crate) fn folder(scratch: &Path, node: usize) -> PathBuf {
    scratch.join(format!("node-{node}"))
}

/// The bridge that nodes are plugged into.
pub(crate) fn create_bridge(plan: Plan) -> Result<(), Error> {
    let bridge = plan.bridge();
    ip(&["link", "add", &bridge, "type", "bridge"])?;
    ip(&["address", "add", &format!("{}/24", plan.host()), "dev", &bridge])?;
    ip(&["link", "set", &bridge, "up"])
}

fn ip(args: &[&str]) -> Result<(), Error> {
    run(Command::new("ip").args(args)).map(drop)
}
