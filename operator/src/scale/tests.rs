#![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]
//! Loads that come, stay, go and vanish, in time that is handed in.

use super::*;
use kvasir_telemetry::names;
use std::fmt::Write as _;

/// A router that has counted so much.
#[derive(Clone, Copy, Default)]
struct Counted {
    queued: u32,
    shed: u32,
    /// First outputs within 0.1 s, within 1 s, and later, of prompts that are warm and that are not.
    warm: [u32; 3],
    cold: [u32; 3],
    /// Requests within the slo, and outside, where there is one.
    judged: Option<[u32; 2]>,
}

impl Counted {
    fn text(self) -> String {
        let mut text = format!("# HELP x\n{p}_{} {}\n", names::ROUTER_QUEUED, self.queued, p = names::PREFIX);
        let _ = writeln!(text, "{}_{}_total{{reason=\"overloaded\"}} {}", names::PREFIX, names::ROUTER_SHED, self.shed);
        for (hit, counts) in [("90-100", self.warm), ("0", self.cold)] {
            let name = format!("{}_{}", names::PREFIX, names::TTFT_SECONDS);
            let mut sum = 0;
            for (bound, count) in ["0.1", "1.0", "+Inf"].into_iter().zip(counts) {
                sum += count;
                let _ = writeln!(text, "{name}_bucket{{hit=\"{hit}\",tier=\"device\",le=\"{bound}\"}} {sum}");
            }
            let _ = writeln!(text, "{name}_count{{hit=\"{hit}\",tier=\"device\"}} {sum}");
        }
        for (within, count) in ["yes", "no"].into_iter().zip(self.judged.into_iter().flatten()) {
            let _ = writeln!(text, "{}_{}_total{{within=\"{within}\"}} {count}", names::PREFIX, names::SLO_REQUESTS);
        }
        text
    }
}

struct World {
    scaler: Scaler,
    rules: Rules,
    desired: u32,
    routable: u32,
    counted: Counted,
    now: Instant,
}

impl World {
    fn new(desired: u32, rules: Rules) -> Self {
        let mut world = Self {
            scaler: Scaler::default(),
            rules,
            desired,
            routable: desired,
            counted: Counted::default(),
            now: Instant::now(),
        };
        // The first look has nothing to compare with.
        assert_eq!(world.look().course, Course::Held);
        world
    }

    fn answer(&mut self, answer: Result<Sample, String>) -> Decision {
        self.now += INTERVAL;
        let answers = [("r-0".to_owned(), answer)].into();
        let decision = self.scaler.decide(&self.rules, (self.desired, self.routable), &answers, self.now);
        self.desired = decision.desired;
        decision
    }

    fn look(&mut self) -> Decision {
        self.answer(Sample::read(&self.counted.text()))
    }

    fn looks(&mut self, times: u32, happens: impl Fn(&mut Counted)) -> Vec<u32> {
        (0..times)
            .map(|_| {
                happens(&mut self.counted);
                self.look().desired
            })
            .collect()
    }
}

fn rules() -> Rules {
    Rules {
        bounds: (1, 10),
        goodput: None,
        ttft: None,
        queue: Some(4),
        up: Duration::from_secs(30),
        down: Duration::from_mins(1),
    }
}

#[test]
fn a_queue_that_lasts_adds_workers_and_a_moment_of_it_does_not() {
    let mut world = World::new(2, rules());
    world.looks(2, |counted| counted.queued = 16);
    assert_eq!(world.looks(1, |counted| counted.queued = 0), [2]);
    let desired = world.looks(4, |counted| (counted.queued, counted.cold[0]) = (16, counted.cold[0] + 10));
    assert_eq!(desired, [2, 2, 2, 4], "8 wait per worker where 4 may: twice the workers, after the window");
    assert_eq!(world.looks(40, |counted| (counted.queued, counted.cold[0]) = (400, counted.cold[0] + 10)).last(), Some(&10));
}

/// R59: a worker that never comes up is no obstacle on the way down.
#[test]
fn r59_workers_that_never_serve_do_not_keep_a_pool_large() {
    let mut world = World::new(5, rules());
    world.routable = 4;
    let desired = world.looks(8, |_| {});
    assert_eq!((desired[0], desired[7]), (5, 1));
}

/// R61: figures that are missing or nonsense never move the number.
#[test]
fn r61_missing_stale_and_nonsense_figures_hold_the_number() {
    let mut world = World::new(4, rules());
    world.looks(3, |counted| (counted.queued, counted.cold[0]) = (12, counted.cold[0] + 10));
    let text = world.counted.text();
    let broken = [
        Err("connection refused".to_owned()),
        Sample::read(""),
        Sample::read(&text.replace(" 12\n", " NaN\n")),
        Sample::read(&text.replace(" 12\n", " -3\n")),
        // A router that started anew counts from nothing: that is no fall of the load.
        Sample::read(&Counted::default().text()),
    ];
    for answer in broken.iter().cycle().take(50) {
        let decision = world.answer(answer.clone());
        let fresh = answer.as_ref().is_ok_and(|sample| sample.answered() == 0.0);
        assert!(decision.course == Course::Held || fresh, "{answer:?}: {decision:?}");
        assert_eq!(decision.desired, 4, "{answer:?}");
    }
    let none = world.scaler.decide(&world.rules, (4, 4), &BTreeMap::new(), world.now);
    assert_eq!((none.desired, none.course), (4, Course::Held));
}

#[test]
fn a_restarted_scaler_begins_where_it_was_and_waits_for_figures() {
    let mut world = World::new(7, rules());
    assert_eq!(world.look().desired, 7);
    assert_eq!(World::new(7, rules()).desired, 7);
}

#[test]
fn what_is_warm_makes_taking_workers_away_dearer() {
    // 1.4 requests wait per worker where 4 may: three of four workers would do, were nothing lost with the fourth.
    let load = |counted: &mut Counted| counted.queued = 6;
    let mut cold = World::new(4, rules());
    let mut warm = World::new(4, rules());
    let cold = cold.looks(8, |counted| {
        load(counted);
        counted.cold[0] += 10;
    });
    let warm = warm.looks(8, |counted| {
        load(counted);
        counted.warm[0] += 10;
    });
    assert_eq!((cold.last(), warm.last()), (Some(&2), Some(&4)));
}

#[test]
fn times_to_the_first_token_and_goodput_are_targets_too() {
    let mut world = World::new(2, Rules { queue: None, ttft: Some(0.2), ..rules() });
    assert_eq!(world.looks(5, |counted| counted.cold[1] += 100).last(), Some(&10), "far from 0.2 s");
    let mut world = World::new(2, Rules { queue: None, goodput: Some(0.9), ..rules() });
    let desired = world.looks(5, |counted| {
        counted.cold[0] += 100;
        let [good, late] = counted.judged.unwrap_or_default();
        counted.judged = Some([good + 80, late + 20]);
    });
    assert_eq!(desired.last(), Some(&4), "a fifth misses it where a tenth may");
    let mut world = World::new(2, Rules { queue: None, goodput: Some(0.9), ..rules() });
    world.counted.cold[0] = 5;
    assert!(world.look().message.contains("slo"));
}

#[test]
fn a_sleeping_pool_wakes_for_requests_and_not_for_silence() {
    let mut world = World::new(0, Rules { bounds: (0, 3), up: Duration::ZERO, ..rules() });
    assert_eq!(world.looks(20, |_| {}), [0; 20]);
    assert_eq!(world.looks(1, |counted| counted.shed += 1), [1]);
    assert_eq!(world.looks(9, |_| {}).last(), Some(&0), "and falls asleep again");
}

#[test]
fn numbers_stay_within_their_bounds_whatever_was_written_before() {
    let mut world = World::new(1, Rules { bounds: (2, 3), ..rules() });
    assert_eq!(world.desired, 2);
    assert_eq!(world.looks(9, |counted| (counted.queued, counted.cold[0]) = (999, counted.cold[0] + 1)).last(), Some(&3));
}
