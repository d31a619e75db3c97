//! `kvasir chat`: a terminal conversation that shows what was cached and where the time went.

use crate::args::ChatArgs;
use crate::client::{Answer, Client, ClientError};
use rustyline::error::ReadlineError;
use serde_json::{Value, json};
use std::io::{self, Write as _};

/// Why a conversation ended badly.
#[derive(Debug, thiserror::Error)]
pub enum ChatError {
    /// A call failed.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// The terminal failed.
    #[error("terminal: {0}")]
    Terminal(#[from] ReadlineError),
    /// Output failed.
    #[error("output: {0}")]
    Output(#[from] io::Error),
    /// No model to talk to.
    #[error("the server at {0} serves no model yet; wait until /readyz answers 200")]
    NoModel(String),
}

/// Runs the conversation until the end of input.
pub async fn run(args: &ChatArgs) -> Result<(), ChatError> {
    let client = Client::new(&args.url, args.key.clone())?;
    let model = match &args.model {
        Some(model) => model.clone(),
        None => first_model(&client, &args.url).await?,
    };
    let mut messages: Vec<Value> = args.system.iter().map(|system| json!({"role": "system", "content": system})).collect();
    if let Some(prompt) = &args.prompt {
        return turn(&client, args, &model, &mut messages, prompt).await;
    }
    println!("{model} at {} (Ctrl-D ends)", args.url);
    let mut editor = rustyline::DefaultEditor::new()?;
    loop {
        // The editor blocks; nothing else runs in this program meanwhile.
        let line = match editor.readline("> ") {
            Ok(line) if line.trim().is_empty() => continue,
            Ok(line) => line,
            Err(ReadlineError::Eof | ReadlineError::Interrupted) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        editor.add_history_entry(&line)?;
        match turn(&client, args, &model, &mut messages, &line).await {
            // A refusal ends the turn, not the conversation.
            Err(ChatError::Client(error)) => {
                messages.pop();
                println!("error: {error}");
            }
            other => other?,
        }
    }
}

async fn first_model(client: &Client, url: &str) -> Result<String, ChatError> {
    let models = client.get("/v1/models").await?;
    models["data"][0]["id"].as_str().map(ToOwned::to_owned).ok_or_else(|| ChatError::NoModel(url.to_owned()))
}

async fn turn(client: &Client, args: &ChatArgs, model: &str, messages: &mut Vec<Value>, text: &str) -> Result<(), ChatError> {
    messages.push(json!({"role": "user", "content": text}));
    let body = json!({
        "model": model,
        "messages": messages,
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "kvasir": {"report": true},
    });
    let mut out = io::stdout();
    let answer = client
        .chat(body, |piece| {
            // A closed terminal shows at the end; the answer is kept for the history all the same.
            let _shown = write!(out, "{piece}").and_then(|()| out.flush());
        })
        .await?;
    println!("\n{}", summary(&answer));
    messages.push(json!({"role": "assistant", "content": answer.text}));
    Ok(())
}

/// One line on cached and computed tokens and timings.
pub fn summary(answer: &Answer) -> String {
    let prompt = answer.usage["prompt_tokens"].as_u64().unwrap_or(0);
    let cached = answer.usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0);
    let output = answer.usage["completion_tokens"].as_u64().unwrap_or(0);
    let decode = answer.total.saturating_sub(answer.ttft).as_secs_f64();
    let rate = if output > 1 && decode > 0.0 { (output - 1) as f64 / decode } else { 0.0 };
    let miss = answer.report["miss_reason"].as_str().map_or(String::new(), |reason| format!(" ({reason})"));
    format!(
        "[{cached} cached + {} computed{miss} · first token {:.0} ms · {output} tokens at {rate:.1}/s]",
        prompt.saturating_sub(cached),
        answer.ttft.as_secs_f64() * 1e3,
    )
}
