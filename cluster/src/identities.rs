//! Who tests act as: users by certificate, service accounts by token; and namespaces of their own.

use crate::Error;
use crate::access::{Access, Proof};
use crate::cluster::Cluster;
use k8s_openapi::api::authentication::v1::{TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{Namespace, ServiceAccount};
use kube::Api;
use kube::api::{ObjectMeta, PostParams};
use std::collections::BTreeMap;

// === impl Cluster ===

impl Cluster {
    /// A user, in a group if one is named. It may do nothing until a role says so.
    pub fn user(&self, name: &str, group: Option<&str>) -> Result<Access, Error> {
        let file = file_name(&["user", name, group.unwrap_or_default()]);
        let pair = self.pki.client(&file, name, group)?;
        let path = self.scratch.path("users").join(file);
        Access::write(path, &format!("https://{}", self.api_server()), &self.pki.ca(), name, &Proof::Certificate(&pair))
    }

    /// A service account that exists, by a token that lives an hour.
    pub async fn service_account(&self, namespace: &str, name: &str) -> Result<Access, Error> {
        let accounts = Api::<ServiceAccount>::namespaced(self.client().await?, namespace);
        let request = TokenRequest {
            spec: TokenRequestSpec { audiences: Vec::new(), expiration_seconds: Some(3600), bound_object_ref: None },
            ..TokenRequest::default()
        };
        let what = format!("token of service account `{namespace}/{name}`");
        let made = accounts.create_token_request(name, &PostParams::default(), &request).await.map_err(Error::api(&what))?;
        let token = made.status.map(|status| status.token).unwrap_or_default();
        let path = self.scratch.path("users").join(file_name(&["account", namespace, name]));
        Access::write(path, &format!("https://{}", self.api_server()), &self.pki.ca(), name, &Proof::Token(&token))
    }

    /// A fresh namespace; the API server adds a unique ending to `prefix`. Labels may ask for Pod Security levels.
    pub async fn namespace(&self, prefix: &str, labels: &[(&str, &str)]) -> Result<String, Error> {
        let labels: BTreeMap<String, String> =
            labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        let namespace = Namespace {
            metadata: ObjectMeta { generate_name: Some(format!("{prefix}-")), labels: Some(labels), ..ObjectMeta::default() },
            ..Namespace::default()
        };
        let namespaces = Api::<Namespace>::all(self.client().await?);
        let made = namespaces.create(&PostParams::default(), &namespace).await.map_err(Error::api("create a namespace"))?;
        Ok(made.metadata.name.unwrap_or_default())
    }
}

/// Names of users may hold slashes and colons.
fn file_name(parts: &[&str]) -> String {
    parts.join("-").chars().map(|c| if c.is_ascii_alphanumeric() || c == '-' || c == '.' { c } else { '_' }).collect()
}
