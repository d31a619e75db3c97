//! Which model a pool serves and how its engine computes: the part of the spec that decides the identity of cached state.

use super::text::{CpuText, DurationText, SizeText};
use super::{ConfigRef, SecretKeyRef};
use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A model: where its bytes come from, and which bytes are meant.
#[derive(KubeSchema, Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.source.huggingFace) || has(self.revision)")
        .message("a model from Hugging Face needs `revision`: write the 40 digits of a commit, because a branch can move"),
    validation = Rule::new("!has(self.source.huggingFace) || !has(self.revision) || self.revision.matches('^[0-9a-f]{40}$')")
        .message("`revision` of a model from Hugging Face is the 40 digits of a commit, because a branch or tag can move"),
    validation = Rule::new("!has(self.source.https) || has(self.fileSha256)")
        .message("a model from an https address needs `fileSha256`, because the bytes behind an address can change; use `sha256sum FILE`")
)]
pub struct ModelSpec {
    /// Name that clients use in requests; the pool's name if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253), regex(pattern = r"^[A-Za-z0-9][A-Za-z0-9._:/-]*$"))]
    pub name: Option<String>,
    /// Where the bytes come from; exactly one member.
    pub source: ModelSource,
    /// Immutable revision of the source: a commit for Hugging Face; free text elsewhere, raised to roll the pool on to other bytes behind the same path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 128), regex(pattern = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"))]
    pub revision: Option<String>,
    /// Expected weights digest, 64 hexadecimal digits, as status and `kvasir model` show it. Workers that report another one are not routed to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 64, max = 64), regex(pattern = r"^[0-9a-f]{64}$"))]
    pub digest: Option<String>,
    /// SHA-256 of the single file behind an https source, 64 hexadecimal digits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 64, max = 64), regex(pattern = r"^[0-9a-f]{64}$"))]
    pub file_sha256: Option<String>,
}

/// Where a model's bytes come from; exactly one member.
#[derive(KubeSchema, Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("[has(self.huggingFace), has(self.https), has(self.pvc), has(self.oci), has(self.file)].filter(x, x).size() == 1")
    .message("a model has exactly one source: set one of huggingFace, https, pvc, oci, file and remove the others"))]
pub struct ModelSource {
    /// A repository on Hugging Face or a mirror of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hugging_face: Option<HuggingFaceSource>,
    /// One file behind an https address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub https: Option<HttpsSource>,
    /// A path on a PersistentVolumeClaim in the pool's namespace, mounted read-only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pvc: Option<PvcSource>,
    /// An OCI image that holds the model as files, mounted as image volume; needs the ImageVolume feature in the cluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub oci: Option<OciSource>,
    /// A path that is already in the worker's container: in its image, or on a volume that podTemplatePatch mounts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<FileSource>,
}

/// A repository on Hugging Face or a mirror of it.
#[derive(KubeSchema, Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HuggingFaceSource {
    /// Repository, such as `HuggingFaceTB/SmolLM2-135M-Instruct`.
    #[schemars(length(max = 200), regex(pattern = r"^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$"))]
    pub repo: String,
    /// File in the repository; all safetensors files if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 512), regex(pattern = r"^[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*$"))]
    pub file: Option<String>,
    /// Secret with an access token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_secret_ref: Option<SecretKeyRef>,
}

/// One file behind an https address.
#[derive(KubeSchema, Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HttpsSource {
    /// Address of a .gguf file. Credentials do not belong into it.
    #[schemars(length(max = 2048), regex(pattern = r"^https://[A-Za-z0-9.\[\]:-]+/[^\s@#]+$"))]
    pub url: String,
    /// Secret whose value is sent as `Authorization: Bearer`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_secret_ref: Option<SecretKeyRef>,
}

/// A path on a PersistentVolumeClaim.
#[derive(KubeSchema, Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PvcSource {
    /// Name of the claim.
    #[schemars(length(min = 1, max = 253), regex(pattern = r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$"))]
    pub claim_name: String,
    /// Path of a .gguf file, or of a folder with safetensors, below the root of the volume.
    #[schemars(length(min = 1, max = 1024), regex(pattern = r"^[^/\s.][^\s]*$"))]
    #[x_kube(validation = Rule::new("!self.split('/').exists(part, part == '..')").message("the path must stay on the volume: remove `..`"))]
    pub path: String,
}

/// An OCI image that holds the model as files.
#[derive(KubeSchema, Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct OciSource {
    /// Image pinned by digest, such as `registry.example/models/smollm2@sha256:…`.
    #[schemars(length(max = 512), regex(pattern = r"^[a-z0-9][a-zA-Z0-9._:/-]*@sha256:[0-9a-f]{64}$"))]
    pub image: String,
    /// Path of a .gguf file, or of a folder with safetensors, in the image.
    #[schemars(length(min = 1, max = 1024), regex(pattern = r"^[^/\s.][^\s]*$"))]
    #[x_kube(validation = Rule::new("!self.split('/').exists(part, part == '..')").message("the path must stay in the image: remove `..`"))]
    pub path: String,
}

/// A path that is already in the worker's container.
#[derive(KubeSchema, Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FileSource {
    /// Absolute path of a .gguf file, or of a folder with safetensors.
    #[schemars(length(min = 2, max = 1024), regex(pattern = r"^/[^\s]+$"))]
    pub path: String,
}

/// Where fetched models are kept.
#[derive(KubeSchema, Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ModelCacheSpec {
    /// PersistentVolumeClaim in the pool's namespace: content-addressed, shared by target, draft and restarts, so that bytes are fetched once. Without it each
    /// pod fetches into a scratch volume of its own.
    #[schemars(length(min = 1, max = 253), regex(pattern = r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$"))]
    pub claim_name: String,
}

/// Which hardware computes.
#[derive(JsonSchema, Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum Backend {
    /// CUDA if the pool asks for an accelerator, else CPU.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// NVIDIA devices.
    Cuda,
}

/// Which promise the arithmetic keeps.
#[derive(JsonSchema, Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum Numerics {
    /// Bits do not depend on neighbours, chunking or caching.
    #[default]
    Invariant,
    /// The fastest kernels; near-ties may differ. CUDA only.
    Fast,
}

/// Type of numbers in the KV cache.
#[derive(JsonSchema, Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum KvDtype {
    /// What the backend does best.
    #[default]
    Auto,
    /// 32-bit floating point.
    F32,
    /// 16-bit floating point.
    F16,
    /// 16-bit brain floating point.
    Bf16,
    /// 8-bit integers, one scale per token and head.
    Int8,
}

/// Size and limits of each worker's engine.
#[derive(KubeSchema, Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EngineSpec {
    /// Which hardware computes: Auto, Cpu or Cuda.
    #[serde(default)]
    pub backend: Backend,
    /// Invariant: bits do not depend on neighbours. Fast: fastest kernels, near-ties may differ, CUDA only.
    #[serde(default)]
    pub numerics: Numerics,
    /// Type of numbers in the KV cache.
    #[serde(default)]
    pub kv_dtype: KvDtype,
    /// Tokens per KV block: 16, 32, 64, 128 or 256. Prefixes are reused in whole blocks.
    #[serde(default = "block_size")]
    #[x_kube(validation = Rule::new("self in [16, 32, 64, 128, 256]").message("blockSize must be 16, 32, 64, 128 or 256"))]
    pub block_size: i32,
    /// Memory of the KV pool of one worker, on the device that computes.
    #[serde(default = "kv_memory")]
    pub kv_memory: SizeText,
    /// Most sequences that one worker computes at once.
    #[serde(default = "max_sequences")]
    #[schemars(range(min = 1, max = 4096))]
    pub max_sequences: i32,
    /// Most tokens of one step.
    #[serde(default = "max_batch_tokens")]
    #[schemars(range(min = 16, max = 1_048_576))]
    pub max_batch_tokens: i32,
    /// Longest step while others decode: what a token may wait for a neighbour's prompt; 1ms to 10s.
    #[serde(default = "step_time")]
    #[x_kube(validation = Rule::new("self <= duration('10s')").message("stepTime must not be longer than 10s; 60ms is the default"))]
    pub step_time: DurationText,
    /// Longest prompt plus output, in tokens; the model's own if absent or larger.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 16, max = 16_777_216))]
    pub context_length: Option<i32>,
    /// CPU and memory of one worker pod.
    #[serde(default)]
    pub resources: ResourcesSpec,
}

/// CPU and memory of a pod. Memory is request and limit; CPU is the request and the number of compute threads.
#[derive(KubeSchema, Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ResourcesSpec {
    /// Cores; whole cores compute best. 1 if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<CpuText>,
    /// Memory for weights, activations and the process; KV pool (on CPU) and host tier are added to it. 2Gi if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<SizeText>,
}

/// Devices of one worker.
#[derive(KubeSchema, Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("has(self.resourceName) != has(self.deviceClassName)")
    .message("an accelerator is asked for in one way: set resourceName (extended resource) or deviceClassName (DRA), not both and not none"))]
pub struct AcceleratorSpec {
    /// Devices per worker.
    #[schemars(range(min = 1, max = 64))]
    pub count: i32,
    /// Extended resource, such as `nvidia.com/gpu`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253), regex(pattern = r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$"))]
    pub resource_name: Option<String>,
    /// DeviceClass for dynamic resource allocation, such as `gpu.nvidia.com`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253), regex(pattern = r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$"))]
    pub device_class_name: Option<String>,
}

/// How one model is spread over the devices of one worker. Copies of the model are `replicas`.
#[derive(KubeSchema, Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ParallelismSpec {
    /// Devices that share each layer.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 64))]
    pub tensor: i32,
    /// Groups of devices that hold consecutive layers.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 64))]
    pub pipeline: i32,
}

/// A prefix that many requests share, registered by whoever runs the pool.
#[derive(KubeSchema, Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SharedPrefixSpec {
    /// Name of the prefix.
    #[schemars(length(min = 1, max = 63), regex(pattern = r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$"))]
    pub name: String,
    /// ConfigMap with the text. It is no secret: every tenant's requests may reuse its state.
    pub config_map_ref: ConfigRef,
}

// === impl Default ===

fn one() -> i32 {
    1
}

fn block_size() -> i32 {
    16
}

fn kv_memory() -> SizeText {
    "1Gi".into()
}

fn max_sequences() -> i32 {
    64
}

fn max_batch_tokens() -> i32 {
    2_048
}

fn step_time() -> DurationText {
    "60ms".into()
}

impl Default for EngineSpec {
    fn default() -> Self {
        Self {
            backend: Backend::Auto,
            numerics: Numerics::Invariant,
            kv_dtype: KvDtype::Auto,
            block_size: block_size(),
            kv_memory: kv_memory(),
            max_sequences: max_sequences(),
            max_batch_tokens: max_batch_tokens(),
            step_time: step_time(),
            context_length: None,
            resources: ResourcesSpec::default(),
        }
    }
}

impl Default for ParallelismSpec {
    fn default() -> Self {
        Self { tensor: one(), pipeline: one() }
    }
}
