//! How much of Kubernetes a test asks for, and with which flags.

use crate::Error;
use crate::plan::NODES_MAX;
use std::collections::BTreeMap;
use std::fmt;

/// A process of the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Component {
    /// Storage of the API server.
    Etcd,
    /// kube-apiserver.
    ApiServer,
    /// kube-controller-manager.
    ControllerManager,
    /// kube-scheduler.
    Scheduler,
    /// containerd of one real node.
    Containerd(usize),
    /// kubelet of one real node.
    Kubelet(usize),
    /// kube-proxy of one real node.
    KubeProxy(usize),
}

/// What to start. Each layer holds the ones before it.
///
/// | layer | seconds (2 cores) | proves |
/// | --- | --- | --- |
/// | [`Layers::api`] | 7 | schema, CEL, apply, RBAC, audit log |
/// | [`Layers::controllers`] | 9 | garbage collection, Deployments, scheduling on played nodes |
/// | [`Layers::nodes`] | 20 | containers, probes, volumes, Services |
#[derive(Clone, Debug, Default)]
pub struct Layers {
    controllers: bool,
    nodes: usize,
    flags: BTreeMap<Component, Vec<String>>,
}

// === impl Layers ===

impl Layers {
    /// etcd and kube-apiserver on loopback. Needs no root.
    pub fn api() -> Self {
        Self::default()
    }

    /// Also kube-controller-manager and kube-scheduler. Needs no root.
    pub fn controllers() -> Self {
        Self { controllers: true, ..Self::default() }
    }

    /// Also real nodes `node-0`, `node-1`, …, each with containerd, kubelet and kube-proxy in its own namespaces. Needs root.
    pub fn nodes(count: usize) -> Self {
        Self { controllers: true, nodes: count, ..Self::default() }
    }

    /// Adds a command-line flag; a repeated one overrides the harness's own.
    pub fn flag(mut self, component: Component, flag: impl Into<String>) -> Self {
        self.flags.entry(component).or_default().push(flag.into());
        self
    }

    pub(crate) fn check(&self) -> Result<(), Error> {
        if self.nodes > NODES_MAX {
            return Err(Error::Settings(format!("{} nodes asked for; at most {NODES_MAX} fit on one machine", self.nodes)));
        }
        Ok(())
    }

    pub(crate) const fn has_controllers(&self) -> bool {
        self.controllers
    }

    pub(crate) const fn node_count(&self) -> usize {
        self.nodes
    }

    pub(crate) fn flags(&self, component: Component) -> &[String] {
        self.flags.get(&component).map_or(&[], Vec::as_slice)
    }

    /// Everything that runs, in the order of its start.
    pub(crate) fn components(&self) -> Vec<Component> {
        let mut all = vec![Component::Etcd, Component::ApiServer];
        if self.controllers {
            all.extend([Component::ControllerManager, Component::Scheduler]);
        }
        for node in 0..self.nodes {
            all.extend([Component::Containerd(node), Component::Kubelet(node), Component::KubeProxy(node)]);
        }
        all
    }
}

// === impl Component ===

impl Component {
    /// The program, as its binary is called.
    pub const fn program(self) -> &'static str {
        match self {
            Self::Etcd => "etcd",
            Self::ApiServer => "kube-apiserver",
            Self::ControllerManager => "kube-controller-manager",
            Self::Scheduler => "kube-scheduler",
            Self::Containerd(_) => "containerd",
            Self::Kubelet(_) => "kubelet",
            Self::KubeProxy(_) => "kube-proxy",
        }
    }

    /// The real node that it runs on.
    pub const fn node(self) -> Option<usize> {
        match self {
            Self::Etcd | Self::ApiServer | Self::ControllerManager | Self::Scheduler => None,
            Self::Containerd(node) | Self::Kubelet(node) | Self::KubeProxy(node) => Some(node),
        }
    }
}

impl fmt::Display for Component {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.node() {
            None => f.write_str(self.program()),
            Some(node) => write!(f, "{}-{node}", self.program()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_layer_starts_what_the_one_before_it_starts() {
        let (api, controllers, nodes) =
            (Layers::api().components(), Layers::controllers().components(), Layers::nodes(2).components());
        assert!(controllers.starts_with(&api) && nodes.starts_with(&controllers));
        assert_eq!([api.len(), controllers.len(), nodes.len()], [2, 4, 10]);
    }

    #[test]
    fn every_process_of_a_cluster_has_its_own_name() {
        let mut names: Vec<_> = Layers::nodes(3).components().iter().map(ToString::to_string).collect();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), 13);
    }

    #[test]
    fn more_nodes_than_there_are_addresses_are_refused_with_the_limit() {
        let error = Layers::nodes(NODES_MAX + 1).check().unwrap_err();
        assert_eq!(error.to_string(), "9 nodes asked for; at most 8 fit on one machine");
    }
}
