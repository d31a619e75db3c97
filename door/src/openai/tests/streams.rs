//! Streams: order, equality with whole answers, silence, failures, disconnects.

use crate::testing::{MODEL, Reply, Step, chat, complete, finished, get, ids, placing_rig, rig, speak, still};
use axum::body::Body;
use futures::StreamExt as _;
use http::Request as HttpRequest;
use http_body_util::BodyExt as _;
use kvasir_core::{Chunk, Error, FinishReason, Reason, StateTimes, TokenLogprob, Tokens, Usage};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::Duration;
use tower::ServiceExt as _;

const PARTS: &[&str] = &["hello", " wörld", " 한국", " 🚀", ""];

fn ask(extra: &Value) -> Value {
    let mut body = json!({ "model": MODEL, "messages": [{ "role": "user", "content": "hi" }], "seed": 1 });
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

/// Runs the per-index state machine of the API over chunks and returns the joined texts.
fn joined(events: &[Value]) -> BTreeMap<u64, String> {
    let mut texts = BTreeMap::new();
    let mut finished: BTreeMap<u64, String> = BTreeMap::new();
    for choice in events.iter().flat_map(|event| event["choices"].as_array().unwrap()) {
        let index = choice["index"].as_u64().unwrap();
        assert!(!finished.contains_key(&index), "a chunk follows the end of {index}");
        let opens = choice["delta"]["role"] == "assistant";
        assert_eq!(opens, !texts.contains_key(&index), "the role comes first and once: {choice}");
        *texts.entry(index).or_default() += choice["delta"]["content"].as_str().unwrap_or_default();
        if let Some(reason) = choice["finish_reason"].as_str() {
            finished.insert(index, reason.to_owned());
        }
    }
    assert_eq!(texts.len(), finished.len(), "each index ends once");
    texts
}

/// R17, R20: per index role, deltas, one finish reason; joined deltas equal the whole answer, byte by byte.
#[tokio::test]
async fn streamed_and_whole_answers_are_equal() {
    for n in [1, 3] {
        let rig = rig(speak(PARTS, FinishReason::Length));
        let streamed = chat(&rig, &ask(&json!({ "n": n, "stream": true }))).await;
        assert_eq!(streamed.headers["content-type"], "text/event-stream");
        let texts = joined(&streamed.events());
        let whole = chat(&rig, &ask(&json!({ "n": n }))).await.json();
        assert_eq!(texts.len(), n);
        for (index, text) in texts {
            assert_eq!(text, "hello wörld 한국 🚀");
            assert_eq!(whole["choices"][index as usize]["message"]["content"], text);
            assert_eq!(whole["choices"][index as usize]["finish_reason"], "length");
        }
        assert_eq!(whole["usage"]["prompt_tokens_details"]["cached_tokens"], 1);
        rig.serve.idle().await;
    }
}

#[tokio::test]
async fn an_answer_without_text_still_opens_and_ends() {
    let rig = rig(speak(&[], FinishReason::Stop));
    let texts = joined(&chat(&rig, &ask(&json!({ "n": 2, "stream": true }))).await.events());
    assert_eq!(texts, BTreeMap::from([(0, String::new()), (1, String::new())]));
}

#[tokio::test]
async fn the_shapes_are_those_of_the_api() {
    let rig = rig(speak(&["hello", " the"], FinishReason::Stop));
    let options = json!({ "stream": true, "stream_options": { "include_usage": true }, "logprobs": true, "top_logprobs": 2 });
    let events: Vec<Value> = chat(&rig, &ask(&options)).await.events().into_iter().map(still).collect();
    insta::assert_json_snapshot!("chat_chunks", events);
    let whole = chat(&rig, &ask(&json!({ "logprobs": true, "kvasir": { "report": true } }))).await.json();
    insta::assert_json_snapshot!("chat_whole", still(whole));
    let body = json!({ "model": MODEL, "prompt": ["hello", "the"], "n": 2, "seed": 1, "logprobs": 1, "max_tokens": 4 });
    insta::assert_json_snapshot!("completion_whole", still(complete(&rig, &body).await.json()));
    let body = json!({ "model": MODEL, "prompt": "hello", "seed": 1, "stream": true, "echo": true });
    let events: Vec<Value> = complete(&rig, &body).await.events().into_iter().map(still).collect();
    insta::assert_json_snapshot!("completion_chunks", events);
    insta::assert_json_snapshot!("models", get(&rig, "/v1/models").await.json());
}

#[tokio::test]
async fn without_usage_asked_for_no_chunk_is_without_a_choice_and_the_report_rides_on_the_last() {
    let rig = rig(speak(&["hello"], FinishReason::Stop));
    let events = chat(&rig, &ask(&json!({ "stream": true, "kvasir": { "report": true } }))).await.events();
    assert!(events.iter().all(|event| event["choices"].as_array().unwrap().len() == 1 && event.get("usage").is_none()));
    let report = &events.last().unwrap()["kvasir"];
    assert_eq!((&report["hits"]["device"], &report["contract"], &report["drafted"]), (&json!(1), &json!("coupled"), &json!(5)));
    assert_eq!(report["states_ms"]["prefill"], 4.0);
    assert!(events[..events.len() - 1].iter().all(|event| event.get("kvasir").is_none()));
}

#[tokio::test]
async fn an_echoed_prompt_carries_its_log_probabilities() {
    let script = |request: &kvasir_core::Request| {
        assert_eq!(request.sampling.prompt_logprobs, Some(0));
        let entry = |id: &u32| Some(TokenLogprob { id: *id, logprob: f32::NEG_INFINITY, top: Vec::new() });
        let mut prompt_logprobs: Vec<_> = request.prompt.iter().map(entry).collect();
        prompt_logprobs[0] = None;
        let ids = ids(" the");
        let logprobs = ids.iter().map(|id| TokenLogprob { id: *id, logprob: -0.5, top: Vec::new() }).collect();
        let tokens = Tokens { ids, text: " the".into(), logprobs, prompt_logprobs, ..Tokens::default() };
        Ok(vec![Step::Send(Chunk::Tokens(tokens)), Step::Send(finished(request, FinishReason::Length, 1))])
    };
    let rig = rig(script);
    let mut body = json!({ "model": MODEL, "prompt": "hello and", "echo": true, "logprobs": 0, "max_tokens": 1 });
    let whole = complete(&rig, &body).await.json()["choices"][0].clone();
    assert_eq!(whole["text"], "hello and the");
    let lists = &whole["logprobs"];
    let count = ids("hello and").len() + ids(" the").len();
    for list in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(lists[list].as_array().unwrap().len(), count, "{list}");
    }
    assert_eq!((&lists["token_logprobs"][0], &lists["top_logprobs"][0]), (&Value::Null, &Value::Null));
    assert_eq!(lists["token_logprobs"][1], -9999.0);
    assert_eq!(lists["text_offset"][count - 1], "hello and".len());
    body["stream"] = json!(true);
    let events = complete(&rig, &body).await.events();
    let text: String = events.iter().map(|event| event["choices"][0]["text"].as_str().unwrap()).collect();
    let offsets: Vec<Value> = events
        .iter()
        .flat_map(|event| event["choices"][0]["logprobs"]["text_offset"].as_array().cloned().unwrap_or_default())
        .collect();
    assert_eq!((text.as_str(), &json!(offsets)), ("hello and the", &lists["text_offset"]));
}

#[tokio::test]
async fn several_prompts_are_numbered_in_order_and_summed() {
    let rig = rig(speak(&["hello"], FinishReason::Stop));
    let body = json!({ "model": MODEL, "prompt": [[5, 6], [7]], "n": 2 });
    let whole = complete(&rig, &body).await.json();
    let indexes: Vec<u64> = whole["choices"].as_array().unwrap().iter().map(|choice| choice["index"].as_u64().unwrap()).collect();
    assert_eq!(indexes, [0, 1, 2, 3]);
    assert!(whole["choices"].as_array().unwrap().iter().all(|choice| choice["text"] == "hello"), "{whole}");
    assert_eq!((&whole["usage"]["prompt_tokens"], &whole["usage"]["total_tokens"]), (&json!(3), &json!(7)));
    let served: Vec<usize> = rig.serve.seen.lock().unwrap().iter().map(|request| request.prompt.len()).collect();
    assert_eq!(served, [2, 1]);
}

/// R23: silence before and inside a stream is filled with comments, and the answer arrives whole.
#[tokio::test(start_paused = true)]
async fn a_silent_stream_is_kept_open_by_comments() {
    let script = |request: &kvasir_core::Request| {
        let tokens = |text: &str| Step::Send(Chunk::Tokens(Tokens { ids: vec![5], text: text.into(), ..Tokens::default() }));
        let (long, pause) = (Step::Wait(Duration::from_secs(90)), Step::Wait(Duration::from_secs(40)));
        Ok(vec![long, tokens("one"), pause, tokens(" two"), Step::Send(finished(request, FinishReason::Stop, 2))])
    };
    let rig = rig(script);
    let begun = tokio::time::Instant::now();
    let request =
        HttpRequest::post("/v1/chat/completions").body(Body::from(ask(&json!({ "stream": true })).to_string())).unwrap();
    let response = rig.door.router().oneshot(request).await.unwrap();
    assert_eq!(begun.elapsed(), Duration::from_secs(15));
    let mut frames = response.into_body().into_data_stream();
    let (mut body, mut last) = (String::new(), begun.elapsed());
    while let Some(frame) = frames.next().await {
        assert!(begun.elapsed().saturating_sub(last) <= Duration::from_secs(10), "silent from {last:?} to {:?}", begun.elapsed());
        last = begun.elapsed();
        body.push_str(std::str::from_utf8(&frame.unwrap()).unwrap());
    }
    assert_eq!(body.matches(": keep-alive\n\n").count(), 1 + 7 + 3, "{body}");
    let reply = Reply { status: http::StatusCode::OK, headers: http::HeaderMap::new(), body };
    assert_eq!(joined(&reply.events())[&0], "one two");
}

fn lost() -> Error {
    Error::new(Reason::WorkerLost, "the worker w-1 went away")
}

/// R22: before the first byte a failure has its true status.
#[tokio::test]
async fn a_failure_before_the_first_output_is_a_status() {
    for stream in [false, true] {
        let refused = rig(|_| Err(Error::new(Reason::Overloaded, "full").with_retry_after(Duration::from_millis(2500))));
        let reply = chat(&refused, &ask(&json!({ "stream": stream }))).await;
        assert_eq!((reply.status.as_u16(), &reply.json()["error"]["code"]), (503, &json!("overloaded")));
        assert_eq!(reply.headers["retry-after"], "3");
        let failed = Chunk::Failed { error: lost(), usage: Usage::default(), states: StateTimes::default() };
        let late = rig(move |_| Ok(vec![Step::Send(Chunk::Started(Default::default())), Step::Send(failed.clone())]));
        let reply = chat(&late, &ask(&json!({ "stream": stream }))).await;
        assert_eq!((reply.status.as_u16(), &reply.json()["error"]["code"]), (502, &json!("worker_lost")));
        let empty = rig(|_| Ok(Vec::new()));
        let reply = chat(&empty, &ask(&json!({ "stream": stream }))).await;
        assert_eq!(reply.status, 502, "a stream that just stops is no success");
        for rig in [refused, late, empty] {
            rig.serve.idle().await;
        }
    }
}

/// R22: after the first byte a failure is an error event, and nothing looks like success.
#[tokio::test]
async fn a_failure_after_the_first_output_is_an_error_event() {
    let tokens = || Step::Send(Chunk::Tokens(Tokens { ids: vec![5], text: "hello".into(), ..Tokens::default() }));
    let failed = || Step::Send(Chunk::Failed { error: lost(), usage: Usage::default(), states: StateTimes::default() });
    let cases: [(Vec<Step>, &str); 3] = [
        (vec![tokens(), failed()], "worker_lost"),
        (vec![tokens(), tokens(), tokens()], "worker_lost"),
        (vec![tokens(), Step::Send(Chunk::Tokens(Tokens { choice: 7, ..Tokens::default() }))], "internal"),
    ];
    for (steps, code) in cases {
        let rig = rig(move |_| Ok(steps.clone()));
        let reply = chat(&rig, &ask(&json!({ "stream": true }))).await;
        assert_eq!(reply.status, 200);
        assert!(!reply.body.contains("[DONE]") && !reply.body.contains("\"finish_reason\":\"stop\""), "{}", reply.body);
        let last = reply.body.trim_end().rsplit("\n\n").next().unwrap().strip_prefix("data: ").unwrap().to_owned();
        let event: Value = serde_json::from_str(&last).unwrap();
        assert_eq!(event["error"]["code"], code);
        assert!(event["error"]["message"].is_string());
        assert_eq!(chat(&rig, &ask(&json!({}))).await.json()["error"]["code"], code);
        assert!(get(&rig, "/metrics").await.body.contains(&format!("outcome=\"{code}\"")));
    }
}

#[tokio::test(start_paused = true)]
async fn a_refusal_after_the_headers_left_is_an_error_event() {
    let failed = Chunk::Failed { error: lost(), usage: Usage::default(), states: StateTimes::default() };
    let rig = rig(move |_| Ok(vec![Step::Wait(Duration::from_secs(20)), Step::Send(failed.clone())]));
    let reply = chat(&rig, &ask(&json!({ "stream": true }))).await;
    assert_eq!(reply.status, 200);
    assert!(reply.body.starts_with(": keep-alive\n\ndata: {\"error\":{"), "{}", reply.body);
    assert!(!reply.body.contains("[DONE]"));
}

/// R19: closing the connection drops the stream of the request, before and after the first output, streamed or not.
#[tokio::test]
async fn dropping_a_call_cancels_it() {
    let tokens = Step::Send(Chunk::Tokens(Tokens { ids: vec![5], text: "hello".into(), ..Tokens::default() }));
    let rig = rig(move |_| Ok(vec![tokens.clone(), Step::Hang]));
    let send = |stream: bool| {
        let request =
            HttpRequest::post("/v1/chat/completions").body(Body::from(ask(&json!({ "stream": stream })).to_string())).unwrap();
        rig.door.router().oneshot(request)
    };
    let mut response = send(true).await.unwrap().into_body();
    assert!(response.frame().await.is_some());
    assert_eq!(*rig.serve.live.borrow(), 1);
    drop(response);
    rig.serve.idle().await;
    let whole = tokio::spawn(send(false));
    rig.serve.live.subscribe().wait_for(|live| *live == 1).await.unwrap();
    whole.abort();
    rig.serve.idle().await;
    let metrics = get(&rig, "/metrics").await.body;
    let cancelled = "kvasir_door_requests_total{door=\"http\",route=\"chat_completions\",model=\"tiny\",outcome=\"cancelled\"} 2";
    assert!(metrics.contains(cancelled), "{metrics}");
    assert!(metrics.contains("kvasir_door_in_flight{door=\"http\"} 0"), "{metrics}");
}

/// The receipt that a placement writes is what the report shows.
#[tokio::test]
async fn a_placement_receipt_reaches_the_report() {
    let rig = placing_rig(speak(&["hello"], FinishReason::Stop));
    let reply = chat(&rig, &ask(&json!({ "kvasir": { "report": true } }))).await.json();
    insta::assert_json_snapshot!("placement", reply["kvasir"]["placement"]);
    let reply = chat(&rig, &ask(&json!({}))).await.json();
    assert!(reply.get("kvasir").is_none());
}
