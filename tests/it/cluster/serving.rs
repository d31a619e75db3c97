//! What users get from a pool, however it came to be: OpenAI and gRPC from outside and from inside, prefix hits on follow-ups, one trace.

use super::support::{CLI, apply, built, eventually, get, kubectl, output};
use crate::e2e::jaeger::{Jaeger, names, send_traced};
use kvasir_cli::client::{Answer, Client};
use kvasir_cluster::{Cluster, until};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::process::Command;
use std::time::Duration;

/// Fewest tokens of the shared prompt that the follow-ups have to find in the cache.
const CACHED_TOKENS_MIN: u64 = 256;
const SPANS_MAX_WAIT: Duration = Duration::from_mins(1);

/// A pool as its users see it.
pub struct Pool<'a> {
    pub cluster: &'a Cluster,
    pub namespace: &'a str,
    /// The Service of its routers; it listens on port 80.
    pub service: &'a str,
    pub model: &'a str,
    /// Secret with a tenant's key under `value`.
    pub key_secret: &'a str,
    pub key: &'a str,
}

/// What every question begins with.
pub fn system_prompt() -> String {
    let rule = "The harbour office answers in one or two plain sentences, names the berth and the hour, and never promises what the \
                tide tables do not say.";
    (1..=16).map(|number| format!("Rule {number}. {rule}")).collect::<Vec<_>>().join("\n")
}

fn question(model: &str, text: &str) -> Value {
    json!({
        "model": model, "max_tokens": 8, "temperature": 0, "kvasir": {"report": true},
        "messages": [{"role": "system", "content": system_prompt()}, {"role": "user", "content": text}],
    })
}

// === impl Pool ===

impl Pool<'_> {
    /// Address of the Service on this machine.
    pub fn address(&self) -> String {
        let service = get(self.cluster, &["-n", self.namespace, "service", self.service]);
        service["spec"]["clusterIP"].as_str().unwrap().to_owned()
    }

    fn client(&self) -> Client {
        Client::new(&format!("http://{}", self.address()), Some(self.key.to_owned())).unwrap()
    }

    /// Waits for the first answer, asking as a user does who tries again.
    pub async fn first_answer(&self, within: Duration) -> Answer {
        until("the pool answers", within, || {
            let answer = async { self.client().chat(question(self.model, "Hello?"), |_| ()).await };
            async move { answer.await.map_err(|error| error.to_string()) }
        })
        .await
        .unwrap_or_else(|error| panic!("{error}"))
    }

    /// Everything that a served pool has to show.
    pub async fn check(&self) {
        self.follow_ups_find_the_prefix().await;
        self.grpc_from_outside();
        self.pods_ask_too().await;
        self.keys_count().await;
    }

    async fn follow_ups_find_the_prefix(&self) {
        let client = self.client();
        let ask = |text: &'static str| client.chat(question(self.model, text), |_| ());
        let first = ask("When does the ferry leave?").await.unwrap();
        assert!(!first.text.is_empty());
        for text in ["Which berth is free at noon?", "May I moor overnight?"] {
            let answer = ask(text).await.unwrap();
            assert!(answer.cached_tokens() >= CACHED_TOKENS_MIN, "{}", answer.usage);
        }
        let again = ask("When does the ferry leave?").await.unwrap();
        assert_eq!(again.text, first.text, "reuse changes no character");
    }

    fn grpc_from_outside(&self) {
        let mut command = Command::new(built("kvasir"));
        command.args(["generate", "--url", &format!("http://{}:80", self.address()), "--model", self.model, "--max-tokens", "4"]);
        command.args(["--min-tokens", "1", "Name a river."]).env("KVASIR_API_KEY", self.key);
        assert!(!output(&mut command).trim().is_empty());
    }

    /// Pods that ask the Service by its name: over gRPC and over HTTP.
    async fn pods_ask_too(&self) {
        let url = format!("http://{}.{}.svc:80", self.service, self.namespace);
        let asked = [
            (
                "grpc",
                json!([
                    "generate",
                    "--url",
                    url,
                    "--model",
                    self.model,
                    "--max-tokens",
                    "4",
                    "--min-tokens",
                    "1",
                    "Name a river."
                ]),
            ),
            ("openai", json!(["chat", "--url", url, "--model", self.model, "--max-tokens", "4", "Name a river."])),
        ];
        for (name, args) in &asked {
            let mut pod = asker(self.namespace, name, args);
            let from = json!({"secretKeyRef": {"name": self.key_secret, "key": "value"}});
            pod["spec"]["containers"][0]["env"] = json!([{"name": "KVASIR_API_KEY", "valueFrom": from}]);
            apply(self.cluster, &pod);
        }
        for (name, _) in &asked {
            assert_ends_well(self.cluster, self.namespace, name).await;
        }
    }

    async fn keys_count(&self) {
        let stranger = Client::new(&format!("http://{}", self.address()), Some("sk-of-nobody".to_owned())).unwrap();
        let refused = stranger.chat(question(self.model, "Hello?"), |_| ()).await.unwrap_err().to_string();
        assert!(refused.contains("401"), "{refused}");
    }

    /// A request is one trace in Jaeger, from the router's door to the worker's last step.
    pub async fn check_trace(&self, jaeger: &Jaeger) {
        let trace = "4bf92f3577b34da6a3ce929d0e0e4736";
        let caller = format!("00-{trace}-00f067aa0ba902b7-01");
        send_traced(&format!("{}:80", self.address()), Some(self.key), &question(self.model, "Who opens the bridge?"), &caller)
            .await;
        let wanted: BTreeSet<String> =
            ["request", "prepare", "route", "attempt", "worker", "queue", "prefill", "decode"].map(str::to_owned).into();
        let arrived = until("the trace arrives whole", SPANS_MAX_WAIT, || async {
            let found = names(&jaeger.trace(trace).await);
            if found.is_superset(&wanted) { Ok(()) } else { Err(format!("{found:?}")) }
        });
        arrived.await.unwrap_or_else(|error| panic!("{error}"));
    }
}

/// What a namespace that enforces `restricted` asks of a container.
pub fn restricted() -> Value {
    json!({
        "allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true, "runAsNonRoot": true,
        "capabilities": {"drop": ["ALL"]}, "seccompProfile": {"type": "RuntimeDefault"},
    })
}

/// A pod that runs the command-line client once.
pub fn asker(namespace: &str, name: &str, args: &Value) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": false,
            "containers": [{
                "name": "asker", "image": CLI, "imagePullPolicy": "Never", "securityContext": restricted(), "args": args,
            }],
        },
    })
}

/// Waits for the end of a pod that runs once; it has to end well and to have said something.
pub async fn assert_ends_well(cluster: &Cluster, namespace: &str, name: &str) {
    let state = eventually(&format!("pod `{name}` ends"), || {
        let pod = get(cluster, &["-n", namespace, "pod", name]);
        let state = pod["status"]["containerStatuses"][0]["state"].clone();
        state["terminated"].is_object().then_some(state).ok_or_else(|| pod["status"].to_string())
    })
    .await;
    let log = kubectl(cluster, &["-n", namespace, "logs", name]);
    assert_eq!(state["terminated"]["exitCode"], 0, "{name}: {log}");
    assert!(!log.trim().is_empty(), "{name} prints an answer");
}
