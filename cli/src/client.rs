//! A small OpenAI client over HTTP/1.1, for `chat`, `demo` and `bench`.
//!
//! Owns one request, its stream and the clock readings of it. Refuses to retry: what it measures is one try.

use bytes::Bytes;
use http::{Method, Request, StatusCode, Uri};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper_util::client::legacy::Client as HyperClient;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::Value;
use std::time::{Duration, Instant};

/// Largest body that is read whole.
const BODY_BYTES_MAX: usize = 16 << 20;

/// Talks to one door.
#[derive(Clone)]
pub struct Client {
    http: HyperClient<HttpConnector, Full<Bytes>>,
    base: String,
    key: Option<String>,
}

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The address is no URL.
    #[error("`{url}` is not a valid URL: {source}")]
    Url {
        /// As given.
        url: String,
        /// Why.
        source: http::uri::InvalidUri,
    },
    /// Nobody answers.
    #[error("cannot reach {url}: {message}; is `kvasir local` running there?")]
    Connect {
        /// Where.
        url: String,
        /// Why.
        message: String,
    },
    /// The door refused.
    #[error("{status}: {message}")]
    Refused {
        /// HTTP status.
        status: StatusCode,
        /// The error body's message.
        message: String,
    },
    /// The stream broke or said something that is no OpenAI event.
    #[error("broken stream: {0}")]
    Stream(String),
}

/// One streamed answer with its clock readings.
#[derive(Clone, Debug, Default)]
pub struct Answer {
    /// The whole text.
    pub text: String,
    /// `usage` of the last chunk.
    pub usage: Value,
    /// The `kvasir` report.
    pub report: Value,
    /// Finish reason of choice 0.
    pub finish: Option<String>,
    /// From sending to the first text.
    pub ttft: Duration,
    /// From sending to the end.
    pub total: Duration,
}

// === impl Client ===

impl Client {
    /// A client of the door at `base` (`http://host:port`).
    pub fn new(base: &str, key: Option<String>) -> Result<Self, ClientError> {
        let base = base.trim_end_matches('/').to_owned();
        base.parse::<Uri>().map_err(|source| ClientError::Url { url: base.clone(), source })?;
        Ok(Self { http: HyperClient::builder(TokioExecutor::new()).build_http(), base, key })
    }

    /// `GET`, JSON answer.
    pub async fn get(&self, path: &str) -> Result<Value, ClientError> {
        let response = self.send(Method::GET, path, Bytes::new()).await?;
        self.json(response).await
    }

    /// `GET`, status and text.
    pub async fn get_text(&self, path: &str) -> Result<(StatusCode, String), ClientError> {
        let response = self.send(Method::GET, path, Bytes::new()).await?;
        let status = response.status();
        let bytes = whole(response).await?;
        Ok((status, String::from_utf8_lossy(&bytes).into_owned()))
    }

    /// `POST` of JSON, JSON answer.
    pub async fn post(&self, path: &str, body: &Value) -> Result<Value, ClientError> {
        let response = self.send(Method::POST, path, Bytes::from(body.to_string())).await?;
        self.json(response).await
    }

    /// A streamed chat answer; `on_text` sees each piece of text of choice 0 as it comes.
    pub async fn chat(&self, body: Value, on_text: impl FnMut(&str)) -> Result<Answer, ClientError> {
        self.stream("/v1/chat/completions", body, on_text).await
    }

    /// A streamed completion; `on_text` sees each piece of text of choice 0 as it comes.
    pub async fn complete(&self, body: Value, on_text: impl FnMut(&str)) -> Result<Answer, ClientError> {
        self.stream("/v1/completions", body, on_text).await
    }

    async fn stream(&self, path: &str, mut body: Value, mut on_text: impl FnMut(&str)) -> Result<Answer, ClientError> {
        if let Some(members) = body.as_object_mut() {
            members.insert("stream".into(), true.into());
            members.insert("stream_options".into(), serde_json::json!({"include_usage": true}));
        }
        let began = Instant::now();
        let response = self.send(Method::POST, path, Bytes::from(body.to_string())).await?;
        if !response.status().is_success() {
            return Err(refused(response).await);
        }
        let mut answer = Answer::default();
        let mut events = Events::new(response.into_body());
        while let Some(event) = events.next().await? {
            if event == "[DONE]" {
                answer.total = began.elapsed();
                return Ok(answer);
            }
            let chunk: Value = serde_json::from_str(&event).map_err(|error| ClientError::Stream(format!("{error}: {event}")))?;
            answer.take(&chunk, began, &mut on_text)?;
        }
        Err(ClientError::Stream("it ended without [DONE]".into()))
    }

    async fn send(&self, method: Method, path: &str, body: Bytes) -> Result<http::Response<Incoming>, ClientError> {
        let mut request =
            Request::builder().method(method).uri(format!("{}{path}", self.base)).header("content-type", "application/json");
        if let Some(key) = &self.key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        let request = request.body(Full::new(body)).map_err(|error| self.unreachable(&error))?;
        self.http.request(request).await.map_err(|error| self.unreachable(&error))
    }

    fn unreachable(&self, error: &dyn std::error::Error) -> ClientError {
        let message = error.source().map_or_else(|| error.to_string(), |source| format!("{error}: {source}"));
        ClientError::Connect { url: self.base.clone(), message }
    }

    async fn json(&self, response: http::Response<Incoming>) -> Result<Value, ClientError> {
        if !response.status().is_success() {
            return Err(refused(response).await);
        }
        let bytes = whole(response).await?;
        serde_json::from_slice(&bytes).map_err(|error| ClientError::Stream(error.to_string()))
    }
}

// === impl Answer ===

impl Answer {
    fn take(&mut self, chunk: &Value, began: Instant, on_text: &mut impl FnMut(&str)) -> Result<(), ClientError> {
        if let Some(error) = chunk.get("error") {
            return Err(ClientError::Stream(error["message"].as_str().unwrap_or("unknown error").to_owned()));
        }
        let choice = &chunk["choices"][0];
        let text = choice["delta"]["content"].as_str().or_else(|| choice["text"].as_str());
        if let Some(text) = text.filter(|text| !text.is_empty()) {
            if self.text.is_empty() {
                self.ttft = began.elapsed();
            }
            self.text.push_str(text);
            on_text(text);
        }
        if let Some(reason) = choice["finish_reason"].as_str() {
            self.finish = Some(reason.to_owned());
        }
        for (slot, name) in [(&mut self.usage, "usage"), (&mut self.report, "kvasir")] {
            if chunk.get(name).is_some_and(Value::is_object) {
                *slot = chunk[name].clone();
            }
        }
        Ok(())
    }

    /// Reused prompt tokens.
    pub fn cached_tokens(&self) -> u64 {
        self.usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0)
    }

    /// Prompt tokens.
    pub fn prompt_tokens(&self) -> u64 {
        self.usage["prompt_tokens"].as_u64().unwrap_or(0)
    }

    /// The worker that the router chose.
    pub fn worker(&self) -> &str {
        self.report["placement"]["worker_uid"].as_str().unwrap_or("-")
    }
}

async fn whole(response: http::Response<Incoming>) -> Result<Bytes, ClientError> {
    let body = http_body_util::Limited::new(response.into_body(), BODY_BYTES_MAX);
    Ok(body.collect().await.map_err(|error| ClientError::Stream(error.to_string()))?.to_bytes())
}

async fn refused(response: http::Response<Incoming>) -> ClientError {
    let status = response.status();
    let bytes = whole(response).await.unwrap_or_default();
    let message = serde_json::from_slice::<Value>(&bytes)
        .ok()
        .and_then(|body| body["error"]["message"].as_str().map(ToOwned::to_owned))
        .unwrap_or_else(|| String::from_utf8_lossy(&bytes).into_owned());
    ClientError::Refused { status, message }
}

/// Splits a body into the data of its server-sent events; comments are skipped.
struct Events {
    body: Incoming,
    buffer: Vec<u8>,
}

impl Events {
    fn new(body: Incoming) -> Self {
        Self { body, buffer: Vec::new() }
    }

    async fn next(&mut self) -> Result<Option<String>, ClientError> {
        loop {
            if let Some(end) = self.buffer.windows(2).position(|pair| pair == b"\n\n") {
                let event: Vec<u8> = self.buffer.drain(..end + 2).collect();
                let event = String::from_utf8_lossy(&event);
                let data: Vec<&str> = event.lines().filter_map(|line| line.strip_prefix("data:")).map(str::trim_start).collect();
                if data.is_empty() {
                    continue;
                }
                return Ok(Some(data.join("\n")));
            }
            match self.body.frame().await {
                None => return Ok(None),
                Some(Err(error)) => return Err(ClientError::Stream(error.to_string())),
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        self.buffer.extend_from_slice(&data);
                    }
                    if self.buffer.len() > BODY_BYTES_MAX {
                        return Err(ClientError::Stream("an event is larger than 16 MiB".into()));
                    }
                }
            }
        }
    }
}
