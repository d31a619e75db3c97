//! One server of the cluster: own pid file, own log, stopped by pid. Owns no decision about order (see `cluster`).
//!
//! A pid file holds `pid start-time`; both must match before anybody is killed, so a reused pid is safe.

use crate::Error;
use crate::probe;
use rustix::process::{Pid, Signal, kill_process};
use std::fs::{self, File};
use std::io::{Read as _, Seek as _, SeekFrom};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// How much of a log an error shows.
const LOG_TAIL_BYTES: u64 = 3000;
/// Between two looks at a process that should be gone.
const LOOK: Duration = Duration::from_millis(10);
/// Time for a process to vanish after SIGKILL.
const GONE_MAX: Duration = Duration::from_secs(10);
/// Servers see this and nothing else of the environment.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// What to run.
#[derive(Clone, Debug)]
pub(crate) struct Spec {
    pub(crate) name: String,
    pub(crate) program: PathBuf,
    pub(crate) args: Vec<String>,
    /// Runs in the namespaces of this process.
    pub(crate) inside: Option<u32>,
}

/// A running server.
#[derive(Debug)]
pub(crate) struct Process {
    name: String,
    child: Child,
    /// The server itself, which is a child of `child` when it runs in namespaces.
    pid: u32,
    log: PathBuf,
    pid_file: PathBuf,
}

// === impl Process ===

impl Process {
    /// Starts a server; its log and pid file go under `dir`.
    pub(crate) async fn spawn(spec: &Spec, dir: &Path) -> Result<Self, Error> {
        let log = dir.join("logs").join(format!("{}.log", spec.name));
        let open = || File::options().create(true).append(true).open(&log);
        let stdout = open().map_err(Error::io("open", &log))?;
        let stderr = open().map_err(Error::io("open", &log))?;
        let mut command = spec.command();
        command.stdin(Stdio::null()).stdout(stdout).stderr(stderr).process_group(0);
        command.env_clear().env("PATH", PATH);
        let mut child = command.spawn().map_err(Error::io("run", &spec.program))?;
        let pid = match spec.inside {
            None => child.id(),
            Some(_) => match only_child(child.id()).await {
                Ok(pid) => pid,
                Err(error) => {
                    end(&mut child);
                    return Err(error);
                }
            },
        };
        let pid_file = dir.join("pids").join(&spec.name);
        let process = Self { name: spec.name.clone(), child, pid, log, pid_file };
        let line = format!("{pid} {}\n", start_time(pid).unwrap_or_default());
        fs::write(&process.pid_file, line).map_err(Error::io("write", &process.pid_file))?;
        Ok(process)
    }

    pub(crate) const fn pid(&self) -> u32 {
        self.pid
    }

    /// The error that a server which ended by itself is.
    pub(crate) fn check(&mut self) -> Result<(), Error> {
        match self.child.try_wait().map_err(Error::io("wait for", &self.pid_file))? {
            None => Ok(()),
            Some(status) => Err(self.ended(status)),
        }
    }

    fn ended(&self, status: ExitStatus) -> Error {
        Error::Ended { process: self.name.clone(), status, log: tail(&self.log) }
    }

    /// SIGKILL; returns when the process is gone.
    pub(crate) fn kill(&mut self) {
        signal(self.pid, Signal::KILL);
        end(&mut self.child);
        // In namespaces the server is not the child that was waited for.
        wait_gone(|| !is_running(self.pid));
        let _absent = fs::remove_file(&self.pid_file);
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

// === impl Spec ===

impl Spec {
    fn command(&self) -> Command {
        let Some(init) = self.inside else {
            let mut command = Command::new(&self.program);
            command.args(&self.args);
            return command;
        };
        let mut command = Command::new("nsenter");
        command.arg("--target").arg(init.to_string()).args(["--mount", "--net", "--pid", "--"]).arg(&self.program);
        command.args(&self.args);
        command
    }
}

/// Kills whoever a pid file names, if it is still the same process. Returns when it is gone.
pub(crate) fn kill_recorded(pid_file: &Path) {
    let Ok(text) = fs::read_to_string(pid_file) else { return };
    let Some((pid, started)) = recorded(&text) else { return };
    if start_time(pid) != Some(started) {
        return;
    }
    signal(pid, Signal::KILL);
    wait_gone(|| start_time(pid) != Some(started) || is_zombie(pid));
}

/// Polls until `gone`, for a few seconds at most: callers run in `Drop` or before there is a runtime.
#[expect(clippy::disallowed_methods, reason = "a bounded poll of the kernel where nothing can be awaited")]
pub(crate) fn wait_gone(mut gone: impl FnMut() -> bool) -> bool {
    let began = Instant::now();
    while !gone() {
        if began.elapsed() > GONE_MAX {
            return false;
        }
        std::thread::sleep(LOOK);
    }
    true
}

pub(crate) fn kill_pid(pid: u32) {
    signal(pid, Signal::KILL);
}

/// Whether this very process still runs (a zombie does not).
pub fn is_running(pid: u32) -> bool {
    start_time(pid).is_some() && !is_zombie(pid)
}

fn recorded(text: &str) -> Option<(u32, u64)> {
    let (pid, started) = text.trim().split_once(' ')?;
    Some((pid.parse().ok()?, started.parse().ok()?))
}

/// Field 22 of `/proc/PID/stat`, in clock ticks since boot. The name in field 2 may hold spaces, so fields count from its bracket.
fn start_time(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}

fn is_zombie(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/stat"))
        .ok()
        .and_then(|stat| Some(stat.rsplit_once(')')?.1.trim_start().starts_with('Z')))
        .unwrap_or(true)
}

fn signal(pid: u32, signal: Signal) {
    if let Some(pid) = Pid::from_raw(pid.cast_signed()) {
        // It may be gone already, which is what the caller wants.
        let _gone = kill_process(pid, signal);
    }
}

fn end(child: &mut Child) {
    let _gone = child.kill();
    let _reaped = child.wait();
}

/// `nsenter` and `unshare` fork once; their child is the program.
pub(crate) async fn only_child(parent: u32) -> Result<u32, Error> {
    let path = format!("/proc/{parent}/task/{parent}/children");
    probe::until(&format!("process {parent} forks"), GONE_MAX, || async {
        let text = fs::read_to_string(&path).map_err(|error| format!("{path}: {error}"))?;
        text.split_whitespace().next().and_then(|pid| pid.parse().ok()).ok_or_else(|| "no child yet".to_owned())
    })
    .await
}

/// The last lines of a log.
pub(crate) fn tail(log: &Path) -> String {
    let read = || -> std::io::Result<String> {
        let mut file = File::open(log)?;
        let len = file.metadata()?.len();
        file.seek(SeekFrom::Start(len.saturating_sub(LOG_TAIL_BYTES)))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    read().unwrap_or_else(|error| format!("{}: {error}", log.display()))
}

/// Runs a short command to its end and gives its output.
pub(crate) fn run(command: &mut Command) -> Result<String, Error> {
    let shown = shown(command);
    let output = command.stdin(Stdio::null()).output().map_err(|source| match source.kind() {
        std::io::ErrorKind::NotFound => Error::Missing {
            program: command.get_program().to_string_lossy().into_owned(),
            hint: "install it, or run `cargo xtask e2e`, which brings every tool".to_owned(),
        },
        _ => Error::Command { command: shown.clone(), output: source.to_string() },
    })?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    let skip = said.len().saturating_sub(LOG_TAIL_BYTES as usize);
    let from = (skip..said.len()).find(|at| said.is_char_boundary(*at)).unwrap_or(said.len());
    Err(Error::Command { command: shown, output: format!("{}, {}", output.status, said[from..].trim()) })
}

fn shown(command: &Command) -> String {
    std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(|word| word.to_string_lossy().into_owned())
        .collect::<Vec<_>>()
        .join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sleeper() -> Child {
        Command::new("sleep").arg("1000").spawn().unwrap()
    }

    #[test]
    fn a_recorded_process_is_killed() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("pid");
        let mut child = sleeper();
        fs::write(&file, format!("{} {}\n", child.id(), start_time(child.id()).unwrap())).unwrap();
        kill_recorded(&file);
        assert!(!is_running(child.id()));
        child.wait().unwrap();
    }

    #[test]
    fn a_process_that_only_has_the_pid_of_a_recorded_one_is_spared() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("pid");
        let mut child = sleeper();
        fs::write(&file, format!("{} {}\n", child.id(), start_time(child.id()).unwrap() + 1)).unwrap();
        kill_recorded(&file);
        assert!(is_running(child.id()));
        end(&mut child);
    }

    #[test]
    fn a_command_that_fails_says_what_it_was_and_what_it_said() {
        let error = run(Command::new("sh").args(["-c", "echo so sorry >&2; exit 3"])).unwrap_err();
        assert_eq!(error.to_string(), "`sh -c echo so sorry >&2; exit 3` failed: exit status: 3, so sorry");
        let error = run(&mut Command::new("kvasir-no-such-program")).unwrap_err();
        assert!(error.to_string().starts_with("`kvasir-no-such-program` is missing; install it"), "{error}");
    }
}
