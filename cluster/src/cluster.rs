//! A running cluster: starts the layers in order, waits for each by asking it, kills them all at the end.
//!
//! Invariants
//! - Every process has a pid file and a log under one scratch folder; dropping the cluster kills all of them and removes the folder.
//! - Nothing waits without a bound, and a server that ends by itself is reported with the end of its log.
//! - Clusters of one machine share nothing: folder, ports, bridge, address ranges and cgroups are their own.

use crate::access::{Access, Proof};
use crate::args::{Settings, Toolbox};
use crate::audit::AuditLog;
use crate::control::{AUDIT_POLICY, Control, Ports, api_server_names};
use crate::layers::{Component, Layers};
use crate::names::Names;
use crate::node::Node;
use crate::pki::{self, Pki};
use crate::plan::Plan;
use crate::process::{self, Process, Spec};
use crate::scratch::Scratch;
use crate::space::{self, Space};
use crate::{Error, nodes, ready};
use kube::Client;
use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// A Kubernetes that lives as long as this value.
pub struct Cluster {
    names: Option<Names>,
    pub(crate) processes: BTreeMap<Component, Process>,
    pub(crate) spaces: Vec<Space>,
    pub(crate) layers: Layers,
    pub(crate) toolbox: Toolbox,
    pub(crate) pki: Pki,
    pub(crate) ports: Ports,
    admin: Access,
    timings: Vec<(String, Duration)>,
    // Last, so that it sweeps after everything else has ended.
    pub(crate) scratch: Scratch,
}

// === impl Cluster ===

impl Cluster {
    /// Starts the layers with the tools that the environment names, and returns when all of them answer.
    pub async fn start(layers: Layers) -> Result<Self, Error> {
        Self::start_with(layers, &Settings::from_environment()?).await
    }

    /// The same with explicit settings.
    pub async fn start_with(layers: Layers, settings: &Settings) -> Result<Self, Error> {
        layers.check()?;
        settings.check()?;
        if layers.node_count() > 0 && !is_root() {
            return Err(Error::NotRoot);
        }
        let toolbox = Toolbox::new(settings)?;
        for component in layers.components() {
            toolbox.path(component.program())?;
        }
        let mut cluster = Self::prepare(layers, toolbox, settings)?;
        cluster.start_all().await?;
        Ok(cluster)
    }

    /// Everything that is only files.
    fn prepare(layers: Layers, toolbox: Toolbox, settings: &Settings) -> Result<Self, Error> {
        let began = Instant::now();
        let scratch = Scratch::claim(&settings.scratch)?;
        let plan = scratch.plan();
        let pki = Pki::create(&scratch.path("pki"))?;
        let ports = free_ports()?;
        let server = format!("https://{}:{}", Control::address(&layers, plan), ports.api);
        let user = |file: &str, user: &str, group: Option<&str>| {
            let pair = pki.client(&format!("user-{file}"), user, group)?;
            let path = scratch.path("users").join(file);
            Access::write(path, &server, &pki.ca(), user, &Proof::Certificate(&pair))
        };
        let admin = user("admin", "admin", Some("system:masters"))?;
        user("controller-manager", "system:kube-controller-manager", None)?;
        user("scheduler", "system:kube-scheduler", None)?;
        user("kube-proxy", "system:kube-proxy", None)?;
        for node in (0..layers.node_count()).map(Node::name) {
            user(&node, &format!("system:node:{node}"), Some("system:nodes"))?;
        }
        let local = ["localhost".to_owned(), Ipv4Addr::LOCALHOST.to_string()];
        pki.server("api-server", "kube-apiserver", &api_server_names(plan))?;
        pki.server("controller-manager", "kube-controller-manager", &local)?;
        pki.server("scheduler", "kube-scheduler", &local)?;
        pki.client("kubelet-client", "kube-apiserver", Some("system:masters"))?;
        pki::write(&scratch.path("audit-policy.yaml"), AUDIT_POLICY)?;
        let timings = vec![("certificates".to_owned(), began.elapsed())];
        let (names, processes, spaces) = (None, BTreeMap::new(), Vec::new());
        Ok(Self { names, processes, spaces, layers, toolbox, pki, ports, admin, timings, scratch })
    }

    /// Starts what does not wait for anything first, and waits while other parts start.
    async fn start_all(&mut self) -> Result<(), Error> {
        use Component::{ApiServer, Containerd, ControllerManager, Etcd, KubeProxy, Kubelet, Scheduler};
        let nodes = self.layers.node_count();
        if nodes > 0 {
            self.scratch.will_have_nodes()?;
            // The API server binds to the bridge.
            space::create_bridge(self.plan())?;
        }
        self.run(Etcd).await?;
        self.wait(Etcd).await?;
        self.run(ApiServer).await?;
        let began = Instant::now();
        for node in 0..nodes {
            self.spaces.push(Space::create(self.plan(), node, nodes, self.scratch.dir()).await?);
            self.node(node).write()?;
            self.run(Containerd(node)).await?;
        }
        for node in 0..nodes {
            self.wait(Containerd(node)).await?;
        }
        if nodes > 0 {
            self.timings.push(("namespaces, containerd".to_owned(), began.elapsed()));
            self.load_pause_image().await?;
        }
        self.wait(ApiServer).await?;
        if nodes > 0 {
            self.names = Some(Names::serve(self.client().await?, self.host()).await?);
        }
        let (mut later, mut waits) = (Vec::new(), Vec::new());
        if self.layers.has_controllers() {
            later.extend([ControllerManager, Scheduler]);
        }
        for node in 0..nodes {
            later.extend([Kubelet(node), KubeProxy(node)]);
        }
        for component in later {
            self.run(component).await?;
            waits.push(component);
        }
        for component in waits {
            self.wait(component).await?;
        }
        Ok(())
    }

    async fn load_pause_image(&mut self) -> Result<(), Error> {
        let began = Instant::now();
        let image = nodes::pause_image(self.scratch.dir())?;
        self.load_image(&image).await?;
        self.timings.push(("pause image".to_owned(), began.elapsed()));
        Ok(())
    }

    async fn run(&mut self, component: Component) -> Result<(), Error> {
        let control = self.control();
        let args = match component {
            Component::Etcd => control.etcd(),
            Component::ApiServer => control.api_server(),
            Component::ControllerManager => control.controller_manager(),
            Component::Scheduler => control.scheduler(),
            Component::Containerd(node) => self.node(node).containerd(),
            Component::Kubelet(node) => [self.node(node).kubelet(), self.layers.flags(component).to_vec()].concat(),
            Component::KubeProxy(node) => [self.node(node).kube_proxy(), self.layers.flags(component).to_vec()].concat(),
        };
        let spec = Spec {
            name: component.to_string(),
            program: self.toolbox.path(component.program())?,
            args,
            inside: component.node().and_then(|node| self.spaces.get(node)).map(Space::init),
        };
        let process = Process::spawn(&spec, self.scratch.dir()).await?;
        self.processes.insert(component, process);
        Ok(())
    }

    /// Waits until a component answers, or has ended.
    async fn wait(&mut self, component: Component) -> Result<(), Error> {
        let began = Instant::now();
        ready::wait(self, component).await?;
        self.timings.push((component.to_string(), began.elapsed()));
        Ok(())
    }

    /// Kills a component at once, as a crash would. A node's containers go on when only its servers are killed.
    pub fn kill(&mut self, component: Component) {
        drop(self.processes.remove(&component));
    }

    /// Starts a killed component again, with the same data and addresses, and waits until it answers.
    pub async fn restart(&mut self, component: Component) -> Result<(), Error> {
        self.kill(component);
        self.run(component).await?;
        self.wait(component).await
    }

    /// Kills every process and removes what they left, off the runtime's threads; dropping does the same in place. Nobody is asked to end
    /// first: what they would save goes too, and an API server takes its time to say goodbye to open watches.
    pub async fn stop(self) {
        if let Err(error) = tokio::task::spawn_blocking(move || drop(self)).await {
            tracing::warn!(%error, "the cluster was not stopped whole; the next start sweeps what is left");
        }
    }

    /// A client that may do everything.
    pub async fn client(&self) -> Result<Client, Error> {
        self.admin.client().await
    }

    /// The identity that may do everything.
    pub const fn admin(&self) -> &Access {
        &self.admin
    }

    /// `kubectl` as the administrator.
    pub fn kubectl(&self) -> Result<Command, Error> {
        self.tool("kubectl")
    }

    /// `helm` as the administrator.
    pub fn helm(&self) -> Result<Command, Error> {
        self.tool("helm")
    }

    fn tool(&self, program: &str) -> Result<Command, Error> {
        let mut command = Command::new(self.toolbox.path(program)?);
        // Their caches and settings lie in the home folder; a test must not read the user's.
        command.env("KUBECONFIG", self.admin.kubeconfig()).env("HOME", self.scratch.dir()).env_remove("XDG_CACHE_HOME");
        Ok(command)
    }

    /// What the API server was asked so far.
    pub fn audit(&self) -> AuditLog {
        AuditLog::new(self.control().audit_log())
    }

    /// A short command to its end; its output, or an error that holds what it said.
    pub fn output(command: &mut Command) -> Result<String, Error> {
        process::run(command)
    }

    /// Seconds of each step of the start.
    pub fn timings(&self) -> &[(String, Duration)] {
        &self.timings
    }

    /// The end of a component's log.
    pub fn log(&self, component: Component) -> String {
        process::tail(&self.scratch.path("logs").join(format!("{component}.log")))
    }

    /// Every process of the control plane and the first process of each node, by pid.
    pub fn pids(&self) -> Vec<u32> {
        self.processes.values().map(Process::pid).chain(self.spaces.iter().map(Space::init)).collect()
    }

    /// Everything of this cluster on disk.
    pub fn folder(&self) -> &Path {
        self.scratch.dir()
    }

    /// This machine as pods see it, for servers that a test runs itself; loopback while there are no nodes.
    pub fn host(&self) -> Ipv4Addr {
        Control::address(&self.layers, self.plan())
    }

    /// Address of the API server.
    pub fn api_server(&self) -> SocketAddr {
        (self.host(), self.ports.api).into()
    }

    pub(crate) const fn plan(&self) -> Plan {
        self.scratch.plan()
    }

    pub(crate) fn node(&self, number: usize) -> Node<'_> {
        Node { scratch: self.scratch.dir(), plan: self.plan(), number, pki: &self.pki }
    }

    fn control(&self) -> Control<'_> {
        Control { dir: self.scratch.dir(), plan: self.plan(), ports: self.ports, pki: &self.pki, layers: &self.layers }
    }
}

/// Whether real nodes can be had.
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Ports that were free together a moment ago.
fn free_ports() -> Result<Ports, Error> {
    let mut held = Vec::new();
    let mut free = || -> Result<u16, Error> {
        let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).map_err(Error::io("bind", Path::new("a free port")))?;
        let port = listener.local_addr().map_err(Error::io("bind", Path::new("a free port")))?.port();
        held.push(listener);
        Ok(port)
    };
    Ok(Ports { etcd: free()?, etcd_peer: free()?, api: free()?, controllers: free()?, scheduler: free()? })
}
