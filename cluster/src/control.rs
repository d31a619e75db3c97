//! The control plane as command lines: data in, data out; `cluster` runs them.

use crate::layers::{Component, Layers};
use crate::pki::Pki;
use crate::plan::Plan;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

/// What the audit log holds: who did what to which object, and the answer. No bodies, since they may hold secrets.
pub(crate) const AUDIT_POLICY: &str =
    "apiVersion: audit.k8s.io/v1\nkind: Policy\nomitStages: [RequestReceived]\nrules: [{level: Metadata}]\n";

/// Ports that were free when the cluster started.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ports {
    pub(crate) etcd: u16,
    pub(crate) etcd_peer: u16,
    pub(crate) api: u16,
    pub(crate) controllers: u16,
    pub(crate) scheduler: u16,
}

/// What command lines are made of.
pub(crate) struct Control<'a> {
    pub(crate) dir: &'a Path,
    pub(crate) plan: Plan,
    pub(crate) ports: Ports,
    pub(crate) pki: &'a Pki,
    pub(crate) layers: &'a Layers,
}

// === impl Control ===

impl Control<'_> {
    /// Loopback without nodes; with nodes the bridge, which only this machine reaches.
    pub(crate) fn address(layers: &Layers, plan: Plan) -> Ipv4Addr {
        if layers.node_count() == 0 { Ipv4Addr::LOCALHOST } else { plan.host() }
    }

    pub(crate) fn etcd(&self) -> Vec<String> {
        let (client, peer) = (url("http", self.ports.etcd), url("http", self.ports.etcd_peer));
        vec![
            "--name=kvasir".to_owned(),
            flag("--data-dir", &self.dir.join("etcd")),
            format!("--listen-client-urls={client}"),
            format!("--advertise-client-urls={client}"),
            format!("--listen-peer-urls={peer}"),
            format!("--initial-advertise-peer-urls={peer}"),
            format!("--initial-cluster=kvasir={peer}"),
            // The data lives as long as the test; a lost machine loses nothing.
            "--unsafe-no-fsync".to_owned(),
            "--logger=zap".to_owned(),
            "--log-level=warn".to_owned(),
        ]
    }

    pub(crate) fn api_server(&self) -> Vec<String> {
        let mut args = vec![
            format!("--bind-address={}", Self::address(self.layers, self.plan)),
            format!("--secure-port={}", self.ports.api),
            format!("--etcd-servers={}", url("http", self.ports.etcd)),
            flag("--cert-dir", &self.dir.join("api")),
            format!("--service-cluster-ip-range={}", self.plan.services()),
            "--authorization-mode=Node,RBAC".to_owned(),
            "--enable-admission-plugins=NodeRestriction".to_owned(),
            "--allow-privileged=true".to_owned(),
            "--profiling=false".to_owned(),
            "--audit-log-mode=blocking".to_owned(),
            flag("--audit-log-path", &self.audit_log()),
            flag("--audit-policy-file", &self.dir.join("audit-policy.yaml")),
            "--service-account-issuer=https://kubernetes.default.svc".to_owned(),
            "--requestheader-allowed-names=front-proxy-client".to_owned(),
            "--requestheader-extra-headers-prefix=X-Remote-Extra-".to_owned(),
            "--requestheader-group-headers=X-Remote-Group".to_owned(),
            "--requestheader-username-headers=X-Remote-User".to_owned(),
            "--kubelet-preferred-address-types=InternalIP".to_owned(),
        ];
        let files = [
            ("--tls-cert-file", "api-server.crt"),
            ("--tls-private-key-file", "api-server.key"),
            ("--client-ca-file", "ca.crt"),
            ("--service-account-key-file", "sa.pub"),
            ("--service-account-signing-key-file", "sa.key"),
            ("--requestheader-client-ca-file", "front-proxy-ca.crt"),
            ("--proxy-client-cert-file", "front-proxy-client.crt"),
            ("--proxy-client-key-file", "front-proxy-client.key"),
            ("--kubelet-certificate-authority", "ca.crt"),
            ("--kubelet-client-certificate", "kubelet-client.crt"),
            ("--kubelet-client-key", "kubelet-client.key"),
        ];
        args.extend(files.map(|(name, file)| flag(name, &self.pki.path(file))));
        if self.layers.node_count() == 0 {
            // A loopback address may not be an endpoint.
            args.push("--endpoint-reconciler-type=none".to_owned());
        } else {
            args.push(format!("--advertise-address={}", self.plan.host()));
        }
        if !self.layers.has_controllers() {
            // Nobody makes the account `default` without controllers, and no pod could be created.
            args.push("--disable-admission-plugins=ServiceAccount".to_owned());
        }
        self.with_flags(args, Component::ApiServer)
    }

    pub(crate) fn controller_manager(&self) -> Vec<String> {
        let mut args = self.delegated("controller-manager", self.ports.controllers);
        args.extend([
            flag("--root-ca-file", &self.pki.ca()),
            flag("--service-account-private-key-file", &self.pki.path("sa.key")),
            flag("--cluster-signing-cert-file", &self.pki.ca()),
            flag("--cluster-signing-key-file", &self.pki.path("ca.key")),
            "--use-service-account-credentials=true".to_owned(),
            "--allocate-node-cidrs=false".to_owned(),
            "--kube-api-qps=200".to_owned(),
            "--kube-api-burst=400".to_owned(),
        ]);
        self.with_flags(args, Component::ControllerManager)
    }

    pub(crate) fn scheduler(&self) -> Vec<String> {
        let args = self.delegated("scheduler", self.ports.scheduler);
        self.with_flags(args, Component::Scheduler)
    }

    pub(crate) fn audit_log(&self) -> PathBuf {
        self.dir.join("audit.log")
    }

    /// Flags that controller manager and scheduler share. One of each runs, so nobody needs electing.
    fn delegated(&self, name: &str, port: u16) -> Vec<String> {
        let kubeconfig = self.dir.join("users").join(name);
        let mut args: Vec<String> = ["--kubeconfig", "--authentication-kubeconfig", "--authorization-kubeconfig"]
            .map(|option| flag(option, &kubeconfig))
            .into();
        args.extend([
            "--bind-address=127.0.0.1".to_owned(),
            format!("--secure-port={port}"),
            flag("--tls-cert-file", &self.pki.path(&format!("{name}.crt"))),
            flag("--tls-private-key-file", &self.pki.path(&format!("{name}.key"))),
            "--leader-elect=false".to_owned(),
            "--profiling=false".to_owned(),
        ]);
        args
    }

    fn with_flags(&self, mut args: Vec<String>, component: Component) -> Vec<String> {
        args.extend_from_slice(self.layers.flags(component));
        args
    }
}

/// Names under which the API server is reached, from outside and from pods.
pub(crate) fn api_server_names(plan: Plan) -> Vec<String> {
    let service =
        ["kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local", "localhost"];
    let addresses = [Ipv4Addr::LOCALHOST, plan.host(), plan.api_service()];
    service.map(str::to_owned).into_iter().chain(addresses.map(|address| address.to_string())).collect()
}

fn url(scheme: &str, port: u16) -> String {
    format!("{scheme}://127.0.0.1:{port}")
}

fn flag(name: &str, path: &Path) -> String {
    format!("{name}={}", path.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(layers: &Layers, component: Component) -> Vec<String> {
        let dir = tempfile::tempdir().unwrap();
        let pki = Pki::create(dir.path()).unwrap();
        let ports = Ports { etcd: 1, etcd_peer: 2, api: 3, controllers: 4, scheduler: 5 };
        let control = Control { dir: dir.path(), plan: Plan::new(0), ports, pki: &pki, layers };
        match component {
            Component::ApiServer => control.api_server(),
            Component::Scheduler => control.scheduler(),
            other => panic!("{other} is not asked for"),
        }
    }

    #[test]
    fn without_nodes_everything_listens_on_loopback() {
        let args = args(&Layers::controllers(), Component::ApiServer);
        assert!(args.contains(&"--bind-address=127.0.0.1".to_owned()));
        assert!(args.contains(&"--endpoint-reconciler-type=none".to_owned()));
    }

    #[test]
    fn with_nodes_pods_find_the_api_server_on_the_bridge() {
        let args = args(&Layers::nodes(1), Component::ApiServer);
        assert!(args.contains(&"--bind-address=10.213.0.1".to_owned()));
        assert!(args.contains(&"--advertise-address=10.213.0.1".to_owned()));
        assert!(api_server_names(Plan::new(0)).contains(&"10.160.0.1".to_owned()), "the address of the service `kubernetes`");
    }

    #[test]
    fn a_flag_of_the_test_comes_last_and_so_wins() {
        let layers = Layers::controllers().flag(Component::Scheduler, "--leader-elect=true");
        let args = args(&layers, Component::Scheduler);
        assert_eq!(args.iter().rfind(|arg| arg.starts_with("--leader-elect=")).unwrap(), "--leader-elect=true");
    }
}
