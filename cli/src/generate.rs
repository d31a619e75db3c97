//! `kvasir generate`: one text, continued over gRPC as a tenant does it, then the end.
//!
//! Owns one call, its bound in time and the exit code. Refuses to retry: whoever runs it (a person, `helm test`) wants to know of this one try.
//!
//! Text goes to standard output as it comes, everything else to standard error. An answer is whole only with its last event; a stream that ends
//! without it is a failure, however much text came.

use crate::args::GenerateArgs;
use kvasir_core::{Error, Reason};
use kvasir_proto::convert::error_from_status;
use kvasir_proto::inference::generate_event::Event;
use kvasir_proto::inference::generate_request::Prompt;
use kvasir_proto::inference::inference_client::InferenceClient;
use kvasir_proto::inference::{Finished, GenerateRequest, ModelsRequest, Parameters};
use std::fmt;
use std::io::{self, Write};
use std::time::{Duration, Instant};
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status};

/// Largest event: the text of one step, with room for whatever else a later version says.
const MESSAGE_BYTES_MAX: usize = 16 << 20;

/// Why there is no whole answer.
#[derive(Debug, thiserror::Error)]
pub enum GenerateError {
    /// The address is none of a gRPC door.
    #[error("--url `{url}`: {why}")]
    Url {
        /// As given.
        url: String,
        /// Why not, and what to write.
        why: String,
    },
    /// The key cannot be sent. It is not repeated.
    #[error("--key: only visible ASCII characters can be sent in a header; check for blanks and line ends in the middle")]
    Key,
    /// Nobody is there, or the connection broke.
    #[error("no way to {url}: {why}")]
    Way {
        /// Where.
        url: String,
        /// Why.
        why: String,
    },
    /// The service refused, or failed in the middle.
    #[error("{0}{hint}", hint = hint(.0))]
    Refused(Error),
    /// The stream ended before its last event.
    #[error("the answer is not whole: the stream ended without its last event")]
    Cut,
    /// It takes too long.
    #[error("no whole answer within {0:?}; raise --timeout-seconds, or look at why the service is slow")]
    Late(Duration),
    /// The text cannot be shown.
    #[error("output: {0}")]
    Output(#[from] io::Error),
}

/// What an answer cost.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Summary {
    /// Who answered.
    pub model: String,
    /// Prompt tokens.
    pub prompt_tokens: u32,
    /// Of these reused.
    pub cached_tokens: u32,
    /// Tokens of output.
    pub completion_tokens: u32,
    /// Until the first text, from the start of the program's work.
    pub first_text: Option<Duration>,
    /// Until the end.
    pub total: Duration,
}

type Client = InferenceClient<Channel>;

/// Continues `args.prompt`, writes the text to `out` as it comes.
pub async fn run(args: &GenerateArgs, out: &mut impl Write) -> Result<Summary, GenerateError> {
    let budget = Duration::from_secs(args.timeout_seconds);
    // Leaving the stream cancels the work.
    tokio::time::timeout(budget, answer(args, out)).await.unwrap_or(Err(GenerateError::Late(budget)))
}

async fn answer(args: &GenerateArgs, out: &mut impl Write) -> Result<Summary, GenerateError> {
    let began = Instant::now();
    let key = args.key.as_deref().and_then(credentials).transpose()?;
    let endpoint = endpoint(&args.url)?;
    let channel = endpoint.connect().await.map_err(|error| way(&args.url, &error))?;
    let mut client = Client::new(channel).max_decoding_message_size(MESSAGE_BYTES_MAX);
    let model = match &args.model {
        Some(model) => model.clone(),
        None => only_model(&mut client, key.as_ref(), &args.url).await?,
    };
    let request = with_key(request(args, model.clone()), key.as_ref());
    let failed = |status: Status| failure(&args.url, &status);
    let mut stream = client.generate(request).await.map_err(failed)?.into_inner();
    let mut first_text = None;
    while let Some(event) = stream.message().await.map_err(failed)? {
        match event.event {
            Some(Event::Delta(delta)) if !delta.text.is_empty() => {
                first_text.get_or_insert_with(|| began.elapsed());
                out.write_all(delta.text.as_bytes())?;
                out.flush()?;
            }
            Some(Event::Finished(finished)) => {
                writeln!(out)?;
                return Ok(Summary::new(model, &finished, first_text, began.elapsed()));
            }
            // The start, a delta of ids only, or what a later version has to say.
            Some(Event::Started(_) | Event::Delta(_)) | None => {}
        }
    }
    Err(GenerateError::Cut)
}

fn request(args: &GenerateArgs, model: String) -> GenerateRequest {
    GenerateRequest {
        model,
        prompt: Some(Prompt::Text(args.prompt.clone())),
        parameters: Some(Parameters {
            max_tokens: Some(args.max_tokens),
            min_tokens: args.min_tokens,
            temperature: Some(args.temperature),
            seed: args.seed,
            ..Parameters::default()
        }),
        ..GenerateRequest::default()
    }
}

async fn only_model(client: &mut Client, key: Option<&MetadataValue<Ascii>>, url: &str) -> Result<String, GenerateError> {
    let models =
        client.models(with_key(ModelsRequest {}, key)).await.map_err(|status| failure(url, &status))?.into_inner().models;
    match &*models {
        [model] => Ok(model.id.clone()),
        [] => {
            Err(GenerateError::Refused(Error::new(Reason::NotReady, "no model is served yet; wait until the service is ready")))
        }
        several => {
            let names: Vec<&str> = several.iter().map(|model| &*model.id).collect();
            let message = format!("several models are served; choose one with --model: {}", names.join(", "));
            Err(GenerateError::Refused(Error::invalid("model", message)))
        }
    }
}

fn endpoint(url: &str) -> Result<Endpoint, GenerateError> {
    let wrong = |why: &str| GenerateError::Url { url: url.to_owned(), why: why.to_owned() };
    if url.starts_with("https:") {
        return Err(wrong("this command speaks no TLS: write http://HOST:PORT, or end TLS in front of it"));
    }
    let endpoint = Endpoint::from_shared(url.to_owned()).map_err(|error| wrong(&error.to_string()))?;
    let uri = endpoint.uri();
    if uri.scheme_str() != Some("http") || uri.host().is_none() {
        return Err(wrong("write http://HOST:PORT"));
    }
    Ok(endpoint.tcp_nodelay(true))
}

/// The header that shows a key; none for an empty one.
fn credentials(key: &str) -> Option<Result<MetadataValue<Ascii>, GenerateError>> {
    let line = key.lines().map(str::trim).find(|line| !line.is_empty())?;
    if !line.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Some(Err(GenerateError::Key));
    }
    Some(format!("Bearer {line}").parse().map_err(|_| GenerateError::Key).map(|mut value: MetadataValue<Ascii>| {
        value.set_sensitive(true);
        value
    }))
}

fn with_key<T>(message: T, key: Option<&MetadataValue<Ascii>>) -> Request<T> {
    let mut request = Request::new(message);
    if let Some(key) = key {
        request.metadata_mut().insert("authorization", key.clone());
    }
    request
}

/// A status with details is the service's word; one without was made on the way there.
fn failure(url: &str, status: &Status) -> GenerateError {
    if status.details().is_empty() {
        let why = format!("{} ({:?}); is there a gRPC door?", status.message(), status.code());
        return GenerateError::Way { url: url.to_owned(), why };
    }
    GenerateError::Refused(error_from_status(status))
}

fn way(url: &str, error: &dyn std::error::Error) -> GenerateError {
    let mut root = error;
    while let Some(source) = root.source() {
        root = source;
    }
    GenerateError::Way { url: url.to_owned(), why: root.to_string() }
}

/// What else the refusal says.
fn hint(error: &Error) -> String {
    let field = error.field.as_ref().map_or(String::new(), |field| format!(" (field `{field}`)"));
    let after = error.retry_after.map_or(String::new(), |after| format!(" (retry after {} s)", after.as_secs_f64().ceil()));
    field + &after
}

// === impl GenerateError ===

impl GenerateError {
    /// The exit code that tells scripts what went wrong.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Refused(_) | Self::Cut | Self::Output(_) => 1,
            Self::Url { .. } | Self::Key => 2,
            Self::Way { .. } => 3,
            Self::Late(_) => 4,
        }
    }
}

// === impl Summary ===

impl Summary {
    fn new(model: String, finished: &Finished, first_text: Option<Duration>, total: Duration) -> Self {
        let usage = finished.usage.unwrap_or_default();
        Self {
            model,
            prompt_tokens: usage.prompt_tokens,
            cached_tokens: usage.cached_tokens,
            completion_tokens: usage.completion_tokens,
            first_text,
            total,
        }
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let computed = self.prompt_tokens.saturating_sub(self.cached_tokens);
        write!(f, "[{}: {} cached + {computed} computed", self.model, self.cached_tokens)?;
        if let Some(first) = self.first_text {
            write!(f, " · first text {:.0} ms", first.as_secs_f64() * 1e3)?;
        }
        write!(f, " · {} tokens in {:.0} ms]", self.completion_tokens, self.total.as_secs_f64() * 1e3)
    }
}

#[cfg(test)]
mod tests;
