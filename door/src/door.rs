//! The door itself: settings, and what both protocols share.
//!
//! Owns the wiring of tenants, preparation, metrics and traces around one [`Serve`]. Refuses to know JSON and protobuf. Built once by a router
//! or a worker; cheap to clone.

use crate::answer::{Answer, Head};
use crate::ask::Ask;
use crate::auth::{Tenant, Tenants, gate};
use crate::call::{Call, Route};
use crate::prepare::{Origin, Preparer};
use crate::serve::Serve;
use crate::server::Ending;
use crate::{grpc, openai};
use axum::Router;
use axum::extract::Request;
use axum::middleware::from_fn_with_state;
use axum::response::Response;
use http::HeaderMap;
use kvasir_core::{Error, TraceContext};
use kvasir_telemetry::{DoorMetrics, Registry, Slo, Tracer};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tower::ServiceExt as _;

/// Settings of a door, with the defaults that are documented for users.
#[derive(Clone, Debug)]
pub struct DoorSettings {
    /// Largest body or gRPC message, in bytes: 8 MiB, twice the longest text that is tokenised.
    pub body_bytes_max: usize,
    /// Size of the cache of tokenised segments, in bytes: 64 MiB, about 15 million tokens.
    pub segment_cache_bytes: usize,
    /// Long texts that are tokenised at once: 2.
    pub tokenizers_running: usize,
    /// How long a stream's headers wait for the first output: 15 s (`contracts` §3).
    pub headers_wait: Duration,
    /// Longest silence on an open stream, after which a comment is sent: 10 s, below the usual idle limits of 30 to 60 s.
    pub keep_alive: Duration,
    /// Longest time that a client may take to send its body: 60 s.
    pub body_wait: Duration,
    /// What requests are judged by in metrics; none by default.
    pub slo: Option<Slo>,
}

/// One implementation behind the HTTP and the gRPC door.
#[derive(Clone)]
pub struct Door(Arc<Inner>);

struct Inner {
    serve: Arc<dyn Serve>,
    tenants: Tenants,
    settings: DoorSettings,
    preparer: Preparer,
    registries: Vec<Registry>,
    metrics: DoorMetrics,
    tracer: Tracer,
}

// === impl DoorSettings ===

impl Default for DoorSettings {
    fn default() -> Self {
        Self {
            body_bytes_max: 8 << 20,
            segment_cache_bytes: 64 << 20,
            tokenizers_running: 2,
            headers_wait: Duration::from_secs(15),
            keep_alive: Duration::from_secs(10),
            body_wait: Duration::from_mins(1),
            slo: None,
        }
    }
}

// === impl Door ===

impl Door {
    /// Puts a door in front of `serve`. Its metrics go into the first of `registries`; `/metrics` shows all of them.
    pub fn new(
        serve: Arc<dyn Serve>,
        tenants: Tenants,
        settings: DoorSettings,
        metrics: DoorMetrics,
        registries: Vec<Registry>,
        tracer: Tracer,
    ) -> Self {
        let preparer = Preparer::new(settings.tokenizers_running, settings.segment_cache_bytes);
        Self(Arc::new(Inner { serve, tenants, settings, preparer, registries, metrics, tracer }))
    }

    /// The OpenAI routes behind the gate.
    pub fn http_router(&self) -> Router {
        self.gated(openai::router(self.clone()))
    }

    /// The gRPC services (inference, health, reflection) behind the gate.
    pub fn grpc_router(&self) -> Router {
        self.gated(grpc::router(self))
    }

    /// Both on one port: what speaks gRPC goes to the services, everything else to the OpenAI routes.
    pub fn router(&self) -> Router {
        let (http, grpc) = (openai::router(self.clone()), grpc::router(self));
        let both = Router::new().fallback(move |request: Request| {
            let chosen = if crate::auth::is_grpc(request.headers()) { grpc.clone() } else { http.clone() };
            async move {
                let response: Response = match chosen.oneshot(request).await {
                    Ok(response) => response,
                    Err(never) => match never {},
                };
                response
            }
        });
        self.gated(both)
    }

    /// (hits, misses) of the cache of tokenised segments.
    pub fn segment_counts(&self) -> (u64, u64) {
        self.0.preparer.segment_counts()
    }

    fn gated(&self, router: Router) -> Router {
        Router::new().fallback_service(router).layer(from_fn_with_state(self.clone(), gate))
    }

    pub(crate) fn settings(&self) -> &DoorSettings {
        &self.0.settings
    }

    pub(crate) fn serve(&self) -> &Arc<dyn Serve> {
        &self.0.serve
    }

    pub(crate) fn preparer(&self) -> &Preparer {
        &self.0.preparer
    }

    pub(crate) fn tenants(&self) -> &Tenants {
        &self.0.tenants
    }

    /// All metrics of the process in the text format.
    pub(crate) fn render_metrics(&self) -> String {
        merge(self.0.registries.iter().map(Registry::render))
    }

    /// A call came in.
    pub(crate) fn open(&self, route: Route, headers: &HeaderMap) -> Call {
        Call::open(route, headers, &self.0.metrics, &self.0.tracer)
    }

    /// Prepares a call and hands it over; an error is recorded as the call's end.
    pub(crate) async fn start(
        &self,
        mut call: Call,
        tenant: &Tenant,
        ask: Ask,
        ending: Option<Ending>,
    ) -> Result<(Head, Answer), Error> {
        let trace = call.span().context();
        let trace = trace.map(|context| TraceContext { traceparent: context.traceparent, tracestate: context.tracestate });
        let origin = Origin { tenant, received: call.received(), trace };
        let catalog = self.0.serve.catalog();
        match self.0.preparer.prepare(&catalog, ask, origin).await {
            Ok(batch) => {
                call.model(&batch.model.name);
                Ok(Answer::start(&self.0.serve, batch, call, ending))
            }
            Err(error) => {
                call.fail(&error, Default::default(), Default::default());
                Err(error)
            }
        }
    }
}

/// Joins expositions into one: a family that several of them have appears once, with the samples of all.
fn merge(texts: impl Iterator<Item = String>) -> String {
    const END: &str = "# EOF";
    let mut order: Vec<String> = Vec::new();
    let mut families: HashMap<String, (Vec<String>, Vec<String>)> = HashMap::new();
    for text in texts {
        let mut family = String::new();
        for line in text.lines().filter(|line| *line != END) {
            let head = line.strip_prefix("# ").and_then(|rest| rest.split(' ').nth(1));
            if let Some(name) = head {
                name.clone_into(&mut family);
            }
            let (heads, samples) = families.entry(family.clone()).or_insert_with(|| {
                order.push(family.clone());
                Default::default()
            });
            let lines = if head.is_some() { heads } else { samples };
            if head.is_none() || !lines.iter().any(|known| known == line) {
                lines.push(line.to_owned());
            }
        }
    }
    let parts = order.iter().filter_map(|name| families.get(name)).flat_map(|(heads, samples)| heads.iter().chain(samples));
    parts.map(String::as_str).chain([END]).fold(String::new(), |text, line| text + line + "\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_family_of_two_registries_appears_once() {
        let (one, two) = (Registry::with_component("a"), Registry::with_component("b"));
        let (first, second) = (DoorMetrics::new(&one), DoorMetrics::new(&two));
        first.opened("http");
        second.opened("grpc");
        let text = merge([one.render(), two.render()].into_iter());
        assert_eq!(text.matches("# TYPE kvasir_door_in_flight gauge").count(), 1, "{text}");
        let samples = [("a", "http"), ("b", "grpc")]
            .map(|(component, door)| text.find(&format!("kvasir_door_in_flight{{component=\"{component}\",door=\"{door}\"}} 1")));
        let next_family = text.find("# HELP kvasir_tpot_seconds");
        assert!(samples.iter().all(|at| at.is_some() && *at < next_family), "{text}");
        assert!(text.ends_with("# EOF\n") && text.matches("# EOF").count() == 1);
    }
}
