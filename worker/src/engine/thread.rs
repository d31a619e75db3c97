//! The engine's thread.

use super::Engine;
use super::mailbox::Message;
use kvasir_core::{Chunk, Error, Reason, StateTimes, Usage};
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::Duration;

/// Longest sleep without a message while requests wait for time to pass (deadlines, stalled readers, load reports).
const SLEEP_MAX: Duration = Duration::from_millis(200);

/// The running thread; it ends after [`super::EngineHandle::stop`].
#[derive(Debug)]
pub struct EngineThread(JoinHandle<()>);

// === impl EngineThread ===

impl EngineThread {
    /// Waits for the thread's end; an error if it died.
    pub fn join(self) -> Result<(), Error> {
        self.0.join().map_err(|_| Error::new(Reason::Internal, "the engine thread died; its log has the cause"))
    }

    /// Whether the thread has ended.
    pub fn is_finished(&self) -> bool {
        self.0.is_finished()
    }
}

// === impl Engine ===

impl Engine {
    /// Runs on a thread of its own until it is stopped.
    pub fn spawn(self) -> Result<EngineThread, Error> {
        let thread = std::thread::Builder::new().name("kvasir-engine".to_owned()).spawn(move || self.run_until_stopped());
        thread.map(EngineThread).map_err(|error| Error::new(Reason::Internal, format!("cannot start the engine thread: {error}")))
    }

    fn run_until_stopped(mut self) {
        loop {
            let worked = self.step();
            if self.reports.stopping && !self.has_work() {
                return;
            }
            if !worked {
                self.shared.mailbox.wait(SLEEP_MAX);
            }
        }
    }
}

impl Drop for Engine {
    /// However the engine ends, also in a panic: every reader learns it and nobody waits for ever.
    fn drop(&mut self) {
        self.shared.down.store(true, Ordering::Release);
        let error = Error::new(Reason::NotReady, "the engine has ended; send the request to another worker");
        let all: Vec<_> = self.work.jobs.keys().copied().collect();
        for id in all {
            self.fail(id, &error);
        }
        for message in self.shared.mailbox.close() {
            if let Message::Submit(submission) = message {
                let (usage, states) = (Usage::default(), StateTimes::default());
                submission.stream.end(Chunk::Failed { error: error.clone(), usage, states });
            }
        }
        self.feed.close();
    }
}
