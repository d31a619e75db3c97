//! `kvasir-cluster`: brings the tools of test clusters, starts one by hand, clears what crashed runs left.

use clap::Parser as _;
use kvasir_cluster::{Cli, Cluster, Error, Layers, Settings, Verb, clean, tools};
use std::process::ExitCode;

#[tokio::main]
async fn main() -> ExitCode {
    let Cli { settings, verb } = Cli::parse();
    let done = match verb {
        Verb::Tools { part } => {
            tools::ensure(part, &settings, &|step| eprintln!("{step}")).map(|path| println!("{}", path.display()))
        }
        Verb::Up { nodes } => Box::pin(up(nodes, &settings)).await,
        Verb::Clean => clean(&settings.scratch).map(|swept| println!("{swept} swept")),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn up(nodes: usize, settings: &Settings) -> Result<(), Error> {
    let layers = if nodes == 0 { Layers::controllers() } else { Layers::nodes(nodes) };
    let cluster = Cluster::start_with(layers, settings).await?;
    for (what, took) in cluster.timings() {
        eprintln!("{what:<28}{:>6.1} s", took.as_secs_f64());
    }
    println!("export KUBECONFIG={}", cluster.admin().kubeconfig().display());
    eprintln!("Ctrl-C stops it");
    let _interrupted = tokio::signal::ctrl_c().await;
    cluster.stop().await;
    Ok(())
}
