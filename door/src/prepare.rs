//! `prepare`: the only place where a [`Request`] is made.
//!
//! Owns the road from an [`Ask`] to requests: find the model, render the template, tokenise, check what depends on the model. Refuses to know
//! JSON, protobuf and placement. Called once per call by both doors.
//!
//! Guarantees
//! 1. Message content becomes plain text tokens, whatever it spells (kvasir-model's guard).
//! 2. Nothing is cut: a prompt that does not fit is refused with both numbers. Only `max_tokens` is lowered to what is left.
//! 3. The cache of tokenised segments is partitioned by reuse domain and bounded in bytes.
//!
//! Costs: about 1 ms per 4 KiB of text that the segment cache lacks. Longer texts leave the async threads: at most [`Preparer::running`]
//! encodes at once and [`WAITING_MAX`] calls in line; more are refused as overload.

use crate::ask::{Ask, Conversation, Input};
use crate::auth::Tenant;
use crate::params::{self, Wishes};
use crate::serve::{Catalog, Prepared, ServedModel};
use kvasir_core::{Error, Reason, Request, RequestId, ReuseDomain, State, StateTimes, TokenId, TraceContext};
use kvasir_model::{ChatInput, SegmentCache, Text, TextError};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::time::Instant;

/// Longest text that is tokenised on the async thread: about 1 ms.
const INLINE_BYTES_MAX: usize = 4 << 10;
/// Most calls that wait for or run a long encode.
const WAITING_MAX: usize = 1024;

/// Turns asks into requests.
pub(crate) struct Preparer {
    segments: Arc<SegmentCache>,
    running: Arc<Semaphore>,
    waiting: Arc<Semaphore>,
}

/// The requests of one call: one per prompt, with what the reply needs to know.
pub(crate) struct Batch {
    pub(crate) model: ServedModel,
    pub(crate) prepared: Vec<Prepared>,
    pub(crate) wishes: Wishes,
    /// Prompts as the client wrote them, for `echo`; empty unless asked for.
    pub(crate) echoes: Vec<String>,
    /// The prompts as tokens.
    pub(crate) prompts: Vec<Arc<[TokenId]>>,
}

/// Who asks, since when, and in which trace.
pub(crate) struct Origin<'a> {
    pub(crate) tenant: &'a Tenant,
    pub(crate) received: Instant,
    pub(crate) trace: Option<TraceContext>,
}

/// When to come back while no worker has described itself: about the time that a small model takes to load.
const EMPTY_RETRY_AFTER: Duration = Duration::from_secs(2);

/// Finds the model that a client means.
///
/// An absent name means the only model, when exactly one is served; any other name has to be a served one to the letter. While nothing is
/// served, no name is known to be wrong: the answer is to come back, not that the model does not exist.
pub(crate) fn find_model<'a>(catalog: &'a Catalog, name: Option<&str>) -> Result<&'a ServedModel, Error> {
    if catalog.models.is_empty() {
        let message = "no worker has said yet which models it serves; retry in a moment";
        return Err(Error::new(Reason::NoWorker, message).with_retry_after(EMPTY_RETRY_AFTER));
    }
    let served = || {
        const SHOWN_MAX: usize = 8;
        let names: Vec<_> = catalog.models.iter().take(SHOWN_MAX).map(|model| format!("\"{}\"", model.name)).collect();
        format!("served are {}", names.join(", "))
    };
    let missing = |message: String| Error::new(Reason::ModelNotFound, message).with_field("model");
    match (name, catalog.models.as_slice()) {
        (Some(name), _) => {
            let message = || missing(format!("the model {} is not served here; {}", params::quoted(name), served()));
            catalog.find(name).ok_or_else(message)
        }
        (None, [only]) => Ok(only),
        (None, _) => Err(missing(format!("`model` is missing and has no default; {}", served()))),
    }
}

/// Random bytes of the system.
pub(crate) fn random<const N: usize>() -> Result<[u8; N], Error> {
    let mut bytes = [0; N];
    let failed = |error| Error::new(Reason::Internal, format!("the system's random source failed: {error}"));
    getrandom::fill(&mut bytes).map_err(failed)?;
    Ok(bytes)
}

// === impl Preparer ===

impl Preparer {
    /// `running`: most encodes at once; `cache_bytes`: size of the segment cache.
    pub(crate) fn new(running: usize, cache_bytes: usize) -> Self {
        Self {
            segments: Arc::new(SegmentCache::new(cache_bytes)),
            running: Arc::new(Semaphore::new(running.max(1))),
            waiting: Arc::new(Semaphore::new(WAITING_MAX)),
        }
    }

    /// Makes the requests of one call.
    pub(crate) async fn prepare(&self, catalog: &Catalog, ask: Ask, origin: Origin<'_>) -> Result<Batch, Error> {
        let model = find_model(catalog, ask.model.as_deref())?.clone();
        let mut wishes = ask.knobs.check(u64::from_le_bytes(random()?))?;
        check_vocabulary(&wishes, model.vocab)?;
        wishes.priority = priority(&wishes, origin.tenant)?;
        let choices = ask.input.count() as u64 * u64::from(wishes.sampling.n);
        if choices > u64::from(params::CHOICES_MAX) {
            let message =
                format!("{choices} choices were asked for over all prompts; at most {} are served", params::CHOICES_MAX);
            return Err(Error::invalid("n", message));
        }
        let field = ask.input.field();
        let echoes = if wishes.echo { echoes(&ask.input, &model.text) } else { Vec::new() };
        let domain = origin.tenant.domain(wishes.cache_salt.as_deref());
        let prompts = self.encode(&model.text, ask.input, domain).await?;
        let mut prepared = Vec::with_capacity(prompts.len());
        for prompt in prompts {
            check_prompt(field, &prompt, &model, wishes.sampling.n)?;
            prepared.push(prompt_request(prompt, &model, &wishes, domain, &origin)?);
        }
        let prompts = prepared.iter().map(|one| one.request.prompt.clone()).collect();
        Ok(Batch { model, prepared, wishes, echoes, prompts })
    }

    /// Tokenises; the result has one entry per prompt.
    pub(crate) async fn encode(&self, text: &Arc<Text>, input: Input, domain: ReuseDomain) -> Result<Vec<Vec<TokenId>>, Error> {
        if let Input::Tokens(prompts) = input {
            return Ok(prompts);
        }
        if input.text_bytes() <= INLINE_BYTES_MAX {
            return encode(text, &input, &self.segments, &domain);
        }
        let full = |_| {
            let message = format!("{WAITING_MAX} long prompts are being tokenised already; come back in a moment");
            Error::new(Reason::Overloaded, message).with_retry_after(Duration::from_secs(1))
        };
        let _place = self.waiting.clone().try_acquire_owned().map_err(full)?;
        let closed = |_| Error::new(Reason::Draining, "the door is closing");
        let running = self.running.clone().acquire_owned().await.map_err(closed)?;
        let (text, segments) = (text.clone(), self.segments.clone());
        let task = tokio::task::spawn_blocking(move || {
            let ids = encode(&text, &input, &segments, &domain);
            drop(running);
            ids
        });
        task.await.map_err(|error| Error::new(Reason::Internal, format!("tokenising stopped: {error}")))?
    }

    /// (hits, misses) of the segment cache.
    pub(crate) fn segment_counts(&self) -> (u64, u64) {
        self.segments.counts()
    }
}

fn encode(text: &Text, input: &Input, segments: &SegmentCache, domain: &ReuseDomain) -> Result<Vec<Vec<TokenId>>, Error> {
    let cache = Some((segments, domain.digest().as_bytes()));
    match input {
        Input::Tokens(prompts) => Ok(prompts.clone()),
        Input::Text(prompts) => prompts
            .iter()
            .map(|prompt| text.encode_prompt(prompt, true, cache).map_err(|error| refused("prompt", &error)))
            .collect(),
        Input::Chat(Conversation { messages, tools, add_generation_prompt, variables }) => {
            let tools = (!tools.is_empty()).then(|| serde_json::Value::Array(tools.clone()));
            let input = ChatInput {
                messages,
                tools: tools.as_ref(),
                add_generation_prompt: *add_generation_prompt,
                extra: variables.as_ref(),
            };
            Ok(vec![text.encode_chat(&input, cache).map_err(|error| refused("messages", &error))?])
        }
    }
}

fn refused(field: &str, error: &TextError) -> Error {
    Error::new(error.reason(), error.to_string()).with_field(error.field().unwrap_or(field))
}

fn echoes(input: &Input, text: &Text) -> Vec<String> {
    match input {
        Input::Chat(_) => Vec::new(),
        Input::Text(prompts) => prompts.clone(),
        Input::Tokens(prompts) => prompts.iter().map(|ids| text.tokenizer().decode(ids, true)).collect(),
    }
}

fn priority(wishes: &Wishes, tenant: &Tenant) -> Result<i32, Error> {
    if wishes.priority > tenant.priority_max {
        let (asked, most) = (wishes.priority, tenant.priority_max);
        let message = format!("`kvasir.priority` = {asked} is above {most}, the highest that this tenant may ask for; lower it");
        return Err(Error::invalid("kvasir.priority", message));
    }
    Ok(tenant.priority.saturating_add(wishes.priority))
}

fn check_vocabulary(wishes: &Wishes, vocab: u32) -> Result<(), Error> {
    let stops = wishes.stop.tokens.iter().map(|id| ("stop_token_ids", *id));
    let biases = wishes.sampling.logit_bias.iter().map(|entry| ("logit_bias", entry.token));
    stops.chain(biases).try_for_each(|(field, id)| check_id(field, id, vocab))
}

fn check_id(field: &str, id: TokenId, vocab: u32) -> Result<(), Error> {
    if id < vocab {
        return Ok(());
    }
    Err(Error::invalid(
        field,
        format!("`{field}` names the token {id}; the model has the tokens 0 to {}", vocab.saturating_sub(1)),
    ))
}

fn check_prompt(field: &str, prompt: &[TokenId], model: &ServedModel, n: u32) -> Result<(), Error> {
    if prompt.is_empty() {
        let message =
            format!("`{field}` is empty and the model adds no start token, so there is nothing to continue; give some text");
        return Err(Error::invalid(field, message));
    }
    prompt.iter().try_for_each(|id| check_id(field, *id, model.vocab))?;
    let len = prompt.len();
    if len >= model.context as usize {
        let context = model.context;
        let message = format!(
            "the prompt has {len} tokens and the model's context holds {context} with the answer, which needs at least one; shorten it"
        );
        return Err(Error::new(Reason::ContextLengthExceeded, message).with_field(field));
    }
    if len + n as usize > model.capacity as usize {
        let capacity = model.capacity;
        let message = format!(
            "the prompt has {len} tokens and asks for {n} choices; one request can hold {capacity} tokens on the workers here; shorten it"
        );
        return Err(Error::new(Reason::CapacityExceeded, message).with_field(field));
    }
    Ok(())
}

fn prompt_request(
    prompt: Vec<TokenId>,
    model: &ServedModel,
    wishes: &Wishes,
    domain: ReuseDomain,
    origin: &Origin<'_>,
) -> Result<Prepared, Error> {
    let room = model.context.min(model.capacity).saturating_sub(prompt.len() as u32);
    let mut stop = wishes.stop.clone();
    stop.max_tokens = stop.max_tokens.min(room);
    stop.min_tokens = stop.min_tokens.min(stop.max_tokens);
    let spent = origin.received.elapsed();
    let deadline = match wishes.deadline {
        Some(deadline) if deadline <= spent => {
            let (asked, spent) = (deadline.as_millis(), spent.as_millis());
            let message = format!("`kvasir.deadline_ms` = {asked} passed while the prompt was prepared, which took {spent} ms");
            return Err(Error::new(Reason::DeadlineExceeded, message).with_field("kvasir.deadline_ms"));
        }
        deadline => deadline.map(|deadline| deadline.saturating_sub(spent)),
    };
    let mut states = StateTimes::default();
    states.add(State::Prepare, spent);
    let request = Request {
        id: RequestId(random()?),
        identity: model.identity,
        adapter: None,
        prompt: prompt.into(),
        domain,
        shared: None,
        secret_epoch: origin.tenant.secret_epoch(),
        tenant: origin.tenant.tag().clone(),
        cache: wishes.cache,
        sampling: wishes.sampling.clone(),
        stop,
        grammar: wishes.grammar.clone(),
        contract: wishes.contract,
        speculation: wishes.speculation,
        priority: wishes.priority,
        deadline,
        trace: origin.trace.clone(),
    };
    Ok(Prepared { request, states, receipt: Arc::default() })
}

#[cfg(test)]
mod tests;
