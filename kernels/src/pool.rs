//! The compute threads: one pool for a worker, taken whole by each step.
//!
//! Owns: the threads, their wake-up and the float environment they compute in. Refuses to know: what a
//! task computes. Called by every kernel that splits its outputs.
//!
//! Invariants
//! - A task index runs exactly once per run, on one thread; `run` returns after the last has ended.
//! - A task is touched only by a thread that claimed its index, and a run ends only when all claimed
//!   indexes have ended, so the borrowed closure outlives its uses.
//! - Concurrent runs take turns; a run started from inside a task runs on that thread alone.
//! - Every task computes with default rounding and with denormals, whatever the calling thread had set.
//!
//! Costs: no allocation per run. A worker spins for about 100 µs after its last task and then parks, so a
//! run costs under 1 µs to start in the middle of a step and one futex wake per thread after an idle gap.

mod float_env;

use std::any::Any;
use std::cell::Cell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

/// The most threads a pool starts, the caller's included.
const MAX_THREADS: usize = 512;

/// Rounds of waiting with a pause instruction before a thread parks (workers) or yields (the caller).
const SPIN_ROUNDS: u32 = 2_000;

/// Low bits of [`Shared::state`]: tasks not claimed yet. High bits: the number of the run.
const REMAINING_BITS: u32 = 24;
const REMAINING_MASK: u64 = (1 << REMAINING_BITS) - 1;

/// Fixed threads that execute the tasks of one run at a time.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<Worker>,
    /// Held for the length of a run.
    turn: Mutex<()>,
}

struct Worker {
    parked: Arc<AtomicBool>,
    handle: Option<JoinHandle<()>>,
}

/// One cache line per word that several threads write.
#[repr(align(64))]
struct Line<T>(T);

type Task<'a> = &'a (dyn Fn(usize) + Sync);

struct Shared {
    /// `run number << REMAINING_BITS | tasks not claimed yet`.
    state: Line<AtomicU64>,
    /// Tasks of the current run that have ended.
    done: Line<AtomicUsize>,
    /// Points at the caller's `Task` while `state` has unclaimed tasks.
    task: AtomicPtr<()>,
    tasks: AtomicUsize,
    closing: AtomicBool,
    /// The first panic of the current run, handed to its caller.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

thread_local! {
    /// Set while this thread executes a task: a nested run must not wait for itself.
    static IN_TASK: Cell<bool> = const { Cell::new(false) };
}

impl Pool {
    /// Starts a pool of `threads` threads, the caller's own counted: `new(1)` starts none.
    ///
    /// `threads` is clamped to 1 to 512. If the system refuses a thread the pool is smaller, which
    /// changes no result; [`Pool::threads`] says how many there are.
    pub fn new(threads: usize) -> Self {
        let shared = Arc::new(Shared::new());
        let mut workers = Vec::new();
        for index in 1..threads.clamp(1, MAX_THREADS) {
            let parked = Arc::new(AtomicBool::new(false));
            let (theirs, flag) = (Arc::clone(&shared), Arc::clone(&parked));
            let spawned = thread::Builder::new().name(format!("kvasir-compute-{index}")).spawn(move || serve(&theirs, &flag));
            match spawned {
                Ok(handle) => workers.push(Worker { parked, handle: Some(handle) }),
                Err(_) => break,
            }
        }
        Self { shared, workers, turn: Mutex::new(()) }
    }

    /// How many threads execute a run, the caller's included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `task(i)` once for every `i` in `0..tasks`, spread over the threads, and returns after the last.
    ///
    /// Indexes are handed out ascending, so put long tasks first. A panic in a task is raised again here
    /// after all other tasks have ended.
    pub fn run(&self, tasks: usize, task: Task<'_>) {
        let _env = float_env::Default::enter();
        if tasks <= 1 || self.workers.is_empty() || IN_TASK.get() {
            (0..tasks).for_each(task);
            return;
        }
        let turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let mut first = 0;
        while first < tasks {
            let count = (tasks - first).min(REMAINING_MASK as usize);
            self.round(count, &|index| task(first + index));
            first += count;
        }
        let panicked = self.shared.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(turn);
        if let Some(payload) = panicked {
            resume_unwind(payload);
        }
    }

    /// One run of at most `REMAINING_MASK` tasks; the caller holds the turn.
    fn round(&self, tasks: usize, task: Task<'_>) {
        let shared = &*self.shared;
        shared.publish(tasks, &task);
        for worker in self.workers.iter().take(tasks - 1) {
            let asleep = worker.parked.load(Ordering::SeqCst) && worker.parked.swap(false, Ordering::SeqCst);
            if let Some(handle) = worker.handle.as_ref().filter(|_| asleep) {
                handle.thread().unpark();
            }
        }
        IN_TASK.set(true);
        shared.drain();
        IN_TASK.set(false);
        let mut rounds = 0;
        while shared.done.0.load(Ordering::Acquire) != tasks {
            if rounds < SPIN_ROUNDS {
                rounds += 1;
                std::hint::spin_loop();
            } else {
                thread::yield_now();
            }
        }
    }
}

impl Shared {
    fn new() -> Self {
        Self {
            state: Line(AtomicU64::new(0)),
            done: Line(AtomicUsize::new(0)),
            task: AtomicPtr::new(std::ptr::null_mut()),
            tasks: AtomicUsize::new(0),
            closing: AtomicBool::new(false),
            panic: Mutex::new(None),
        }
    }

    /// Opens a run. The previous one has ended: `state` has no unclaimed task, so nobody reads these words.
    fn publish(&self, tasks: usize, task: &Task<'_>) {
        self.task.store(std::ptr::from_ref(task).cast_mut().cast(), Ordering::Relaxed);
        self.tasks.store(tasks, Ordering::Relaxed);
        self.done.0.store(0, Ordering::Relaxed);
        let run = (self.state.0.load(Ordering::Relaxed) >> REMAINING_BITS).wrapping_add(1);
        self.state.0.store(run << REMAINING_BITS | tasks as u64, Ordering::SeqCst);
        // Pairs with the fence in `rest`: either we see the worker parked, or it sees the tasks.
        fence(Ordering::SeqCst);
    }

    fn has_tasks(&self) -> bool {
        self.state.0.load(Ordering::SeqCst) & REMAINING_MASK != 0
    }

    /// Claims and executes tasks until none is left unclaimed.
    fn drain(&self) {
        let mut state = self.state.0.load(Ordering::Acquire);
        loop {
            let remaining = (state & REMAINING_MASK) as usize;
            if remaining == 0 {
                return;
            }
            let task = self.task.load(Ordering::Relaxed);
            let tasks = self.tasks.load(Ordering::Relaxed);
            match self.state.0.compare_exchange_weak(state, state - 1, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => {
                    self.execute(task, tasks - remaining);
                    state = self.state.0.load(Ordering::Acquire);
                }
                Err(now) => state = now,
            }
        }
    }

    fn execute(&self, task: *mut (), index: usize) {
        // SAFETY: `task` and the claim belong to the same run: the exchange succeeded on the state that was
        // loaded before them, and `publish` stores a new pointer only after every claimed task of the run
        // before has been counted in `done`, this one included. Until this task is counted the caller waits
        // in `round`, so the reference that the pointer leads to is alive.
        let task: Task<'_> = unsafe { *task.cast_const().cast::<Task<'_>>() };
        if let Err(payload) = catch_unwind(AssertUnwindSafe(|| task(index))) {
            self.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(payload);
        }
        self.done.0.fetch_add(1, Ordering::Release);
    }
}

/// A worker thread's life: tasks, a short spin, park.
fn serve(shared: &Shared, parked: &AtomicBool) {
    let _env = float_env::Default::enter();
    IN_TASK.set(true);
    while !shared.closing.load(Ordering::SeqCst) {
        shared.drain();
        rest(shared, parked);
    }
}

/// Returns when there may be work or the pool closes.
fn rest(shared: &Shared, parked: &AtomicBool) {
    for _ in 0..SPIN_ROUNDS {
        if shared.has_tasks() || shared.closing.load(Ordering::Relaxed) {
            return;
        }
        std::hint::spin_loop();
    }
    parked.store(true, Ordering::SeqCst);
    fence(Ordering::SeqCst);
    while parked.load(Ordering::SeqCst) {
        if shared.has_tasks() || shared.closing.load(Ordering::SeqCst) {
            break;
        }
        thread::park();
    }
    parked.store(false, Ordering::SeqCst);
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::SeqCst);
        for worker in &mut self.workers {
            if let Some(handle) = worker.handle.take() {
                handle.thread().unpark();
                // A worker catches the panics of its tasks and has no other way to fail.
                let _ = handle.join();
            }
        }
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("threads", &self.threads()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
