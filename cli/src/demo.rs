//! `kvasir demo`: the main job on a real model. A shared system prompt of 1,024 tokens, one cold question, follow-ups that reuse it, and
//! the proof that reuse changed no character.

use crate::args::{DemoArgs, LocalArgs};
use crate::client::{Answer, Client, ClientError};
use crate::local::{Fleet, LocalError};
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::path::Path;

/// Tokens of the shared system prompt, at least.
const SYSTEM_TOKENS: usize = 1024;
/// Tokens of each answer, at most.
const ANSWER_TOKENS: u32 = 24;

/// A paragraph that repeats until the system prompt is long enough; each repetition is numbered so that no block repeats.
const HOUSE_RULE: &str = "The harbour office answers in one or two plain sentences, names the berth and the hour, \
    and never promises what the tide tables do not say.";

const QUESTIONS: [&str; 4] =
    ["When does the ferry leave?", "Which berth is free at noon?", "May I moor overnight?", "Who opens the bridge?"];

/// Why the demo failed.
#[derive(Debug, thiserror::Error)]
pub enum DemoError {
    /// The fleet did not start.
    #[error(transparent)]
    Local(#[from] LocalError),
    /// A request failed.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// What the demo shows did not hold.
    #[error("the demo's promise does not hold: {0}")]
    Promise(String),
}

/// Starts a fleet, asks, prints, stops.
pub async fn run(args: &DemoArgs, cache: &Path, state: &Path) -> Result<(), DemoError> {
    let local = LocalArgs::for_measurement(&args.model, args.workers, state);
    println!("starting a router and {} workers with {} ...", args.workers, args.model);
    let fleet = Fleet::start(&local, cache, state).await?;
    let outcome = job(&fleet).await;
    fleet.stop().await;
    outcome
}

async fn job(fleet: &Fleet) -> Result<(), DemoError> {
    let client = Client::new(&format!("http://{}", fleet.http()), None)?;
    let system = system_prompt(&client, fleet.model()).await?;
    println!(
        "\nA shared system prompt of at least {SYSTEM_TOKENS} tokens, {} questions, greedy answers of {ANSWER_TOKENS} tokens:\n",
        QUESTIONS.len()
    );
    println!("{:<32} {:>8} {:>8} {:>6} {:>10}  worker", "question", "prompt", "cached", "H", "TTFT ms");
    // A first short request pays for lazily grown buffers, so that the cold figure is the prompt's own.
    ask(&client, fleet.model(), "You are brief.", "Hello?", "on").await?;
    let mut answers = Vec::new();
    for question in QUESTIONS {
        let answer = ask(&client, fleet.model(), &system, question, "on").await?;
        print_row(question, &answer);
        answers.push(answer);
    }
    let again = ask(&client, fleet.model(), &system, QUESTIONS[0], "on").await?;
    print_row("(the first question again)", &again);
    let uncached = ask(&client, fleet.model(), &system, QUESTIONS[0], "off").await?;
    print_row("(and with the cache off)", &uncached);
    conclude(&answers, &again, &uncached)
}

fn conclude(answers: &[Answer], again: &Answer, uncached: &Answer) -> Result<(), DemoError> {
    let (cold, warm) = (&answers[0], &answers[1..]);
    let mut times: Vec<f64> = warm.iter().map(|answer| answer.ttft.as_secs_f64() * 1e3).collect();
    times.sort_by(f64::total_cmp);
    let warm_ms = times[times.len() / 2];
    let cold_ms = cold.ttft.as_secs_f64() * 1e3;
    println!("\ncold TTFT {cold_ms:.0} ms, warm TTFT {warm_ms:.0} ms (median), ratio {:.3}", warm_ms / cold_ms);
    println!("answer: {:?}", cold.text);
    if cold.cached_tokens() != 0 {
        return Err(DemoError::Promise(format!(
            "the first request found {} cached tokens in an empty fleet",
            cold.cached_tokens()
        )));
    }
    if let Some(poor) = warm.iter().find(|answer| answer.cached_tokens() < SYSTEM_TOKENS as u64) {
        return Err(DemoError::Promise(format!(
            "a follow-up reused only {} of {SYSTEM_TOKENS} shared tokens",
            poor.cached_tokens()
        )));
    }
    if again.text != cold.text || uncached.text != cold.text || uncached.cached_tokens() != 0 {
        return Err(DemoError::Promise("cold, warm and uncached answers differ".to_owned()));
    }
    if let Some(strayed) = warm.iter().find(|answer| answer.worker() != cold.worker()) {
        return Err(DemoError::Promise(format!(
            "a follow-up went to {} although {} holds the prefix",
            strayed.worker(),
            cold.worker()
        )));
    }
    println!("equal text: cold = warm = cache off; all follow-ups went to the worker that holds the prefix ({})", cold.worker());
    Ok(())
}

fn print_row(question: &str, answer: &Answer) {
    let (prompt, cached) = (answer.prompt_tokens(), answer.cached_tokens());
    let share = cached as f64 / prompt.max(1) as f64;
    println!(
        "{question:<32} {prompt:>8} {cached:>8} {share:>6.2} {:>10.1}  {}",
        answer.ttft.as_secs_f64() * 1e3,
        answer.worker()
    );
}

async fn ask(client: &Client, model: &str, system: &str, question: &str, cache: &str) -> Result<Answer, ClientError> {
    let body = json!({
        "model": model,
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": ANSWER_TOKENS,
        "kvasir": {"report": true, "cache": {"mode": cache}},
    });
    client.chat(body, |_| ()).await
}

/// The house rule, numbered and repeated until it has enough tokens by the server's own count.
async fn system_prompt(client: &Client, model: &str) -> Result<String, ClientError> {
    let mut text = String::new();
    for number in 1.. {
        // Writing into a String cannot fail.
        let _infallible = writeln!(text, "Rule {number}. {HOUSE_RULE}");
        if number % 8 == 0 {
            let counted = client.post("/tokenize", &json!({"model": model, "prompt": text})).await?;
            let count =
                counted["count"].as_u64().or_else(|| counted["tokens"].as_array().map(|tokens| tokens.len() as u64)).unwrap_or(0);
            if count >= SYSTEM_TOKENS as u64 || counted == Value::Null {
                break;
            }
        }
    }
    Ok(text)
}
