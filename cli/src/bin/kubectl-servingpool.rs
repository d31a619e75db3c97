//! `kubectl servingpool`: put it on PATH under this name, and kubectl finds it.

use clap::Parser as _;
use kube::config::KubeConfigOptions;
use kube::{Client, Config};
use kvasir_cli::servingpool::{Plugin, run};
use std::error::Error;
use std::process::ExitCode;

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    match answer(&Plugin::parse()).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn answer(plugin: &Plugin) -> Result<(), Box<dyn Error>> {
    let mut config = match &plugin.context {
        Some(context) => {
            Config::from_kubeconfig(&KubeConfigOptions { context: Some(context.clone()), ..KubeConfigOptions::default() }).await?
        }
        None => Config::infer().await?,
    };
    // Whoever waits at a terminal wants the failure, not fifteen tries of it.
    config.default_retry = false;
    Ok(run(plugin, Client::try_from(config)?, &mut std::io::stdout().lock()).await?)
}
