//! Every metric and span name, once.
//!
//! Counters are registered without the `_total` that the exposition format adds. The prefix is `kvasir_`.

/// Prefix of every metric.
pub const PREFIX: &str = "kvasir";

macro_rules! names {
    ($($(#[$doc:meta])* $name:ident = $value:literal;)*) => {
        $($(#[$doc])* pub const $name: &str = $value;)*
        /// All metric names without prefix, for documentation and tests.
        pub const METRICS: &[&str] = &[$($value),*];
    };
}

names! {
    /// Requests by door, route, model and outcome.
    DOOR_REQUESTS = "door_requests";
    /// Requests that are open at the doors.
    DOOR_IN_FLIGHT = "door_in_flight";
    /// From receipt to the first output, by hit bucket and deepest tier.
    TTFT_SECONDS = "ttft_seconds";
    /// Mean time per output token after the first.
    TPOT_SECONDS = "tpot_seconds";
    /// Time between consecutive outputs of a choice.
    ITL_SECONDS = "itl_seconds";
    /// From receipt to the end.
    REQUEST_SECONDS = "request_seconds";
    /// Requests that could be judged by the pool's objective, by whether they kept it.
    SLO_REQUESTS = "slo_requests";
    /// Share of requests that should keep the pool's objective.
    SLO_FRACTION = "slo_fraction";
    /// Visible output tokens.
    OUTPUT_TOKENS = "output_tokens";
    /// Time that requests spent in each exclusive state.
    STATE_SECONDS = "state_seconds";
    /// Requests by cache mode that reached the prefix cache.
    PREFIX_REQUESTS = "prefix_requests";
    /// Prompt lengths.
    PROMPT_TOKENS_PER_REQUEST = "prompt_tokens_per_request";
    /// Reused tokens per request, by tier.
    HIT_TOKENS_PER_REQUEST = "hit_tokens_per_request";
    /// Reused share of the prompt.
    HIT_RATIO = "hit_ratio";
    /// Prompt tokens by source (device, host, disk, computed, recomputed).
    PROMPT_TOKENS = "prompt_tokens";
    /// Time of prefix lookups.
    LOOKUP_SECONDS = "lookup_seconds";
    /// Prompts that were not wholly reused, by reason.
    PREFIX_MISSES = "prefix_misses";
    /// Evicted blocks by cause.
    EVICTIONS = "evictions";
    /// Blocks by tier and state.
    BLOCKS = "blocks";
    /// Bytes that unreferenced blocks hold, by tier.
    RETAINED_BYTES = "retained_bytes";
    /// Time in the engine's queue.
    QUEUE_SECONDS = "queue_seconds";
    /// Sequences that had to give their blocks back.
    PREEMPTIONS = "preemptions";
    /// Admissions that waited for retained blocks.
    ADMISSION_BLOCKED_BY_RETENTION = "admission_blocked_by_retention";
    /// Sequences that take part in steps.
    RUNNING = "running_sequences";
    /// Requests that wait in the engine.
    WAITING = "waiting_requests";
    /// Engine steps.
    STEPS = "engine_steps";
    /// Requests that ended in the engine, by outcome.
    ENGINE_REQUESTS = "engine_requests";
    /// Broken counter laws; must stay 0.
    RECONCILE_VIOLATIONS = "reconcile_violations";
    /// Target steps with a draft.
    SPECULATION_STEPS = "speculation_steps";
    /// Drafted tokens by outcome.
    DRAFT_TOKENS = "draft_tokens";
    /// Placement decisions by branch.
    ROUTER_DECISIONS = "router_decisions";
    /// Time of one placement decision.
    ROUTER_PICK_SECONDS = "router_pick_seconds";
    /// Predicted minus reported cached tokens.
    ROUTER_PREDICTION_ERROR_TOKENS = "router_prediction_error_tokens";
    /// Workers by state of their index.
    ROUTER_INDEX_WORKERS = "router_index_workers";
    /// Bytes of the prefix index.
    ROUTER_INDEX_BYTES = "router_index_bytes";
    /// Attempts in flight.
    ROUTER_LEASES = "router_leases";
    /// Requests that wait for admission.
    ROUTER_QUEUED = "router_queued_requests";
    /// Retries by the reason of the failed attempt.
    ROUTER_RETRIES = "router_retries";
    /// Requests refused before any attempt, by reason.
    ROUTER_SHED = "router_shed";
    /// Attempts by outcome.
    ROUTER_ATTEMPTS = "router_attempts";
    /// Endpoints of workers that discovery names.
    ROUTER_DISCOVERY_ENDPOINTS = "router_discovery_endpoints";
    /// Whether the list of endpoints may be behind (1) or its source is followed (0).
    ROUTER_DISCOVERY_STALE = "router_discovery_stale";
    /// Failures to follow the source of endpoints, by reason.
    ROUTER_DISCOVERY_ERRORS = "router_discovery_errors";
    /// Tenants that are in force.
    ROUTER_TENANTS = "router_tenants";
    /// Whether secrets and tenants in force may be behind (1) or are the newest (0).
    ROUTER_SECRETS_STALE = "router_secrets_stale";
    /// Changes of secrets and tenants by outcome (applied, refused, unreadable).
    ROUTER_SECRETS_LOADS = "router_secrets_loads";
    /// Time of one pass over a pool, by outcome (rest, changed, fault).
    OPERATOR_RECONCILE_SECONDS = "operator_reconcile_seconds";
    /// Faults of passes by reason.
    OPERATOR_FAULTS = "operator_faults";
    /// Writing requests to the API server by verb, resource and outcome.
    OPERATOR_API_WRITES = "operator_api_writes";
    /// Steps of rollouts by kind (create, patch_image, drain, delete).
    OPERATOR_STEPS = "operator_steps";
    /// Pools by phase (ready, rolling, held, stalled, not_ready).
    OPERATOR_POOLS = "operator_pools";
    /// Whether this process leads (1) or follows (0).
    OPERATOR_LEADING = "operator_leading";
    /// Events of pools that were written, or left out because there were too many, by outcome (written, dropped, failed).
    OPERATOR_EVENTS = "operator_events";
    /// Decisions of pools' scalers by outcome (kept, out, in, held).
    OPERATOR_SCALINGS = "operator_scalings";
}

/// Span names (`contracts` §4).
pub mod span {
    /// Root of a request at the router or at a worker's own door.
    pub const REQUEST: &str = "request";
    /// Waiting for admission.
    pub const ADMIT: &str = "admit";
    /// Template, tokenise, keys.
    pub const PREPARE: &str = "prepare";
    /// Choosing a worker.
    pub const ROUTE: &str = "route";
    /// One try on one worker.
    pub const ATTEMPT: &str = "attempt";
    /// A worker's part of an attempt.
    pub const WORKER: &str = "worker";
    /// Waiting in the engine.
    pub const QUEUE: &str = "queue";
    /// Prefix lookup.
    pub const LOOKUP: &str = "lookup";
    /// Waiting for blocks from a lower tier.
    pub const RESTORE: &str = "restore";
    /// Computing the prompt.
    pub const PREFILL: &str = "prefill";
    /// Producing output.
    pub const DECODE: &str = "decode";
    /// Handing output over.
    pub const EMIT: &str = "emit";
    /// Preempted, waiting to run again.
    pub const PREEMPTED: &str = "preempted";
    /// Root of one pass of the operator over a pool that changed something or failed.
    pub const RECONCILE: &str = "reconcile";
    /// Reading what a pool names.
    pub const FETCH: &str = "fetch";
    /// From a pool to its objects.
    pub const DESIGN: &str = "design";
    /// Writing objects other than pods.
    pub const APPLY: &str = "apply";
    /// Asking routers and workers.
    pub const OBSERVE: &str = "observe";
    /// Steps of a rollout.
    pub const STEPS: &str = "steps";
    /// Writing the status.
    pub const STATUS: &str = "status";
}
