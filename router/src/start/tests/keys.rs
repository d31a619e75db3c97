//! Keys that are given and withdrawn while a router runs.

use super::slices::{get, until_get};
use super::*;
use crate::testing::{ApiServer, Reply, Verb, event};
use k8s_openapi::ByteString;
use serde_json::json;
use sha2::{Digest as _, Sha256};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep};
use tonic::Status;

const KEY_A: &str = "sk-key-of-tenant-a";
const KEY_B: &str = "sk-key-of-tenant-b";
/// The bound that is promised for a withdrawn key.
const BOUND: Duration = Duration::from_secs(5);

fn tenants(entries: &[(&str, &str)]) -> String {
    let digest = |key: &str| hex::encode(Sha256::digest(key));
    let entry = |(name, key): &(&str, &str)| format!("[[tenant]]\nname = \"{name}\"\nkey_sha256 = \"{}\"\n", digest(key));
    entries.iter().map(entry).collect::<Vec<_>>().concat()
}

fn keyed(key: &str, max_tokens: u32) -> tonic::Request<inference::GenerateRequest> {
    let mut request = tonic::Request::new(request(max_tokens));
    request.metadata_mut().insert("authorization", format!("Bearer {key}").parse().unwrap());
    request
}

async fn code(client: &mut InferenceClient<Channel>, key: &str) -> Result<(), Status> {
    client.generate(keyed(key, 1)).await.map(drop)
}

fn write(path: &Path, text: &str) {
    std::fs::write(path, text).unwrap();
}

/// Field report R50: a key that goes from the file is refused by every router within the bound, and a stream that was let in goes on to its end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_that_is_withdrawn_while_it_is_used_is_refused_in_time_and_cuts_no_stream() {
    let dir = tempfile::TempDir::new().unwrap();
    let (pool, file) = (dir.path().join("pool"), dir.path().join("tenants.toml"));
    write(&pool, "the first pool secret");
    write(&file, &tenants(&[("a", KEY_A), ("b", KEY_B)]));
    let slow = MockSettings { decode_token: Duration::from_millis(50), ..MockSettings::default() };
    let mocks = vec![MockWorker::start(slow, loopback(), Some(bearer())).unwrap()];
    let files = SecretFiles { pool_secrets: vec![pool], tenants: Some(file.clone()), isolation: Isolation::PerTenant };
    let two = || async {
        let router = RouterRuntime::start(settings(listed(&mocks), SecretSource::Files(files.clone()))).await.unwrap();
        router.serve().fleet().until(|view| !view.pool(&mocks[0].identity()).is_empty()).await;
        let client = client(&router).await;
        (router, client)
    };
    let mut routers = [two().await, two().await];
    let mut running = routers[0].1.generate(keyed(KEY_A, 100)).await.unwrap().into_inner();

    write(&file, &tenants(&[("b", KEY_B), ("c", "sk-new")]));
    let began = Instant::now();
    for (_, client) in &mut routers {
        while code(client, KEY_A).await.is_ok() {
            assert!(began.elapsed() <= BOUND, "still let in after {:?}", began.elapsed());
            sleep(Duration::from_millis(10)).await;
        }
        assert_eq!(code(client, KEY_A).await.unwrap_err().code(), Code::Unauthenticated);
        code(client, KEY_B).await.unwrap();
        code(client, "sk-new").await.unwrap();
    }
    let mut tokens = 0;
    while let Some(event) = running.message().await.unwrap() {
        if let Some(generate_event::Event::Delta(delta)) = event.event {
            tokens += delta.ids.len();
        }
    }
    assert_eq!(tokens, 100, "what was let in goes on to its end");

    // A file that cannot be used leaves everyone as they were, and is told.
    write(&file, "[[tenant]]\nname = \"b\"\nkey_sha256 = \"sk-pasted-by-mistake\"\n");
    let (router, client) = &mut routers[0];
    let text = until_get(router, "/readyz", |_, text| text.contains("secrets: ")).await;
    assert!(text.starts_with("HTTP/1.1 200"), "{text}");
    code(client, KEY_B).await.unwrap();
    let secrets = admin(router).await.secrets(wire::SecretsRequest {}).await.unwrap().into_inner();
    let stale = secrets.stale.unwrap();
    assert!(stale.message.contains("64 hexadecimal digits") && secrets.tenants == 2, "{stale:?}");
    let metrics = get(router, "/metrics").await.1;
    assert!(metrics.contains("kvasir_router_secrets_stale{component=\"router\"} 1\n"), "{metrics}");
    for text in [text, stale.message, metrics] {
        assert!(!text.contains("sk-pasted"), "{text}");
    }
    for (router, _) in routers {
        router.shutdown().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_router_whose_keys_are_not_there_yet_is_not_ready_and_tells_nobody_that_a_key_is_wrong() {
    let there = Arc::new(AtomicBool::new(false));
    let base64 = |text: &str| serde_json::to_value(ByteString(text.as_bytes().to_vec())).unwrap();
    let object = json!({
        "metadata": {"name": "keys", "resourceVersion": "7"},
        "data": {"pool-secret": base64("the first pool secret"), "tenants.toml": base64(&tenants(&[("a", KEY_A)]))},
    });
    let (made, kept) = (Arc::clone(&there), Arc::new(std::sync::Mutex::new(Vec::new())));
    let server = ApiServer::new(move |asked| match (asked.verb, made.load(Ordering::Relaxed)) {
        (Verb::Watch, true) => {
            let (events, stream) = mpsc::unbounded_channel();
            events.send(event("ADDED", &object)).unwrap();
            kept.lock().unwrap().push(events);
            Reply::Events(stream)
        }
        (Verb::Watch, false) => Reply::Silence,
        (_, true) => Reply::Object(object.clone()),
        (_, false) => Reply::Status(404),
    });
    let mocks = mocks(1);
    let name = ObjectName::parse("pools/keys").unwrap();
    let source = SecretSource::Object(name, Isolation::PerTenant);
    let router = RouterRuntime::start_with(Some(server.client), settings(listed(&mocks), source)).await.unwrap();
    let text = until_get(&router, "/readyz", |_, text| text.contains("whoever deploys this router")).await;
    assert!(text.starts_with("HTTP/1.1 503") && text.contains("Secret pools/keys"), "{text}");
    let mut client = client(&router).await;
    assert_eq!(code(&mut client, KEY_A).await.unwrap_err().code(), Code::Unavailable);
    there.store(true, Ordering::Relaxed);
    ready(&router).await;
    router.serve().fleet().until(|view| !view.pool(&mocks[0].identity()).is_empty()).await;
    code(&mut client, KEY_A).await.unwrap();
    assert_eq!(code(&mut client, KEY_B).await.unwrap_err().code(), Code::Unauthenticated);
    let secrets = admin(&router).await.secrets(wire::SecretsRequest {}).await.unwrap().into_inner();
    assert_eq!((secrets.resource_version.as_str(), secrets.tenants, secrets.stale), ("7", 1, None));
    router.shutdown().await;
}

#[tokio::test]
async fn a_start_with_keys_that_cannot_be_used_fails_and_names_the_file() {
    let dir = tempfile::TempDir::new().unwrap();
    let (pool, file) = (dir.path().join("pool"), dir.path().join("tenants.toml"));
    write(&pool, "the first pool secret");
    write(&file, "[[tenant]]\nname = \"a\"\nkey_sha256 = \"sk-pasted-by-mistake\"\n");
    let files = SecretFiles { pool_secrets: vec![pool], tenants: Some(file), isolation: Isolation::PerTenant };
    let error = RouterRuntime::start(settings(listed(&[]), SecretSource::Files(files))).await.err().unwrap();
    assert_eq!(error.reason(), Reason::InvalidArgument);
    let text = format!("{error} {error:?}");
    assert!(text.contains("tenants.toml") && text.contains("tenant \"a\"") && !text.contains("sk-pasted"), "{text}");
}
