//! Serves a router on a listener: HTTP/1.1 and HTTP/2 (also without TLS), with a graceful end.
//!
//! Owns connections and their limits. Refuses to know routes. Flow of the end: for [`ServerSettings::settle`] accept and answer as ever, but ask clients
//! to come back on another connection; stop accepting; let each connection finish what it has begun (see [`Parting`]), wait for
//! [`ServerSettings::grace`], tell each request that is left that its time is over ([`Ending`], so that a stream ends with an error and not just so),
//! wait for [`LAST_WORDS`], then close what is left, which cancels its work.
//!
//! A client that keeps its connection may send a request in the moment in which its server closes it, and cannot tell whether it was read. So no HTTP/1
//! connection is closed behind a client that was not told: each answer of the end says `connection: close`.

mod parting;

use axum::{Extension, Router};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::service::TowerToHyperService;
use parting::Parting;
use std::future::Future;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;

/// Limits of a server.
#[derive(Clone, Debug)]
pub struct ServerSettings {
    /// Most open connections; more wait in the listener's queue.
    pub connections_max: usize,
    /// Longest time to send the head of a request.
    pub header_wait: Duration,
    /// Most concurrent requests on one HTTP/2 connection.
    pub streams_max: u32,
    /// Interval of HTTP/2 pings; a peer that does not answer within the same time is gone.
    pub ping_interval: Duration,
    /// Time at the beginning of the end in which new connections are still taken, so that load balancers notice.
    pub settle: Duration,
    /// Time that a client which keeps its connection gets at the end for a request that was on its way.
    pub linger: Duration,
    /// Longest time that running requests get at the end.
    pub grace: Duration,
}

/// How far the end has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// It has not begun.
    Serves,
    /// New connections are taken; each answer on an old one is its last.
    Settles,
    /// Connections end.
    Parts,
}

/// Tells a request that its server has no time left; travels with each request as an extension.
#[derive(Clone, Debug)]
pub(crate) struct Ending(watch::Receiver<bool>);

/// Time that requests get to say how they ended: they only have to be written to a socket.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Pause after a failed accept (out of file descriptors), so that the loop does not spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Serves until `shutdown` resolves and the running requests are done.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    settings: ServerSettings,
    shutdown: impl Future<Output = ()> + Send,
) -> io::Result<()> {
    let builder = Arc::new(settings.builder());
    let places = Arc::new(Semaphore::new(settings.connections_max));
    let (stage, stages) = watch::channel(Stage::Serves);
    let (over, ending) = watch::channel(false);
    let router = router.layer(Extension(Ending(ending)));
    let mut connections = JoinSet::new();
    let mut closing = pin!(async {
        shutdown.await;
        stage.send_replace(Stage::Settles);
        tokio::time::sleep(settings.settle).await;
    });
    loop {
        let accept = async {
            let place = places.clone().acquire_owned().await;
            (listener.accept().await, place)
        };
        let (accepted, place) = tokio::select! {
            () = &mut closing => break,
            Some(_) = connections.join_next(), if !connections.is_empty() => continue,
            accepted = accept => accepted,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) if is_of_peer(&error) => continue,
            Err(error) => {
                tracing::warn!(%error, "a connection could not be accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        // Tokens are small and late ones are useless: nothing is held back to fill packets.
        let _slower_without = stream.set_nodelay(true);
        let parting = Parting::new(stages.clone(), settings.linger);
        let (answering, routes) = (parting.clone(), router.clone());
        let service =
            TowerToHyperService::new(tower::service_fn(move |request| answering.clone().answer(routes.clone(), request)));
        let builder = builder.clone();
        connections.spawn(async move {
            let mut connection = pin!(builder.serve_connection(TokioIo::new(stream), service));
            let ended = tokio::select! {
                ended = connection.as_mut() => ended,
                () = parting.due() => {
                    connection.as_mut().graceful_shutdown();
                    connection.await
                }
            };
            if let Err(error) = ended {
                tracing::debug!(%error, "a connection ended early");
            }
            drop(place);
        });
    }
    drop(listener);
    stage.send_replace(Stage::Parts);
    if tokio::time::timeout(settings.grace, all(&mut connections)).await.is_err() {
        tracing::warn!(connections = connections.len(), "the grace period is over; running requests are ended with an error");
        over.send_replace(true);
        if tokio::time::timeout(LAST_WORDS, all(&mut connections)).await.is_err() {
            tracing::warn!("connections are closed although they have running requests");
        }
    }
    connections.shutdown().await;
    Ok(())
}

/// Waits until every connection has ended.
async fn all(connections: &mut JoinSet<()>) {
    while connections.join_next().await.is_some() {}
}

fn is_of_peer(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}

// === impl Ending ===

impl Ending {
    /// Waits until the time is over; a server that has ended otherwise says nothing more.
    pub(crate) async fn over(&mut self) {
        if self.0.wait_for(|over| *over).await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

// === impl ServerSettings ===

impl Default for ServerSettings {
    fn default() -> Self {
        Self {
            connections_max: 16_384,
            header_wait: Duration::from_secs(30),
            streams_max: 1024,
            ping_interval: Duration::from_secs(20),
            settle: Duration::ZERO,
            linger: Duration::from_secs(1),
            grace: Duration::from_secs(30),
        }
    }
}

impl ServerSettings {
    fn builder(&self) -> Builder<TokioExecutor> {
        let mut builder = Builder::new(TokioExecutor::new());
        builder.http1().timer(TokioTimer::new()).header_read_timeout(self.header_wait);
        builder
            .http2()
            .timer(TokioTimer::new())
            .keep_alive_interval(self.ping_interval)
            .keep_alive_timeout(self.ping_interval)
            .max_concurrent_streams(self.streams_max);
        builder
    }
}
