//! A streamed answer as server-sent events.
//!
//! Flow: [`respond`] waits for the first output; an end before it gives a plain status, silence for too long sends the headers and a comment.
//! From then on each poll of the body takes one event from the answer, so a slow reader holds up its own request only. Nothing is spawned: the
//! body owns the answer, and dropping the body cancels the work.

use super::error::{ErrorBody, error_response};
use super::print::{COMMENT, ChunkPrinter, frame};
use crate::answer::{Answer, Event};
use crate::door::DoorSettings;
use axum::body::{Body, Bytes};
use axum::response::Response;
use futures::stream;
use http::{HeaderValue, header};
use kvasir_core::Error;
use std::convert::Infallible;
use std::time::Duration;
use tokio::time::{timeout, timeout_at};

struct Open {
    answer: Answer,
    printer: ChunkPrinter,
    keep_alive: Duration,
    /// What the headers waited for.
    first: Option<First>,
    ended: bool,
}

enum First {
    Event(Event),
    Silence,
}

/// Starts to answer.
pub(crate) async fn respond(settings: &DoorSettings, mut answer: Answer, printer: ChunkPrinter) -> Response {
    let first = match timeout_at(answer.received() + settings.headers_wait, output(&mut answer)).await {
        Ok(Some(Event::Failed(error))) => return error_response(&error),
        Ok(event) => event.map(First::Event),
        Err(_) => Some(First::Silence),
    };
    let open = Open { answer, printer, keep_alive: settings.keep_alive, first, ended: false };
    let mut response = Response::new(Body::from_stream(stream::unfold(open, step)));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Proxies that buffer would hold the stream back (nginx's convention).
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

/// The next event that a client sees.
async fn output(answer: &mut Answer) -> Option<Event> {
    loop {
        match answer.next().await {
            Some(Event::Started(_)) => {}
            other => return other,
        }
    }
}

async fn step(mut open: Open) -> Option<(Result<Bytes, Infallible>, Open)> {
    loop {
        if open.ended {
            return None;
        }
        let event = match open.first.take() {
            Some(First::Event(event)) => Some(event),
            Some(First::Silence) => return Some((Ok(Bytes::from_static(COMMENT.as_bytes())), open)),
            None => match timeout(open.keep_alive, output(&mut open.answer)).await {
                Ok(event) => event,
                Err(_) => return Some((Ok(Bytes::from_static(COMMENT.as_bytes())), open)),
            },
        };
        let text = open.print(event);
        if !text.is_empty() {
            return Some((Ok(Bytes::from(text)), open));
        }
    }
}

// === impl Open ===

impl Open {
    fn print(&mut self, event: Option<Event>) -> String {
        let printed = match event {
            None => {
                self.ended = true;
                return String::new();
            }
            Some(Event::Started(_)) => return String::new(),
            Some(Event::Output(tokens)) => self.printer.output(tokens),
            Some(Event::Finished(end)) => {
                self.ended = true;
                self.printer.finish(&end)
            }
            Some(Event::Failed(error)) => Err(error),
        };
        printed.unwrap_or_else(|error| self.fail(&error))
    }

    /// An error event ends a stream; `[DONE]` would look like success.
    fn fail(&mut self, error: &Error) -> String {
        self.ended = true;
        frame(&ErrorBody::new(error).json())
    }
}
