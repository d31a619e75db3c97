//! Bad input: each case has its status, its code, and the parameter's name.

use crate::testing::{MODEL, Rig, Scripted, call, chat, complete, get, model, post, rig, rig_with, secret, speak};
use crate::{DoorSettings, TenantTable};
use axum::body::{Body, Bytes};
use http::Request as HttpRequest;
use kvasir_core::{Error, FinishReason, Grammar, Reason};
use proptest::prelude::*;
use serde_json::{Value, json};

fn plain() -> Rig {
    rig(speak(&["hello"], FinishReason::Stop))
}

fn with(base: &Value, member: &str, value: Value) -> Value {
    let mut body = base.clone();
    body[member] = value;
    body
}

fn talk() -> Value {
    json!({ "model": MODEL, "messages": [{ "role": "user", "content": "hi" }] })
}

fn text() -> Value {
    json!({ "model": MODEL, "prompt": "hello" })
}

async fn param(rig: &Rig, body: &Value) -> String {
    let reply = if body.get("messages").is_some() { chat(rig, body).await } else { complete(rig, body).await };
    assert_eq!(reply.status, 400, "{body} gave {}", reply.body);
    assert_eq!(reply.headers["x-should-retry"], "false");
    let error = reply.json()["error"].clone();
    assert_eq!(error["type"], "invalid_request_error");
    error["param"].as_str().unwrap_or_else(|| panic!("{body} gave {error}")).to_owned()
}

/// R25: every malformed bias is refused by name, and none reaches a worker.
#[tokio::test]
async fn a_bad_logit_bias_is_refused() {
    let rig = plain();
    let many: serde_json::Map<String, Value> = (0..100_000).map(|id| (id.to_string(), json!(1))).collect();
    let cases = [
        json!({ "999999": 5 }),
        json!({ "-1": 5 }),
        json!({ "abc": 1 }),
        json!({ "10": 1_000_000_000 }),
        json!({ "10": null }),
        json!({ "320": 1 }),
        json!({ "010": 1 }),
        json!({ "+10": 1 }),
        json!({ "1.5": 1 }),
        json!({ "": 1 }),
        json!([1]),
        json!("x"),
        Value::Object(many),
    ];
    for bias in cases {
        for body in [with(&talk(), "logit_bias", bias.clone()), with(&text(), "logit_bias", bias.clone())] {
            assert!(param(&rig, &body).await.starts_with("logit_bias"), "{body}");
        }
    }
    assert_eq!(rig.serve.seen.lock().unwrap().len(), 0);
    let edge = with(&talk(), "logit_bias", json!({ "319": 100, "0": -100 }));
    assert_eq!(chat(&rig, &edge).await.status, 200);
}

/// R26: prompts and messages with nothing in them, or with ids that no token has.
#[tokio::test]
async fn a_prompt_without_content_is_refused() {
    let rig = plain();
    for prompt in [
        json!(""),
        json!([""]),
        json!([]),
        json!([[]]),
        json!([[-1]]),
        json!([[320]]),
        json!([1.5]),
        json!(5),
        json!({}),
        json!([null]),
        json!(["a", 1]),
        json!([[1], "a"]),
        json!([true]),
        Value::Null,
    ] {
        assert_eq!(param(&rig, &with(&text(), "prompt", prompt)).await, "prompt");
    }
    let mut missing = text();
    missing.as_object_mut().unwrap().remove("prompt");
    assert_eq!(param(&rig, &missing).await, "prompt");
    let user = |content: Value| json!([{ "role": "user", "content": content }]);
    let cases = [
        (json!([]), "messages"),
        (json!("hi"), "messages"),
        (json!([1]), "messages[0]"),
        (user(Value::Null), "messages[0].content"),
        (user(json!(5)), "messages[0].content"),
        (user(json!([])), "messages[0].content"),
        (user(json!([{ "type": "image_url", "image_url": {} }])), "messages[0].content[0].type"),
        (user(json!([{ "type": "text" }])), "messages[0].content[0].text"),
        (json!([{ "content": "x" }]), "messages[0].role"),
        (json!([{ "role": "robot", "content": "x" }]), "messages[0].role"),
        (json!([{ "role": "user", "content": "x", "colour": 1 }]), "messages[0].colour"),
        (json!([{ "role": "user", "content": "x", "tool_calls": [{}] }]), "messages[0].tool_calls"),
        (json!([{ "role": "assistant" }]), "messages[0].content"),
        (json!([{ "role": "assistant", "tool_calls": [{ "function": {} }] }]), "messages[0].tool_calls[0].function.name"),
    ];
    for (messages, field) in cases {
        assert_eq!(param(&rig, &with(&talk(), "messages", messages)).await, field);
    }
    assert_eq!(chat(&rig, &with(&talk(), "messages", user(json!("")))).await.status, 200);
    assert_eq!(complete(&rig, &with(&text(), "prompt", json!([[319]]))).await.status, 200);
}

/// A worker knows one name for what constrains the output; the client reads the one that it wrote.
#[tokio::test]
async fn a_refused_grammar_is_named_as_the_client_wrote_it() {
    let refused = || Error::invalid("response_format", "response_format cannot be used: too wide");
    let rig = rig(move |_| Err(refused()));
    let schema = json!({ "type": "json_schema", "json_schema": { "schema": {} } });
    for (member, value) in [("guided_regex", json!("a+")), ("guided_choice", json!(["a"])), ("response_format", schema)] {
        let reply = chat(&rig, &with(&talk(), member, value)).await;
        assert_eq!(reply.status, 400);
        let error = reply.json()["error"].clone();
        assert_eq!((&error["param"], &error["message"]), (&json!(member), &json!(format!("{member} cannot be used: too wide"))));
    }
}

#[tokio::test]
async fn a_value_that_nests_too_deep_is_named_by_its_own_member() {
    let rig = plain();
    let deep = (0..80).fold(json!(1), |inner, _| json!([inner]));
    let tool = json!([{ "type": "function", "function": { "name": "f", "parameters": deep } }]);
    assert_eq!(param(&rig, &with(&talk(), "chat_template_kwargs", json!({ "x": deep }))).await, "chat_template_kwargs");
    assert_eq!(param(&rig, &with(&talk(), "tools", tool)).await, "tools");
}

/// R29 on both routes, streamed or not, and the rest of the members.
#[tokio::test]
async fn each_bad_member_is_refused_by_name() {
    let rig = plain();
    let shared = [
        ("stop", json!("")),
        ("stop", json!([""])),
        ("stop", json!(["", "x"])),
        ("stop", json!([null])),
        ("stop", json!(5)),
        ("stop", json!(["a", "b", "c", "d", "e"])),
        ("temperature", json!(3)),
        ("temperature", json!("1")),
        ("temperature", json!(-1)),
        ("top_p", json!(2)),
        ("top_k", json!(1.5)),
        ("min_p", json!(true)),
        ("n", json!(0)),
        ("n", json!(1000)),
        ("max_tokens", json!(0)),
        ("max_tokens", json!(-5)),
        ("max_tokens", json!(1e30)),
        ("seed", json!("x")),
        ("seed", json!(1.5)),
        ("stream", json!("yes")),
        ("stream_options", json!({ "include_usage": true })),
        ("repetition_penalty", json!(-1)),
        ("stop_token_ids", json!([-1])),
        ("response_format", json!("json")),
        ("response_format.type", json!(null)),
        ("response_format.type", json!("xml")),
        ("cache_salt", json!("")),
        ("cache_salt", json!(5)),
        ("ignore_eos", json!(1)),
        ("kvasir", json!(1)),
        ("temprature", json!(1)),
        ("guided_choice", json!([])),
    ];
    for (field, value) in shared {
        let (member, value) = match field.split_once('.') {
            Some((member, inner)) => (member, json!({ inner: value })),
            None => (field, value),
        };
        for base in [talk(), text()] {
            assert_eq!(param(&rig, &with(&base, member, value.clone())).await, field, "{value}");
        }
    }
    let extension = [
        ("kvasir.cahe", json!({ "cahe": {} })),
        ("kvasir.report", json!({ "report": 1 })),
        ("kvasir.cache.mode", json!({ "cache": { "mode": "maybe" } })),
        ("kvasir.cache.ttl_s", json!({ "cache": { "ttl_s": 0 } })),
        ("kvasir.cache.size", json!({ "cache": { "size": 1 } })),
        ("kvasir.speculation.mode", json!({ "speculation": { "mode": "on" } })),
        ("kvasir.speculation.depth", json!({ "speculation": { "depth": 1 } })),
        ("kvasir.contract", json!({ "contract": "exact" })),
        ("kvasir.priority", json!({ "priority": 1000 })),
        ("kvasir.deadline_ms", json!({ "deadline_ms": 0 })),
    ];
    for (field, value) in extension {
        assert_eq!(param(&rig, &with(&talk(), "kvasir", value)).await, field);
    }
    let chat_only = [
        ("top_logprobs", json!(2)),
        ("logprobs", json!(3)),
        ("functions", json!([])),
        ("function_call", json!("auto")),
        ("audio", json!({})),
        ("modalities", json!(["audio"])),
        ("reasoning_effort", json!("low")),
        ("verbosity", json!("low")),
        ("tool_choice", json!("required")),
        ("tools", json!({})),
        ("tools", json!([1])),
        ("prompt", json!("x")),
        ("continue_final_message", json!(true)),
        ("chat_template_kwargs.messages", json!([])),
    ];
    for (field, value) in chat_only {
        let (member, value) = match field.split_once('.') {
            Some((member, inner)) => (member, json!({ inner: value })),
            None => (field, value),
        };
        assert_eq!(param(&rig, &with(&talk(), member, value)).await, field);
    }
    for (field, value) in
        [("suffix", json!("x")), ("best_of", json!(2)), ("logprobs", json!(21)), ("echo", json!("x")), ("logprobs", json!(true))]
    {
        assert_eq!(param(&rig, &with(&text(), field, value)).await, field);
    }
    assert_eq!(rig.serve.seen.lock().unwrap().len(), 0, "nothing bad was served");
}

#[tokio::test]
async fn null_means_absent_and_harmless_members_are_taken() {
    let rig = plain();
    let mut body = talk();
    for member in [
        "stop",
        "temperature",
        "n",
        "logprobs",
        "logit_bias",
        "tools",
        "response_format",
        "functions",
        "reasoning_effort",
        "kvasir",
        "seed",
    ] {
        body[member] = Value::Null;
    }
    for (member, value) in
        [("user", json!("u")), ("metadata", json!({ "a": "b" })), ("store", json!(false)), ("service_tier", json!("auto"))]
    {
        body[member] = value;
    }
    assert_eq!(chat(&rig, &body).await.status, 200);
    assert_eq!(complete(&rig, &with(&text(), "suffix", Value::Null)).await.status, 200);
}

#[tokio::test]
async fn each_constraint_reaches_the_request() {
    let rig = plain();
    let schema = json!({ "type": "object", "properties": { "z": {}, "a": {} } });
    let ordered = "{\"type\":\"object\",\"properties\":{\"z\":{},\"a\":{}}}";
    let cases = [
        ("response_format", json!({ "type": "text" }), None),
        ("response_format", json!({ "type": "json_object" }), Some(Grammar::JsonObject)),
        (
            "response_format",
            json!({ "type": "json_schema", "json_schema": { "name": "x", "strict": true, "schema": schema } }),
            Some(Grammar::JsonSchema(ordered.into())),
        ),
        ("guided_json", schema.clone(), Some(Grammar::JsonSchema(ordered.into()))),
        ("guided_json", json!(ordered), Some(Grammar::JsonSchema(ordered.into()))),
        ("guided_regex", json!("a+"), Some(Grammar::Regex("a+".into()))),
        ("guided_choice", json!(["a.b", "c|d"]), Some(Grammar::Regex(r"(a\.b|c\|d)".into()))),
        ("guided_grammar", json!("start: \"a\""), Some(Grammar::Lark("start: \"a\"".into()))),
    ];
    for (member, value, grammar) in cases {
        assert_eq!(chat(&rig, &with(&talk(), member, value)).await.status, 200);
        assert_eq!(rig.serve.last().grammar, grammar, "{member}");
    }
}

#[tokio::test]
async fn a_developer_speaks_as_the_system_and_parts_are_joined() {
    let rig = plain();
    let prompt = async |message: Value| {
        assert_eq!(chat(&rig, &with(&talk(), "messages", json!([message]))).await.status, 200);
        rig.serve.last().prompt
    };
    let system = prompt(json!({ "role": "system", "content": "be\nkind" })).await;
    assert_eq!(prompt(json!({ "role": "developer", "content": "be\nkind" })).await, system);
    let parts = json!([{ "type": "text", "text": "be" }, { "type": "text", "text": "kind" }]);
    assert_eq!(prompt(json!({ "role": "system", "content": parts })).await, system);
}

/// R80: on each route that names a model.
#[tokio::test]
async fn an_unknown_model_is_a_404_and_no_new_series() {
    let rig = plain();
    let routes = [
        ("/v1/chat/completions", json!({ "model": "nope", "messages": [{ "role": "user", "content": "x" }] })),
        ("/v1/completions", json!({ "model": "nope", "prompt": "x" })),
        ("/tokenize", json!({ "model": "nope", "prompt": "x" })),
        ("/detokenize", json!({ "model": "nope", "tokens": [1] })),
    ];
    for (path, body) in routes {
        let reply = post(&rig, path, body.to_string()).await;
        assert_eq!((reply.status.as_u16(), &reply.json()["error"]["code"]), (404, &json!("model_not_found")), "{path}");
    }
    assert_eq!(get(&rig, "/v1/models/nope").await.status, 404);
    assert_eq!(get(&rig, "/v1/models/tiny").await.json()["id"], "tiny");
    let series = async || get(&rig, "/metrics").await.body.lines().filter(|line| !line.starts_with('#')).count();
    let before = series().await;
    for index in 0..100 {
        let body = with(&talk(), "model", json!(format!("{index}-{}", "x".repeat(index * 10))));
        assert_eq!(chat(&rig, &body).await.status, 404);
        assert_eq!(get(&rig, &format!("/v1/nothing/{index}")).await.status, 404);
    }
    // One series for 404s on an unknown path appears once, whatever the number of paths.
    assert!(series().await <= before + 1);
    let metrics = get(&rig, "/metrics").await.body;
    let counted =
        "kvasir_door_requests_total{door=\"http\",route=\"chat_completions\",model=\"other\",outcome=\"model_not_found\"} 101";
    assert!(metrics.contains(counted), "{metrics}");
}

/// R79: a body over the limit is refused as such, whatever way it comes, and is not read to its end.
#[tokio::test]
async fn a_body_over_the_limit_is_a_413_that_names_it() {
    let settings = DoorSettings { body_bytes_max: 1000, ..DoorSettings::default() };
    let serve = Scripted::new(vec![model(MODEL)], speak(&["hello"], FinishReason::Stop));
    let rig = rig_with(serve, TenantTable::open(secret()), settings);
    let sized = |len: usize| {
        let base = with(&talk(), "user", json!(""));
        with(&base, "user", json!("x".repeat(len - base.to_string().len()))).to_string()
    };
    assert_eq!(post(&rig, "/v1/chat/completions", sized(999)).await.status, 200);
    assert_eq!(post(&rig, "/v1/chat/completions", sized(1000)).await.status, 200);
    for len in [1001, 10_000] {
        let reply = post(&rig, "/v1/chat/completions", sized(len)).await;
        assert_eq!((reply.status.as_u16(), &reply.json()["error"]["code"]), (413, &json!("payload_too_large")));
        assert!(reply.json()["error"]["message"].as_str().unwrap().contains("1000 bytes"));
    }
    // Endless and without a length: an answer comes although the body never ends.
    let chunks = futures::stream::repeat_with(|| Ok::<_, std::io::Error>(Bytes::from_static(&[b' '; 100])));
    let reply = post(&rig, "/v1/completions", Body::from_stream(chunks)).await;
    assert_eq!(reply.status, 413);
    let packed = HttpRequest::post("/v1/completions").header("content-encoding", "gzip").body(Body::from("x")).unwrap();
    let reply = call(&rig, packed).await;
    assert_eq!((reply.status.as_u16(), &reply.json()["error"]["param"]), (400, &json!("Content-Encoding")));
}

#[tokio::test(start_paused = true)]
async fn a_body_that_never_comes_is_given_up() {
    let rig = plain();
    let body = Body::from_stream(futures::stream::pending::<Result<Bytes, std::io::Error>>());
    assert_eq!(post(&rig, "/v1/completions", body).await.status, 504);
}

#[tokio::test]
async fn error_bodies_read_like_this() {
    let rig = plain();
    let mut shown = Vec::new();
    for body in [
        with(&talk(), "temperature", json!(3)),
        with(&talk(), "temprature", json!(1)),
        with(&talk(), "model", json!("gpt")),
        with(&talk(), "stop", json!("")),
        with(&talk(), "messages", json!([{ "role": "user", "content": "x ".repeat(600) }])),
        with(&talk(), "guided_regex", json!("a"))
            .as_object()
            .map(|body| {
                let mut body = body.clone();
                body.insert("response_format".into(), json!({ "type": "json_object" }));
                Value::Object(body)
            })
            .unwrap(),
    ] {
        let reply = chat(&rig, &body).await;
        shown.push(json!({ "status": reply.status.as_u16(), "body": reply.json() }));
    }
    for (path, body) in [
        ("/v1/completions", ""),
        ("/v1/completions", "{\"prompt\": "),
        ("/v1/completions", "[]"),
        ("/nothing", "{}"),
        ("/v1/models", "{}"),
    ] {
        let reply = post(&rig, path, body).await;
        shown.push(json!({ "status": reply.status.as_u16(), "body": reply.json() }));
    }
    insta::assert_json_snapshot!("errors", shown);
}

#[tokio::test]
async fn readiness_tells_the_reason_and_health_does_not_depend_on_it() {
    let rig = plain();
    assert_eq!(get(&rig, "/readyz").await.status, 200);
    *rig.serve.ready.lock().unwrap() = Err(Error::new(Reason::NoWorker, "no worker is ready"));
    let reply = get(&rig, "/readyz").await;
    assert_eq!((reply.status.as_u16(), reply.body.as_str()), (503, "no_worker: no worker is ready\n"));
    assert_eq!(get(&rig, "/healthz").await.status, 200);
}

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        ".{0,12}".prop_map(Value::from),
        proptest::sample::select(vec!["user", "assistant", "tool", "text", "json_object", "auto", "on", "fixed", "function"])
            .prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 48, 6, |inner| {
        let names = prop_oneof![".{0,6}", proptest::sample::select(MEMBERS.to_vec()).prop_map(str::to_owned)];
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
            proptest::collection::vec((names, inner), 0..6).prop_map(|members| Value::Object(members.into_iter().collect())),
        ]
    })
}

const MEMBERS: &[&str] = &[
    "messages",
    "prompt",
    "role",
    "content",
    "type",
    "text",
    "tool_calls",
    "function",
    "arguments",
    "name",
    "stop",
    "n",
    "max_tokens",
    "seed",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "logit_bias",
    "logprobs",
    "top_logprobs",
    "echo",
    "response_format",
    "json_schema",
    "schema",
    "guided_json",
    "guided_choice",
    "kvasir",
    "cache",
    "mode",
    "ttl_s",
    "pin",
    "speculation",
    "max_draft_tokens",
    "contract",
    "priority",
    "deadline_ms",
    "report",
    "stream",
    "stream_options",
    "include_usage",
    "tools",
    "chat_template_kwargs",
    "cache_salt",
    "model",
    "1",
    "best_of",
];

fn any_body() -> impl Strategy<Value = Value> {
    let member = (proptest::sample::select(MEMBERS.to_vec()), any_json());
    (proptest::collection::vec(member, 0..5), any::<bool>(), any_json()).prop_map(|(members, valid_base, whole)| {
        let mut body = match (valid_base, whole) {
            (true, _) => json!({ "messages": [{ "role": "user", "content": "hi" }] }),
            (false, Value::Object(members)) => Value::Object(members),
            (false, other) => return other,
        };
        for (name, value) in members {
            body[name] = value;
        }
        body
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_json_makes_a_server_error(body in any_body()) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let rig = plain();
            for path in ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"] {
                let reply = post(&rig, path, body.to_string()).await;
                prop_assert!(reply.status.as_u16() < 500, "{path} {body} gave {} {}", reply.status, reply.body);
            }
            Ok(())
        })?;
    }

    #[test]
    fn no_bytes_make_a_server_error(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let reply = runtime.block_on(async { post(&plain(), "/v1/completions", bytes).await });
        prop_assert!(reply.status.as_u16() < 500);
    }
}
