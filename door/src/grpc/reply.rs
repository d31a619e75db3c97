//! Events → protobuf.

use crate::answer::{End, Event, Head, Report};
use crate::serve::Receipt;
use kvasir_core::{TokenId, TokenLogprob, Tokens};
use kvasir_model::Text;
use kvasir_proto::convert::{
    contract_to_wire, finish_reason_to_wire, miss_reason_to_wire, states_to_wire, tier_to_wire, usage_to_wire,
};
use kvasir_proto::inference as wire;
use kvasir_proto::inference::generate_event::Event as WireEvent;
use kvasir_proto::pb;

/// Writes the events of one call.
pub(crate) struct EventPrinter {
    head: Head,
    opened: Vec<bool>,
}

// === impl EventPrinter ===

impl EventPrinter {
    /// Starts an answer.
    pub(crate) fn new(head: Head) -> Self {
        Self { opened: vec![false; head.wishes.sampling.n as usize], head }
    }

    /// Messages of one event; a failure has none, it ends the call with a status.
    pub(crate) fn print(&mut self, event: Event) -> Result<Vec<wire::GenerateEvent>, kvasir_core::Error> {
        let mut events = Vec::new();
        match event {
            Event::Failed(error) => return Err(error),
            Event::Started(started) => {
                let cached_tokens = started.cached();
                events.push(WireEvent::Started(wire::Started { prompt_tokens: cached_tokens + started.computed, cached_tokens }));
            }
            Event::Output(tokens) => {
                events.extend(self.open(tokens.choice));
                events.push(WireEvent::Delta(self.delta(tokens)));
            }
            Event::Finished(end) => {
                for choice in 0..self.opened.len() as u32 {
                    events.extend(self.open(choice));
                }
                events.push(WireEvent::Finished(finished(&end)));
            }
        }
        Ok(events.into_iter().map(|event| self.envelope(event)).collect())
    }

    fn envelope(&self, event: WireEvent) -> wire::GenerateEvent {
        wire::GenerateEvent { id: self.head.id.clone(), model: self.head.model.name.clone(), event: Some(event) }
    }

    fn open(&mut self, choice: u32) -> Option<WireEvent> {
        let opened = self.opened.get_mut(choice as usize).filter(|opened| !**opened)?;
        *opened = true;
        let text = self.head.echoes.first()?.clone();
        Some(WireEvent::Delta(wire::Delta { choice, text, ..wire::Delta::default() }))
    }

    fn delta(&self, tokens: Tokens) -> wire::Delta {
        let text = &self.head.model.text;
        let prompt =
            |entry: &Option<TokenLogprob>| wire::PromptLogprob { token: entry.as_ref().map(|entry| logprob(text, entry)) };
        wire::Delta {
            choice: tokens.choice,
            logprobs: tokens.logprobs.iter().map(|entry| logprob(text, entry)).collect(),
            prompt_logprobs: tokens.prompt_logprobs.iter().map(prompt).collect(),
            text: tokens.text,
            ids: tokens.ids,
        }
    }
}

fn logprob(text: &Text, entry: &TokenLogprob) -> wire::TokenLogprob {
    let bytes = |id: TokenId| text.tokenizer().token_bytes(id).to_vec();
    let top = |(id, logprob): &(TokenId, f32)| wire::TopLogprob { id: *id, bytes: bytes(*id), logprob: *logprob };
    wire::TokenLogprob { id: entry.id, bytes: bytes(entry.id), logprob: entry.logprob, top: entry.top.iter().map(top).collect() }
}

fn finished(end: &End) -> wire::Finished {
    wire::Finished {
        reasons: end.reasons.iter().map(|reason| finish_reason_to_wire(*reason) as i32).collect(),
        usage: Some(usage_to_wire(&end.usage)),
        report: end.report.as_ref().map(report),
    }
}

fn report(report: &Report) -> wire::Report {
    wire::Report {
        hits: report.hits.iter().map(|hit| pb::TierHit { tier: tier_to_wire(hit.tier) as i32, tokens: hit.tokens }).collect(),
        computed: report.computed,
        miss_reason: miss_reason_to_wire(report.miss_reason) as i32,
        contract: contract_to_wire(report.contract) as i32,
        drafted: report.counters.proposed,
        accepted: report.counters.accepted,
        states: states_to_wire(&report.states),
        placement: report.receipt.as_ref().map(placement),
    }
}

fn placement(receipt: &Receipt) -> wire::Placement {
    let term = |(name, seconds): &(String, f64)| wire::PlacementTerm { name: name.clone(), seconds: *seconds };
    wire::Placement {
        worker_uid: receipt.worker_uid.clone(),
        candidates: receipt.candidates,
        score_s: receipt.score_s,
        terms: receipt.terms.iter().map(term).collect(),
        attempts: receipt.attempts,
        predicted_cached_tokens: receipt.predicted_cached_tokens,
    }
}
