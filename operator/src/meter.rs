//! Meter: counts writing requests to the API server by verb, resource and outcome.
//!
//! Owns the words. A layer under a client, above the gate, so that what the gate refused is counted as well.

use crate::lead::NotLeading;
use http::{Method, Request, Response};
use kube::client::Body;
use kvasir_telemetry::OperatorMetrics;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use tower::{BoxError, Layer, Service};

/// Resources that are told apart; whatever else is written is `other`.
const RESOURCES: [&str; 15] = [
    "servingpools",
    "pods",
    "services",
    "serviceaccounts",
    "secrets",
    "configmaps",
    "deployments",
    "poddisruptionbudgets",
    "networkpolicies",
    "roles",
    "rolebindings",
    "resourceclaimtemplates",
    "servicemonitors",
    "events",
    "leases",
];

/// Puts a meter under a client.
#[derive(Clone)]
pub struct MeterLayer(OperatorMetrics);

/// A client's service with a meter.
#[derive(Clone)]
pub struct Metered<S> {
    inner: S,
    metrics: OperatorMetrics,
}

// === impl MeterLayer ===

impl MeterLayer {
    /// A layer that counts into `metrics`.
    pub fn new(metrics: OperatorMetrics) -> Self {
        Self(metrics)
    }
}

impl<S> Layer<S> for MeterLayer {
    type Service = Metered<S>;

    fn layer(&self, inner: S) -> Metered<S> {
        Metered { inner, metrics: self.0.clone() }
    }
}

impl<S, B> Service<Request<Body>> for Metered<S>
where
    S: Service<Request<Body>, Response = Response<B>>,
    S::Error: Into<BoxError>,
    S::Future: Send + 'static,
{
    type Response = Response<B>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Response<B>, BoxError>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(cx).map_err(Into::into)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let verb = verb(request.method());
        let resource = resource(request.uri().path());
        let (call, metrics) = (self.inner.call(request), self.metrics.clone());
        Box::pin(async move {
            let result = call.await.map_err(Into::into);
            if let Some(verb) = verb {
                metrics.wrote(verb, resource, outcome(&result));
            }
            result
        })
    }
}

fn verb(method: &Method) -> Option<&'static str> {
    match *method {
        Method::GET | Method::HEAD => None,
        Method::POST => Some("create"),
        Method::PUT => Some("update"),
        Method::DELETE => Some("delete"),
        _ => Some("patch"),
    }
}

fn resource(path: &str) -> &'static str {
    // /api/v1/namespaces/{namespace}/{resource}/… and /apis/{group}/{version}/namespaces/{namespace}/{resource}/…
    let mut segments = path.split('/').skip_while(|segment| *segment != "namespaces").skip(2);
    let named = segments.next().unwrap_or_default();
    RESOURCES.into_iter().find(|known| *known == named).unwrap_or("other")
}

fn outcome<B>(result: &Result<Response<B>, BoxError>) -> &'static str {
    match result {
        Ok(response) => match response.status().as_u16() {
            200..=299 => "done",
            404 => "not_found",
            409 => "conflict",
            400..=499 => "refused",
            _ => "server",
        },
        Err(error) if error.downcast_ref::<NotLeading>().is_some() => "not_leading",
        Err(_) => "unreachable",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lead::{Gate, GateLayer};
    use crate::testing::MockApi;
    use k8s_openapi::api::core::v1::ConfigMap;
    use kube::api::{Api, DeleteParams, PostParams};
    use kube::client::ClientBuilder;
    use kvasir_telemetry::Registry;

    #[tokio::test]
    async fn what_is_written_is_counted_and_what_the_gate_refuses_too() {
        let (api, registry, gate) = (MockApi::new(), Registry::default(), Gate::open());
        let service = ClientBuilder::new(api.service(), "ns").with_layer(&GateLayer::new(gate.clone()));
        let client = service.with_layer(&MeterLayer::new(OperatorMetrics::new(&registry))).build();
        let maps: Api<ConfigMap> = Api::namespaced(client, "ns");
        let mut map = ConfigMap::default();
        map.metadata.name = Some("m".to_owned());
        maps.create(&PostParams::default(), &map).await.unwrap();
        maps.create(&PostParams::default(), &map).await.unwrap_err();
        maps.get("m").await.unwrap();
        gate.close();
        maps.delete("m", &DeleteParams::default()).await.unwrap_err();
        let text = registry.render();
        for (verb, outcome) in [("create", "done"), ("create", "conflict"), ("delete", "not_leading")] {
            let line = format!("{{verb=\"{verb}\",resource=\"configmaps\",outcome=\"{outcome}\"}} 1");
            assert!(text.contains(&line), "{line}\n{text}");
        }
        assert_eq!(resource("/api/v1/namespaces/n/pods/p/status"), "pods");
        assert_eq!(resource("/apis/apps/v1/namespaces/n/deployments"), "deployments");
        assert_eq!(resource("/api/v1/nodes"), "other");
    }
}
