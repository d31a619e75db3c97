//! `kubectl servingpool`: what a pool is, why it is so, and what happened to it.
//!
//! Owns the verbs and how much each may ask of the API server: `status` one GET, `why` three, `events` one, `drain` two and one eviction. Refuses to
//! decide anything: what is true of a pool stands in its status, computed by the operator; `explain` puts it together.

mod explain;
mod print;
#[cfg(test)]
mod tests;

pub use explain::{Answer, State, explain};

use clap::{Parser, Subcommand, ValueEnum};
use k8s_openapi::api::core::v1::{Event, Pod};
use kube::api::{Api, EvictParams, ListParams};
use kube::{Client, ResourceExt as _};
use kvasir_operator::api::ServingPool;
use kvasir_operator::names::{Component, Names, selector_text};
use std::io::{self, Write};

/// Most objects of one kind that are read.
const LIST_MAX: u32 = 500;

/// Look at ServingPools: what they are, why, and what happened.
#[derive(Parser, Clone, Debug)]
#[command(name = "kubectl-servingpool", bin_name = "kubectl servingpool", version, about)]
pub struct Plugin {
    /// What to do.
    #[command(subcommand)]
    pub verb: Verb,

    /// Namespace; the context's own if absent.
    #[arg(short, long, global = true, value_name = "NAME")]
    pub namespace: Option<String>,

    /// Context of the kubeconfig; its current one if absent.
    #[arg(long, global = true, value_name = "NAME")]
    pub context: Option<String>,

    /// Form of the answer.
    #[arg(short, long, global = true, default_value = "table")]
    pub output: Output,
}

/// What can be done.
#[derive(Subcommand, Clone, Debug)]
pub enum Verb {
    /// What a pool is: counts, conditions, the running rollout.
    Status {
        /// Name of the pool.
        pool: String,
    },
    /// Why it is so: serving, rollout, placement, model, cache, draft and routers in one answer.
    Why {
        /// Name of the pool.
        pool: String,
    },
    /// What happened to it, oldest first.
    Events {
        /// Name of the pool.
        pool: String,
    },
    /// Let one worker end its streams and leave; another one takes its place. A PodDisruptionBudget that allows none is an error.
    Drain {
        /// Name of the pool.
        pool: String,
        /// Name of the worker's pod.
        pod: String,
    },
}

/// Forms of the answer.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum Output {
    /// For people.
    Table,
    /// For programs.
    Json,
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum PluginError {
    /// The API server says no, or is not there.
    #[error("{what}: {source}")]
    Cluster {
        /// What was asked for.
        what: String,
        /// Its answer.
        source: Box<kube::Error>,
    },
    /// The pod belongs to someone else.
    #[error("pod {pod} is no worker of the pool {pool}; its workers are: {workers}")]
    NotAWorker {
        /// As given.
        pod: String,
        /// As given.
        pool: String,
        /// What could have been meant.
        workers: String,
    },
    /// The answer cannot be written.
    #[error("the answer cannot be written: {0}")]
    Write(#[from] io::Error),
    /// The answer cannot be put into JSON.
    #[error("the answer cannot be put into JSON: {0}")]
    Json(#[from] serde_json::Error),
}

/// Where to look.
struct Reader {
    client: Client,
    namespace: String,
}

/// Answers on `out`.
pub async fn run(plugin: &Plugin, client: Client, out: &mut impl Write) -> Result<(), PluginError> {
    let namespace = plugin.namespace.clone().unwrap_or_else(|| client.default_namespace().to_owned());
    let reader = Reader { client, namespace };
    match &plugin.verb {
        Verb::Status { pool } => {
            let pool = reader.pool(pool).await?;
            match plugin.output {
                Output::Table => print::status(out, &pool)?,
                Output::Json => print::json(out, &pool.status)?,
            }
        }
        Verb::Why { pool } => {
            let pool = reader.pool(pool).await?;
            let pods = reader.pods(&pool).await?;
            let events = reader.events(&pool.name_any()).await?;
            let answers = explain(&pool, &pods, &events);
            match plugin.output {
                Output::Table => print::answers(out, &answers)?,
                Output::Json => print::json(out, &answers)?,
            }
        }
        Verb::Events { pool } => {
            let events = reader.events(pool).await?;
            match plugin.output {
                Output::Table => print::events(out, &events)?,
                Output::Json => print::json(out, &events)?,
            }
        }
        Verb::Drain { pool, pod } => {
            let pool = reader.pool(pool).await?;
            reader.evict(&pool, pod).await?;
            let longest = &pool.spec.max_stream_duration;
            let text = format!(
                "{pod} takes nothing new and leaves when its streams end, {longest} at most; another worker takes its place"
            );
            match plugin.output {
                Output::Table => writeln!(out, "{text}")?,
                Output::Json => print::json(out, &serde_json::json!({ "pod": pod, "message": text }))?,
            }
        }
    }
    Ok(())
}

// === impl Reader ===

impl Reader {
    async fn pool(&self, name: &str) -> Result<ServingPool, PluginError> {
        let api: Api<ServingPool> = Api::namespaced(self.client.clone(), &self.namespace);
        api.get(name).await.map_err(|error| cluster(format!("servingpool {name} in namespace {}", self.namespace), error))
    }

    /// Workers and draft pods.
    async fn pods(&self, pool: &ServingPool) -> Result<Vec<Pod>, PluginError> {
        let labels = format!("{}={}", kvasir_operator::names::POOL, Names::new(&pool.name_any()).stem());
        self.list(labels).await
    }

    async fn list(&self, labels: String) -> Result<Vec<Pod>, PluginError> {
        let api: Api<Pod> = Api::namespaced(self.client.clone(), &self.namespace);
        let params = ListParams::default().labels(&labels).limit(LIST_MAX);
        let mut pods = api.list(&params).await.map_err(|error| cluster("pods of the pool".to_owned(), error))?.items;
        pods.sort_by_key(kube::ResourceExt::name_any);
        Ok(pods)
    }

    async fn events(&self, pool: &str) -> Result<Vec<Event>, PluginError> {
        let api: Api<Event> = Api::namespaced(self.client.clone(), &self.namespace);
        let fields = format!("involvedObject.kind=ServingPool,involvedObject.name={pool}");
        let params = ListParams::default().fields(&fields).limit(LIST_MAX);
        let mut events = api.list(&params).await.map_err(|error| cluster("events of the pool".to_owned(), error))?.items;
        events.sort_by_key(explain::last_seen);
        Ok(events)
    }

    async fn evict(&self, pool: &ServingPool, pod: &str) -> Result<(), PluginError> {
        let names = Names::new(&pool.name_any());
        let workers = self.list(selector_text(&names.selector(Component::Worker))).await?;
        if workers.iter().all(|worker| worker.name_any() != pod) {
            let workers: Vec<String> = workers.iter().map(kube::ResourceExt::name_any).collect();
            let workers = if workers.is_empty() { "none".to_owned() } else { workers.join(", ") };
            return Err(PluginError::NotAWorker { pod: pod.to_owned(), pool: pool.name_any(), workers });
        }
        let api: Api<Pod> = Api::namespaced(self.client.clone(), &self.namespace);
        api.evict(pod, &EvictParams::default()).await.map_err(|error| cluster(format!("eviction of pod {pod}"), error))?;
        Ok(())
    }
}

fn cluster(what: String, error: kube::Error) -> PluginError {
    PluginError::Cluster { what, source: Box::new(error) }
}
