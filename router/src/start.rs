//! Assembling a router: fleet, doors, admin and metrics on their ports, from settings. Used by the binary and by fleets in one process.
//!
//! Owns the order of start and end, and the tasks beside the servers. Refuses to read flags.
//!
//! Order of an end: `/readyz` says draining, and each answer asks its client to come back on another connection → [`StartSettings::settle`] passes, so
//! that load balancers notice → waiting requests are handed back, and so is what would have to wait → running ones finish, at most for the server's
//! grace → ports close.

use crate::admin::Admin;
use crate::discover::{Discover, Endpoint, Fixed, PortChoice, Slices};
use crate::fleet::{Fleet, FleetTask};
use crate::kubernetes::{self, ClusterError, ObjectName};
use crate::secrets::{Material, MaterialError, SecretFiles, Secrets, follow_files, follow_object};
use crate::serve::RouterServe;
use crate::settings::RouterSettings;
use axum::Router;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse as _;
use axum::routing::get;
use kube::Client;
use kvasir_core::Reason;
use kvasir_door::{Door, DoorSettings, Isolation, Serve as _, ServerSettings};
use kvasir_proto::FILE_DESCRIPTOR_SET;
use kvasir_proto::auth::{Access, Guard};
use kvasir_proto::router::router_admin_server::RouterAdminServer;
use kvasir_telemetry::{DoorMetrics, Registry, RouterMetrics, Tracer};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tonic::service::interceptor::InterceptedService;

/// Everything that a router is made of.
pub struct StartSettings {
    /// Placement, admission, attempts, and what is shown to workers.
    pub router: RouterSettings,
    /// Limits of the doors.
    pub door: DoorSettings,
    /// Limits of the servers.
    pub server: ServerSettings,
    /// Where workers are found.
    pub workers: WorkerSource,
    /// Where OpenAI clients come in; gRPC clients too when `grpc` is absent. Port 0 takes a free one.
    pub http: SocketAddr,
    /// Where gRPC clients come in.
    pub grpc: Option<SocketAddr>,
    /// Where the admin service listens, and who may call it.
    pub admin: Option<(SocketAddr, Access)>,
    /// Where metrics and probes are served without a key, beside the HTTP door.
    pub metrics: Option<SocketAddr>,
    /// Where pool secrets and tenants come from.
    pub secrets: SecretSource,
    /// Exports request spans.
    pub tracer: Tracer,
    /// Registries of other components of the process that `/metrics` shows too.
    pub registries: Vec<Registry>,
    /// Time between "not ready" and the end of service at shutdown.
    pub settle: Duration,
}

/// Where workers are found.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum WorkerSource {
    /// A list that never changes.
    Listed(Vec<Endpoint>),
    /// The EndpointSlices of a headless Service.
    Service(ObjectName, PortChoice),
}

/// Where pool secrets and tenants come from.
#[derive(Clone, Debug)]
pub enum SecretSource {
    /// They never change but by the admin service.
    Fixed(Material),
    /// Files, followed.
    Files(SecretFiles),
    /// A Kubernetes Secret, followed.
    Object(ObjectName, Isolation),
}

/// Why a router could not start or ended badly.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Pool secrets or tenants.
    #[error(transparent)]
    Secrets(#[from] MaterialError),
    /// The cluster.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    /// Something is to be watched in a cluster, and there is none.
    #[error("workers or secrets come from a cluster, and no connection to one was given")]
    NoCluster,
    /// A port is not to be had.
    #[error("the {port} port cannot listen on {address}: {source}; choose another address")]
    Listen {
        /// Which.
        port: &'static str,
        /// Where.
        address: SocketAddr,
        /// Why.
        source: std::io::Error,
    },
    /// The reflection service refused the descriptors.
    #[error("reflection cannot be served: {0}")]
    Reflection(#[from] tonic_reflection::server::Error),
    /// A server ended while it should run.
    #[error("a server ended: {0}")]
    Ended(String),
}

/// A running router.
pub struct RouterRuntime {
    /// Bound address of the HTTP door.
    pub http: SocketAddr,
    /// Bound address of the gRPC door; the HTTP door's when they share one.
    pub grpc: SocketAddr,
    /// Bound address of the admin service.
    pub admin: Option<SocketAddr>,
    /// Bound address of the metrics port.
    pub metrics: Option<SocketAddr>,
    serve: RouterServe,
    stop: watch::Sender<bool>,
    servers: JoinSet<std::io::Result<()>>,
    settle: Duration,
    secrets: Arc<Secrets>,
    _fleet: FleetTask,
    /// Follows secrets; stops when dropped.
    _followers: JoinSet<()>,
}

// === impl StartError ===

impl StartError {
    /// The public word for this failure.
    pub fn reason(&self) -> Reason {
        match self {
            Self::Secrets(_) | Self::Cluster(_) | Self::Listen { .. } => Reason::InvalidArgument,
            Self::NoCluster | Self::Reflection(_) | Self::Ended(_) => Reason::Internal,
        }
    }
}

// === impl RouterRuntime ===

impl RouterRuntime {
    /// Starts a router; connects to the cluster if its settings need one.
    pub async fn start(settings: StartSettings) -> Result<Self, StartError> {
        let cluster = if settings.needs_cluster() { Some(kubernetes::client().await?) } else { None };
        Self::start_with(cluster, settings).await
    }

    async fn start_with(cluster: Option<Client>, settings: StartSettings) -> Result<Self, StartError> {
        let StartSettings { router, door, server, workers, http, grpc, admin, metrics, secrets, tracer, registries, settle } =
            settings;
        let registry = Registry::with_component("router");
        let (router_metrics, door_metrics) = (RouterMetrics::new(&registry), DoorMetrics::with_slo(&registry, door.slo));
        let mut followers = JoinSet::new();
        let secrets = follow(secrets, cluster.as_ref(), &router_metrics, &mut followers)?;
        let discover = discover(workers, cluster)?;
        let (fleet, task) = Fleet::start(discover, router.index_bytes, router.credentials.clone(), router_metrics.clone());
        let serve = RouterServe::with_secrets(fleet.clone(), router, router_metrics, tracer.clone(), Some(Arc::clone(&secrets)));
        let registries: Vec<Registry> = std::iter::once(registry).chain(registries).collect();
        let door = Door::new(Arc::new(serve.clone()), secrets.tenants().clone(), door, door_metrics, registries.clone(), tracer);

        let (stop, _) = watch::channel(false);
        let mut servers = Servers { tasks: JoinSet::new(), stop: &stop, settings: ServerSettings { settle, ..server } };
        let http_routes = if grpc.is_some() { door.http_router() } else { door.router() };
        let http = servers.open("http", http, http_routes).await?;
        let grpc = match grpc {
            Some(address) => servers.open("grpc", address, door.grpc_router()).await?,
            None => http,
        };
        let admin = match admin {
            Some((address, access)) => {
                let service = Admin::new(fleet, serve.admission().clone(), Arc::clone(&secrets));
                Some(servers.open("admin", address, admin_routes(service, access).await?).await?)
            }
            None => None,
        };
        let metrics = match metrics {
            Some(address) => Some(servers.open("metrics", address, metrics_routes(serve.clone(), registries)).await?),
            None => None,
        };
        let servers = servers.tasks;
        Ok(Self { http, grpc, admin, metrics, serve, stop, servers, settle, secrets, _fleet: task, _followers: followers })
    }

    /// Secrets and tenants in force.
    pub fn secrets(&self) -> &Secrets {
        &self.secrets
    }

    /// The router behind the doors.
    pub fn serve(&self) -> &RouterServe {
        &self.serve
    }

    /// Waits until `/readyz` would say yes.
    pub async fn ready(&self) {
        let serve = &self.serve;
        self.secrets.loaded().await;
        serve.fleet().until(|_newest| serve.ready().is_ok()).await;
    }

    /// Waits for a server that ends although nobody asked it to.
    pub async fn failed(&mut self) -> StartError {
        match self.servers.join_next().await {
            None => StartError::Ended("none is running".to_owned()),
            Some(Ok(Ok(()))) => StartError::Ended("its listener closed".to_owned()),
            Some(Ok(Err(error))) => StartError::Ended(error.to_string()),
            Some(Err(error)) => StartError::Ended(error.to_string()),
        }
    }

    /// Ends in the order that the module tells.
    pub async fn shutdown(mut self) {
        self.serve.begin_drain();
        self.stop.send_replace(true);
        tokio::time::sleep(self.settle).await;
        self.serve.admission().close();
        while let Some(ended) = self.servers.join_next().await {
            if let Err(error) = ended {
                tracing::warn!(%error, "a server did not end cleanly");
            }
        }
    }
}

// === impl StartSettings ===

impl StartSettings {
    fn needs_cluster(&self) -> bool {
        matches!(self.workers, WorkerSource::Service(..)) || matches!(self.secrets, SecretSource::Object(..))
    }
}

/// Loads secrets, and has them followed where they can change.
fn follow(
    source: SecretSource,
    cluster: Option<&Client>,
    metrics: &RouterMetrics,
    followers: &mut JoinSet<()>,
) -> Result<Arc<Secrets>, StartError> {
    Ok(match source {
        SecretSource::Fixed(material) => Arc::new(Secrets::new(material, metrics.clone())?),
        SecretSource::Files(files) => {
            let (material, settle) = files.first()?;
            let secrets = Arc::new(Secrets::new(material, metrics.clone())?);
            followers.spawn(follow_files(files, settle, Arc::clone(&secrets)));
            secrets
        }
        SecretSource::Object(name, isolation) => {
            let client = cluster.ok_or(StartError::NoCluster)?.clone();
            let secrets = Arc::new(Secrets::awaited(metrics.clone()));
            followers.spawn(follow_object(client, name, isolation, Arc::clone(&secrets)));
            secrets
        }
    })
}

fn discover(source: WorkerSource, cluster: Option<Client>) -> Result<Box<dyn Discover>, StartError> {
    Ok(match source {
        WorkerSource::Listed(endpoints) => Box::new(Fixed::new(endpoints)),
        WorkerSource::Service(service, port) => Box::new(Slices::new(cluster.ok_or(StartError::NoCluster)?, service, port)),
    })
}

struct Servers<'a> {
    tasks: JoinSet<std::io::Result<()>>,
    stop: &'a watch::Sender<bool>,
    settings: ServerSettings,
}

impl Servers<'_> {
    async fn open(&mut self, port: &'static str, address: SocketAddr, routes: Router) -> Result<SocketAddr, StartError> {
        let listen = |source| StartError::Listen { port, address, source };
        let listener = TcpListener::bind(address).await.map_err(listen)?;
        let bound = listener.local_addr().map_err(listen)?;
        let mut stop = self.stop.subscribe();
        let settings = self.settings.clone();
        self.tasks.spawn(async move {
            let stopped = async move {
                // An error means that the runtime is gone, which is a stop as well.
                let _stopped = stop.wait_for(|stop| *stop).await;
            };
            kvasir_door::serve(listener, routes, settings, stopped).await
        });
        Ok(bound)
    }
}

async fn admin_routes(service: Admin, access: Access) -> Result<Router, StartError> {
    let guard = Guard::new(access);
    let (health_reporter, health) = tonic_health::server::health_reporter();
    health_reporter.set_serving::<RouterAdminServer<Admin>>().await;
    let reflection = || tonic_reflection::server::Builder::configure().register_encoded_file_descriptor_set(FILE_DESCRIPTOR_SET);
    let (v1, v1alpha) = (reflection().build_v1()?, reflection().build_v1alpha()?);
    let routes = tonic::service::Routes::new(InterceptedService::new(RouterAdminServer::new(service), guard.clone()))
        .add_service(health)
        .add_service(InterceptedService::new(v1, guard.clone()))
        .add_service(InterceptedService::new(v1alpha, guard));
    Ok(routes.into_axum_router())
}

fn metrics_routes(serve: RouterServe, registries: Vec<Registry>) -> Router {
    const END: &str = "# EOF\n";
    let metrics = move || {
        let mut text = String::new();
        for registry in &registries {
            let part = registry.render();
            text.push_str(part.strip_suffix(END).unwrap_or(&part));
        }
        async move { ([(header::CONTENT_TYPE, Registry::CONTENT_TYPE)], text + END) }
    };
    let ready = move || {
        let answer = match serve.ready() {
            Ok(()) => (StatusCode::OK, serve.notes().iter().fold("ready\n".to_owned(), |text, note| text + note + "\n")),
            Err(error) => (StatusCode::SERVICE_UNAVAILABLE, format!("{error}\n")),
        };
        async move { answer.into_response() }
    };
    Router::new().route("/metrics", get(metrics)).route("/readyz", get(ready)).route("/healthz", get(|| async { "ok\n" }))
}

#[cfg(test)]
mod tests;
