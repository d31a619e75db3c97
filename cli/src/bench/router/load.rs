//! The load: a closed loop of so many clients, each with one connection, that stream whole answers and check them.

use super::RouterBenchError;
use super::prompts::{CHUNKS, Form, Prompts};
use bytes::Bytes;
use http::{Method, Request, header};
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

/// Where and what to send.
pub struct Load {
    /// Addresses, used in turn by the clients.
    pub targets: Vec<SocketAddr>,
    /// Form of the prompts.
    pub form: Form,
    /// Maker of the prompts.
    pub prompts: Arc<Prompts>,
    /// Number of the next prompt.
    pub next: AtomicU64,
}

/// What one stretch of load showed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Figures {
    /// Answers.
    pub requests: u64,
    /// Answers per second.
    pub per_second: f64,
    /// Median time of an answer.
    pub p50_ms: f64,
    /// 99th percentile.
    pub p99_ms: f64,
    /// Median time to the first bytes of the body.
    pub ttft_p50_ms: f64,
}

struct Timing {
    first: Duration,
    total: Duration,
}

struct Connection {
    target: SocketAddr,
    sender: SendRequest<Full<Bytes>>,
}

// === impl Load ===

impl Load {
    /// Keeps `clients` requests open for `time`, then waits for those that are.
    pub async fn run(self: &Arc<Self>, clients: usize, time: Duration) -> Result<Figures, RouterBenchError> {
        let began = Instant::now();
        let mut slots = JoinSet::new();
        for number in 0..clients {
            let load = Arc::clone(self);
            slots.spawn(async move { load.client(number, began + time).await });
        }
        let mut timings = Vec::new();
        while let Some(slot) = slots.join_next().await {
            timings.extend(slot.map_err(|error| RouterBenchError::Answer(error.to_string()))??);
        }
        Ok(Figures::new(&timings, began.elapsed()))
    }

    /// One answer, whole; the text of its events.
    pub async fn one(&self, report: bool) -> Result<String, RouterBenchError> {
        let mut connection = Connection::open(self.targets[0]).await?;
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        Ok(connection.ask(self.form, self.prompts.body(self.form, number, report)).await?.1)
    }

    async fn client(&self, number: usize, until: Instant) -> Result<Vec<Timing>, RouterBenchError> {
        let mut connection = Connection::open(self.targets[number % self.targets.len()]).await?;
        let mut timings = Vec::new();
        while Instant::now() < until {
            let body = self.prompts.body(self.form, self.next.fetch_add(1, Ordering::Relaxed), false);
            timings.push(connection.ask(self.form, body).await?.0);
            if connection.sender.is_closed() {
                connection = Connection::open(connection.target).await?;
            }
        }
        Ok(timings)
    }
}

// === impl Connection ===

impl Connection {
    async fn open(target: SocketAddr) -> Result<Self, RouterBenchError> {
        let failed = |error: &dyn std::error::Error| RouterBenchError::Connect { target, message: error.to_string() };
        let stream = TcpStream::connect(target).await.map_err(|error| failed(&error))?;
        stream.set_nodelay(true).map_err(|error| failed(&error))?;
        let (sender, connection) = handshake(TokioIo::new(stream)).await.map_err(|error| failed(&error))?;
        // Its errors come to the sender too.
        tokio::spawn(connection);
        Ok(Self { target, sender })
    }

    async fn ask(&mut self, form: Form, body: Bytes) -> Result<(Timing, String), RouterBenchError> {
        let request = Request::builder()
            .method(Method::POST)
            .uri(Prompts::path(form))
            .header(header::HOST, self.target.to_string())
            .header(header::CONTENT_TYPE, "application/json")
            .body(Full::new(body))
            .map_err(|error| RouterBenchError::Answer(error.to_string()))?;
        let broken = |error: hyper::Error| RouterBenchError::Answer(format!("{}: {error}", self.target));
        self.sender.ready().await.map_err(broken)?;
        let began = Instant::now();
        let response = self.sender.send_request(request).await.map_err(broken)?;
        let status = response.status();
        let mut body = response.into_body();
        let mut text = Vec::with_capacity(8 << 10);
        let mut first = None;
        while let Some(frame) = body.frame().await {
            if let Ok(data) = frame.map_err(broken)?.into_data() {
                first.get_or_insert_with(|| began.elapsed());
                text.extend_from_slice(&data);
            }
        }
        let timing = Timing { total: began.elapsed(), first: first.unwrap_or_default() };
        let text = String::from_utf8_lossy(&text).into_owned();
        if status.is_success() && is_whole(&text, form) {
            return Ok((timing, text));
        }
        Err(RouterBenchError::Answer(format!("{} answered {status}, not {CHUNKS} chunks and [DONE]: {text}", self.target)))
    }
}

/// Whether an answer has all its chunks and its end.
fn is_whole(text: &str, form: Form) -> bool {
    let member = match form {
        Form::Chat | Form::Seen => "\"content\":\"",
        Form::Ids => "\"text\":\"",
    };
    let filled = text.match_indices(member).filter(|(at, _)| text.as_bytes().get(at + member.len()) != Some(&b'"')).count();
    filled == CHUNKS && text.ends_with("data: [DONE]\n\n")
}

// === impl Figures ===

impl Figures {
    fn new(timings: &[Timing], time: Duration) -> Self {
        let ordered = |of: fn(&Timing) -> Duration| {
            let mut all: Vec<f64> = timings.iter().map(|timing| of(timing).as_secs_f64() * 1e3).collect();
            all.sort_by(f64::total_cmp);
            all
        };
        let (total, first) = (ordered(|timing| timing.total), ordered(|timing| timing.first));
        let at = |all: &[f64], share: f64| all.get((all.len() as f64 * share) as usize).copied().unwrap_or(f64::NAN);
        Self {
            requests: timings.len() as u64,
            per_second: timings.len() as f64 / time.as_secs_f64(),
            p50_ms: at(&total, 0.5),
            p99_ms: at(&total, 0.99),
            ttft_p50_ms: at(&first, 0.5),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_whole_only_with_every_chunk_and_its_end() {
        let chunk = |text: &str| format!("data: {{\"delta\":{{\"content\":\"{text}\"}}}}\n\n");
        let end = "data: [DONE]\n\n";
        let answer = |chunks: usize, end: &str| chunk("") + &chunk("\\\"").repeat(chunks) + end;
        assert!(is_whole(&answer(CHUNKS, end), Form::Chat));
        assert!(!is_whole(&answer(CHUNKS - 1, end), Form::Chat));
        assert!(!is_whole(&answer(CHUNKS, ""), Form::Chat));
        assert!(!is_whole(&answer(CHUNKS, end), Form::Ids));
    }

    #[test]
    fn percentiles_come_from_the_ordered_times() {
        let timings: Vec<Timing> =
            (1..=100).rev().map(|ms| Timing { first: Duration::from_millis(ms / 2), total: Duration::from_millis(ms) }).collect();
        let figures = Figures::new(&timings, Duration::from_secs(2));
        assert_eq!((figures.requests, figures.per_second, figures.p50_ms, figures.p99_ms), (100, 50.0, 51.0, 100.0));
    }
}
