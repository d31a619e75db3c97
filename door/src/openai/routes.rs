//! Routes of the HTTP door.

use super::error::error_response;
use super::pieces::Shape;
use super::print::{ChunkPrinter, WholePrinter};
use super::{ask, body, sse, tokens};
use crate::answer::{Answer, Event};
use crate::auth::Tenant;
use crate::call::{Call, OTHER, Route};
use crate::door::Door;
use crate::prepare::find_model;
use crate::serve::ServedModel;
use crate::server::Ending;
use axum::body::Body;
use axum::extract::{Path, Request, State};
use axum::response::Response;
use axum::routing::{MethodRouter, get, post};
use axum::{Extension, Router};
use http::{HeaderValue, StatusCode, header};
use kvasir_core::{Error, Reason, StateTimes, Usage};
use kvasir_telemetry::Registry;
use serde_json::{Value, json};
use std::sync::Arc;

const CHAT: Route = Route { door: "http", name: "chat_completions", generates: true };
const COMPLETIONS: Route = Route { door: "http", name: "completions", generates: true };
const MODELS: Route = Route { door: "http", name: "models", generates: false };
const TOKENIZE: Route = Route { door: "http", name: "tokenize", generates: false };
const DETOKENIZE: Route = Route { door: "http", name: "detokenize", generates: false };
const UNKNOWN: Route = Route { door: "http", name: OTHER, generates: false };

/// Every route; the gate in front of it decides who may call.
pub(crate) fn router(door: Door) -> Router {
    let only = |methods: MethodRouter<Door>| methods.fallback(method_not_allowed);
    Router::new()
        .route("/v1/chat/completions", only(post(chat)))
        .route("/v1/completions", only(post(completions)))
        .route("/v1/models", only(get(models)))
        .route("/v1/models/{*id}", only(get(model)))
        .route("/tokenize", only(post(tokenize)))
        .route("/detokenize", only(post(detokenize)))
        .route("/healthz", only(get(healthz)))
        .route("/readyz", only(get(readyz)))
        .route("/metrics", only(get(metrics)))
        .fallback(not_found)
        .with_state(door)
}

async fn chat(State(door): State<Door>, Extension(tenant): Extension<Arc<Tenant>>, request: Request) -> Response {
    generate(door, CHAT, Shape::Chat, tenant, request).await
}

async fn completions(State(door): State<Door>, Extension(tenant): Extension<Arc<Tenant>>, request: Request) -> Response {
    generate(door, COMPLETIONS, Shape::Text, tenant, request).await
}

async fn generate(door: Door, route: Route, shape: Shape, tenant: Arc<Tenant>, request: Request) -> Response {
    let mut call = door.open(route, request.headers());
    let ending = request.extensions().get::<Ending>().cloned();
    let read = async {
        let value = body::json(door.settings(), request).await?;
        match shape {
            Shape::Chat => ask::chat(value),
            Shape::Text => ask::completions(value),
        }
    };
    let body = match read.await {
        Ok(body) => body,
        Err(error) => return refuse(call, &error),
    };
    // From here on the answer is timed: how fast a client sends its body is not our time.
    call.restart();
    let (head, answer) = match door.start(call, &tenant, body.ask, ending).await {
        Ok(started) => started,
        Err(error) => return error_response(&error),
    };
    let id = head.id.clone();
    let mut response = if body.stream {
        sse::respond(door.settings(), answer, ChunkPrinter::new(shape, head, body.include_usage)).await
    } else {
        whole(answer, WholePrinter::new(shape, head)).await
    };
    if let Ok(id) = HeaderValue::from_str(&id) {
        response.headers_mut().insert("x-request-id", id);
    }
    response
}

async fn whole(mut answer: Answer, mut printer: WholePrinter) -> Response {
    loop {
        match answer.next().await {
            Some(Event::Started(_)) => {}
            Some(Event::Output(tokens)) => printer.output(tokens),
            Some(Event::Finished(end)) => {
                return printer.finish(&end).map_or_else(|error| error_response(&error), json_response);
            }
            Some(Event::Failed(error)) => return error_response(&error),
            None => return error_response(&Error::new(Reason::Internal, "the answer had no end")),
        }
    }
}

async fn models(State(door): State<Door>, request: Request) -> Response {
    let call = door.open(MODELS, request.headers());
    let data: Vec<Value> = door.serve().catalog().models.iter().map(model_object).collect();
    succeed(call, &json!({ "object": "list", "data": data }))
}

async fn model(State(door): State<Door>, Path(id): Path<String>, request: Request) -> Response {
    let mut call = door.open(MODELS, request.headers());
    match find_model(&door.serve().catalog(), Some(&id)) {
        Ok(model) => {
            call.model(&model.name);
            succeed(call, &model_object(model))
        }
        Err(error) => refuse(call, &error),
    }
}

fn model_object(model: &ServedModel) -> Value {
    json!({
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "kvasir",
        "max_model_len": model.context,
    })
}

async fn tokenize(State(door): State<Door>, Extension(tenant): Extension<Arc<Tenant>>, request: Request) -> Response {
    let call = door.open(TOKENIZE, request.headers());
    let reply = async {
        let value = body::json(door.settings(), request).await?;
        tokens::tokenize(&door, &tenant, value).await
    };
    with_model(call, reply.await)
}

async fn detokenize(State(door): State<Door>, request: Request) -> Response {
    let call = door.open(DETOKENIZE, request.headers());
    let reply = body::json(door.settings(), request).await.and_then(|value| tokens::detokenize(&door, value));
    with_model(call, reply)
}

async fn healthz() -> Response {
    plain(StatusCode::OK, "ok\n".to_owned())
}

async fn readyz(State(door): State<Door>) -> Response {
    match door.serve().ready() {
        Ok(()) => plain(StatusCode::OK, "ready\n".to_owned()),
        Err(error) => plain(StatusCode::SERVICE_UNAVAILABLE, format!("{}: {}\n", error.reason.code(), error.message)),
    }
}

async fn metrics(State(door): State<Door>) -> Response {
    let mut response = Response::new(Body::from(door.render_metrics()));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(Registry::CONTENT_TYPE));
    response
}

async fn not_found(State(door): State<Door>, request: Request) -> Response {
    let path = crate::params::quoted(request.uri().path());
    let message = format!("there is no route {path}; see /v1/chat/completions, /v1/completions, /v1/models");
    refuse(door.open(UNKNOWN, request.headers()), &Error::new(Reason::NotFound, message))
}

async fn method_not_allowed(State(door): State<Door>, request: Request) -> Response {
    let message = format!("{} is not possible on this route; see the API description", request.method());
    refuse(door.open(UNKNOWN, request.headers()), &Error::new(Reason::MethodNotAllowed, message))
}

fn with_model(mut call: Call, reply: Result<(String, Value), Error>) -> Response {
    match reply {
        Ok((model, value)) => {
            call.model(&model);
            succeed(call, &value)
        }
        Err(error) => refuse(call, &error),
    }
}

fn succeed(mut call: Call, value: &Value) -> Response {
    call.succeed(Usage::default(), Vec::new(), StateTimes::default());
    json_response(value.to_string())
}

fn refuse(mut call: Call, error: &Error) -> Response {
    call.fail(error, Usage::default(), StateTimes::default());
    error_response(error)
}

fn json_response(text: String) -> Response {
    let mut response = Response::new(Body::from(text));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

fn plain(status: StatusCode, text: String) -> Response {
    let mut response = Response::new(Body::from(text));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    response
}
