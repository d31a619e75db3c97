//! A thousand clients that leave: queued, in prefill, in decode; over HTTP and gRPC. Nothing stays behind and neighbours notice nothing.

use super::support::{metric, tiny, until, with_fleet};
use kvasir_cli::client::Client;
use kvasir_cli::local::Fleet;
use kvasir_proto::inference as wire;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;

const DISCONNECTS: u32 = 1000;
/// Clients at once: more than the pool can run, so that some leave while they are queued.
const AT_ONCE: u32 = 40;

fn tokens(seed: u32, len: u32) -> Vec<u32> {
    (0..len).map(|i| (seed * 31 + i * i * 7 + i) % 250).collect()
}

fn body(fleet: &Fleet, seed: u32, len: u32, output: u32) -> Value {
    json!({"model": fleet.model(), "prompt": tokens(seed, len), "max_tokens": output, "temperature": 0.8, "seed": seed, "ignore_eos": true})
}

/// Leaves after a while that depends on the number alone.
async fn leave(fleet: &Fleet, client: &Client, number: u32) {
    let after = Duration::from_micros(u64::from(number.wrapping_mul(2_654_435_761) % 60_000));
    let length = 20 + number % 900;
    let request = body(fleet, number, length, 600);
    if number.is_multiple_of(2) {
        // Dropping the future closes the connection.
        let _left = tokio::time::timeout(after, client.complete(request, |_| ())).await;
    } else {
        let _left = tokio::time::timeout(after, grpc(fleet, number, length)).await;
    }
}

async fn grpc(fleet: &Fleet, seed: u32, length: u32) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let mut client = wire::inference_client::InferenceClient::connect(format!("http://{}", fleet.grpc())).await?;
    let request = wire::GenerateRequest {
        model: fleet.model().to_owned(),
        prompt: Some(wire::generate_request::Prompt::Tokens(wire::TokenIds { ids: tokens(seed, length) })),
        parameters: Some(wire::Parameters { max_tokens: Some(600), ignore_eos: true, ..wire::Parameters::default() }),
        ..wire::GenerateRequest::default()
    };
    let mut stream = client.generate(request).await?.into_inner();
    while stream.message().await?.is_some() {}
    Ok(())
}

#[test]
fn a_thousand_disconnects_leave_nothing_behind() {
    let state = tempfile::tempdir().unwrap();
    let mut args = tiny(2, state.path());
    args.kv_mib = 2;
    with_fleet(&args, state.path(), |fleet| async move {
        let client = Client::new(&format!("http://{}", fleet.http()), None).unwrap();
        let neighbour = |seed| {
            let (client, request) = (client.clone(), body(&fleet, seed, 64, 200));
            async move { client.complete(request, |_| ()).await.unwrap().text }
        };
        let undisturbed = neighbour(7).await;
        let mut texts = Vec::new();
        for wave in 0..DISCONNECTS / AT_ONCE {
            let storm: Vec<_> = (0..AT_ONCE)
                .map(|i| {
                    let (fleet, client) = (Arc::clone(&fleet), client.clone());
                    tokio::spawn(async move { leave(&fleet, &client, wave * AT_ONCE + i).await })
                })
                .collect();
            texts.push(neighbour(7).await);
            for task in storm {
                task.await.unwrap();
            }
        }
        assert!(texts.iter().all(|text| *text == undisturbed), "a neighbour's text changed");
        let client = &client;
        until("all in-flight gauges are 0", || async move {
            let text = client.get_text("/metrics").await.unwrap().1;
            let zero = |name| metric(&text, name, &[]) == 0.0;
            zero("kvasir_door_in_flight")
                && zero("kvasir_router_leases")
                && zero("kvasir_router_queued_requests")
                && zero("kvasir_running_sequences")
                && zero("kvasir_waiting_requests")
                && metric(&text, "kvasir_blocks", &["state=\"held\""]) == 0.0
        })
        .await;
        let text = client.get_text("/metrics").await.unwrap().1;
        assert_eq!(metric(&text, "kvasir_reconcile_violations_total", &[]), 0.0);
        let cancelled = metric(&text, "kvasir_engine_requests_total", &["outcome=\"cancelled\""]);
        assert!(cancelled > f64::from(DISCONNECTS) / 4.0, "the storm reached the engines: {cancelled} cancelled there");
        assert_eq!(neighbour(7).await, undisturbed, "and the fleet still answers");
    });
}
