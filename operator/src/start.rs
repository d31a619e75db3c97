//! Assembling an operator: clients, election, controller and its port, from flags. Used by the binary.
//!
//! Owns the order of start and end. Order of an end: no new pass begins → passes in hand end → the lease is given up → the port closes.

use crate::admin::GrpcAdmin;
use crate::args::{Abilities, Args, ArgsError};
use crate::build::{self, Builder, Seed};
use crate::clock::Clock;
use crate::control::{Controller, ControllerSettings, Parts, Readiness};
use crate::lead::{Elector, Gate, GateLayer};
use crate::meter::MeterLayer;
use axum::Router;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse as _;
use axum::routing::get;
use kube::client::ClientBuilder;
use kube::{Client, Config};
use kvasir_telemetry::{OperatorMetrics, Registry, Tracer};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// Longest time for connecting and for sending a request.
const REACH_MAX: Duration = Duration::from_secs(5);
/// Silence on a connection after which it is given up: longer than any watch is silent.
const READ_MAX: Duration = Duration::from_secs(305);
/// First minor version that mounts OCI images as volumes without a feature gate.
const IMAGE_VOLUMES_SINCE: u32 = 35;
/// Group and version of ServiceMonitors.
const MONITORS: &str = "monitoring.coreos.com/v1";

/// Why an operator could not start or ended badly.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Flags that cannot be used.
    #[error(transparent)]
    Args(#[from] ArgsError),
    /// No way to a cluster.
    #[error("no way to the cluster's API server: {0}; run in a pod with a service account, or set KUBECONFIG")]
    Config(#[from] Box<kube::config::InferConfigError>),
    /// The cluster cannot be asked.
    #[error("the cluster's API server cannot be asked: {0}")]
    Cluster(#[from] Box<kube::Error>),
    /// The port is not to be had.
    #[error("--http {address}: {source}; choose another address")]
    Listen {
        /// Where.
        address: SocketAddr,
        /// Why.
        source: std::io::Error,
    },
    /// No random numbers.
    #[error("the system gives no random numbers: {0}")]
    Random(#[from] getrandom::Error),
    /// Something ended while it should run.
    #[error("the {0} ended by itself; this is a fault of the operator")]
    Ended(&'static str),
}

/// A running operator.
pub struct Operator {
    /// Bound address of /metrics, /readyz and /healthz.
    pub http: SocketAddr,
    stop: CancellationToken,
    resign: CancellationToken,
    close: CancellationToken,
    controller: JoinHandle<()>,
    elector: JoinHandle<()>,
    server: JoinHandle<std::io::Result<()>>,
}

// === impl Operator ===

impl Operator {
    /// Starts an operator under a name. Connects to the cluster of the environment.
    pub async fn start(args: &Args, identity: &str, tracer: Tracer) -> Result<Self, StartError> {
        let lead = args.lead(identity)?;
        let config = config().await?;
        let (gate, registry) = (Gate::closed(), Registry::default());
        let metrics = OperatorMetrics::new(&registry);
        // The elector's own client passes no gate: who leads is decided by writing.
        let open = Client::try_from(config.clone()).map_err(Box::new)?;
        let gated = ClientBuilder::try_from(config).map_err(Box::new)?.with_layer(&GateLayer::new(gate.clone()));
        let gated = gated.with_layer(&MeterLayer::new(metrics.clone())).build();
        let abilities = abilities(&open).await?;
        tracing::info!(?abilities, identity, namespace = args.namespace, "starting");
        let controller = Controller::start(Parts {
            client: gated,
            admin: Arc::new(GrpcAdmin::default()),
            blueprint: Arc::new(Builder::new(args.settings(abilities), Seed::random()?)),
            gate: gate.clone(),
            clock: Clock::system(),
            metrics,
            tracer,
            settings: ControllerSettings {
                namespace: args.namespace.clone(),
                kinds: build::kinds(abilities.service_monitors),
                concurrency: args.concurrency,
                rest: Duration::from_secs(args.rest_seconds),
                instance: identity.to_owned(),
            },
        });
        let listener = TcpListener::bind(args.http).await.map_err(|source| StartError::Listen { address: args.http, source })?;
        let http = listener.local_addr().map_err(|source| StartError::Listen { address: args.http, source })?;
        let (stop, resign, close) = (CancellationToken::new(), CancellationToken::new(), CancellationToken::new());
        let serve = axum::serve(listener, routes(controller.readiness(), registry));
        Ok(Self {
            http,
            server: tokio::spawn(serve.with_graceful_shutdown(close.clone().cancelled_owned()).into_future()),
            elector: tokio::spawn(Elector::new(open, lead, Clock::system(), gate).run(resign.clone())),
            controller: tokio::spawn(controller.run(stop.clone())),
            stop,
            resign,
            close,
        })
    }

    /// Waits for a part that ends although nobody asked it to.
    pub async fn failed(&mut self) -> StartError {
        tokio::select! {
            _ended = &mut self.controller => StartError::Ended("controller"),
            _ended = &mut self.elector => StartError::Ended("election"),
            _ended = &mut self.server => StartError::Ended("server of /metrics"),
        }
    }

    /// Ends in the order that the module tells.
    pub async fn shutdown(self) {
        self.stop.cancel();
        ended("controller", self.controller.await);
        self.resign.cancel();
        ended("election", self.elector.await);
        self.close.cancel();
        if let Err(error) = self.server.await {
            tracing::warn!(%error, "the server of /metrics did not end cleanly");
        }
    }
}

fn ended(part: &'static str, result: Result<(), tokio::task::JoinError>) {
    if let Err(error) = result {
        tracing::warn!(%error, part, "a part did not end cleanly");
    }
}

async fn config() -> Result<Config, StartError> {
    let mut config = Config::infer().await.map_err(Box::new)?;
    // Retries inside the client hide failures and repeat writes; passes back off themselves and say so.
    config.default_retry = false;
    config.connect_timeout = Some(REACH_MAX);
    config.write_timeout = Some(REACH_MAX);
    config.read_timeout = Some(READ_MAX);
    Ok(config)
}

async fn abilities(client: &Client) -> Result<Abilities, StartError> {
    let version = client.apiserver_version().await.map_err(Box::new)?;
    // Some distributions write `35+`.
    let digits: String = version.minor.chars().take_while(char::is_ascii_digit).collect();
    let minor: u32 = digits.parse().unwrap_or(0);
    let groups = client.list_api_groups().await.map_err(Box::new)?;
    let knows = |version: &str| groups.groups.iter().flat_map(|group| &group.versions).any(|it| it.group_version == version);
    Ok(Abilities {
        service_monitors: knows(MONITORS)
            && client
                .list_api_group_resources(MONITORS)
                .await
                .is_ok_and(|list| list.resources.iter().any(|it| it.kind == "ServiceMonitor")),
        image_volumes: minor >= IMAGE_VOLUMES_SINCE,
    })
}

/// What probes and scrapers ask.
fn routes(readiness: Readiness, registry: Registry) -> Router {
    let ready = move || {
        let (is_ready, missing) = (readiness.is_ready(), readiness.missing());
        async move {
            let text = if missing.is_empty() { "ready\n".to_owned() } else { format!("{}\n", missing.join("\n")) };
            (if is_ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }, text)
        }
    };
    let metrics = move || {
        let text = registry.render();
        async move { ([(header::CONTENT_TYPE, Registry::CONTENT_TYPE)], text).into_response() }
    };
    Router::new().route("/healthz", get(async || "ok\n")).route("/readyz", get(ready)).route("/metrics", get(metrics))
}
