//! Programs under measurement: started with a clean environment, watched through /proc, ended with the bench.
//!
//! Costs are those of the whole process with all its threads, user and system time, in the kernel's ticks of 10 ms.

use super::RouterBenchError;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};

/// A running program; dropping it kills it.
pub struct Process {
    name: String,
    pid: u32,
    child: Child,
    log: PathBuf,
}

/// Ticks per second in /proc/PID/stat: USER_HZ, part of Linux's interface, whatever the kernel's own clock.
const TICKS_PER_SECOND: u64 = 100;
/// Bytes of a log that an error shows.
const SHOWN_BYTES: usize = 2_000;
/// Longest wait for a line that a program prints at its start.
const LINE_MAX: Duration = Duration::from_secs(30);

// === impl Process ===

impl Process {
    /// Starts `program`; what it writes goes to a file in `folder`.
    pub fn spawn<A: AsRef<OsStr>>(name: &str, program: &Path, args: &[A], folder: &Path) -> Result<Self, RouterBenchError> {
        let failed = |source| RouterBenchError::Spawn { program: program.to_owned(), source };
        let log = folder.join(format!("{}.log", name.replace(' ', "-")));
        let file = File::create(&log).map_err(failed)?;
        let mut command = Command::new(program);
        // A variable of the caller must not change one of the arms.
        command.env_clear().envs(std::env::vars_os().filter(|(name, _)| name == "PATH" || name == "HOME" || name == "LANG"));
        command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(file).kill_on_drop(true);
        let mut child = command.spawn().map_err(failed)?;
        let pid = child.id().ok_or_else(|| RouterBenchError::Ended { name: name.to_owned(), log: String::new() })?;
        // Without a reader a program that prints much would stand still.
        let unread = child.stdout.take();
        let mut process = Self { name: name.to_owned(), pid, child, log };
        process.child.stdout = unread;
        Ok(process)
    }

    /// The next lines of its standard output.
    pub async fn lines(&mut self, count: usize) -> Result<Vec<String>, RouterBenchError> {
        let Some(stdout) = self.child.stdout.take() else { return Err(self.ended()) };
        let mut reader = BufReader::new(stdout).lines();
        let mut lines = Vec::new();
        while lines.len() < count {
            match tokio::time::timeout(LINE_MAX, reader.next_line()).await {
                Ok(Ok(Some(line))) => lines.push(line),
                _ => return Err(self.ended()),
            }
        }
        tokio::spawn(async move { while let Ok(Some(_)) = reader.next_line().await {} });
        Ok(lines)
    }

    /// Reads and forgets what it prints.
    pub fn forget_output(&mut self) {
        if let Some(stdout) = self.child.stdout.take() {
            tokio::spawn(async move {
                let mut reader = BufReader::new(stdout).lines();
                while let Ok(Some(_)) = reader.next_line().await {}
            });
        }
    }

    /// An error if it has ended.
    pub fn check(&mut self) -> Result<(), RouterBenchError> {
        match self.child.try_wait() {
            Ok(None) => Ok(()),
            _ => Err(self.ended()),
        }
    }

    /// User and system time so far.
    pub fn cpu(&self) -> Result<Duration, RouterBenchError> {
        let (path, text) = self.proc("stat")?;
        cpu_of(&text).ok_or(RouterBenchError::Format { path, text })
    }

    /// Resident memory in MiB.
    pub fn rss_mib(&self) -> Result<f64, RouterBenchError> {
        let (path, text) = self.proc("status")?;
        let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = line.and_then(|line| line.split_whitespace().next()).and_then(|word| word.parse::<f64>().ok());
        kib.map(|kib| kib / 1024.0).ok_or(RouterBenchError::Format { path, text })
    }

    /// Kills it and waits for its end.
    pub async fn stop(mut self) {
        if let Err(error) = self.child.kill().await {
            tracing::warn!(%error, name = self.name, "a program could not be ended");
        }
    }

    fn proc(&self, file: &str) -> Result<(String, String), RouterBenchError> {
        let path = format!("/proc/{}/{file}", self.pid);
        match fs::read_to_string(&path) {
            Ok(text) => Ok((path, text)),
            Err(source) => Err(RouterBenchError::Proc { path, source }),
        }
    }

    fn ended(&self) -> RouterBenchError {
        let log = fs::read(&self.log).unwrap_or_default();
        let shown = String::from_utf8_lossy(&log[log.len().saturating_sub(SHOWN_BYTES)..]).into_owned();
        RouterBenchError::Ended { name: self.name.clone(), log: shown }
    }
}

/// Fields 14 and 15 of /proc/PID/stat; the name, field 2, may hold spaces and brackets.
fn cpu_of(stat: &str) -> Option<Duration> {
    let (_, fields) = stat.rsplit_once(')')?;
    let mut ticks = fields.split_whitespace().skip(11).map(str::parse::<u64>);
    let total = ticks.next()?.ok()? + ticks.next()?.ok()?;
    Some(Duration::from_millis(total * 1000 / TICKS_PER_SECOND))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_is_found_behind_any_name() {
        let stat = "42 (a b) c) S 1 2 3 4 5 6 7 8 9 10 150 25 0 0 20 0 8 0 1 2 3";
        assert_eq!(cpu_of(stat), Some(Duration::from_millis(1750)));
        assert_eq!(cpu_of("42 (a) S 1"), None);
    }
}
