//! Cache events: cutting a batch into messages of bounded size and putting it together again.
//!
//! Invariants
//! 1. Every part of a batch carries its incarnation, seq and epoch; all but the last have `continued`.
//! 2. Putting together checks that the parts belong together; parts of a snapshot are passed on as they come, since a snapshot has no bound.

use super::words::{removal_cause_from_wire, removal_cause_to_wire, tier_from_wire, tier_to_wire};
use super::{Malformed, bytes_from_wire, digest_from_wire, required};
use crate::worker as wire;
use crate::worker::cache_event::Kind;
use kvasir_core::{BlockKey, CacheEvent, Error, EventBatch, Incarnation, TenantTag};

/// Most keys in one message, about 280 KB: far below the 4 MiB that gRPC peers take by default.
pub const KEYS_PER_MESSAGE: usize = 8192;

/// Most events in one message, so that a batch of many small events is cut as well.
const EVENTS_PER_MESSAGE: usize = 4096;

/// Puts the parts of batches together.
#[derive(Debug, Default)]
pub struct EventReader {
    pending: Option<EventBatch>,
}

/// Writes a batch as one or more messages; `Stored` runs that are cut name the key before them as their parent.
pub fn events_to_wire(batch: &EventBatch) -> Vec<wire::KvEventsResponse> {
    let mut parts: Vec<Vec<wire::CacheEvent>> = vec![Vec::new()];
    let mut keys = 0;
    for event in &batch.events {
        for (piece, size) in cut(event) {
            let full = parts
                .last()
                .is_some_and(|part| !part.is_empty() && (keys + size > KEYS_PER_MESSAGE || part.len() == EVENTS_PER_MESSAGE));
            if full {
                parts.push(Vec::new());
                keys = 0;
            }
            keys += size;
            if let Some(part) = parts.last_mut() {
                part.push(piece);
            }
        }
    }
    let last = parts.len() - 1;
    let more_of_snapshot = batch.snapshot == Some(false);
    parts
        .into_iter()
        .enumerate()
        .map(|(index, events)| wire::KvEventsResponse {
            incarnation: batch.incarnation.0.to_vec(),
            seq: batch.seq,
            epoch: batch.epoch,
            snapshot: batch.snapshot.is_some(),
            continued: index < last || more_of_snapshot,
            events,
        })
        .collect()
}

/// The event in pieces of at most [`KEYS_PER_MESSAGE`] keys, each with its number of keys.
fn cut(event: &CacheEvent) -> Vec<(wire::CacheEvent, usize)> {
    let event_of = |kind| wire::CacheEvent { kind: Some(kind) };
    match event {
        CacheEvent::Stored { keys, parent, tier, tenant } => {
            let mut parent = *parent;
            pieces(keys)
                .map(|run| {
                    let stored = wire::Stored {
                        keys: keys_to_wire(run),
                        parent: parent.map(|key| key.digest().as_bytes().to_vec()).unwrap_or_default(),
                        tier: tier_to_wire(*tier) as i32,
                        tenant_tag: tenant.0.to_string(),
                    };
                    parent = run.last().copied().or(parent);
                    (event_of(Kind::Stored(stored)), run.len())
                })
                .collect()
        }
        CacheEvent::Removed { keys, tier, cause } => pieces(keys)
            .map(|run| {
                let removed = wire::Removed {
                    keys: keys_to_wire(run),
                    tier: tier_to_wire(*tier) as i32,
                    cause: removal_cause_to_wire(*cause) as i32,
                };
                (event_of(Kind::Removed(removed)), run.len())
            })
            .collect(),
        CacheEvent::Cleared { tenant } => {
            let cleared = wire::Cleared { tenant_tag: tenant.as_ref().map(|tenant| tenant.0.to_string()) };
            vec![(event_of(Kind::Cleared(cleared)), 0)]
        }
    }
}

fn pieces(keys: &[BlockKey]) -> std::slice::Chunks<'_, BlockKey> {
    keys.chunks(KEYS_PER_MESSAGE)
}

fn keys_to_wire(keys: &[BlockKey]) -> Vec<Vec<u8>> {
    keys.iter().map(|key| key.digest().as_bytes().to_vec()).collect()
}

// === impl EventReader ===

impl EventReader {
    /// Takes one message; gives a batch when it is complete. After an error the stream is of no use any more.
    pub fn push(&mut self, message: wire::KvEventsResponse) -> Result<Option<EventBatch>, Error> {
        self.read(message).map_err(Malformed::into_internal)
    }

    fn read(&mut self, message: wire::KvEventsResponse) -> Result<Option<EventBatch>, Malformed> {
        let incarnation = Incarnation(bytes_from_wire("incarnation", &message.incarnation)?);
        let events = message.events.into_iter().map(event_from_wire).collect::<Result<Vec<_>, _>>()?;
        let part = EventBatch { incarnation, seq: message.seq, epoch: message.epoch, snapshot: None, events };
        if message.snapshot {
            if self.pending.is_some() {
                return Err(Malformed::new("snapshot", "begins inside an unfinished batch"));
            }
            return Ok(Some(EventBatch { snapshot: Some(!message.continued), ..part }));
        }
        let whole = match self.pending.take() {
            None => part,
            Some(mut pending) => {
                if (pending.incarnation, pending.seq, pending.epoch) != (part.incarnation, part.seq, part.epoch) {
                    let problem = format!("is {} inside the unfinished batch {}", part.seq, pending.seq);
                    return Err(Malformed::new("seq", problem));
                }
                pending.events.extend(part.events);
                pending
            }
        };
        if message.continued {
            self.pending = Some(whole);
            return Ok(None);
        }
        Ok(Some(whole))
    }
}

fn event_from_wire(event: wire::CacheEvent) -> Result<CacheEvent, Malformed> {
    Ok(match required("events.kind", event.kind)? {
        Kind::Stored(stored) => CacheEvent::Stored {
            keys: keys_from_wire("events.stored.keys", &stored.keys)?,
            parent: match stored.parent.as_slice() {
                [] => None,
                bytes => Some(BlockKey::from_digest(digest_from_wire("events.stored.parent", bytes)?)),
            },
            tier: tier_from_wire("events.stored.tier", stored.tier)?,
            tenant: TenantTag(stored.tenant_tag.into()),
        },
        Kind::Removed(removed) => CacheEvent::Removed {
            keys: keys_from_wire("events.removed.keys", &removed.keys)?,
            tier: tier_from_wire("events.removed.tier", removed.tier)?,
            cause: removal_cause_from_wire("events.removed.cause", removed.cause)?,
        },
        Kind::Cleared(cleared) => CacheEvent::Cleared { tenant: cleared.tenant_tag.map(|tag| TenantTag(tag.into())) },
    })
}

fn keys_from_wire(field: &str, keys: &[Vec<u8>]) -> Result<Vec<BlockKey>, Malformed> {
    if keys.is_empty() {
        return Err(Malformed::new(field, "must have at least one key"));
    }
    keys.iter().map(|key| digest_from_wire(field, key).map(BlockKey::from_digest)).collect()
}
