//! The inference service and the routes of the gRPC door.

use super::ask;
use super::health::HealthService;
use super::reply::EventPrinter;
use crate::answer::Answer;
use crate::ask::{Ask, Input};
use crate::auth::Tenant;
use crate::call::{Call, Route};
use crate::door::Door;
use crate::openai::without_start;
use crate::prepare::find_model;
use crate::server::Ending;
use axum::Router;
use axum::extract::State;
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response as HttpResponse;
use futures::StreamExt as _;
use futures::stream::{self, BoxStream};
use http::{HeaderMap, HeaderName};
use kvasir_core::{Error, Reason, StateTimes, Usage};
use kvasir_proto::convert::error_to_status;
use kvasir_proto::inference as wire;
use kvasir_proto::inference::inference_server::{Inference, InferenceServer};
use kvasir_proto::inference::tokenize_request::Input as TokenizeInput;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;
use tonic::service::Routes;
use tonic::{Code, Request, Response, Status};
use tonic_health::pb::health_server::HealthServer;

/// Full name of the service.
pub(super) const INFERENCE: &str = "kvasir.inference.v1.Inference";

const HEALTH: &str = "grpc.health.v1.Health";
const GENERATE: Route = Route { door: "grpc", name: "generate", generates: true };
const CHAT: Route = Route { door: "grpc", name: "chat", generates: true };
const MODELS: Route = Route { door: "grpc", name: "models", generates: false };
const TOKENIZE: Route = Route { door: "grpc", name: "tokenize", generates: false };

type EventStream = BoxStream<'static, Result<wire::GenerateEvent, Status>>;

struct InferenceService(Door);

/// Every service; the gate in front of it decides who may call.
pub(crate) fn router(door: &Door) -> Router {
    let limit = door.settings().body_bytes_max;
    let inference = InferenceServer::new(InferenceService(door.clone())).max_decoding_message_size(limit);
    let mut routes = Routes::new(inference).add_service(HealthServer::new(HealthService(door.clone())));
    let described = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(kvasir_proto::FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            .with_service_name(INFERENCE)
            .with_service_name(HEALTH)
    };
    // Older clients know only the alpha version. Both read static data that a test reads as well.
    match (described().build_v1(), described().build_v1alpha()) {
        (Ok(v1), Ok(v1alpha)) => routes = routes.add_service(v1).add_service(v1alpha),
        (Err(error), _) | (_, Err(error)) => {
            tracing::error!(%error, "the service descriptions cannot be read; reflection is off");
        }
    }
    routes.into_axum_router().layer(from_fn_with_state(limit, name_limit))
}

/// A refusal as a whole gRPC response.
pub(crate) fn status_response(error: &Error) -> HttpResponse {
    error_to_status(error).into_http()
}

/// tonic answers a message over its limit with OUT_OF_RANGE, which no method here uses; gRPC's word for it is RESOURCE_EXHAUSTED.
async fn name_limit(State(limit): State<usize>, request: axum::extract::Request, next: Next) -> HttpResponse {
    const STATUS: HeaderName = HeaderName::from_static("grpc-status");
    let response = next.run(request).await;
    let out_of_range = (Code::OutOfRange as i32).to_string();
    if response.headers().get(STATUS).is_none_or(|status| status.as_bytes() != out_of_range.as_bytes()) {
        return response;
    }
    let message =
        format!("the message is larger than the limit of {limit} bytes; shorten it, or ask the operator to raise the limit");
    status_response(&Error::new(Reason::PayloadTooLarge, message))
}

fn tenant<T>(request: &Request<T>) -> Result<Arc<Tenant>, Error> {
    let missing = || Error::new(Reason::Unauthenticated, "the call did not pass the gate");
    request.extensions().get::<Arc<Tenant>>().cloned().ok_or_else(missing)
}

fn open<T>(door: &Door, route: Route, request: &Request<T>) -> Call {
    door.open(route, request.metadata().as_ref())
}

fn refuse(mut call: Call, error: &Error) -> Status {
    call.fail(error, Usage::default(), StateTimes::default());
    error_to_status(error)
}

/// Time that the caller will wait, from gRPC's own header.
fn caller_timeout(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get("grpc-timeout")?.to_str().ok()?;
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let value =
        Some(digits).filter(|digits| digits.len() <= 8 && digits.bytes().all(|byte| byte.is_ascii_digit()))?.parse().ok()?;
    Some(match unit {
        "H" => Duration::from_secs(value * 3600),
        "M" => Duration::from_secs(value * 60),
        "S" => Duration::from_secs(value),
        "m" => Duration::from_millis(value),
        "u" => Duration::from_micros(value),
        "n" => Duration::from_nanos(value),
        _ => return None,
    })
}

/// A caller's timeout is a deadline, unless it states an earlier one or waits longer than a deadline can be.
fn bound_by_timeout(ask: &mut Ask, headers: &HeaderMap) {
    let Some(timeout) = caller_timeout(headers).filter(|timeout| *timeout <= crate::params::DURATION_MAX) else { return };
    let timeout_ms = (timeout.as_millis() as i64).max(1);
    let deadline = &mut ask.knobs.extension.deadline_ms;
    *deadline = Some(deadline.map_or(timeout_ms, |stated| stated.min(timeout_ms)));
}

// === impl InferenceService ===

impl InferenceService {
    async fn answer(
        &self,
        call: Call,
        tenant: &Tenant,
        ask: Ask,
        ending: Option<Ending>,
    ) -> Result<Response<EventStream>, Status> {
        let (head, mut answer) = self.0.start(call, tenant, ask, ending).await.map_err(|error| error_to_status(&error))?;
        let mut printer = EventPrinter::new(head);
        // A refusal before the first event is the call's own status; a long silence lets the headers go.
        let wait = answer.received() + self.0.settings().headers_wait;
        let first = tokio::time::timeout_at(wait, answer.next()).await;
        let mut ready = VecDeque::new();
        if let Ok(Some(event)) = first {
            ready.extend(printer.print(event).map_err(|error| error_to_status(&error))?);
        }
        Ok(Response::new(stream::unfold(Streaming { answer, printer, ready }, step).boxed()))
    }
}

struct Streaming {
    answer: Answer,
    printer: EventPrinter,
    ready: VecDeque<wire::GenerateEvent>,
}

async fn step(mut open: Streaming) -> Option<(Result<wire::GenerateEvent, Status>, Streaming)> {
    loop {
        if let Some(event) = open.ready.pop_front() {
            return Some((Ok(event), open));
        }
        match open.printer.print(open.answer.next().await?) {
            Ok(events) => open.ready.extend(events),
            Err(error) => return Some((Err(error_to_status(&error)), open)),
        }
    }
}

#[tonic::async_trait]
impl Inference for InferenceService {
    type GenerateStream = EventStream;
    type ChatStream = EventStream;

    async fn generate(&self, request: Request<wire::GenerateRequest>) -> Result<Response<EventStream>, Status> {
        let call = open(&self.0, GENERATE, &request);
        let tenant = match tenant(&request) {
            Ok(tenant) => tenant,
            Err(error) => return Err(refuse(call, &error)),
        };
        let (metadata, extensions, message) = request.into_parts();
        match ask::generate(message) {
            Ok(mut ask) => {
                bound_by_timeout(&mut ask, metadata.as_ref());
                self.answer(call, &tenant, ask, extensions.get().cloned()).await
            }
            Err(error) => Err(refuse(call, &error)),
        }
    }

    async fn chat(&self, request: Request<wire::ChatRequest>) -> Result<Response<EventStream>, Status> {
        let call = open(&self.0, CHAT, &request);
        let tenant = match tenant(&request) {
            Ok(tenant) => tenant,
            Err(error) => return Err(refuse(call, &error)),
        };
        let (metadata, extensions, message) = request.into_parts();
        match ask::chat(message) {
            Ok(mut ask) => {
                bound_by_timeout(&mut ask, metadata.as_ref());
                self.answer(call, &tenant, ask, extensions.get().cloned()).await
            }
            Err(error) => Err(refuse(call, &error)),
        }
    }

    async fn tokenize(&self, request: Request<wire::TokenizeRequest>) -> Result<Response<wire::TokenizeResponse>, Status> {
        let mut call = open(&self.0, TOKENIZE, &request);
        let reply = match tenant(&request) {
            Ok(tenant) => self.tokens(&tenant, request.into_inner(), &mut call).await,
            Err(error) => Err(error),
        };
        match reply {
            Ok(reply) => {
                call.succeed(Usage::default(), Vec::new(), StateTimes::default());
                Ok(Response::new(reply))
            }
            Err(error) => Err(refuse(call, &error)),
        }
    }

    async fn models(&self, request: Request<wire::ModelsRequest>) -> Result<Response<wire::ModelsResponse>, Status> {
        let mut call = open(&self.0, MODELS, &request);
        let catalog = self.0.serve().catalog();
        let model = |model: &crate::ServedModel| wire::Model {
            id: model.name.clone(),
            created_unix_s: model.created,
            max_model_len: model.context,
            identity: model.identity.0.to_hex(),
        };
        call.succeed(Usage::default(), Vec::new(), StateTimes::default());
        Ok(Response::new(wire::ModelsResponse { models: catalog.models.iter().map(model).collect() }))
    }
}

impl InferenceService {
    async fn tokens(
        &self,
        tenant: &Tenant,
        request: wire::TokenizeRequest,
        call: &mut Call,
    ) -> Result<wire::TokenizeResponse, Error> {
        let catalog = self.0.serve().catalog();
        let model = find_model(&catalog, Some(request.model.as_str()).filter(|name| !name.is_empty()))?;
        call.model(&model.name);
        let (input, plain) = match request.input {
            None => return Err(Error::invalid("input", "`input` is missing; set `text` or `chat`")),
            Some(TokenizeInput::Text(text)) => (Input::Text(vec![text]), true),
            Some(TokenizeInput::Chat(chat)) => (Input::Chat(ask::conversation(chat)?), false),
        };
        let mut tokens = self.0.preparer().encode(&model.text, input, tenant.domain(None)).await?.pop().unwrap_or_default();
        if plain && request.add_special_tokens == Some(false) {
            without_start(&model.text, &mut tokens);
        }
        Ok(wire::TokenizeResponse { count: tokens.len() as u32, tokens, max_model_len: model.context })
    }
}
