//! When a component is ready, asked of the component itself.

use crate::cluster::Cluster;
use crate::layers::Component;
use crate::node::Node as Files;
use crate::process::{self, Process};
use crate::{Error, probe};
use k8s_openapi::api::core::v1::{Node, ServiceAccount};
use kube::{Api, Client};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

/// The slowest part takes about 10 s on two busy cores.
const READY_MAX: Duration = Duration::from_secs(90);

pub(crate) async fn wait(cluster: &mut Cluster, component: Component) -> Result<(), Error> {
    // Taken out while it is watched, so that the rest of the cluster can be asked.
    let Some(mut process) = cluster.processes.remove(&component) else {
        return Err(Error::Settings(format!("{component} was never started")));
    };
    let asked = ask_until_ready(cluster, component, &mut process).await;
    // A server that ended is the better answer than that it did not reply.
    let ended = process.check();
    cluster.processes.insert(component, process);
    ended.and(asked)
}

async fn ask_until_ready(cluster: &Cluster, component: Component, process: &mut Process) -> Result<(), Error> {
    let question = Question::of(cluster, component).await?;
    probe::until(&format!("{component} is ready"), READY_MAX, || {
        let ended = process.check().is_err();
        let question = &question;
        async move { if ended { Ok(()) } else { question.ask().await } }
    })
    .await
}

/// What to ask, with what it takes.
enum Question {
    Http(SocketAddr, &'static str),
    Https(Client, &'static str),
    Controllers(Client, Api<ServiceAccount>),
    Containerd { ctr: PathBuf, socket: PathBuf },
    Kubelet(Api<Node>, String),
}

// === impl Question ===

impl Question {
    async fn of(cluster: &Cluster, component: Component) -> Result<Self, Error> {
        Ok(match component {
            Component::Etcd => Self::Http((Ipv4Addr::LOCALHOST, cluster.ports.etcd).into(), "/health"),
            Component::ApiServer => Self::Https(cluster.client().await?, "/readyz"),
            Component::ControllerManager => Self::Controllers(
                local_client(cluster, cluster.ports.controllers).await?,
                Api::namespaced(cluster.client().await?, "default"),
            ),
            Component::Scheduler => Self::Https(local_client(cluster, cluster.ports.scheduler).await?, "/healthz"),
            Component::Containerd(node) => {
                Self::Containerd { ctr: cluster.toolbox.path("ctr")?, socket: cluster.node(node).socket() }
            }
            Component::Kubelet(node) => Self::Kubelet(Api::all(cluster.client().await?), Files::name(node)),
            Component::KubeProxy(node) => Self::Http(cluster.node(node).proxy_health(), "/healthz"),
        })
    }

    async fn ask(&self) -> Result<(), String> {
        match self {
            Self::Http(address, path) => probe::http_ok(*address, path).await,
            Self::Https(client, path) => https_ok(client, path).await,
            // It answers before its controllers work; the account that every pod needs shows that they do.
            Self::Controllers(client, accounts) => {
                https_ok(client, "/healthz").await?;
                accounts.get("default").await.map(drop).map_err(|error| error.to_string())
            }
            Self::Containerd { ctr, socket } => {
                let mut command = Command::new(ctr);
                command.arg("--address").arg(socket).arg("version");
                process::run(&mut command).map(drop).map_err(|error| error.to_string())
            }
            Self::Kubelet(nodes, name) => {
                let node = nodes.get(name).await.map_err(|error| error.to_string())?;
                let conditions = node.status.and_then(|status| status.conditions).unwrap_or_default();
                match conditions.into_iter().find(|condition| condition.type_ == "Ready") {
                    Some(ready) if ready.status == "True" => Ok(()),
                    Some(ready) => Err(ready.message.unwrap_or_default()),
                    None => Err("the node has no condition yet".to_owned()),
                }
            }
        }
    }
}

async fn https_ok(client: &Client, path: &str) -> Result<(), String> {
    let request = http::Request::get(path).body(Vec::new()).map_err(|error| error.to_string())?;
    client.request_text(request).await.map(drop).map_err(|error| error.to_string())
}

/// A client of a server on loopback that has a certificate of the cluster, but is not the API server.
async fn local_client(cluster: &Cluster, port: u16) -> Result<Client, Error> {
    let mut config = cluster.admin().config().await?;
    let url = format!("https://127.0.0.1:{port}");
    config.cluster_url = url.parse().map_err(|error| Error::Settings(format!("{url}: {error}")))?;
    Client::try_from(config).map_err(Error::api("make a client"))
}
