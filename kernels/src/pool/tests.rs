//! Every task once, on threads that sleep, wake, panic and nest.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use super::*;

#[test]
fn every_index_runs_exactly_once_for_any_thread_and_task_count() {
    for threads in [1, 2, 3, 5] {
        let pool = Pool::new(threads);
        assert_eq!(pool.threads(), threads);
        for tasks in [0, 1, 2, 3, 7, 64, 1000] {
            let hits: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
            pool.run(tasks, &|i| {
                hits[i].fetch_add(1, Ordering::Relaxed);
            });
            assert!(hits.iter().all(|h| h.load(Ordering::Relaxed) == 1), "{threads} threads, {tasks} tasks");
        }
    }
}

/// Waits until `met` holds; fails after a minute.
fn wait_until(what: &str, met: impl Fn() -> bool) {
    let start = std::time::Instant::now();
    while !met() {
        assert!(start.elapsed().as_secs() < 60, "{what}");
        thread::yield_now();
    }
}

#[test]
fn many_short_runs_lose_no_task() {
    let pool = Pool::new(3);
    let total = AtomicUsize::new(0);
    for _ in 0..20_000 {
        pool.run(4, &|i| {
            total.fetch_add(i + 1, Ordering::Relaxed);
        });
    }
    assert_eq!(total.into_inner(), 20_000 * 10);
}

#[test]
fn parked_workers_wake_for_the_next_run() {
    let pool = Pool::new(3);
    for _ in 0..20 {
        wait_until("an idle worker never parked", || pool.workers.iter().all(|worker| worker.parked.load(Ordering::SeqCst)));
        // No thread can take a second task before all three have one.
        let inside = AtomicUsize::new(0);
        pool.run(3, &|_| {
            inside.fetch_add(1, Ordering::SeqCst);
            wait_until("a worker slept through a run", || inside.load(Ordering::SeqCst) == 3);
        });
    }
}

#[test]
fn concurrent_runs_take_turns() {
    let pool = Pool::new(2);
    let start = std::sync::Barrier::new(3);
    // The caller whose tasks are inside, and how many of them; callers are 1, 2, 3.
    let inside = Mutex::new((0, 0));
    let strangers = AtomicUsize::new(0);
    thread::scope(|scope| {
        for caller in 1..=3 {
            let (pool, start, inside, strangers) = (&pool, &start, &inside, &strangers);
            scope.spawn(move || {
                start.wait();
                for _ in 0..200 {
                    pool.run(4, &|_| {
                        {
                            let mut inside = inside.lock().unwrap();
                            strangers.fetch_add(usize::from(inside.1 > 0 && inside.0 != caller), Ordering::Relaxed);
                            *inside = (caller, inside.1 + 1);
                        }
                        // Gives the others every chance to be here at the same time.
                        thread::yield_now();
                        inside.lock().unwrap().1 -= 1;
                    });
                }
            });
        }
    });
    assert_eq!(strangers.into_inner(), 0, "tasks of two runs were inside at once");
}

#[test]
fn a_run_inside_a_task_runs_on_that_thread() {
    let pool = Pool::new(2);
    let total = AtomicUsize::new(0);
    pool.run(4, &|_| {
        pool.run(3, &|i| {
            total.fetch_add(i, Ordering::Relaxed);
        });
    });
    assert_eq!(total.into_inner(), 12);
}

#[test]
fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
    let pool = Pool::new(2);
    let ran = AtomicUsize::new(0);
    let result = catch_unwind(AssertUnwindSafe(|| {
        pool.run(16, &|i| {
            ran.fetch_add(1, Ordering::Relaxed);
            assert!(i != 5, "task five");
        });
    }));
    assert!(result.is_err());
    assert_eq!(ran.load(Ordering::Relaxed), 16);
    pool.run(2, &|_| {
        ran.fetch_add(1, Ordering::Relaxed);
    });
    assert_eq!(ran.load(Ordering::Relaxed), 18);
}

#[cfg(target_arch = "x86_64")]
#[test]
fn tasks_keep_denormals_even_if_the_caller_flushes_them() {
    const FLUSH: u64 = 0x8040;
    let before = float_env::arch::read();
    float_env::arch::write(before | FLUSH);
    // Threads inherit the spawning thread's control word.
    let pool = Pool::new(2);
    let kept = AtomicUsize::new(0);
    pool.run(64, &|_| {
        let half = std::hint::black_box(f32::MIN_POSITIVE) * std::hint::black_box(0.5);
        kept.fetch_add(usize::from(half.to_bits() != 0), Ordering::Relaxed);
    });
    let after = float_env::arch::read();
    float_env::arch::write(before);
    assert_eq!(kept.into_inner(), 64);
    assert_eq!(after & FLUSH, FLUSH, "the caller's own setting is restored");
}
