//! Who one is to the API server: a kubeconfig on disk, and clients made of it.

use crate::Error;
use crate::pki::{self, Pair};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// One identity: the administrator, a user, or a service account.
#[derive(Clone, Debug)]
pub struct Access {
    kubeconfig: PathBuf,
}

/// What proves an identity.
pub(crate) enum Proof<'a> {
    Certificate(&'a Pair),
    Token(&'a str),
}

// === impl Access ===

impl Access {
    pub(crate) fn write(path: PathBuf, server: &str, ca: &Path, user: &str, proof: &Proof) -> Result<Self, Error> {
        pki::write(&path, &kubeconfig(server, ca, user, proof).to_string())?;
        Ok(Self { kubeconfig: path })
    }

    /// The file for `kubectl`, `helm` and programs.
    pub fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }

    /// Settings of a client. It never retries by itself, since that would hide faults from a test.
    pub async fn config(&self) -> Result<Config, Error> {
        let explain = |problem: String| Error::Kubeconfig { path: self.kubeconfig.clone(), problem };
        let file = Kubeconfig::read_from(&self.kubeconfig).map_err(|error| explain(error.to_string()))?;
        let mut config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default())
            .await
            .map_err(|error| explain(error.to_string()))?;
        config.default_retry = false;
        Ok(config)
    }

    /// A client on the current runtime.
    pub async fn client(&self) -> Result<Client, Error> {
        Client::try_from(self.config().await?).map_err(Error::api("make a client"))
    }
}

/// JSON is YAML, so every tool reads this.
fn kubeconfig(server: &str, ca: &Path, user: &str, proof: &Proof) -> Value {
    let identity = match proof {
        Proof::Certificate(pair) => json!({"client-certificate": pair.cert, "client-key": pair.key}),
        Proof::Token(token) => json!({"token": token}),
    };
    json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "kvasir", "cluster": {"server": server, "certificate-authority": ca}}],
        "users": [{"name": user, "user": identity}],
        "contexts": [{"name": "kvasir", "context": {"cluster": "kvasir", "user": user}}],
        "current-context": "kvasir",
    })
}
