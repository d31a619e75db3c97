//! How large a worker is and what it computes on.

use super::draft::Draft;
use super::findings::Findings;
use crate::api::{
    Backend, CacheMode, HostTierPolicy, KvDtype, Numerics, Placement, PrefixCacheSpec, ResourcesSpec, ServingPoolSpec,
};
use std::num::NonZeroU32;

/// Sizes and limits of a worker's engine.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Engine {
    /// Compute threads.
    pub threads: u16,
    /// Tokens per KV block.
    pub block_size: u32,
    /// Bytes of the KV pool.
    pub kv_bytes: u64,
    /// Most sequences at once.
    pub sequences: u32,
    /// Most tokens of one step.
    pub step_tokens: u32,
    /// Longest step beside decoding neighbours, in milliseconds.
    pub step_ms: u64,
    /// Longest prompt plus output, in tokens.
    pub context: Option<u32>,
    /// Upper bound of the model's bytes: what the spec gives to weights and activations.
    pub model_bytes_max: u64,
    /// What the whole pod asks for.
    pub pod: Size,
}

/// CPU and memory of a pod.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Size {
    /// Thousandths of a core.
    pub millicores: u64,
    /// Bytes.
    pub memory: u64,
}

/// Tier in memory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HostTier {
    /// Bytes.
    pub bytes: u64,
    /// When blocks are copied to it.
    pub policy: HostTierPolicy,
    /// Whether it lies on a memory volume.
    pub survives_restart: bool,
}

/// What a worker computes on.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Devices {
    /// The CPU.
    None,
    /// An extended resource.
    Resource {
        /// Its name.
        name: String,
        /// How many.
        ask: DeviceAsk,
    },
    /// Devices by claim.
    Class {
        /// Name of the DeviceClass.
        name: String,
        /// How many.
        ask: DeviceAsk,
        /// Attribute that the target's and the draft's devices share.
        link: Option<String>,
    },
}

/// How many devices one worker pod needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceAsk {
    /// For the model.
    pub target: NonZeroU32,
    /// For a draft on devices of its own in the same pod.
    pub draft: Option<NonZeroU32>,
}

/// Cores of a worker that names none, in thousandths.
const MILLICORES_DEFAULT: u64 = 1_000;
/// Memory for weights, activations and process of a worker that names none.
const MEMORY_DEFAULT: u64 = 2 << 30;
/// Most compute threads of one worker.
const THREADS_MAX: u64 = 512;
/// Most devices of one worker.
const DEVICES_MAX: u32 = 64;
/// Smallest memory of a worker: a process without a model.
const MEMORY_MIN: u64 = 64 << 20;

/// Reads CPU and memory with defaults; `field` is where they stand.
pub(super) fn size(field: &str, spec: &ResourcesSpec, default: Size, findings: &mut Findings) -> Size {
    let cpu = spec.cpu.as_ref().map(|cpu| findings.cpu(&format!("{field}.cpu"), cpu));
    let memory = spec.memory.as_ref().map(|memory| {
        let field = format!("{field}.memory");
        let bytes = findings.size(&field, memory);
        if bytes < MEMORY_MIN {
            findings.refuse(&field, memory, "the program alone needs 64Mi; give it what the model needs");
        }
        bytes
    });
    Size { millicores: cpu.unwrap_or(default.millicores), memory: memory.unwrap_or(default.memory) }
}

/// Default size of a worker or a draft pod.
pub(super) fn default_size() -> Size {
    Size { millicores: MILLICORES_DEFAULT, memory: MEMORY_DEFAULT }
}

/// Reads the engine and what a worker pod asks for.
pub(super) fn read(
    spec: &ServingPoolSpec,
    host_tier: Option<&HostTier>,
    disk_tier: Option<u64>,
    draft: Option<&Draft>,
    findings: &mut Findings,
) -> Engine {
    let engine = &spec.engine;
    let at = |name: &str| format!("spec.engine.{name}");
    let own = size(&at("resources"), &engine.resources, default_size(), findings);
    let kv_bytes = findings.size(&at("kvMemory"), &engine.kv_memory);
    let block_size = findings.number(&at("blockSize"), engine.block_size, 16, 256);
    if !block_size.is_power_of_two() {
        findings.refuse(&at("blockSize"), block_size, "blockSize must be 16, 32, 64, 128 or 256");
    }
    let step = findings.duration(&at("stepTime"), &engine.step_time);
    if step.as_secs() > 10 || (step.as_secs() == 10 && step.subsec_millis() > 0) {
        findings.refuse(&at("stepTime"), &engine.step_time, "stepTime must not be longer than 10s; 60ms is the default");
    }
    let beside = draft.filter(|draft| draft.placement != Placement::SeparatePod).map(|draft| draft.size);
    let tier = host_tier.map_or(0, |tier| tier.bytes);
    let memory = findings.sum(&at("kvMemory"), [own.memory, kv_bytes, tier, beside.map_or(0, |size| size.memory)]);
    findings.sum("spec.prefixCache.diskTier.size", [disk_tier.unwrap_or(0), own.memory]);
    compute(spec, findings);
    Engine {
        threads: (own.millicores / 1_000).clamp(1, THREADS_MAX) as u16,
        block_size,
        kv_bytes,
        sequences: findings.number(&at("maxSequences"), engine.max_sequences, 1, 4_096),
        step_tokens: findings.number(&at("maxBatchTokens"), engine.max_batch_tokens, 16, 1_048_576),
        step_ms: step.as_millis() as u64,
        context: engine.context_length.map(|tokens| findings.number(&at("contextLength"), tokens, 16, 16_777_216)),
        model_bytes_max: own.memory,
        pod: Size { millicores: own.millicores + beside.map_or(0, |size| size.millicores), memory },
    }
}

/// What the arithmetic was asked to be and is not yet.
fn compute(spec: &ServingPoolSpec, findings: &mut Findings) {
    let engine = &spec.engine;
    match (engine.backend, &spec.accelerator) {
        (Backend::Cuda, None) => {
            findings.refuse("spec.engine.backend", "Cuda", "it computes on devices: set accelerator, or set backend to Cpu");
        }
        (Backend::Cpu, Some(_)) => {
            let fix = "it leaves devices unused: remove accelerator, or set backend to Cuda";
            findings.refuse("spec.engine.backend", "Cpu", fix);
        }
        (_, Some(_)) => findings.unsupported("accelerator (its devices are reserved, the CPU computes)"),
        (_, None) => {}
    }
    if engine.numerics == Numerics::Fast {
        if spec.accelerator.is_none() {
            findings.refuse(
                "spec.engine.numerics",
                "Fast",
                "it exists on CUDA only: set accelerator, or set numerics to Invariant",
            );
        }
        findings.unsupported("engine.numerics Fast (Invariant is kept)");
    }
    if !matches!(engine.kv_dtype, KvDtype::Auto | KvDtype::F32) {
        findings.unsupported(format!("engine.kvDtype {:?} (F32 is used)", engine.kv_dtype));
    }
}

/// Reads the devices of one worker pod.
pub(super) fn devices(spec: &ServingPoolSpec, draft: Option<&Draft>, findings: &mut Findings) -> Devices {
    let tensor = findings.number("spec.parallelism.tensor", spec.parallelism.tensor, 1, DEVICES_MAX);
    let pipeline = findings.number("spec.parallelism.pipeline", spec.parallelism.pipeline, 1, DEVICES_MAX);
    let count = spec.accelerator.as_ref().map(|it| findings.number("spec.accelerator.count", it.count, 1, DEVICES_MAX));
    if tensor * pipeline != count.unwrap_or(1) {
        let fix = format!("a worker has {} accelerators: make tensor x pipeline and accelerator.count equal", count.unwrap_or(0));
        findings.refuse("spec.parallelism", format_args!("{tensor} x {pipeline}"), fix);
    }
    let draft = draft.filter(|draft| draft.placement == Placement::OtherDevice);
    let link = draft.and_then(|draft| draft.link.clone());
    let Some((accelerator, count)) = spec.accelerator.as_ref().zip(count.and_then(NonZeroU32::new)) else {
        if draft.is_some() {
            let fix = "it needs a second device: set accelerator, or choose SameDevice or SeparatePod";
            findings.refuse("spec.speculation.draft.placement", "OtherDevice", fix);
        }
        return Devices::None;
    };
    let ask = DeviceAsk { target: count, draft: draft.and_then(|draft| draft.devices) };
    match (&accelerator.resource_name, &accelerator.device_class_name) {
        (Some(name), None) => {
            if link.is_some() {
                let fix =
                    "it ties devices by claim: set accelerator.deviceClassName instead of resourceName, or remove interconnect";
                findings.refuse("spec.speculation.draft.interconnect", "set", fix);
            }
            Devices::Resource { name: name.clone(), ask }
        }
        (None, Some(name)) => Devices::Class { name: name.clone(), ask, link },
        _ => {
            findings.refuse("spec.accelerator", "not one of two ways", "set either resourceName or deviceClassName");
            Devices::None
        }
    }
}

/// Reads the tiers behind the device's KV pool.
pub(super) fn tiers(spec: &PrefixCacheSpec, findings: &mut Findings) -> (Option<HostTier>, Option<u64>) {
    let cached = spec.host_tier.is_some() || spec.disk_tier.is_some() || !spec.shared_prefixes.is_empty();
    if spec.mode == CacheMode::Off && cached {
        let fix = "nothing is cached then: remove hostTier, diskTier and sharedPrefixes, or set mode to Auto or On";
        findings.refuse("spec.prefixCache.mode", "Off", fix);
    }
    let host = spec.host_tier.as_ref().map(|tier| {
        findings.unsupported("prefixCache.hostTier (its memory is reserved)");
        HostTier {
            bytes: findings.size("spec.prefixCache.hostTier.size", &tier.size),
            policy: tier.policy,
            survives_restart: tier.survives_restart,
        }
    });
    let disk = spec.disk_tier.as_ref().map(|tier| {
        findings.unsupported("prefixCache.diskTier (its disk is reserved)");
        findings.size("spec.prefixCache.diskTier.size", &tier.size)
    });
    (host, disk)
}

// === impl DeviceAsk ===

impl DeviceAsk {
    /// All devices of the pod.
    pub fn total(&self) -> u32 {
        self.target.get() + self.draft.map_or(0, NonZeroU32::get)
    }
}
