//! `kvasir model`: fetch, list and inspect.

use crate::args::{Cli, ModelCommand};
use indicatif::{ProgressBar, ProgressStyle};
use kvasir_model::{DigestCache, FetchError, FileError, KNOWN_MODELS, ModelFile, Progress, fetch};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Why a model command failed.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// It could not be had.
    #[error(transparent)]
    Fetch(#[from] FetchError),
    /// It could not be read.
    #[error(transparent)]
    File(#[from] FileError),
}

/// Runs one of the model commands.
pub fn run(cli: &Cli, command: &ModelCommand) -> Result<(), ModelError> {
    match command {
        ModelCommand::Pull { name } => {
            println!("{}", obtain(name, &cli.model_cache())?.display());
            Ok(())
        }
        ModelCommand::List => {
            list(&cli.model_cache());
            Ok(())
        }
        ModelCommand::Inspect { model } => inspect(&open(model, &cli.model_cache())?),
    }
}

/// The file of a known name or a path, fetched with a progress bar if it is not there.
pub fn obtain(model: &str, cache: &Path) -> Result<PathBuf, FetchError> {
    let bar = ProgressBar::new_spinner();
    if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} [{elapsed}]") {
        bar.set_style(style);
    }
    bar.enable_steady_tick(Duration::from_millis(120));
    let path = fetch(model, cache, &mut |progress| {
        bar.set_message(match progress {
            Progress::Waiting => format!("{model}: another process is fetching it"),
            Progress::Downloading { part, parts } => format!("{model}: downloading part {part} of {parts}"),
            Progress::Fetching { bytes, total: Some(total) } => {
                format!("{model}: {} of {} MB", bytes / 1_000_000, total / 1_000_000)
            }
            Progress::Fetching { bytes, total: None } => format!("{model}: {} MB", bytes / 1_000_000),
            Progress::Unpacking { bytes } => format!("{model}: {} MB unpacked and hashed", bytes / 1_000_000),
            Progress::Ready => format!("{model}: ready"),
        });
    });
    bar.finish_and_clear();
    path
}

/// Opens a known name or a path; digests of files that did not change are remembered beside the cache.
pub fn open(model: &str, cache: &Path) -> Result<ModelFile, ModelError> {
    let path = obtain(model, cache)?;
    Ok(ModelFile::open_with(&path, Some(DigestCache::new(cache.to_owned())))?)
}

fn list(cache: &Path) {
    println!("{:<22} {:>8}  {:<8} title", "name", "MB", "cached");
    for known in KNOWN_MODELS {
        let cached = if cache.join(format!("{}.gguf", known.sha256)).exists() { "yes" } else { "no" };
        println!("{:<22} {:>8}  {cached:<8} {}", known.name, known.size_mb, known.title);
    }
}

fn inspect(file: &ModelFile) -> Result<(), ModelError> {
    println!("path            {}", file.path().display());
    println!("config          {:#?}", file.config());
    println!("weight bytes    {}", file.weight_bytes());
    println!("weights digest  {}", file.weights_digest());
    let text = file.text()?;
    println!("tokenizer       {}", text.tokenizer_digest());
    println!("chat template   {}", text.chat_template_digest());
    println!("stop tokens     {:?}", text.stop_ids());
    Ok(())
}
