//! Identity, domains, collisions, shared prefixes, joins, and what a stranger can learn from time.

use crate::rig::{Answer, Dice, Rig, identity, prompt, request, rig, secret, settings, shared_domain, solo};
use kvasir_core::{
    Adapter, Digest, IdentityParts, MissReason, ModelIdentity, NumericsMode, NumericsParts, PoolSecret, Request, ReuseDomain,
    TenantTag,
};
use kvasir_worker::kv::{FlushScope, Pool};
use std::time::Duration;

fn reason(answer: &Answer) -> Option<MissReason> {
    answer.started.as_ref().unwrap().miss_reason
}

fn numerics() -> NumericsParts {
    NumericsParts {
        mode: NumericsMode::Fake,
        revision: 1,
        kv_dtype: "u64".to_owned(),
        kv_layout: "slots".to_owned(),
        parallel_degree: 1,
        block_size: 4,
    }
}

fn parts() -> IdentityParts {
    IdentityParts {
        weights: crate::rig::digest("weights"),
        architecture: b"llama".to_vec(),
        tokenizer: crate::rig::digest("tokenizer"),
        chat_template: crate::rig::digest("template"),
        adapter: None,
        numerics: numerics().id(),
    }
}

/// One row per component: a change of it, and nothing else.
fn identities() -> Vec<(&'static str, ModelIdentity)> {
    let digest: fn(&str) -> Digest = crate::rig::digest;
    let adapter = |content: &str, scale| Some(Adapter { content: digest(content), scale });
    let with = |change: &dyn Fn(&mut IdentityParts)| {
        let mut parts = parts();
        change(&mut parts);
        parts.id()
    };
    let in_numerics = |change: &dyn Fn(&mut NumericsParts)| {
        let mut numerics = numerics();
        change(&mut numerics);
        with(&|parts| parts.numerics = numerics.id())
    };
    vec![
        ("base", parts().id()),
        ("weights", with(&|parts| parts.weights = digest("other"))),
        ("architecture", with(&|parts| parts.architecture = b"qwen2".to_vec())),
        ("tokenizer", with(&|parts| parts.tokenizer = digest("other"))),
        ("chat template", with(&|parts| parts.chat_template = digest("other"))),
        ("tokenizer and template exchanged", with(&|parts| std::mem::swap(&mut parts.tokenizer, &mut parts.chat_template))),
        ("adapter", with(&|parts| parts.adapter = adapter("a", 1.0))),
        ("other adapter", with(&|parts| parts.adapter = adapter("b", 1.0))),
        ("adapter scale", with(&|parts| parts.adapter = adapter("a", 0.5))),
        ("adapter named like the weights", with(&|parts| parts.adapter = adapter("weights", 1.0))),
        ("numerics mode", in_numerics(&|numerics| numerics.mode = NumericsMode::Cpu)),
        ("numerics revision", in_numerics(&|numerics| numerics.revision = 2)),
        ("kv dtype", in_numerics(&|numerics| "f16".clone_into(&mut numerics.kv_dtype))),
        ("kv layout", in_numerics(&|numerics| "rows".clone_into(&mut numerics.kv_layout))),
        ("parallel degree", in_numerics(&|numerics| numerics.parallel_degree = 2)),
        ("block size", in_numerics(&|numerics| numerics.block_size = 8)),
    ]
}

#[test]
fn every_changed_component_of_the_identity_reuses_nothing() {
    let table = identities();
    let mut settings = settings(256);
    settings.identities = table.iter().map(|(_, identity)| *identity).collect();
    let mut rig = rig(settings);
    let prompt = prompt(1, 22);
    for (name, identity) in &table {
        let mut asking = request("t", &prompt, 1);
        asking.identity = *identity;
        let cold = rig.ask(asking.clone());
        assert_eq!((cold.cached(), reason(&cold)), (0, Some(MissReason::Cold)), "{name}");
        assert_eq!(rig.ask(asking).cached(), 20, "{name}: the same identity hits in full");
    }
    rig.assert_at_rest();
}

#[test]
fn every_changed_component_of_the_domain_reuses_nothing() {
    let secret = secret();
    let other = PoolSecret::new(&[4; 32]).unwrap();
    let domains = [
        ReuseDomain::derive(&secret, "a", 0, None),
        ReuseDomain::derive(&secret, "b", 0, None),
        ReuseDomain::derive(&secret, "a", 1, None),
        ReuseDomain::derive(&secret, "a", 0, Some("")),
        ReuseDomain::derive(&secret, "a", 0, Some("b")),
        ReuseDomain::derive(&secret, "b", 0, Some("a")),
        ReuseDomain::derive(&other, "a", 0, None),
    ];
    let mut rig = rig(settings(128));
    for domain in domains {
        let mut asking = request("t", &prompt(1, 22), 1);
        asking.domain = domain;
        let cold = rig.ask(asking.clone());
        assert_eq!((cold.cached(), reason(&cold)), (0, Some(MissReason::Cold)));
        assert_eq!(rig.ask(asking).cached(), 20);
    }
    rig.assert_at_rest();
}

#[test]
fn a_stranger_with_the_same_prompt_gets_nothing_and_the_reason_cold() {
    let mut rig = rig(settings(64));
    let prompt = prompt(1, 30);
    rig.ask(request("a", &prompt, 4));
    let stranger = rig.ask(request("b", &prompt, 4));
    assert_eq!((stranger.cached(), reason(&stranger)), (0, Some(MissReason::Cold)));
    // Also while the owner is computing it right now, and after it was evicted.
    let fresh = crate::rig::prompt(2, 30);
    let mut owner = rig.submit(request("a", &fresh, 4));
    rig.engine.step();
    let stranger = rig.ask(request("b", &fresh, 4));
    assert_eq!((stranger.cached(), reason(&stranger)), (0, Some(MissReason::Cold)));
    rig.wait(&mut owner);
    for seed in 100..120 {
        rig.ask(request("a", &crate::rig::prompt(seed, 30), 4));
    }
    assert_eq!(reason(&rig.ask(request("a", &prompt, 4))), Some(MissReason::Evicted));
    let mut later = request("c", &prompt, 4);
    later.tenant = TenantTag("c".into());
    assert_eq!(reason(&rig.ask(later)), Some(MissReason::Cold));
    rig.assert_at_rest();
}

#[test]
fn every_miss_has_its_reason() {
    let mut rig = rig(settings(64));
    let base = prompt(1, 21);
    assert_eq!(reason(&rig.ask(request("a", &base, 1))), Some(MissReason::Cold));
    assert_eq!(reason(&rig.ask(request("a", &base, 1))), None, "all but the last token was reused");
    assert_eq!(reason(&rig.ask(request("a", &base[..20], 1))), Some(MissReason::PartialBlock));
    let mut fork = base.clone();
    fork[10] ^= 1;
    let diverged = rig.ask(request("a", &fork, 1));
    assert_eq!((diverged.cached(), reason(&diverged)), (8, Some(MissReason::Diverged)));
    let mut off = request("a", &base, 1);
    off.cache.mode = kvasir_core::CacheMode::Off;
    let disabled = rig.ask(off);
    assert_eq!((disabled.cached(), reason(&disabled)), (0, Some(MissReason::Disabled)));
    assert_eq!(rig.engine.stats().missed(MissReason::Diverged), 1);
    rig.assert_at_rest();
}

#[test]
fn caching_off_neither_reads_nor_writes() {
    let mut off = settings(64);
    off.cache = kvasir_core::CacheMode::Off;
    let mut rig = rig(off);
    for _ in 0..2 {
        let answer = rig.ask(request("a", &prompt(1, 21), 9));
        assert_eq!((answer.cached(), reason(&answer)), (0, Some(MissReason::Disabled)));
    }
    assert_eq!(rig.engine.pool().counts().cached, 0);
    rig.assert_at_rest();
}

#[test]
fn a_forced_collision_is_refused_by_content() {
    let mut colliding = settings(64);
    // All keys fall together; only root, tokens and parent tell blocks apart.
    colliding.key_map = |_| kvasir_core::BlockKey::from_digest(Digest::new([7; 32]));
    let mut rig = rig(colliding);
    let prompt = prompt(1, 6);
    let owner = rig.ask(request("a", &prompt, 3));
    assert_eq!(rig.ask(request("a", &prompt, 3)).cached(), 4, "the path is taken: equal content under that key hits");
    let stranger = rig.ask(request("b", &prompt, 3));
    assert_eq!(stranger.cached(), 0, "another root");
    let mut other = prompt.clone();
    other[2] ^= 1;
    assert_eq!(rig.ask(request("a", &other, 3)).cached(), 0, "other tokens");
    let mut twice = prompt[..4].to_vec();
    twice.extend(&prompt[..4]);
    twice.push(1);
    let again = rig.ask(request("a", &twice, 3));
    assert_eq!(again.cached(), 4, "the second block has the same key and tokens but another parent");
    assert_eq!(again.output(), solo(&request("a", &twice, 3)).output());
    assert_eq!(owner.output(), stranger.output());
    assert!(rig.engine.stats().collisions >= 4);
    rig.assert_at_rest();
}

#[test]
fn a_registered_prefix_is_shared_up_to_the_block_boundary_and_nothing_after_it() {
    let mut rig = rig(settings(128));
    let tokens = prompt(1, 30);
    let asking = |tenant: &str, tokens: &[u32]| {
        let mut asking = request(tenant, tokens, 2);
        asking.shared = Some((shared_domain(), 14));
        asking
    };
    assert_eq!(rig.ask(asking("a", &tokens)).cached(), 0);
    let stranger = rig.ask(asking("b", &tokens));
    assert_eq!((stranger.cached(), reason(&stranger)), (12, Some(MissReason::Cold)), "14 tokens are three whole blocks");
    assert_eq!(rig.ask(asking("b", &tokens)).cached(), 28, "the rest is its own");
    assert_eq!(rig.ask(request("c", &tokens, 2)).cached(), 0, "who does not carry the prefix shares nothing");
    let mut tags: Vec<_> = rig.engine.pool().by_tenant().into_iter().map(|(tenant, ..)| tenant.0.to_string()).collect();
    tags.sort();
    assert_eq!(tags, [Pool::SHARED_TAG, "a", "b", "c"], "shared blocks belong to no tenant");
    let handle = rig.handle.clone();
    assert!(rig.command(handle.flush(FlushScope::Tenant(TenantTag("a".into())))) > 0);
    assert_eq!(rig.ask(asking("d", &tokens)).cached(), 12, "flushing a tenant leaves what is shared");
    rig.assert_at_rest();
}

#[test]
fn flushes_take_what_they_name_and_held_blocks_lose_their_name() {
    let other_secret = PoolSecret::new(&[4; 32]).unwrap();
    let mut two = settings(128);
    two.identities.push(identity("n"));
    let mut rig = rig(two);
    let ask = |rig: &mut Rig, change: &dyn Fn(&mut Request)| {
        let mut asking = request("a", &prompt(1, 21), 1);
        change(&mut asking);
        rig.ask(asking).cached()
    };
    let rotated = |asking: &mut Request| {
        asking.domain = ReuseDomain::derive(&other_secret, "a", 0, None);
        asking.secret_epoch = other_secret.epoch();
    };
    let other_model = |asking: &mut Request| asking.identity = identity("n");
    let other_tenant = |asking: &mut Request| {
        asking.tenant = TenantTag("b".into());
        asking.domain = crate::rig::domain("b");
    };
    let all: [&dyn Fn(&mut Request); 4] = [&|_| {}, &rotated, &other_model, &other_tenant];
    let scopes = [
        (FlushScope::Tenant(TenantTag("b".into())), [20, 20, 20, 0]),
        (FlushScope::Identity(identity("n")), [20, 20, 0, 20]),
        (FlushScope::SecretEpochNot(other_secret.epoch()), [0, 20, 0, 0]),
        (FlushScope::All, [0, 0, 0, 0]),
    ];
    for (scope, left) in scopes {
        for change in all {
            ask(&mut rig, change);
        }
        let handle = rig.handle.clone();
        rig.command(handle.flush(scope.clone()));
        let cached: Vec<_> = all.iter().map(|change| ask(&mut rig, change)).collect();
        assert_eq!(cached, left, "{scope:?}");
    }
    // A running request keeps its blocks through a flush and publishes nothing more.
    let running = request("z", &prompt(9, 21), 30);
    let mut reader = rig.submit(running.clone());
    for _ in 0..6 {
        rig.engine.step();
    }
    let handle = rig.handle.clone();
    assert!(rig.command(handle.flush(FlushScope::All)) > 0);
    assert_eq!(rig.wait(&mut reader).output(), solo(&running).output());
    assert_eq!(rig.ask(running).cached(), 0);
    rig.assert_at_rest();
}

#[test]
fn a_prefix_that_another_computes_is_joined_and_computed_once() {
    let mut rig = rig(settings(128));
    let base = prompt(1, 60);
    let mut readers: Vec<_> = (0..5).map(|_| rig.submit(request("a", &base, 4))).collect();
    rig.engine.step();
    readers.push(rig.submit(request("a", &base, 4)));
    let answers: Vec<_> = readers.iter_mut().map(|reader| rig.wait(reader)).collect();
    assert_eq!(answers.iter().map(Answer::cached).collect::<Vec<_>>(), [0, 56, 56, 56, 56, 56]);
    assert_eq!(rig.engine.stats().steps.joins, 5);
    assert_eq!(rig.engine.stats().prompt.computed, 60 + 5 * 4);
    assert!(answers.iter().all(|answer| answer.output() == answers[0].output()));
    rig.assert_at_rest();
}

#[test]
fn a_join_falls_back_when_the_other_is_cancelled_or_preempted_at_any_step() {
    for at in 1..6 {
        for cancel in [true, false] {
            let mut rig = rig(settings(128));
            let asking = request("a", &prompt(1, 60), 4);
            let mut first = Some(rig.submit(asking.clone()));
            rig.engine.step();
            let mut second = rig.submit(asking.clone());
            for _ in 0..at {
                rig.engine.step();
            }
            if cancel {
                drop(first.take());
            } else {
                rig.engine.preempt_one();
            }
            assert_eq!(rig.wait(&mut second).output(), solo(&asking).output());
            if let Some(mut first) = first {
                assert_eq!(rig.wait(&mut first).output(), solo(&asking).output());
            }
            rig.engine.step();
            rig.assert_at_rest();
        }
    }
}

#[test]
fn a_flush_takes_what_hangs_below_and_stops_who_had_begun() {
    // Two tenants in one domain (isolation: Pool): the second one's blocks hang below the first one's.
    let mut rig = rig(settings(64));
    let tokens = prompt(1, 21);
    let asking = |tenant: &str, length: usize| {
        let mut asking = request("pool", &tokens[..length], 1);
        asking.tenant = TenantTag(tenant.into());
        asking
    };
    rig.ask(asking("a", 9));
    assert_eq!(rig.ask(asking("b", 21)).cached(), 8);
    let handle = rig.handle.clone();
    assert_eq!(rig.command(handle.flush(FlushScope::Tenant(TenantTag("a".into())))), 5);
    assert_eq!(rig.ask(asking("b", 21)).cached(), 0);
    // One that has begun, but published nothing yet, publishes nothing after a flush; one that waits may.
    let mut begun = rig.submit(request("c", &prompt(2, 3), 30));
    rig.engine.step();
    let handle = rig.handle.clone();
    rig.command(handle.flush(FlushScope::All));
    let answer = rig.wait(&mut begun);
    assert_eq!(rig.engine.pool().counts().cached, 0);
    let mut follow = prompt(2, 3);
    follow.extend(answer.ids());
    assert_eq!(rig.ask(request("c", &follow, 1)).cached(), 0);
    rig.assert_at_rest();
}

#[test]
fn after_a_rotation_the_old_secret_neither_finds_nor_stores() {
    let new = PoolSecret::new(&[4; 32]).unwrap();
    let mut rig = rig(settings(64));
    let old = request("a", &prompt(1, 21), 1);
    let mut renewed = old.clone();
    renewed.domain = ReuseDomain::derive(&new, "a", 0, None);
    renewed.secret_epoch = new.epoch();
    rig.ask(old.clone());
    let handle = rig.handle.clone();
    rig.command(handle.flush(FlushScope::SecretEpochNot(new.epoch())));
    for _ in 0..2 {
        assert_eq!(rig.ask(old.clone()).cached(), 0);
    }
    assert_eq!(rig.engine.pool().counts().cached, 0);
    rig.ask(renewed.clone());
    assert_eq!(rig.ask(renewed).cached(), 20);
    rig.assert_at_rest();
}

/// Time to the first token of a stranger's probe, after the victim did or did not send the same prompt, at equal load.
fn probe(rig: &mut Rig, dice: &mut Dice, prober: &str, sent: bool) -> Duration {
    let length = 24 + dice.below(24) as usize;
    let target = prompt(dice.next(), length);
    let other = prompt(dice.next(), length);
    let mut victim = rig.submit(request("victim", if sent { &target } else { &other }, 2));
    let mut load = rig.submit(request("load", &prompt(dice.next(), 10 + dice.below(10) as usize), 1 + dice.below(6) as u32));
    let warm_up = dice.below(3);
    for _ in 0..warm_up {
        rig.engine.step();
    }
    // The probe comes while the victim runs or after it ended.
    if dice.chance(70) {
        rig.wait(&mut victim);
    }
    let mut reader = rig.submit(request(prober, &target, 1));
    let answer = rig.wait(&mut reader);
    rig.wait(&mut load);
    drop(victim);
    rig.run_dry();
    answer.finished.unwrap().states.total()
}

/// Probability that a probe after "sent" is faster than one after "not sent" (Mann and Whitney 1947), ties half.
fn auc(prober: &str, trials: u64) -> f64 {
    let mut dice = Dice(11);
    let mut rig = rig(settings(96));
    let mut samples: Vec<(Duration, bool)> = Vec::new();
    for trial in 0..trials {
        let sent = trial % 2 == 0;
        let time = probe(&mut rig, &mut dice, prober, sent);
        samples.push((time, sent));
    }
    rig.assert_at_rest();
    let (sent, not): (Vec<_>, Vec<_>) = samples.into_iter().partition(|(_, sent)| *sent);
    let mut score = 0.0;
    for (fast, _) in &sent {
        for (slow, _) in &not {
            score += match fast.cmp(slow) {
                std::cmp::Ordering::Less => 1.0,
                std::cmp::Ordering::Equal => 0.5,
                std::cmp::Ordering::Greater => 0.0,
            };
        }
    }
    score / (sent.len() * not.len()) as f64
}

#[test]
fn time_to_first_token_tells_nothing_of_a_strangers_prompts() {
    let own = auc("victim", 400);
    assert!(own > 0.85, "the positive control: one's own prompts are seen, {own}");
    let stranger = auc("stranger", 2400);
    assert!((stranger - 0.5).abs() <= 0.05, "{stranger}");
}
