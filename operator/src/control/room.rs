//! Room: how many more pods of a template the cluster could place now, read from the API server when a plan depends on it.
//!
//! Owns the reading; the arithmetic is [`crate::world::devices`]'. What cannot be counted is said so, and then nothing surges.

use super::Context;
use crate::apply::{RequestError, answered};
use crate::design::{Accelerator, Template};
use crate::rollout::Free;
use crate::world::devices;
use k8s_openapi::api::core::v1::{Node, Pod, PodSpec};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};
use kube::Resource;
use kube::api::{Api, ListParams};
use serde::de::DeserializeOwned;
use std::fmt::Debug;

/// Objects per page.
const PAGE: u32 = 500;
/// Most objects of a kind that are read.
const OBJECTS_MAX: usize = 100_000;

/// Counts.
pub(super) async fn free(context: &Context, template: &Template) -> Free {
    if context.settings.namespace.is_some() {
        return Free::Unknown("this operator is installed for one namespace and may not see nodes".to_owned());
    }
    let spec = match serde_json::from_value::<PodSpec>(template.body["spec"].clone()) {
        Ok(spec) => spec,
        Err(error) => return Free::Unknown(format!("the worker's pod cannot be read: {error}")),
    };
    count(context, template, &spec)
        .await
        .unwrap_or_else(|error| Free::Unknown(format!("nodes and devices cannot be counted: {error}")))
}

async fn count(context: &Context, template: &Template, spec: &PodSpec) -> Result<Free, RequestError> {
    let all = ListParams::default();
    let alive = all.clone().fields("status.phase!=Succeeded,status.phase!=Failed");
    let nodes: Vec<Node> = list(context, &all).await?;
    let pods: Vec<Pod> = list(context, &alive).await?;
    let places = devices::free(spec, &nodes, &pods);
    let Accelerator::Class { name, count } = &template.accelerator else { return Ok(places) };
    let class: DeviceClass = answered(Api::all(context.client.clone()).get(name)).await?;
    let slices: Vec<ResourceSlice> = list(context, &all).await?;
    let claims: Vec<ResourceClaim> = list(context, &all).await?;
    let devices = devices::free_of_class(&class, *count, &slices, &claims);
    Ok(match (places, devices) {
        (Free::Slots(places), Free::Slots(devices)) => Free::Slots(places.min(devices)),
        (Free::Unknown(why), _) | (_, Free::Unknown(why)) => Free::Unknown(why),
    })
}

async fn list<K>(context: &Context, params: &ListParams) -> Result<Vec<K>, RequestError>
where
    K: Resource<DynamicType = ()> + DeserializeOwned + Clone + Debug,
{
    let api: Api<K> = Api::all(context.client.clone());
    let mut params = params.clone().limit(PAGE);
    let mut found = Vec::new();
    loop {
        let page = answered(api.list(&params)).await?;
        found.extend(page.items);
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) if found.len() < OBJECTS_MAX => params = params.continue_token(&token),
            _ => return Ok(found),
        }
    }
}
