use super::*;
use crate::breaker::Signal;
use crate::cost::OwnLoad;
use crate::lease::Total;
use crate::view::{Described, Live, Readiness, Reported};
use kvasir_core::{
    CacheEvent, CostPoint, Digest, EventBatch, Incarnation, PoolSecret, Prefix, ReuseDomain, TenantTag, Tier, TierLoad,
    WorkerLoad, block_keys,
};

const BLOCK: u32 = 16;

fn identity(number: u8) -> ModelIdentity {
    ModelIdentity(Digest::new([number; 32]))
}

struct Fleet {
    index: Index,
    workers: Vec<WorkerView>,
    now: Instant,
}

impl Fleet {
    fn of(count: usize) -> Self {
        let mut fleet = Self { index: Index::new(64 << 20), workers: Vec::new(), now: Instant::now() };
        (0..count).for_each(|number| fleet.add(&format!("worker-{number}")));
        fleet
    }

    fn add(&mut self, name: &str) {
        let uid = WorkerUid(name.into());
        let mut worker =
            WorkerView::unknown(uid, format!("http://{name}"), Arc::new(Live::new(Arc::new(Total::default()), Arc::default())));
        let incarnation = Incarnation([1; 8]);
        let member = self.index.attach(worker.salt, incarnation);
        let models = Arc::from([("m".to_owned(), identity(1))]);
        worker.described = Some(Described { incarnation, member, models, block_size: BLOCK });
        worker.readiness = Readiness::Ready;
        worker.load = Some(reported(self.now));
        self.workers.push(worker);
    }

    fn caches(&mut self, worker: usize, keys: &[BlockKey]) {
        let member = self.workers[worker].described.as_ref().unwrap().member;
        let event = CacheEvent::Stored { keys: keys.to_vec(), parent: None, tier: Tier::Device, tenant: TenantTag("t".into()) };
        let batch = EventBatch { incarnation: Incarnation([1; 8]), seq: 1, epoch: 1, snapshot: Some(true), events: vec![event] };
        self.index.apply(member, &batch, Duration::ZERO);
    }

    fn view(&self) -> View {
        View::new(self.workers.iter().cloned().map(Arc::new).collect(), Arc::default(), true)
    }

    fn try_pick(&self, keys: &[BlockKey], tried: &[WorkerUid]) -> Result<Pick, Error> {
        let work = Work { prompt_tokens: keys.len() as u32 * BLOCK + 5, output_tokens: 100.0, choices: 1, block_size: BLOCK };
        let placement = Placement { identity: identity(1), keys, work, tried };
        let mut counter = 0;
        let mut rng = move || {
            counter += 1;
            counter
        };
        pick(
            &self.view(),
            &self.index,
            &placement,
            &PickSettings::default(),
            Moment { now: self.now, index: Duration::ZERO },
            &mut rng,
        )
    }

    fn pick(&self, keys: &[BlockKey]) -> Pick {
        self.try_pick(keys, &[]).unwrap()
    }

    fn at(&self, pick: &Pick) -> usize {
        self.workers.iter().position(|worker| worker.uid == pick.worker.uid).unwrap()
    }
}

fn load() -> WorkerLoad {
    WorkerLoad {
        incarnation: Incarnation([1; 8]),
        seq: 1,
        running: 0,
        waiting: 0,
        tiers: vec![TierLoad { tier: Tier::Device, free: 4_000, cached: 0, held: 0 }],
        queued_prefill_tokens: 0,
        prefill_tokens_per_second: 1_000.0,
        decode_tokens_per_second: 50.0,
        cost: vec![CostPoint { rows: 1, seconds: 0.02 }, CostPoint { rows: 16, seconds: 0.05 }],
        acceptance: Vec::new(),
        draining: false,
    }
}

fn reported(now: Instant) -> Reported {
    Reported { load: load(), measured: now, own: OwnLoad::default() }
}

fn keys(domain: u64, blocks: u32) -> Vec<BlockKey> {
    let secret = PoolSecret::new(b"a secret of more than sixteen bytes").unwrap();
    let domain = ReuseDomain::derive(&secret, &format!("tenant-{domain}"), 0, None);
    let tokens: Vec<u32> = (0..blocks * BLOCK).collect();
    block_keys(Prefix::new(&identity(1), &domain, None), BLOCK, &tokens)
}

#[test]
fn the_holder_of_the_prefix_wins_over_the_first_in_rendezvous_order() {
    let mut fleet = Fleet::of(10);
    let keys = keys(1, 64);
    let first = fleet.pick(&keys);
    assert_eq!((first.branch, first.predicted_cached_tokens), (Branch::Rendezvous, 0));
    let holder = (fleet.at(&first) + 1) % 10;
    fleet.caches(holder, &keys);
    let pick = fleet.pick(&keys);
    assert_eq!((fleet.at(&pick), pick.branch, pick.predicted_cached_tokens), (holder, Branch::Prefix, 64 * BLOCK));
    assert!(pick.terms.prefill_s < first.terms.prefill_s);
}

#[test]
fn a_busy_holder_loses_when_waiting_costs_more_than_computing() {
    let mut fleet = Fleet::of(4);
    let keys = keys(1, 64);
    fleet.caches(0, &keys);
    assert_eq!(fleet.at(&fleet.pick(&keys)), 0);
    fleet.workers[0].load.as_mut().unwrap().load.queued_prefill_tokens = 500;
    assert_eq!(fleet.at(&fleet.pick(&keys)), 0, "half a second of waiting is less than a second of prefill");
    fleet.workers[0].load.as_mut().unwrap().load.queued_prefill_tokens = 2_000;
    let pick = fleet.pick(&keys);
    assert_ne!(fleet.at(&pick), 0);
    assert_eq!(pick.branch, Branch::Spill);
}

#[test]
fn a_hot_prefix_walks_on_along_the_order_when_its_candidates_are_busy() {
    let mut fleet = Fleet::of(40);
    let keys = keys(1, 64);
    let mut used = std::collections::HashSet::new();
    for _ in 0..20 {
        let pick = fleet.pick(&keys);
        let at = fleet.at(&pick);
        used.insert(at);
        fleet.workers[at].load.as_mut().unwrap().load.queued_prefill_tokens += 3_000;
    }
    assert_eq!(used.len(), 20, "each request found an idle worker");
}

#[test]
fn unusable_workers_are_left_out_each_for_its_own_reason() {
    let mut fleet = Fleet::of(1);
    let keys = keys(1, 8);
    let refused = |fleet: &Fleet| fleet.try_pick(&keys, &[]).unwrap_err();
    assert!(fleet.try_pick(&keys, &[]).is_ok());
    for readiness in [
        Readiness::Unprobed,
        Readiness::Draining,
        Readiness::Unready(Error::new(Reason::NotReady, "loading")),
        Readiness::Lost(Error::new(Reason::WorkerLost, "refused")),
    ] {
        fleet.workers[0].readiness = readiness;
        let error = refused(&fleet);
        assert_eq!((error.reason, error.retry_after.is_some()), (Reason::NoWorker, true), "{error}");
    }
    fleet.workers[0].readiness = Readiness::Ready;
    fleet.workers[0].load.as_mut().unwrap().load.draining = true;
    assert_eq!(refused(&fleet).reason, Reason::NoWorker);
    fleet.workers[0].load = Some(reported(fleet.now));
    fleet.now += WorkerLoad::AGE_MAX + Duration::from_millis(1);
    assert_eq!(refused(&fleet).reason, Reason::NoWorker, "a stale load is no signal");
    fleet.workers[0].load = None;
    assert_eq!(refused(&fleet).reason, Reason::NoWorker);
    fleet.workers[0].load = Some(reported(fleet.now));
    assert!(fleet.try_pick(&keys, &[]).is_ok());
    let uid = fleet.workers[0].uid.clone();
    assert_eq!(fleet.try_pick(&keys, &[uid]).unwrap_err().reason, Reason::NoWorker);
    (0..crate::breaker::FAILURES_MAX).for_each(|_| fleet.workers[0].live.breaker.record(Signal::TransportFailed, fleet.now, 0.5));
    assert_eq!(refused(&fleet).reason, Reason::NoWorker);
    fleet.add("worker-other");
    fleet.workers[1].described.as_mut().unwrap().models = Arc::from([("m".to_owned(), identity(2))]);
    assert_eq!(refused(&fleet).reason, Reason::NoWorker, "another identity is another model");
}

#[test]
fn a_usable_worker_far_down_the_order_is_found() {
    let mut fleet = Fleet::of(300);
    (0..299).for_each(|number| fleet.workers[number].load = None);
    assert_eq!(fleet.at(&fleet.pick(&keys(1, 8))), 299);
}

#[test]
fn a_prompt_without_a_full_block_spreads_at_random() {
    let fleet = Fleet::of(8);
    let view = fleet.view();
    let work = Work { prompt_tokens: 5, output_tokens: 10.0, choices: 1, block_size: BLOCK };
    let placement = Placement { identity: identity(1), keys: &[], work, tried: &[] };
    let mut seen = std::collections::HashSet::new();
    for seed in 0..200u64 {
        let mut rng = || crate::rendezvous::rank(seed, 1);
        let at = Moment { now: fleet.now, index: Duration::ZERO };
        let pick = pick(&view, &fleet.index, &placement, &PickSettings::default(), at, &mut rng).unwrap();
        assert_eq!(pick.branch, Branch::Random);
        seen.insert(pick.worker.uid.clone());
    }
    assert_eq!(seen.len(), 8);
}

#[test]
fn equal_membership_gives_every_router_the_same_choice_whatever_the_order_of_joining() {
    let names: Vec<String> = (0..24).map(|number| format!("worker-{number}")).collect();
    let routers: Vec<Fleet> = (0..4)
        .map(|router: usize| {
            let mut fleet = Fleet { index: Index::new(1 << 20), workers: Vec::new(), now: Instant::now() };
            let mut names = names.clone();
            names.rotate_left(router * 7 % 24);
            if router % 2 == 1 {
                names.reverse();
            }
            for name in &names {
                fleet.add(name);
            }
            fleet
        })
        .collect();
    for domain in 0..200 {
        let keys = keys(domain, 70);
        let choices: Vec<WorkerUid> = routers.iter().map(|router| router.pick(&keys).worker.uid.clone()).collect();
        assert!(choices.windows(2).all(|pair| pair[0] == pair[1]), "{choices:?}");
    }
}

#[test]
fn equal_prompts_of_two_tenants_share_a_worker_no_more_often_than_chance() {
    let workers = 8;
    let fleet = Fleet::of(workers);
    let mut together = 0u32;
    let domains = 1_000u64;
    for domain in 0..domains {
        let (a, b) = (fleet.pick(&keys(2 * domain, 64)), fleet.pick(&keys(2 * domain + 1, 64)));
        together += u32::from(a.worker.uid == b.worker.uid);
    }
    // Binomial(1000, 1/8): mean 125, sigma 10.46. Five sigmas, two-sided p < 6e-7.
    let (mean, sigma) = (domains as f64 / workers as f64, (domains as f64 / 8.0 * 7.0 / 8.0).sqrt());
    assert!((f64::from(together) - mean).abs() < 5.0 * sigma, "{together} of {domains} shared a worker, {mean} expected");
    // Positive control: the same domain always meets itself.
    assert!((0..100).all(|domain| fleet.pick(&keys(domain, 64)).worker.uid == fleet.pick(&keys(domain, 64)).worker.uid));
}

#[test]
fn the_receipt_sums_to_the_score_and_the_least_cost_won() {
    let mut fleet = Fleet::of(6);
    for (number, worker) in fleet.workers.iter_mut().enumerate() {
        let load = &mut worker.load.as_mut().unwrap().load;
        load.queued_prefill_tokens = 100 * number as u64;
        load.running = (number as u32 * 5) % 7;
    }
    for domain in 0..50 {
        let pick = fleet.pick(&keys(domain, 20));
        assert_eq!(pick.terms.named().iter().map(|(_, seconds)| seconds).sum::<f64>(), pick.terms.score_s());
        assert!(pick.candidates >= 4);
    }
}

/// A figure, not a limit: printed so that a change can be seen (`--nocapture`).
#[test]
fn the_cost_of_a_decision_is_printed_for_small_and_large_fleets() {
    for count in [16, 4_000] {
        let mut fleet = Fleet::of(count);
        // A hot prefix that everybody holds and a conversation that one worker holds.
        let hot = keys(0, 32);
        let warm: Vec<Vec<BlockKey>> = (1..=200).map(|domain| keys(domain, 32)).collect();
        for worker in 0..count {
            let mine: Vec<BlockKey> = hot.iter().chain(warm.iter().skip(worker).step_by(count).flatten()).copied().collect();
            fleet.caches(worker, &mine);
        }
        let view = fleet.view();
        let work = Work { prompt_tokens: 517, output_tokens: 16.0, choices: 1, block_size: BLOCK };
        let time = |prompts: &[Vec<BlockKey>]| {
            let rounds = 2_000 / prompts.len();
            let start = std::time::Instant::now();
            for keys in std::iter::repeat_n(prompts, rounds).flatten() {
                let placement = Placement { identity: identity(1), keys, work, tried: &[] };
                let at = Moment { now: fleet.now, index: Duration::ZERO };
                let pick = pick(&view, &fleet.index, &placement, &PickSettings::default(), at, &mut || 1).unwrap();
                std::hint::black_box(pick);
            }
            start.elapsed() / (rounds * prompts.len()) as u32
        };
        let (own, everybody) = (time(&warm), time(std::slice::from_ref(&hot)));
        println!("{count} workers, 512-token prompts: own prefix {own:?}, everybody's prefix {everybody:?} a decision");
    }
}
