//! Signals that end a process.

use tokio::signal::unix::{Signal, SignalKind, signal};

/// Exit code of a process that SIGTERM ended.
pub const EXIT_SIGNALLED: u8 = 143;

/// SIGTERM and Ctrl-C, which mean the same.
pub struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

// === impl Signals ===

impl Signals {
    /// Listens from now on; needs a runtime.
    pub fn new() -> std::io::Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    /// Returns at the next one.
    pub async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}
