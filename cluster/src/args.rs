//! The environment and the command line, read here once.

use crate::Error;
use clap::{Args, Parser, Subcommand, ValueEnum};
use std::path::PathBuf;

/// Version of Kubernetes that is built and run: from 1.35 the kubelet refuses cgroup v1 by default.
pub const KUBERNETES_VERSION: &str = "v1.34.4";

/// Where tools and clusters lie.
#[derive(Args, Clone, Debug)]
pub struct Settings {
    /// Folder with every program of a cluster under its own name, as `kvasir-cluster tools` prints it.
    #[arg(long, env = "KVASIR_TEST_CLUSTER_BIN")]
    pub bin: Option<PathBuf>,
    /// Folder of programs that need no building, as other Kubernetes test tools use it.
    #[arg(long, env = "KUBEBUILDER_ASSETS")]
    pub assets: Option<PathBuf>,
    /// Base folder of running clusters; not below /run, /var/lib or /var/log, which nodes cover.
    #[arg(long, env = "KVASIR_TEST_CLUSTER_SCRATCH", default_value = "/tmp/kvasir-cluster")]
    pub scratch: PathBuf,
    #[arg(long, env = "XDG_CACHE_HOME", hide = true)]
    xdg_cache_home: Option<PathBuf>,
    #[arg(long, env = "HOME", hide = true)]
    home: Option<PathBuf>,
}

/// A real Kubernetes on this machine, for tests.
#[derive(Debug, Parser)]
#[command(name = "kvasir-cluster", disable_help_subcommand = true)]
pub struct Cli {
    /// Where tools and clusters lie.
    #[command(flatten)]
    pub settings: Settings,
    /// What to do.
    #[command(subcommand)]
    pub verb: Verb,
}

/// What the program can do.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Build or install what is missing; the line printed is the path for `KVASIR_TEST_CLUSTER_BIN` or `KVASIR_TEST_HELM`.
    Tools {
        /// What to bring.
        part: Part,
    },
    /// Start a cluster, print its kubeconfig, and stop it on Ctrl-C.
    Up {
        /// Real nodes; needs root.
        #[arg(long, default_value_t = 0)]
        nodes: usize,
    },
    /// Remove what crashed runs left. Running clusters stay.
    Clean,
}

/// What `tools` brings.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum Part {
    /// The folder of every program that a cluster runs.
    Kubernetes,
    /// The program `helm`.
    Helm,
}

#[derive(Parser)]
struct EnvironmentOnly {
    #[command(flatten)]
    settings: Settings,
}

// === impl Settings ===

impl Settings {
    /// As the environment says, for tests, which have no command line of their own.
    pub fn from_environment() -> Result<Self, Error> {
        EnvironmentOnly::try_parse_from(["kvasir-cluster"])
            .map(|parsed| parsed.settings)
            .map_err(|error| Error::Settings(error.to_string()))
    }

    /// The folder of everything that is built or fetched once.
    pub fn cache(&self) -> Result<PathBuf, Error> {
        let base = self.xdg_cache_home.clone().or_else(|| self.home.as_ref().map(|home| home.join(".cache")));
        base.map(|base| base.join("kvasir")).ok_or_else(|| Error::Settings("neither XDG_CACHE_HOME nor HOME is set".to_owned()))
    }

    /// The folder that holds every program under its own name.
    pub fn bin(&self) -> Result<PathBuf, Error> {
        match &self.bin {
            Some(bin) => Ok(bin.clone()),
            None => Ok(self.cache()?.join(format!("bin/cluster-{KUBERNETES_VERSION}"))),
        }
    }

    /// Nodes cover some folders of the machine with their own; a scratch below one would vanish from their sight.
    pub(crate) fn check(&self) -> Result<(), Error> {
        let covered = ["/run", "/var/run", "/var/lib", "/var/log"];
        if self.scratch.is_absolute() && !covered.iter().any(|dir| self.scratch.starts_with(dir)) {
            return Ok(());
        }
        let scratch = self.scratch.display();
        Err(Error::Settings(format!("scratch `{scratch}` has to be an absolute path outside {}", covered.join(", "))))
    }
}

/// Programs by name.
#[derive(Clone, Debug)]
pub(crate) struct Toolbox {
    dir: PathBuf,
}

// === impl Toolbox ===

impl Toolbox {
    pub(crate) fn new(settings: &Settings) -> Result<Self, Error> {
        Ok(Self { dir: settings.bin()? })
    }

    pub(crate) fn path(&self, program: &str) -> Result<PathBuf, Error> {
        let path = self.dir.join(program);
        if path.exists() {
            return Ok(path);
        }
        Err(Error::Missing {
            program: program.to_owned(),
            hint: format!("`{}` lacks it; `cargo xtask e2e` builds every tool once", self.dir.display()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    fn settings(scratch: &str) -> Settings {
        let args = ["x", "--scratch", scratch, "--xdg-cache-home", "/cache"];
        EnvironmentOnly::try_parse_from(args).unwrap().settings
    }

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_scratch_that_nodes_cover_is_refused() {
        settings("/tmp/clusters").check().unwrap();
        for bad in ["/run/clusters", "/var/lib/clusters", "clusters"] {
            assert!(settings(bad).check().unwrap_err().to_string().contains(bad));
        }
    }

    #[test]
    fn a_missing_program_names_the_command_that_brings_it() {
        let dir = tempfile::tempdir().unwrap();
        let toolbox = Toolbox { dir: dir.path().to_owned() };
        let message = toolbox.path("kubelet").unwrap_err().to_string();
        assert!(
            message.starts_with("`kubelet` is missing;") && message.ends_with("`cargo xtask e2e` builds every tool once"),
            "{message}"
        );
    }
}
