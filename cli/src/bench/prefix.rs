//! TTFT of a warm prefix against a cold one, paired, on an idle fleet; hashing and lookup per token.
//!
//! L_in is exactly 1,056 tokens of which 1,024 are shared, block 16, prompts given as token ids so that text plays no part. Each pair uses
//! a fresh prefix: the first request is cold, the second shares its first 1,024 tokens. TTFT is the time to the end of a one-token answer.

use super::{BenchError, Report, Row, median};
use crate::args::{BenchArgs, LocalArgs};
use crate::client::{Answer, Client, ClientError};
use crate::local::Fleet;
use kvasir_core::{Digest, ModelIdentity, PoolSecret, Prefix, ReuseDomain, block_keys};
use serde_json::json;
use std::hint::black_box;
use std::path::Path;
use std::time::Instant;

const SHARED_TOKENS: u32 = 1024;
const FRESH_TOKENS: u32 = 32;
const BLOCK: u32 = 16;

/// Runs the bench.
pub async fn prefix(args: &BenchArgs, cache: &Path, state: &Path) -> Result<(), BenchError> {
    let local = LocalArgs::for_measurement("smollm2", 1, state);
    let fleet = Fleet::start(&local, cache, state).await?;
    let outcome = measure(args, &fleet).await;
    fleet.stop().await;
    outcome
}

async fn measure(args: &BenchArgs, fleet: &Fleet) -> Result<(), BenchError> {
    let pairs: u32 = if args.quick { 5 } else { 15 };
    let client = Client::new(&format!("http://{}", fleet.http()), None)?;
    let (mut cold, mut warm, mut ratios, mut lookup_ns) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for pair in 0..=pairs {
        let first = ask(&client, fleet.model(), pair, 0).await?;
        let second = ask(&client, fleet.model(), pair, 1).await?;
        check(&first, 0)?;
        check(&second, SHARED_TOKENS)?;
        // The first pair pays for lazily grown buffers and is kept apart.
        if pair == 0 {
            continue;
        }
        let (cold_ms, warm_ms) = (first.total.as_secs_f64() * 1e3, second.total.as_secs_f64() * 1e3);
        cold.push(cold_ms);
        warm.push(warm_ms);
        ratios.push(warm_ms / cold_ms);
        let lookup_ms = second.report["states_ms"]["lookup"].as_f64().unwrap_or(0.0);
        lookup_ns.push(lookup_ms * 1e6 / f64::from(SHARED_TOKENS + FRESH_TOKENS));
    }
    let mut report = Report::new(
        "prefix",
        json!({
            "model": fleet.model(), "L_in": SHARED_TOKENS + FRESH_TOKENS, "shared": SHARED_TOKENS, "block": BLOCK, "L_out": 1, "pairs": pairs,
            "arrivals": "closed loop, one client, idle fleet", "warm_up": "one pair, kept apart", "threads": fleet.threads(),
            "ratio_min": ratios.iter().copied().fold(f64::INFINITY, f64::min), "ratio_max": ratios.iter().copied().fold(0.0, f64::max),
        }),
    );
    let ratio = median(&mut ratios);
    let cold = median(&mut cold);
    report.push(Row {
        name: "TTFT warm / cold",
        unit: "ms",
        ours: ratio * cold,
        peer: cold,
        peer_name: "own cold",
        floor: Some(0.15),
        aim: 0.12,
        lower_is_better: true,
    });
    let hashing = hashing_ns_per_token();
    let both = hashing + median(&mut lookup_ns);
    report.push(Row {
        name: "hashing + lookup per token",
        unit: "ns",
        ours: both,
        peer: 0.0,
        peer_name: "-",
        floor: Some(300.0),
        aim: 100.0,
        lower_is_better: true,
    });
    report.push(Row {
        name: "hashing per block",
        unit: "us",
        ours: hashing * f64::from(BLOCK) / 1e3,
        peer: 0.0,
        peer_name: "-",
        floor: Some(4.8),
        aim: 1.0,
        lower_is_better: true,
    });
    report.finish(args)
}

fn check(answer: &Answer, cached: u32) -> Result<(), BenchError> {
    if answer.cached_tokens() == u64::from(cached) && answer.prompt_tokens() == u64::from(SHARED_TOKENS + FRESH_TOKENS) {
        return Ok(());
    }
    Err(BenchError::Report(format!(
        "the path was not taken: expected {cached} cached of {} tokens, got {} of {}",
        SHARED_TOKENS + FRESH_TOKENS,
        answer.cached_tokens(),
        answer.prompt_tokens()
    )))
}

async fn ask(client: &Client, model: &str, pair: u32, tail: u32) -> Result<Answer, ClientError> {
    let tokens: Vec<u32> =
        (0..SHARED_TOKENS).map(|i| token(pair, 0, i)).chain((0..FRESH_TOKENS).map(|i| token(pair, 1 + tail, i))).collect();
    let body = json!({"model": model, "prompt": tokens, "max_tokens": 1, "temperature": 0, "kvasir": {"report": true}});
    client.complete(body, |_| ()).await
}

/// An ordinary token id (1,000 to 40,999), different for each pair and part.
fn token(pair: u32, part: u32, index: u32) -> u32 {
    let mixed = (u64::from(pair) << 40 | u64::from(part) << 32 | u64::from(index)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    1_000 + (mixed >> 33) as u32 % 40_000
}

/// Cost of the key chain alone, which router and worker each pay once.
fn hashing_ns_per_token() -> f64 {
    let tokens: Vec<u32> = (0..SHARED_TOKENS).map(|i| token(0, 0, i)).collect();
    let Some(secret) = PoolSecret::new(&[7; 32]) else { return f64::NAN };
    let prefix = Prefix::new(&ModelIdentity(Digest::new([1; 32])), &ReuseDomain::derive(&secret, "bench", 0, None), None);
    let mut times: Vec<f64> = (0..200)
        .map(|_| {
            let began = Instant::now();
            black_box(block_keys(black_box(prefix), BLOCK, black_box(&tokens)));
            began.elapsed().as_secs_f64() * 1e9 / f64::from(SHARED_TOKENS)
        })
        .collect();
    median(&mut times)
}
