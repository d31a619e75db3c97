//! The three servers of a real node as configuration: containerd, kubelet, kube-proxy. Data in, text out; `cluster` runs them.

use crate::pki::{Pki, write};
use crate::plan::Plan;
use crate::{Error, names, space};
use serde_json::json;
use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

/// The sandbox image, built here: nothing is pulled from anywhere.
pub(crate) const PAUSE_IMAGE: &str = "kvasir.test/pause:1";
/// Where Debian puts the CNI plugins.
const CNI_PLUGINS: &str = "/usr/lib/cni";
const PROXY_HEALTH_PORT: u16 = 10256;

/// A real node's files and addresses.
pub(crate) struct Node<'a> {
    pub(crate) scratch: &'a Path,
    pub(crate) plan: Plan,
    pub(crate) number: usize,
    pub(crate) pki: &'a Pki,
}

// === impl Node ===

impl Node<'_> {
    pub(crate) fn name(number: usize) -> String {
        format!("node-{number}")
    }

    fn path(&self, name: &str) -> PathBuf {
        space::folder(self.scratch, self.number).join(name)
    }

    /// Containerd's socket: a file, so programs outside the namespaces reach it too.
    pub(crate) fn socket(&self) -> PathBuf {
        self.path("containerd.sock")
    }

    pub(crate) fn proxy_health(&self) -> SocketAddr {
        (self.plan.node(self.number), PROXY_HEALTH_PORT).into()
    }

    /// Writes every file that the servers read.
    pub(crate) fn write(&self) -> Result<(), Error> {
        for dir in ["cni", "pod-logs", "volume-plugins", "kubelet"] {
            let dir = self.path(dir);
            fs::create_dir_all(&dir).map_err(Error::io("create", &dir))?;
        }
        self.pki.server(&self.kubelet_server(), &Self::name(self.number), &[self.plan.node(self.number).to_string()])?;
        write(&self.path("containerd.toml"), &self.containerd_config())?;
        write(&self.path("cni/10-kvasir.conflist"), &self.cni_config())?;
        write(&self.path("kubelet.json"), &self.kubelet_config())?;
        write(&self.path("kube-proxy.json"), &self.proxy_config())?;
        // Nothing outside the cluster has a name.
        write(&self.path("resolv.conf"), "")
    }

    pub(crate) fn containerd(&self) -> Vec<String> {
        vec![format!("--config={}", self.path("containerd.toml").display())]
    }

    pub(crate) fn kubelet(&self) -> Vec<String> {
        vec![
            format!("--config={}", self.path("kubelet.json").display()),
            format!("--kubeconfig={}", self.scratch.join("users").join(Self::name(self.number)).display()),
            format!("--hostname-override={}", Self::name(self.number)),
            format!("--node-ip={}", self.plan.node(self.number)),
            format!("--root-dir={}", self.path("kubelet").display()),
        ]
    }

    pub(crate) fn kube_proxy(&self) -> Vec<String> {
        vec![
            format!("--config={}", self.path("kube-proxy.json").display()),
            format!("--hostname-override={}", Self::name(self.number)),
        ]
    }

    fn kubelet_server(&self) -> String {
        format!("{}-server", Self::name(self.number))
    }

    fn containerd_config(&self) -> String {
        let (root, socket, cni) = (self.path("containerd"), self.socket(), self.path("cni"));
        // A process without CAP_SYS_RESOURCE may not lower its OOM score, and containerd would fail every sandbox over it.
        format!(
            r#"version = 2
root = "{root}"
state = "/run/containerd/state"
disabled_plugins = ["io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs", "io.containerd.internal.v1.opt"]
[grpc]
address = "{socket}"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{PAUSE_IMAGE}"
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{CNI_PLUGINS}"
conf_dir = "{cni}"
"#,
            root = root.display(),
            socket = socket.display(),
            cni = cni.display(),
        )
    }

    /// Point-to-point cables: a reply to a Service always passes the node's own rules, which on a bridge it would only with br_netfilter.
    fn cni_config(&self) -> String {
        json!({
            "cniVersion": "0.4.0",
            "name": "kvasir",
            "plugins": [
                {
                    "type": "ptp",
                    "ipMasq": false,
                    "ipam": {
                        "type": "host-local",
                        "ranges": [[{"subnet": self.plan.node_pods(self.number)}]],
                        "routes": [{"dst": "0.0.0.0/0"}],
                    },
                },
                {"type": "portmap", "capabilities": {"portMappings": true}},
            ],
        })
        .to_string()
    }

    fn kubelet_config(&self) -> String {
        let server = self.kubelet_server();
        json!({
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": self.plan.node(self.number),
            "healthzBindAddress": Ipv4Addr::LOCALHOST,
            "authentication": {
                "anonymous": {"enabled": false},
                "webhook": {"enabled": true},
                "x509": {"clientCAFile": self.pki.ca()},
            },
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": self.pki.path(&format!("{server}.crt")),
            "tlsPrivateKeyFile": self.pki.path(&format!("{server}.key")),
            "containerRuntimeEndpoint": format!("unix://{}", self.socket().display()),
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": format!("/{}", self.plan.cgroup(self.number)),
            "failCgroupV1": false,
            "failSwapOn": false,
            "enforceNodeAllocatable": [],
            "localStorageCapacityIsolation": false,
            // A full disk or little memory of this machine is no reason to evict a test's pod.
            "evictionHard": {"memory.available": "0%", "nodefs.available": "0%", "nodefs.inodesFree": "0%", "imagefs.available": "0%"},
            "imageGCHighThresholdPercent": 100,
            "podLogsDir": self.path("pod-logs"),
            "volumePluginDir": self.path("volume-plugins"),
            "resolvConf": self.path("resolv.conf"),
            "clusterDNS": [self.plan.host()],
            "clusterDomain": names::DOMAIN,
            "registerNode": true,
            "serializeImagePulls": false,
            "kubeAPIQPS": 100,
            "kubeAPIBurst": 200,
            "volumeStatsAggPeriod": "0s",
            "logging": {"verbosity": 1},
        })
        .to_string()
    }

    fn proxy_config(&self) -> String {
        json!({
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": "iptables",
            "bindAddress": self.plan.node(self.number),
            "healthzBindAddress": self.proxy_health().to_string(),
            "metricsBindAddress": "127.0.0.1:10249",
            "clientConnection": {"kubeconfig": self.scratch.join("users/kube-proxy")},
            "clusterCIDR": self.plan.pods(),
            "detectLocalMode": "ClusterCIDR",
            // Limits of the whole machine's connection tracking are not a node's to set.
            "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
            // The defaults wait up to 30 s between two changes; tests look for a change within seconds.
            "iptables": {"minSyncPeriod": "100ms", "syncPeriod": "30s"},
        })
        .to_string()
    }
}
