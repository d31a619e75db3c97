//! Tenants that never stop asking: streams over HTTP and gRPC, each compared with what the same question was answered before.
//!
//! Owns clients without a second try, a ledger of what they got, and how many streams each worker held when its drain began. Refuses to know what
//! happens to the pool meanwhile.

use super::serving::{Pool, system_prompt};
use super::support::eventually;
use kvasir_cli::args::GenerateArgs;
use kvasir_cli::client::{Answer, Client};
use kvasir_cluster::http_get;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::task::JoinSet;

/// Tenants that stream at once over HTTP. Every second one keeps its connection from question to question.
pub const CLIENTS: usize = 48;
/// Fewest streams that a worker holds when something begins to happen to it.
pub const OPEN_MIN: u64 = 10;
/// Tokens of each answer.
const TOKENS: u64 = 24;
/// Time between two looks at the workers.
const LOOK: Duration = Duration::from_millis(200);
/// What is asked; each begins with the same system prompt.
const QUESTIONS: [&str; 12] = [
    "When does the ferry leave?",
    "Which berth is free at noon?",
    "May I moor overnight?",
    "Who opens the bridge?",
    "How deep is the basin at low tide?",
    "Where do I pay the dues?",
    "Is the crane free on Monday?",
    "When is high water tomorrow?",
    "Can I buy diesel on Sunday?",
    "Who is on watch tonight?",
    "May a yawl of nine metres turn here?",
    "Is the light on the mole lit?",
];

/// One question that was answered, or not.
#[derive(Clone, Debug)]
pub struct Asked {
    /// Whether it was begun after the mark of this number was set.
    pub mark: usize,
    /// Cached and prompt tokens, or what went wrong.
    pub outcome: Result<(u64, u64), String>,
}

#[derive(Default)]
struct Ledger {
    asked: Vec<Asked>,
    mark: usize,
    /// Most streams that were seen on a worker in the last look before its drain, by pod and by how often its container has started.
    at_drain: BTreeMap<(String, u64), u64>,
    open: BTreeMap<(String, u64), u64>,
}

/// Tenants at work.
pub struct Traffic {
    ledger: Arc<Mutex<Ledger>>,
    stop: Arc<AtomicBool>,
    tasks: JoinSet<()>,
}

#[derive(Clone)]
struct Tenant {
    address: String,
    model: String,
    key: String,
    ledger: Arc<Mutex<Ledger>>,
    stop: Arc<AtomicBool>,
}

fn body(model: &str, question: &str) -> Value {
    json!({
        "model": model, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": true,
        "messages": [{"role": "system", "content": system_prompt()}, {"role": "user", "content": question}],
    })
}

// === impl Traffic ===

impl Traffic {
    /// Asks each question once, then lets everybody ask without end.
    pub async fn begin(pool: &Pool<'_>) -> Self {
        let (ledger, stop) = (Arc::<Mutex<Ledger>>::default(), Arc::<AtomicBool>::default());
        let tenant = Tenant {
            address: format!("http://{}:80", pool.address()),
            model: pool.model.to_owned(),
            key: pool.key.to_owned(),
            ledger: Arc::clone(&ledger),
            stop: Arc::clone(&stop),
        };
        let client = tenant.client();
        let mut texts = Vec::new();
        for question in QUESTIONS {
            texts.push(client.chat(body(pool.model, question), |_| ()).await.unwrap().text);
        }
        let texts: Arc<[String]> = texts.into();
        let mut tasks = JoinSet::new();
        for number in 0..CLIENTS {
            tasks.spawn(tenant.clone().chat(number, Arc::clone(&texts)));
        }
        tasks.spawn(tenant.generate());
        tasks.spawn(look(pool.cluster.client().await.unwrap(), pool.namespace.to_owned(), Arc::clone(&ledger), stop.clone()));
        Self { ledger, stop, tasks }
    }

    /// Waits until each of `workers` workers holds [`OPEN_MIN`] streams.
    pub async fn spread(&self, workers: usize) {
        eventually("every worker has its streams", || {
            let open = self.open();
            let loaded = open.values().filter(|open| **open >= OPEN_MIN).count();
            (open.len() == workers && loaded == workers).then_some(()).ok_or_else(|| format!("{open:?}"))
        })
        .await;
    }

    fn open(&self) -> BTreeMap<(String, u64), u64> {
        hold(&self.ledger).open.clone()
    }

    /// From here on questions count for this mark.
    pub fn mark(&self) -> usize {
        let mut ledger = hold(&self.ledger);
        ledger.mark += 1;
        ledger.mark
    }

    /// Questions that were begun under a mark and have ended.
    pub fn asked(&self, mark: usize) -> Vec<Asked> {
        hold(&self.ledger).asked.iter().filter(|asked| asked.mark == mark).cloned().collect()
    }

    /// Streams that workers held in the last look before each drain.
    pub fn at_drain(&self) -> Vec<u64> {
        hold(&self.ledger).at_drain.values().copied().collect()
    }

    /// What went wrong so far.
    pub fn failures(&self) -> Vec<String> {
        hold(&self.ledger).asked.iter().filter_map(|it| it.outcome.as_ref().err().cloned()).collect()
    }

    /// Lets everybody finish, and tells how many answers there were.
    pub async fn end(mut self) -> usize {
        self.stop.store(true, Ordering::Relaxed);
        while let Some(ended) = self.tasks.join_next().await {
            ended.unwrap();
        }
        assert_eq!(self.failures(), [] as [String; 0]);
        hold(&self.ledger).asked.len()
    }
}

// === impl Tenant ===

impl Tenant {
    fn client(&self) -> Client {
        Client::new(&self.address, Some(self.key.clone())).unwrap()
    }

    async fn chat(self, number: usize, texts: Arc<[String]>) {
        let kept = self.client();
        for round in 0.. {
            if self.stop.load(Ordering::Relaxed) {
                return;
            }
            let at = (number + round) % QUESTIONS.len();
            let mark = hold(&self.ledger).mark;
            let client = if number.is_multiple_of(2) { kept.clone() } else { self.client() };
            let answer = client.chat(body(&self.model, QUESTIONS[at]), |_| ()).await;
            let outcome = answer.map_err(|error| error.to_string()).and_then(|answer| whole(&answer, &texts[at]));
            self.note(mark, outcome.map_err(|error| format!("client {number}, round {round}: {error}")));
        }
    }

    async fn generate(self) {
        let args = GenerateArgs {
            url: self.address.clone(),
            model: Some(self.model.clone()),
            key: Some(self.key.clone()),
            max_tokens: TOKENS as u32,
            min_tokens: TOKENS as u32,
            temperature: 0.0,
            seed: None,
            timeout_seconds: 120,
            prompt: system_prompt(),
        };
        let mut first = None;
        while !self.stop.load(Ordering::Relaxed) {
            let mark = hold(&self.ledger).mark;
            let mut text = Vec::new();
            let outcome = match kvasir_cli::generate::run(&args, &mut text).await {
                Err(error) => Err(error.to_string()),
                Ok(_) if *first.get_or_insert_with(|| text.clone()) != text => Err("another text than before".to_owned()),
                Ok(summary) => Ok((summary.cached_tokens.into(), summary.prompt_tokens.into())),
            };
            self.note(mark, outcome.map_err(|error| format!("gRPC: {error}")));
        }
    }

    fn note(&self, mark: usize, outcome: Result<(u64, u64), String>) {
        if let Err(error) = &outcome {
            eprintln!("a stream failed: {error}");
        }
        hold(&self.ledger).asked.push(Asked { mark, outcome });
    }
}

/// A whole answer says what was said before, to the last token.
fn whole(answer: &Answer, text: &str) -> Result<(u64, u64), String> {
    if answer.text != text {
        return Err(format!("`{}` instead of `{text}`", answer.text));
    }
    if answer.finish.as_deref() != Some("length") || answer.usage["completion_tokens"] != TOKENS {
        return Err(format!("cut: {:?}, {}", answer.finish, answer.usage));
    }
    Ok((answer.cached_tokens(), answer.prompt_tokens()))
}

fn hold(ledger: &Mutex<Ledger>) -> std::sync::MutexGuard<'_, Ledger> {
    ledger.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Looks at the workers again and again: how many streams they hold, and which begin to leave.
async fn look(client: kube::Client, namespace: String, ledger: Arc<Mutex<Ledger>>, stop: Arc<AtomicBool>) {
    let pods = kube::Api::<k8s_openapi::api::core::v1::Pod>::namespaced(client, &namespace);
    let workers = kube::api::ListParams::default().labels("app.kubernetes.io/component=worker");
    while !stop.load(Ordering::Relaxed) {
        // An API server that does not answer at once is asked again.
        let listed = pods.list(&workers).await.map(|list| list.items).unwrap_or_default();
        let mut seen = BTreeMap::new();
        for pod in listed {
            let pod = serde_json::to_value(pod).unwrap();
            let restarts = pod["status"]["containerStatuses"][0]["restartCount"].as_u64().unwrap_or(0);
            let life = (pod["metadata"]["uid"].as_str().unwrap_or_default().to_owned(), restarts);
            let leaves = pod["metadata"]["deletionTimestamp"].is_string()
                || pod["metadata"]["annotations"].get(kvasir_operator::design::DRAIN_SINCE).is_some();
            if leaves {
                let mut ledger = hold(&ledger);
                if let Some(open) = ledger.open.get(&life).copied() {
                    ledger.at_drain.entry(life).or_insert(open);
                }
            } else if let Some(open) = in_flight(&pod["status"]["podIP"]).await {
                seen.insert(life, open);
            }
        }
        hold(&ledger).open = seen;
        tokio::time::sleep(LOOK).await;
    }
}

/// Requests that a ready worker runs.
async fn in_flight(ip: &Value) -> Option<u64> {
    let address = format!("{}:7402", ip.as_str()?).parse().ok()?;
    let answer = http_get(address, "/readyz").await.ok()?;
    let body: Value = serde_json::from_str(answer.split("\r\n\r\n").nth(1)?).ok()?;
    body["in_flight"].as_u64()
}
