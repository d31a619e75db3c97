//! The HTTP door over a real socket: disconnects and the graceful end.

use crate::ServerSettings;
use crate::testing::{MODEL, Rig, Running, Step, finished, get, rig};
use kvasir_core::{Chunk, FinishReason, Tokens};
use serde_json::json;
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::watch;

fn request(stream: bool) -> String {
    let body = json!({ "model": MODEL, "messages": [{ "role": "user", "content": "hi" }], "stream": stream }).to_string();
    format!("POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}", body.len())
}

async fn read_until(socket: &mut TcpStream, wanted: &str) -> String {
    let mut text = String::new();
    let mut buffer = [0; 1024];
    while !text.contains(wanted) {
        let read = tokio::time::timeout(Duration::from_secs(10), socket.read(&mut buffer)).await.expect("bytes arrive").unwrap();
        assert!(read > 0, "closed before {wanted:?} in {text:?}");
        text.push_str(std::str::from_utf8(&buffer[..read]).unwrap());
    }
    text
}

async fn live(rig: &Rig, wanted: usize) {
    let mut live = rig.serve.live.subscribe();
    tokio::time::timeout(Duration::from_secs(10), live.wait_for(|live| *live == wanted)).await.expect("in time").unwrap();
}

fn hello() -> Step {
    Step::Send(Chunk::Tokens(Tokens { ids: vec![5], text: "hello".into(), ..Tokens::default() }))
}

/// R19: a client that closes its socket frees its request within moments: mid-stream, before the first output, and without a stream.
#[tokio::test]
async fn closing_the_socket_cancels_the_request() {
    for (stream, speaks) in [(true, true), (true, false), (false, true), (false, false)] {
        let rig = rig(move |_| Ok(if speaks { vec![hello(), Step::Hang] } else { vec![Step::Hang] }));
        let server = Running::start(rig.door.router()).await;
        let mut socket = TcpStream::connect(server.address).await.unwrap();
        socket.write_all(request(stream).as_bytes()).await.unwrap();
        if stream && speaks {
            read_until(&mut socket, "hello").await;
        } else {
            live(&rig, 1).await;
        }
        drop(socket);
        live(&rig, 0).await;
        let metrics = get(&rig, "/metrics").await.body;
        assert!(metrics.contains("outcome=\"cancelled\"} 1"), "{stream} {speaks} {metrics}");
    }
}

/// R73: at the end running streams go on to theirs, new connections are refused, and the server leaves when it is empty.
#[tokio::test]
async fn the_graceful_end_lets_streams_finish() {
    let (go, wait) = watch::channel(false);
    let script = move |request: &kvasir_core::Request| {
        Ok(vec![hello(), Step::Until(wait.clone()), hello(), Step::Send(finished(request, FinishReason::Stop, 2))])
    };
    let rig = rig(script);
    let mut server = Running::start(rig.door.router()).await;
    let mut socket = TcpStream::connect(server.address).await.unwrap();
    socket.write_all(request(true).as_bytes()).await.unwrap();
    read_until(&mut socket, "hello").await;
    server.stop();
    // The listener is closed once the server has seen the signal.
    tokio::time::timeout(Duration::from_secs(10), async {
        while TcpStream::connect(server.address).await.is_ok() {
            tokio::task::yield_now().await;
        }
    })
    .await
    .expect("new connections are refused");
    go.send(true).unwrap();
    read_until(&mut socket, "[DONE]").await;
    server.ended().await;
}

/// A client that keeps its connection is asked to leave it with its next answer, and not cut off between two requests: not while load balancers
/// are told, and not right after a stream that outlived that time.
#[tokio::test]
async fn at_the_end_no_connection_is_closed_behind_a_client_that_was_not_told() {
    let (go, wait) = watch::channel(false);
    let script = move |request: &kvasir_core::Request| {
        Ok(vec![hello(), Step::Until(wait.clone()), hello(), Step::Send(finished(request, FinishReason::Stop, 2))])
    };
    let rig = rig(script);
    let settings = ServerSettings { linger: Duration::from_mins(1), ..ServerSettings::default() };
    let mut server = Running::with(rig.door.router(), settings).await;
    let [mut idle, mut streams] =
        [TcpStream::connect(server.address).await.unwrap(), TcpStream::connect(server.address).await.unwrap()];
    let health = "GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n";
    idle.write_all(health.as_bytes()).await.unwrap();
    let before = read_until(&mut idle, "\r\n\r\n").await;
    assert!(!before.to_ascii_lowercase().contains("connection: close"), "{before}");
    streams.write_all(request(true).as_bytes()).await.unwrap();
    read_until(&mut streams, "hello").await;
    server.stop();
    while TcpStream::connect(server.address).await.is_ok() {
        tokio::task::yield_now().await;
    }
    idle.write_all(health.as_bytes()).await.unwrap();
    let told = read_until(&mut idle, "\r\n\r\n").await.to_ascii_lowercase();
    assert!(told.contains(" 200 ") && told.contains("connection: close"), "{told}");
    go.send(true).unwrap();
    read_until(&mut streams, "[DONE]").await;
    streams.write_all(request(true).as_bytes()).await.unwrap();
    let told = read_until(&mut streams, "[DONE]").await.to_ascii_lowercase();
    assert!(told.contains(" 200 ") && told.contains("connection: close"), "{told}");
    server.ended().await;
}

/// R74: when the grace period is over, a running stream ends with an error event, a whole answer with a status that says to come back, and
/// both are counted as what they are.
#[tokio::test]
async fn after_the_grace_period_every_client_is_told() {
    for (stream, ends) in [(true, "\"code\":\"draining\""), (false, "HTTP/1.1 503 ")] {
        let rig = rig(|_| Ok(vec![hello(), Step::Hang]));
        let mut server = Running::with_grace(rig.door.router(), Duration::from_millis(20)).await;
        let mut socket = TcpStream::connect(server.address).await.unwrap();
        socket.write_all(request(stream).as_bytes()).await.unwrap();
        if stream {
            read_until(&mut socket, "hello").await;
        } else {
            live(&rig, 1).await;
        }
        server.stop();
        let mut told = read_until(&mut socket, ends).await;
        // The socket is closed after it.
        tokio::time::timeout(Duration::from_secs(10), socket.read_to_string(&mut told)).await.expect("in time").unwrap();
        assert!(!told.contains("[DONE]"), "{told}");
        assert!(stream || told.to_ascii_lowercase().contains("retry-after: 2"), "{told}");
        server.ended().await;
        live(&rig, 0).await;
        let metrics = get(&rig, "/metrics").await.body;
        assert!(metrics.contains("outcome=\"draining\"} 1"), "{stream} {metrics}");
    }
}
