//! Round trips over generated values, and one refusal per rule of the strict reading.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test may stop at the first surprise")]

use super::*;
use crate::describe::{
    ArtifactKind, ArtifactRef, BuildInfo, Description, DrafterInfo, DrafterKind, DrafterPlacement, DrafterState,
    ModelDescription, Phase, Role, TierCapacity,
};
use crate::worker as wire;
use kvasir_core::{
    Adapter, BlockKey, CacheEvent, CacheMode, CachePolicy, Chunk, Contract, CostPoint, Counters, EventBatch, FinishReason,
    Finished, Grammar, IdentityParts, Incarnation, LogitBias, MissReason, ModelIdentity, NumericsMode, NumericsParts,
    RemovalCause, Request, RequestId, ReuseDomain, Sampling, SecretEpoch, SharedDomain, Speculation, SpeculationMode, Started,
    State, StateTimes, Stop, TenantTag, Tier, TierHit, TierLoad, TokenLogprob, Tokens, TraceContext, Usage, WorkerLoad,
    WorkerUid,
};
use proptest::collection::vec;
use proptest::option::of;
use proptest::prelude::*;
use std::time::Duration;

fn digest() -> impl Strategy<Value = Digest> {
    any::<[u8; 32]>().prop_map(Digest::new)
}

fn word<T: Copy + std::fmt::Debug + 'static>(words: &'static [T]) -> impl Strategy<Value = T> {
    proptest::sample::select(words)
}

fn adapter() -> impl Strategy<Value = Adapter> {
    (digest(), -8.0f32..8.0).prop_map(|(content, scale)| Adapter { content, scale })
}

fn sampling() -> impl Strategy<Value = Sampling> {
    let numbers = (0.0f32..4.0, 0..100u32, 0.01f32..=1.0, 0.0f32..=1.0, 0.1f32..4.0, -2.0f32..2.0, -2.0f32..2.0);
    let bias = vec((any::<u32>(), -100.0f32..=100.0).prop_map(|(token, bias)| LogitBias { token, bias }), 0..4);
    (any::<u64>(), 1..=CHOICES_MAX, numbers, bias, of(0..=LOGPROBS_MAX), of(0..=LOGPROBS_MAX)).prop_map(
        |(seed, n, numbers, logit_bias, logprobs, prompt_logprobs)| Sampling {
            seed,
            n,
            temperature: numbers.0,
            top_k: numbers.1,
            top_p: numbers.2,
            min_p: numbers.3,
            repetition_penalty: numbers.4,
            presence_penalty: numbers.5,
            frequency_penalty: numbers.6,
            logit_bias,
            logprobs,
            prompt_logprobs,
        },
    )
}

fn grammar() -> impl Strategy<Value = Grammar> {
    prop_oneof![
        Just(Grammar::JsonObject),
        ".{0,9}".prop_map(Grammar::JsonSchema),
        ".{0,9}".prop_map(Grammar::Regex),
        ".{0,9}".prop_map(Grammar::Lark),
    ]
}

fn request() -> impl Strategy<Value = Request> {
    let names = (any::<[u8; 16]>(), digest(), of(adapter()), digest(), any::<[u8; 8]>(), ".{1,9}", of(digest()));
    let work = (vec(any::<u32>(), 1..9), sampling(), of(grammar()), vec(".{1,4}", 0..3), vec(any::<u32>(), 0..3));
    let wishes = (
        word(&[CacheMode::Auto, CacheMode::On, CacheMode::Off]),
        of(any::<u32>()),
        any::<(bool, bool, u32, u32)>(),
        word(&[Contract::Coupled, Contract::Rejection]),
        word(&[SpeculationMode::Auto, SpeculationMode::Fixed, SpeculationMode::Off]),
        of(any::<u32>()),
    );
    let rest = (any::<i32>(), of(0..u64::MAX / 2), of((".{0,9}", of(".{1,9}"))));
    (names, work, wishes, rest).prop_map(|(names, work, wishes, rest)| Request {
        id: RequestId(names.0),
        identity: ModelIdentity(names.1),
        adapter: names.2,
        domain: ReuseDomain::from_digest(names.3),
        shared: names.6.map(|domain| (SharedDomain::from_digest(domain), work.0.len() as u32)),
        secret_epoch: SecretEpoch(names.4),
        tenant: TenantTag(names.5.into()),
        prompt: work.0.into(),
        sampling: work.1,
        grammar: work.2,
        stop: Stop { strings: work.3, tokens: work.4, ignore_eos: wishes.2.0, min_tokens: wishes.2.2, max_tokens: wishes.2.3 },
        cache: CachePolicy { mode: wishes.0, ttl: wishes.1.map(|ttl| Duration::from_millis(ttl.into())), pin: wishes.2.1 },
        contract: wishes.3,
        speculation: Speculation { mode: wishes.4, max_draft_tokens: wishes.5 },
        priority: rest.0,
        deadline: rest.1.map(Duration::from_micros),
        trace: rest.2.map(|(traceparent, tracestate)| TraceContext { traceparent, tracestate }),
    })
}

/// A request that reads well, to be broken in one place.
fn good() -> wire::GenerateRequest {
    wire::GenerateRequest {
        request_id: vec![1; 16],
        expected_identity: vec![2; 32],
        prompt_tokens: vec![3, 4],
        domain_id: vec![5; 32],
        secret_epoch: vec![6; 8],
        tenant_tag: "tenant".into(),
        cache: Some(wire::CachePolicy { mode: 1, ttl_ms: None, pin: false }),
        sampling: Some(wire::Sampling { n: 1, top_p: 1.0, repetition_penalty: 1.0, ..Default::default() }),
        stop: Some(wire::Stop { max_tokens: 4, ..Default::default() }),
        contract: 1,
        speculation: Some(wire::Speculation { mode: 1, max_draft_tokens: None }),
        phase: 1,
        ..Default::default()
    }
}

/// The field that is blamed when `spoil` has changed a good request.
fn blamed(spoil: impl FnOnce(&mut wire::GenerateRequest)) -> (Reason, String) {
    let mut request = good();
    spoil(&mut request);
    let error = request_from_wire(request).expect_err("the request is broken");
    (error.reason, error.field.expect("an error names the field"))
}

fn sampled(spoil: impl FnOnce(&mut wire::Sampling)) -> (Reason, String) {
    blamed(|request| spoil(request.sampling.as_mut().unwrap()))
}

#[test]
fn each_broken_part_of_a_request_is_named() {
    assert!(request_from_wire(good()).is_ok());
    let cases = [
        ("request_id", blamed(|r| r.request_id = vec![0; 15])),
        ("expected_identity", blamed(|r| r.expected_identity = vec![0; 31])),
        ("expected_identity", blamed(|r| r.expected_identity.clear())),
        ("adapter.content_digest", blamed(|r| r.adapter = Some(wire::Adapter { content_digest: vec![0; 33], scale: 1.0 }))),
        ("adapter.scale", blamed(|r| r.adapter = Some(wire::Adapter { content_digest: vec![0; 32], scale: f32::NAN }))),
        ("prompt_tokens", blamed(|r| r.prompt_tokens.clear())),
        ("domain_id", blamed(|r| r.domain_id = vec![0; 64])),
        (
            "shared_prefix.shared_domain_id",
            blamed(|r| r.shared_prefix = Some(wire::SharedPrefix { shared_domain_id: vec![], tokens: 1 })),
        ),
        (
            "shared_prefix.tokens",
            blamed(|r| r.shared_prefix = Some(wire::SharedPrefix { shared_domain_id: vec![0; 32], tokens: 3 })),
        ),
        ("secret_epoch", blamed(|r| r.secret_epoch = vec![0; 9])),
        ("tenant_tag", blamed(|r| r.tenant_tag.clear())),
        ("cache", blamed(|r| r.cache = None)),
        ("cache.mode", blamed(|r| r.cache.as_mut().unwrap().mode = 0)),
        ("cache.mode", blamed(|r| r.cache.as_mut().unwrap().mode = 9)),
        ("sampling", blamed(|r| r.sampling = None)),
        ("stop", blamed(|r| r.stop = None)),
        ("stop.strings", blamed(|r| r.stop.as_mut().unwrap().strings.push(String::new()))),
        ("grammar.kind", blamed(|r| r.grammar = Some(wire::Grammar { kind: None }))),
        (
            "grammar.json_object",
            blamed(|r| r.grammar = Some(wire::Grammar { kind: Some(wire::grammar::Kind::JsonObject(false)) })),
        ),
        ("contract", blamed(|r| r.contract = 3)),
        ("speculation", blamed(|r| r.speculation = None)),
        ("speculation.mode", blamed(|r| r.speculation.as_mut().unwrap().mode = -1)),
        ("phase", blamed(|r| r.phase = 0)),
        ("sampling.n", sampled(|s| s.n = 0)),
        ("sampling.n", sampled(|s| s.n = CHOICES_MAX + 1)),
        ("sampling.temperature", sampled(|s| s.temperature = f32::NAN)),
        ("sampling.temperature", sampled(|s| s.temperature = -0.1)),
        ("sampling.temperature", sampled(|s| s.temperature = f32::INFINITY)),
        ("sampling.top_p", sampled(|s| s.top_p = 0.0)),
        ("sampling.top_p", sampled(|s| s.top_p = 1.1)),
        ("sampling.min_p", sampled(|s| s.min_p = f32::NAN)),
        ("sampling.repetition_penalty", sampled(|s| s.repetition_penalty = 0.0)),
        ("sampling.presence_penalty", sampled(|s| s.presence_penalty = f32::NEG_INFINITY)),
        ("sampling.frequency_penalty", sampled(|s| s.frequency_penalty = f32::NAN)),
        ("sampling.logit_bias.bias", sampled(|s| s.logit_bias.push(wire::LogitBias { token: 1, bias: 100.5 }))),
        ("sampling.logprobs", sampled(|s| s.logprobs = Some(LOGPROBS_MAX + 1))),
        ("sampling.prompt_logprobs", sampled(|s| s.prompt_logprobs = Some(LOGPROBS_MAX + 1))),
    ];
    for (field, blame) in cases {
        assert_eq!(blame, (Reason::InvalidArgument, field.to_owned()));
    }
}

#[test]
fn what_is_reserved_is_refused_and_never_ignored() {
    let cases = [
        ("phase", blamed(|r| r.phase = wire::Phase::Prefill as i32)),
        ("kv_source", blamed(|r| r.kv_source = Some(wire::KvSource::default()))),
        ("resume", blamed(|r| r.resume.push(wire::ResumeChoice::default()))),
        ("contents", blamed(|r| r.contents.push(wire::Content::default()))),
    ];
    for (field, blame) in cases {
        assert_eq!(blame, (Reason::Unimplemented, field.to_owned()));
    }
}

fn states() -> impl Strategy<Value = StateTimes> {
    vec((word(&State::ALL), 1..1u64 << 40), 0..6).prop_map(|entries| {
        entries.into_iter().fold(StateTimes::default(), |mut times, (state, time)| {
            times.add(state, Duration::from_nanos(time));
            times
        })
    })
}

fn usage() -> impl Strategy<Value = Usage> {
    any::<(u32, u32, u32, u32)>().prop_map(|(prompt_tokens, cached_tokens, completion_tokens, recomputed_tokens)| Usage {
        prompt_tokens,
        cached_tokens,
        completion_tokens,
        recomputed_tokens,
    })
}

fn logprob() -> impl Strategy<Value = TokenLogprob> {
    (any::<u32>(), -50.0f32..=0.0, vec((any::<u32>(), -50.0f32..=0.0), 0..3)).prop_map(|(id, logprob, top)| TokenLogprob {
        id,
        logprob,
        top,
    })
}

fn error() -> impl Strategy<Value = Error> {
    (word(&Reason::ALL), ".{0,40}", of(".{1,9}"), of(any::<u32>())).prop_map(|(reason, message, field, after)| Error {
        reason,
        message,
        field,
        retry_after: after.map(|after| Duration::from_millis(after.into())),
    })
}

fn chunk() -> impl Strategy<Value = Chunk> {
    let hits = vec((word(&Tier::ALL), any::<u32>()).prop_map(|(tier, tokens)| TierHit { tier, tokens }), 0..3);
    let started = (hits, any::<u32>(), of(word(&MissReason::ALL)))
        .prop_map(|(hits, computed, miss_reason)| Chunk::Started(Started { hits, computed, miss_reason }));
    let tokens = (any::<u32>(), vec((any::<u32>(), logprob()), 0..4), ".{0,9}", any::<bool>(), vec(of(logprob()), 0..3))
        .prop_map(|(choice, tokens, text, with_logprobs, prompt_logprobs)| {
            let (ids, logprobs): (Vec<_>, Vec<_>) = tokens.into_iter().unzip();
            let logprobs = if with_logprobs { logprobs } else { Vec::new() };
            Chunk::Tokens(Tokens { choice, accepted_from_draft: ids.len() as u32, ids, text, logprobs, prompt_logprobs })
        });
    let reasons = vec(word(&[FinishReason::Stop, FinishReason::Length]), 1..4);
    let finished = (reasons, usage(), states(), any::<[u64; 8]>(), word(&[Contract::Coupled, Contract::Rejection])).prop_map(
        |(reasons, usage, states, c, contract)| {
            let counters = Counters {
                steps: c[0],
                proposed: c[1],
                accepted: c[2],
                rejected: c[3],
                unverified: c[4],
                discarded: c[5],
                sampled: c[6],
                trimmed: c[7],
            };
            Chunk::Finished(Box::new(Finished { reasons, usage, states, counters, contract }))
        },
    );
    let failed = (error(), usage(), states()).prop_map(|(error, usage, states)| Chunk::Failed { error, usage, states });
    prop_oneof![started, tokens, finished, failed]
}

#[test]
fn nonsense_from_a_worker_is_internal() {
    let broken = [
        wire::GenerateResponse { message: None },
        tokens_message(wire::Tokens { ids: vec![1, 2], logprobs: vec![wire::TokenLogprob::default()], ..Default::default() }),
        tokens_message(wire::Tokens { ids: vec![1], accepted_from_draft: 2, ..Default::default() }),
        tokens_message(wire::Tokens {
            ids: vec![1],
            logprobs: vec![wire::TokenLogprob { logprob: f32::NAN, ..Default::default() }],
            ..Default::default()
        }),
        wire::GenerateResponse { message: Some(wire::generate_response::Message::Finished(wire::Finished::default())) },
        wire::GenerateResponse { message: Some(wire::generate_response::Message::Failed(wire::Failed::default())) },
    ];
    for message in broken {
        let text = format!("{message:?}");
        assert_eq!(chunk_from_wire(message).expect_err(&text).reason, Reason::Internal);
    }
}

fn tokens_message(tokens: wire::Tokens) -> wire::GenerateResponse {
    wire::GenerateResponse { message: Some(wire::generate_response::Message::Tokens(tokens)) }
}

fn keys() -> impl Strategy<Value = Vec<BlockKey>> {
    vec(digest().prop_map(BlockKey::from_digest), 1..6)
}

fn event() -> impl Strategy<Value = CacheEvent> {
    let tag = || ".{0,5}".prop_map(|tag: String| TenantTag(tag.into()));
    let causes = word(&[
        RemovalCause::Capacity,
        RemovalCause::Expired,
        RemovalCause::Flushed,
        RemovalCause::Rotated,
        RemovalCause::Corrupt,
    ]);
    prop_oneof![
        (keys(), of(digest()), word(&Tier::ALL), tag()).prop_map(|(keys, parent, tier, tenant)| CacheEvent::Stored {
            keys,
            parent: parent.map(BlockKey::from_digest),
            tier,
            tenant
        }),
        (keys(), word(&Tier::ALL), causes).prop_map(|(keys, tier, cause)| CacheEvent::Removed { keys, tier, cause }),
        of(tag()).prop_map(|tenant| CacheEvent::Cleared { tenant }),
    ]
}

fn batch() -> impl Strategy<Value = EventBatch> {
    (any::<[u8; 8]>(), any::<u64>(), any::<u64>(), of(any::<bool>()), vec(event(), 0..6)).prop_map(
        |(incarnation, seq, epoch, snapshot, events)| EventBatch {
            incarnation: Incarnation(incarnation),
            seq,
            epoch,
            snapshot,
            events,
        },
    )
}

#[test]
fn a_large_batch_is_cut_and_put_together_again() {
    let keys: Vec<_> = (0..KEYS_PER_MESSAGE as u32 * 2 + 5)
        .map(|number| {
            let mut bytes = [0; 32];
            bytes[..4].copy_from_slice(&number.to_le_bytes());
            BlockKey::from_digest(Digest::new(bytes))
        })
        .collect();
    let events = vec![
        CacheEvent::Stored { keys: keys.clone(), parent: None, tier: Tier::Device, tenant: TenantTag("a".into()) },
        CacheEvent::Removed { keys: keys.clone(), tier: Tier::Device, cause: RemovalCause::Capacity },
    ];
    let batch = EventBatch { incarnation: Incarnation([7; 8]), seq: 3, epoch: 9, snapshot: None, events };
    let messages = events_to_wire(&batch);
    assert!(messages.len() >= 5, "{} messages", messages.len());
    assert!(messages.iter().all(|message| prost::Message::encoded_len(message) < 4 << 20));
    let mut reader = EventReader::default();
    let mut whole = Vec::new();
    for message in messages {
        whole.extend(reader.push(message).unwrap());
    }
    let [whole] = whole.try_into().expect("one batch");
    assert_eq!((whole.seq, whole.epoch, whole.snapshot), (3, 9, None));
    let mut stored = Vec::new();
    let mut removed = Vec::new();
    for event in &whole.events {
        match event {
            CacheEvent::Stored { keys, parent, .. } => {
                assert_eq!(*parent, stored.last().copied(), "a cut run names the key before it");
                stored.extend(keys.iter().copied());
            }
            CacheEvent::Removed { keys, .. } => removed.extend(keys.iter().copied()),
            CacheEvent::Cleared { .. } => panic!("nothing was cleared"),
        }
    }
    assert_eq!(stored, keys);
    assert_eq!(removed, keys);
}

#[test]
fn parts_that_do_not_belong_together_are_refused() {
    let part = |seq, snapshot, continued| wire::KvEventsResponse {
        incarnation: vec![1; 8],
        seq,
        epoch: 1,
        snapshot,
        continued,
        events: Vec::new(),
    };
    for second in [part(2, false, false), part(1, true, false)] {
        let mut reader = EventReader::default();
        assert_eq!(reader.push(part(1, false, true)).unwrap(), None);
        assert!(reader.push(second).is_err());
    }
}

fn load() -> impl Strategy<Value = WorkerLoad> {
    let tiers = vec((word(&Tier::ALL), any::<(u32, u32, u32)>()), 0..3);
    let cost = vec((any::<u32>(), 0.0f32..9.0), 0..4);
    let acceptance = vec((".{1,5}", 0.0f32..=1.0), 0..3);
    (any::<([u8; 8], u64, u32, u32, u64, bool)>(), (0.0f32..1e6, 0.0f32..1e6), tiers, cost, acceptance).prop_map(
        |((incarnation, seq, running, waiting, queued, draining), rates, tiers, cost, acceptance)| WorkerLoad {
            incarnation: Incarnation(incarnation),
            seq,
            running,
            waiting,
            tiers: tiers.into_iter().map(|(tier, (free, cached, held))| TierLoad { tier, free, cached, held }).collect(),
            queued_prefill_tokens: queued,
            prefill_tokens_per_second: rates.0,
            decode_tokens_per_second: rates.1,
            cost: cost.into_iter().map(|(rows, seconds)| CostPoint { rows, seconds }).collect(),
            acceptance,
            draining,
        },
    )
}

fn numerics() -> impl Strategy<Value = NumericsParts> {
    let mode = prop_oneof![
        Just(NumericsMode::Cpu),
        Just(NumericsMode::Fake),
        (any::<u32>(), digest())
            .prop_map(|(compute_capability, kernels)| NumericsMode::CudaInvariant { compute_capability, kernels }),
        (any::<u32>(), digest()).prop_map(|(compute_capability, kernels)| NumericsMode::CudaFast { compute_capability, kernels }),
    ];
    (mode, any::<(u32, u32)>(), ".{1,5}", ".{1,5}", 1..64u32).prop_map(|(mode, numbers, kv_dtype, kv_layout, block_size)| {
        NumericsParts { mode, revision: numbers.0, kv_dtype, kv_layout, parallel_degree: numbers.1, block_size }
    })
}

fn model(numerics: NumericsParts) -> impl Strategy<Value = ModelDescription> {
    let artifacts = vec(
        (
            word(&[ArtifactKind::Tokenizer, ArtifactKind::ChatTemplate, ArtifactKind::GenerationConfig, ArtifactKind::Text]),
            digest(),
            any::<u64>(),
        )
            .prop_map(|(kind, digest, size_bytes)| ArtifactRef { kind, digest, size_bytes }),
        0..4,
    );
    let parts = (digest(), vec(any::<u8>(), 0..9), digest(), digest(), of(adapter()));
    (".{1,9}", parts, 1..u32::MAX, 1..u32::MAX, any::<(u32, u64)>(), artifacts).prop_map(
        move |(name, parts, context, vocab, (capacity, created), artifacts)| ModelDescription {
            name,
            parts: IdentityParts {
                weights: parts.0,
                architecture: parts.1,
                tokenizer: parts.2,
                chat_template: parts.3,
                adapter: parts.4,
                numerics: numerics.id(),
            },
            numerics: numerics.clone(),
            context,
            vocab,
            capacity,
            created,
            artifacts,
        },
    )
}

fn drafter() -> impl Strategy<Value = DrafterInfo> {
    (
        ".{1,5}",
        word(&[DrafterKind::Ngram, DrafterKind::Model, DrafterKind::Mtp]),
        word(&[DrafterPlacement::SameDevice, DrafterPlacement::OtherDevice, DrafterPlacement::SeparatePod]),
        word(&[DrafterState::Starting, DrafterState::Ready, DrafterState::Failed]),
        of(digest()),
        any::<u32>(),
        ".{0,5}",
    )
        .prop_map(|(name, kind, placement, state, identity, max_draft_tokens, message)| DrafterInfo {
            name,
            kind,
            placement,
            state,
            identity: identity.map(ModelIdentity),
            max_draft_tokens,
            message,
        })
}

fn description() -> impl Strategy<Value = Description> {
    let models = numerics().prop_flat_map(|numerics| {
        let block_size = numerics.block_size;
        (vec(model(numerics), 1..3), Just(block_size))
    });
    let tiers = vec((word(&Tier::ALL), any::<(u32, u64)>()), 0..3);
    let words = (
        vec(word(&[Contract::Coupled, Contract::Rejection]), 0..3),
        vec(word(&[Phase::Unified, Phase::Prefill, Phase::Decode]), 0..3),
        word(&[Role::Target, Role::Draft]),
    );
    (".{1,9}", any::<([u8; 8], u64)>(), models, tiers, vec(drafter(), 0..3), words, [".{0,5}", ".{0,5}", ".{0,5}", ".{0,5}"])
        .prop_map(
            |(
                uid,
                (incarnation, request_bytes_max),
                (models, block_size),
                tiers,
                drafters,
                words,
                [version, commit, backend, device],
            )| {
                Description {
                    uid: WorkerUid(uid.into()),
                    incarnation: Incarnation(incarnation),
                    role: words.2,
                    models,
                    block_size,
                    tiers: tiers
                        .into_iter()
                        .map(|(tier, (blocks, block_bytes))| TierCapacity { tier, blocks, block_bytes })
                        .collect(),
                    drafters,
                    contracts: words.0,
                    phases: words.1,
                    build: BuildInfo { version, commit, backend, device, driver: String::new() },
                    request_bytes_max,
                }
            },
        )
}

fn some_description() -> Description {
    let numerics = NumericsParts {
        mode: NumericsMode::Cpu,
        revision: 1,
        kv_dtype: "f32".into(),
        kv_layout: "v1".into(),
        parallel_degree: 1,
        block_size: 16,
    };
    let digest = Digest::new([1; 32]);
    let parts = IdentityParts {
        weights: digest,
        architecture: vec![1],
        tokenizer: digest,
        chat_template: digest,
        adapter: None,
        numerics: numerics.id(),
    };
    let model = ModelDescription {
        name: "m".into(),
        parts,
        numerics,
        context: 8,
        vocab: 8,
        capacity: 8,
        created: 1,
        artifacts: Vec::new(),
    };
    Description {
        uid: WorkerUid("w".into()),
        incarnation: Incarnation([1; 8]),
        role: Role::Target,
        models: vec![model],
        block_size: 16,
        tiers: Vec::new(),
        drafters: Vec::new(),
        contracts: vec![Contract::Coupled],
        phases: vec![Phase::Unified],
        build: BuildInfo::default(),
        request_bytes_max: 1,
    }
}

#[test]
fn a_worker_that_contradicts_itself_is_refused() {
    type Spoil = fn(&mut wire::DescribeResponse);
    let spoils: [(&str, Spoil); 8] = [
        ("models.identity", |d| d.models[0].identity[0] ^= 1),
        ("models.identity", |d| d.models[0].components.as_mut().unwrap().architecture.push(0)),
        ("numerics.id", |d| d.models[0].components.as_mut().unwrap().numerics.as_mut().unwrap().revision += 1),
        ("numerics.block_size", |d| d.block_size = 32),
        ("worker_uid", |d| d.worker_uid.clear()),
        ("models", |d| d.models.clear()),
        ("role", |d| d.role = 0),
        ("build", |d| d.build = None),
    ];
    assert!(description_from_wire(description_to_wire(&some_description())).is_ok());
    for (field, spoil) in spoils {
        let mut wire = description_to_wire(&some_description());
        spoil(&mut wire);
        let error = description_from_wire(wire).expect_err(field);
        assert!(error.message.contains(field), "{field}: {}", error.message);
    }
}

#[test]
fn a_load_report_with_impossible_figures_is_refused() {
    type Spoil = fn(&mut wire::LoadResponse);
    let good = || wire::LoadResponse { incarnation: vec![1; 8], ..Default::default() };
    assert!(load_from_wire(good()).is_ok());
    let spoils: [Spoil; 6] = [
        |l| l.incarnation.clear(),
        |l| l.prefill_tokens_per_second = f32::NAN,
        |l| l.decode_tokens_per_second = -1.0,
        |l| l.cost.push(wire::CostPoint { rows: 1, seconds: f32::INFINITY }),
        |l| l.acceptance.push(wire::DrafterAcceptance { drafter: "d".into(), share: 1.5 }),
        |l| l.tiers.push(wire::TierLoad::default()),
    ];
    for spoil in spoils {
        let mut load = good();
        spoil(&mut load);
        assert!(load_from_wire(load).is_err());
    }
}

#[test]
fn a_status_without_a_detail_gets_the_nearest_reason() {
    let cases = [
        (tonic::Code::Unavailable, Reason::WorkerLost),
        (tonic::Code::Unknown, Reason::WorkerLost),
        (tonic::Code::OutOfRange, Reason::PayloadTooLarge),
        (tonic::Code::Unimplemented, Reason::Unimplemented),
        (tonic::Code::Cancelled, Reason::Cancelled),
    ];
    for (code, reason) in cases {
        assert_eq!(error_from_status(&tonic::Status::new(code, "text")), Error::new(reason, "text"));
    }
}

#[test]
fn a_reason_of_a_later_version_keeps_its_name_in_the_message() {
    let error = error_from_pb(crate::pb::Error { reason: "brand_new".into(), message: "m".into(), ..Default::default() });
    assert_eq!(error.reason, Reason::Internal);
    assert!(error.message.contains("brand_new"));
}

#[test]
fn a_long_message_is_cut_between_characters() {
    let status = error_to_status(&Error::new(Reason::Internal, "é".repeat(2000)));
    assert!(status.message().len() <= 1024, "{}", status.message().len());
    assert!(status.message().ends_with('…'));
    assert!(status.details().len() < 4096);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn requests_go_there_and_back(request in request()) {
        let wire = request_to_wire(&request);
        let back = request_from_wire(wire.clone()).unwrap();
        // A request holds capabilities and so compares by its wire form; the fields that it prints are compared as well.
        prop_assert_eq!(format!("{:?}", &back), format!("{:?}", &request));
        prop_assert!(request_to_wire(&back) == wire);
        prop_assert!(back.domain == request.domain);
        prop_assert!(back.shared == request.shared);
    }

    #[test]
    fn chunks_go_there_and_back(chunk in chunk()) {
        prop_assert_eq!(chunk_from_wire(chunk_to_wire(chunk.clone())).unwrap(), chunk);
    }

    #[test]
    fn batches_go_there_and_back(batch in batch()) {
        let mut reader = EventReader::default();
        let mut back = Vec::new();
        for message in events_to_wire(&batch) {
            back.extend(reader.push(message).unwrap());
        }
        prop_assert_eq!(back, vec![batch]);
    }

    #[test]
    fn loads_go_there_and_back(load in load(), age in any::<u32>()) {
        let age = Duration::from_micros(age.into());
        prop_assert_eq!(load_from_wire(load_to_wire(&load, age)).unwrap(), (load, age));
    }

    #[test]
    fn errors_go_there_and_back_in_a_status(error in error()) {
        let status = error_to_status(&error);
        prop_assert_eq!(status.code() as i32, error.reason.grpc_code());
        prop_assert_eq!(error_from_status(&status), error);
    }

    #[test]
    fn descriptions_go_there_and_back(description in description()) {
        prop_assert_eq!(description_from_wire(description_to_wire(&description)).unwrap(), description);
    }
}
