//! Against a server of this process that counts what it sends and can hang up.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]

use super::super::*;
use super::Proof;
use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpListener;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// Serves files by path, with ranges.
struct Server {
    url: String,
    sent: Arc<AtomicU64>,
    requests: Arc<Mutex<Vec<String>>>,
}

/// What a server holds: bytes by path. `cut` ends each answer after so many bytes.
fn serve(files: BTreeMap<String, Vec<u8>>, cut: Option<usize>) -> Server {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let (sent, requests) = (Arc::new(AtomicU64::new(0)), Arc::new(Mutex::new(Vec::new())));
    let server = Server { url, sent: Arc::clone(&sent), requests: Arc::clone(&requests) };
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map(Result::unwrap);
            let path = lines.next().unwrap_or_default().split(' ').nth(1).unwrap_or_default().to_owned();
            let mut from = 0;
            for line in lines.take_while(|line| !line.is_empty()) {
                if let Some(range) = line.to_ascii_lowercase().strip_prefix("range: bytes=") {
                    from = range.trim_end_matches('-').parse().unwrap();
                }
            }
            requests.lock().unwrap().push(format!("{path} from {from}"));
            let Some(file) = path.split('?').next().and_then(|path| files.get(path)) else {
                write!(stream, "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n").unwrap();
                continue;
            };
            if from > 0 && from >= file.len() {
                write!(stream, "HTTP/1.1 416 Range\r\ncontent-length: 0\r\nconnection: close\r\n\r\n").unwrap();
                continue;
            }
            let rest = &file[from..];
            let status = if from > 0 { "206 Partial Content" } else { "200 OK" };
            write!(stream, "HTTP/1.1 {status}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", rest.len()).unwrap();
            let now = &rest[..cut.unwrap_or(rest.len()).min(rest.len())];
            stream.write_all(now).unwrap();
            sent.fetch_add(now.len() as u64, Ordering::SeqCst);
        }
    });
    server
}

fn bytes(count: usize) -> Vec<u8> {
    (0..count).map(|at| (at * 31 % 251) as u8).collect()
}

fn proof(kind: fn(String) -> Proof, content: &[u8]) -> String {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), content).unwrap();
    kind(String::new()).of(file.path()).unwrap()
}

fn wanted<'a>(model: &'a str, hub: &'a str) -> Wanted<'a> {
    Wanted { hub, ..Wanted::named(model) }
}

#[test]
fn a_file_is_fetched_once_and_verified() {
    let content = bytes(3 << 20);
    let server = serve([("/a.gguf".to_owned(), content.clone())].into(), None);
    let (cache, sha256) = (tempfile::tempdir().unwrap(), proof(Proof::Sha256, &content));
    let url = format!("{}/a.gguf?token=secret", server.url);
    let mut seen = Vec::new();
    for _ in 0..3 {
        let wanted = Wanted { sha256: Some(&sha256), ..Wanted::named(&url) };
        let path = fetch_wanted(&wanted, cache.path(), &mut |progress| seen.push(progress)).unwrap();
        assert_eq!(std::fs::read(path).unwrap(), content);
    }
    assert_eq!(server.sent.load(Ordering::SeqCst), 3 << 20, "restarts fetch nothing again");
    assert!(seen.contains(&Progress::Fetching { bytes: 3 << 20, total: Some(3 << 20) }));
}

#[test]
fn a_download_that_breaks_off_goes_on_where_it_stood() {
    let content = bytes(5_000_000);
    let server = serve([("/a.gguf".to_owned(), content.clone())].into(), Some(1_000_000));
    let (cache, sha256) = (tempfile::tempdir().unwrap(), proof(Proof::Sha256, &content));
    let url = format!("{}/a.gguf", server.url);
    let wanted = Wanted { sha256: Some(&sha256), ..Wanted::named(&url) };
    let path = fetch_wanted(&wanted, cache.path(), &mut |_| {}).unwrap();
    assert_eq!(std::fs::read(path).unwrap(), content);
    assert_eq!(server.sent.load(Ordering::SeqCst), 5_000_000, "each byte came once");
    assert_eq!(server.requests.lock().unwrap().last().unwrap(), "/a.gguf from 4000000");
}

#[test]
fn bytes_of_another_file_are_thrown_away() {
    let server = serve([("/a.gguf".to_owned(), bytes(100))].into(), None);
    let cache = tempfile::tempdir().unwrap();
    let url = format!("{}/a.gguf?token=secret", server.url);
    let sha256 = "0".repeat(64);
    let wanted = Wanted { sha256: Some(&sha256), ..Wanted::named(&url) };
    let error = fetch_wanted(&wanted, cache.path(), &mut |_| {}).unwrap_err();
    assert_eq!(error.reason(), Reason::ModelFile);
    let message = error.to_string();
    assert!(message.contains(&sha256) && !message.contains("secret"), "{message}");
    let left: Vec<_> = std::fs::read_dir(cache.path().join("models")).unwrap().flatten().map(|it| it.file_name()).collect();
    assert!(left.iter().all(|name| name.to_string_lossy().ends_with(".lock")), "{left:?}");
}

#[test]
fn what_cannot_be_verified_or_said_aloud_is_not_fetched() {
    let cache = tempfile::tempdir().unwrap();
    let refused = |wanted: &Wanted<'_>| fetch_wanted(wanted, cache.path(), &mut |_| {}).unwrap_err();
    let error = refused(&Wanted::named("https://example.org/m.gguf"));
    assert!(error.to_string().contains("SHA-256"), "{error}");
    let sha256 = "0".repeat(64);
    let error =
        refused(&Wanted { sha256: Some(&sha256), token: Some("hf_secret"), ..Wanted::named("http://127.0.0.1:9/m.gguf") });
    assert!(error.to_string().contains("https") && !error.to_string().contains("hf_secret"), "{error}");
    for wrong in [
        "hf://org/model",
        "hf://org/model@main",
        "hf://model@0123456789012345678901234567890123456789",
        "hf://a/b@0123456789012345678901234567890123456789/../x",
    ] {
        let error = refused(&Wanted::named(wrong));
        assert!(error.to_string().contains("hf://OWNER/NAME@COMMIT"), "{wrong}: {error}");
    }
}

#[test]
fn a_server_that_has_it_not_is_named_with_its_answer() {
    let server = serve(BTreeMap::new(), None);
    let cache = tempfile::tempdir().unwrap();
    let url = format!("{}/a.gguf", server.url);
    let sha256 = "0".repeat(64);
    let error = fetch_wanted(&Wanted { sha256: Some(&sha256), ..Wanted::named(&url) }, cache.path(), &mut |_| {}).unwrap_err();
    assert_eq!(error.reason(), Reason::ModelNotFound);
    assert!(error.to_string().contains("404"), "{error}");
}

const COMMIT: &str = "0123456789012345678901234567890123456789";

/// A hub with one repository.
fn hub() -> (Server, Vec<u8>, Vec<u8>) {
    let (weights, config) = (bytes(70_000), b"{\"model_type\": \"llama\"}".to_vec());
    let listing = serde_json::json!([
        { "type": "directory", "path": "onnx", "oid": "x" },
        { "type": "file", "path": "README.md", "oid": "x" },
        { "type": "file", "path": "../evil.json", "oid": "x" },
        { "type": "file", "path": "config.json", "oid": proof(Proof::GitBlob, &config) },
        { "type": "file", "path": "model.safetensors", "oid": "x", "lfs": { "oid": proof(Proof::Sha256, &weights) } },
    ]);
    let files = [
        (format!("/api/models/o/m/tree/{COMMIT}"), listing.to_string().into_bytes()),
        (format!("/o/m/resolve/{COMMIT}/config.json"), config.clone()),
        (format!("/o/m/resolve/{COMMIT}/model.safetensors"), weights.clone()),
    ];
    (serve(files.into(), None), weights, config)
}

#[test]
fn a_commit_becomes_a_folder_once() {
    let (server, weights, config) = hub();
    let cache = tempfile::tempdir().unwrap();
    let model = format!("hf://o/m@{COMMIT}");
    for _ in 0..2 {
        let folder = fetch_wanted(&wanted(&model, &server.url), cache.path(), &mut |_| {}).unwrap();
        assert_eq!(std::fs::read(folder.join("model.safetensors")).unwrap(), weights);
        assert_eq!(std::fs::read(folder.join("config.json")).unwrap(), config);
        assert!(!folder.join("README.md").exists());
    }
    assert_eq!(server.requests.lock().unwrap().len(), 3, "one list and two files");
}

#[test]
fn one_file_of_a_commit_is_fetched_alone() {
    let (server, weights, _) = hub();
    let cache = tempfile::tempdir().unwrap();
    let model = format!("hf://o/m@{COMMIT}/model.safetensors");
    let path = fetch_wanted(&wanted(&model, &server.url), cache.path(), &mut |_| {}).unwrap();
    assert_eq!(std::fs::read(path).unwrap(), weights);
    let missing = format!("hf://o/m@{COMMIT}/other.gguf");
    let error = fetch_wanted(&wanted(&missing, &server.url), cache.path(), &mut |_| {}).unwrap_err();
    assert!(error.to_string().contains("other.gguf"), "{error}");
}

#[test]
fn a_blob_has_the_name_that_git_gives_it() {
    assert_eq!(proof(Proof::GitBlob, b"hello\n"), "ce013625030ba8dba906f756967f9e9ca394464a");
}
