//! Output of a request.

use super::words::{
    contract_from_wire, contract_to_wire, finish_reason_from_wire, finish_reason_to_wire, hits_from_wire, hits_to_wire,
    miss_reason_from_wire, miss_reason_to_wire, states_from_wire, states_to_wire, usage_from_wire, usage_to_wire,
};
use super::{Malformed, error_from_pb, error_to_pb, not_nan, required};
use crate::worker as wire;
use crate::worker::generate_response::Message;
use kvasir_core::{Chunk, Counters, Error, Finished, Started, TokenLogprob, Tokens};

/// Writes one message of a stream.
pub fn chunk_to_wire(chunk: Chunk) -> wire::GenerateResponse {
    let message = match chunk {
        Chunk::Started(started) => Message::Started(wire::Started {
            hits: hits_to_wire(&started.hits),
            computed: started.computed,
            miss_reason: miss_reason_to_wire(started.miss_reason) as i32,
        }),
        Chunk::Tokens(tokens) => Message::Tokens(tokens_to_wire(tokens)),
        Chunk::Finished(finished) => Message::Finished(finished_to_wire(&finished)),
        Chunk::Failed { error, usage, states } => Message::Failed(wire::Failed {
            error: Some(error_to_pb(&error)),
            usage: Some(usage_to_wire(&usage)),
            states: states_to_wire(&states),
        }),
    };
    wire::GenerateResponse { message: Some(message) }
}

/// Reads one message of a stream; a worker that sends nonsense is an internal error.
pub fn chunk_from_wire(response: wire::GenerateResponse) -> Result<Chunk, Error> {
    read(response).map_err(Malformed::into_internal)
}

fn read(response: wire::GenerateResponse) -> Result<Chunk, Malformed> {
    Ok(match required("message", response.message)? {
        Message::Started(started) => Chunk::Started(Started {
            hits: hits_from_wire("started.hits", &started.hits)?,
            computed: started.computed,
            miss_reason: miss_reason_from_wire("started.miss_reason", started.miss_reason)?,
        }),
        Message::Tokens(tokens) => Chunk::Tokens(tokens_from_wire(tokens)?),
        Message::Finished(finished) => Chunk::Finished(Box::new(finished_from_wire(&finished)?)),
        Message::Failed(failed) => Chunk::Failed {
            error: error_from_pb(required("failed.error", failed.error)?),
            usage: usage_from_wire(required("failed.usage", failed.usage)?),
            states: states_from_wire("failed.states", &failed.states)?,
        },
    })
}

fn tokens_to_wire(tokens: Tokens) -> wire::Tokens {
    wire::Tokens {
        choice: tokens.choice,
        ids: tokens.ids,
        text: tokens.text,
        logprobs: tokens.logprobs.into_iter().map(logprob_to_wire).collect(),
        accepted_from_draft: tokens.accepted_from_draft,
        prompt_logprobs: tokens
            .prompt_logprobs
            .into_iter()
            .map(|token| wire::PromptLogprob { token: token.map(logprob_to_wire) })
            .collect(),
    }
}

fn tokens_from_wire(tokens: wire::Tokens) -> Result<Tokens, Malformed> {
    if !tokens.logprobs.is_empty() && tokens.logprobs.len() != tokens.ids.len() {
        let problem = format!("has {} entries for {} ids", tokens.logprobs.len(), tokens.ids.len());
        return Err(Malformed::new("tokens.logprobs", problem));
    }
    if tokens.accepted_from_draft as usize > tokens.ids.len() {
        let problem = format!("is {} of {} ids", tokens.accepted_from_draft, tokens.ids.len());
        return Err(Malformed::new("tokens.accepted_from_draft", problem));
    }
    Ok(Tokens {
        choice: tokens.choice,
        ids: tokens.ids,
        text: tokens.text,
        logprobs: tokens
            .logprobs
            .into_iter()
            .map(|token| logprob_from_wire("tokens.logprobs", token))
            .collect::<Result<_, _>>()?,
        accepted_from_draft: tokens.accepted_from_draft,
        prompt_logprobs: tokens
            .prompt_logprobs
            .into_iter()
            .map(|entry| entry.token.map(|token| logprob_from_wire("tokens.prompt_logprobs", token)).transpose())
            .collect::<Result<_, _>>()?,
    })
}

fn logprob_to_wire(token: TokenLogprob) -> wire::TokenLogprob {
    wire::TokenLogprob {
        id: token.id,
        logprob: token.logprob,
        top: token.top.into_iter().map(|(id, logprob)| wire::TopLogprob { id, logprob }).collect(),
    }
}

fn logprob_from_wire(field: &str, token: wire::TokenLogprob) -> Result<TokenLogprob, Malformed> {
    Ok(TokenLogprob {
        id: token.id,
        logprob: not_nan(field, token.logprob)?,
        top: token.top.into_iter().map(|top| Ok((top.id, not_nan(field, top.logprob)?))).collect::<Result<_, Malformed>>()?,
    })
}

fn finished_to_wire(finished: &Finished) -> wire::Finished {
    let counters = &finished.counters;
    wire::Finished {
        reasons: finished.reasons.iter().map(|reason| finish_reason_to_wire(*reason) as i32).collect(),
        usage: Some(usage_to_wire(&finished.usage)),
        states: states_to_wire(&finished.states),
        speculation: Some(wire::SpeculationRecord {
            steps: counters.steps,
            proposed: counters.proposed,
            accepted: counters.accepted,
            rejected: counters.rejected,
            unverified: counters.unverified,
            discarded: counters.discarded,
            sampled: counters.sampled,
            trimmed: counters.trimmed,
            ..Default::default()
        }),
        contract: contract_to_wire(finished.contract) as i32,
    }
}

fn finished_from_wire(finished: &wire::Finished) -> Result<Finished, Malformed> {
    if finished.reasons.is_empty() {
        return Err(Malformed::new("finished.reasons", "must have one entry per choice"));
    }
    let record = required("finished.speculation", finished.speculation.as_ref())?;
    Ok(Finished {
        reasons: finished
            .reasons
            .iter()
            .map(|reason| finish_reason_from_wire("finished.reasons", *reason))
            .collect::<Result<_, _>>()?,
        usage: usage_from_wire(required("finished.usage", finished.usage)?),
        states: states_from_wire("finished.states", &finished.states)?,
        counters: Counters {
            steps: record.steps,
            proposed: record.proposed,
            accepted: record.accepted,
            rejected: record.rejected,
            unverified: record.unverified,
            discarded: record.discarded,
            sampled: record.sampled,
            trimmed: record.trimmed,
        },
        contract: contract_from_wire("finished.contract", finished.contract)?,
    })
}
