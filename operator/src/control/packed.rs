//! Packed: a live object as it is kept between two looks.
//!
//! Owns the form: what is asked at each look and each change stands apart, everything else is one piece of text. A tree of JSON values costs
//! some ten times its text, and a hundred pools have more than a thousand objects that nobody looks at for hours. Refuses to know what the
//! objects are. Unpacking costs one reading of the text.

use crate::names::POOL;
use kube::Resource;
use kube::api::{DynamicObject, ObjectMeta};
use kube::core::{ApiResource, DynamicResourceScope};
use kube::runtime::watcher::Event;
use std::borrow::Cow;

/// A live object in few bytes.
#[derive(Clone, Debug)]
pub(super) struct Packed {
    /// Whose it is and which it is; of its labels only the pool's.
    meta: ObjectMeta,
    /// All of it but managed fields.
    text: Box<str>,
}

// === impl Packed ===

impl Packed {
    pub(super) fn of(mut object: DynamicObject) -> Self {
        object.metadata.managed_fields = None;
        let text = serde_json::to_string(&object).unwrap_or_default().into_boxed_str();
        let ObjectMeta { name, namespace, uid, resource_version, deletion_timestamp, owner_references, labels, .. } =
            object.metadata;
        let labels = labels.map(|labels| labels.into_iter().filter(|(name, _)| name == POOL).collect());
        let meta = ObjectMeta {
            name,
            namespace,
            uid,
            resource_version,
            deletion_timestamp,
            owner_references,
            labels,
            ..ObjectMeta::default()
        };
        Self { meta, text }
    }

    /// Packs what a watch delivers.
    pub(super) fn event(event: Event<DynamicObject>) -> Event<Self> {
        match event {
            Event::Apply(object) => Event::Apply(Self::of(object)),
            Event::Delete(object) => Event::Delete(Self::of(object)),
            Event::InitApply(object) => Event::InitApply(Self::of(object)),
            Event::Init => Event::Init,
            Event::InitDone => Event::InitDone,
        }
    }

    /// The whole object.
    pub(super) fn unpack(&self) -> Option<DynamicObject> {
        serde_json::from_str(&self.text).ok()
    }
}

impl Resource for Packed {
    type DynamicType = ApiResource;
    type Scope = DynamicResourceScope;

    fn kind(resource: &ApiResource) -> Cow<'_, str> {
        resource.kind.as_str().into()
    }

    fn group(resource: &ApiResource) -> Cow<'_, str> {
        resource.group.as_str().into()
    }

    fn version(resource: &ApiResource) -> Cow<'_, str> {
        resource.version.as_str().into()
    }

    fn plural(resource: &ApiResource) -> Cow<'_, str> {
        resource.plural.as_str().into()
    }

    fn meta(&self) -> &ObjectMeta {
        &self.meta
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.meta
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn an_object_comes_back_whole_but_for_managed_fields() {
        let mut object = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "s", "namespace": "n", "uid": "u",
            "resourceVersion": "7", "labels": {POOL: "p", "other": "label"}, "annotations": {"a": "b"},
            "managedFields": [{"manager": "someone"}]}, "spec": {"ports": [{"port": 80}], "selector": {"x": "y"}}});
        let packed = Packed::of(serde_json::from_value(object.clone()).unwrap());
        object["metadata"].as_object_mut().unwrap().remove("managedFields");
        assert_eq!(serde_json::to_value(packed.unpack().unwrap()).unwrap(), object);
        let meta: Value = serde_json::to_value(packed.meta()).unwrap();
        assert_eq!(meta, json!({"name": "s", "namespace": "n", "uid": "u", "resourceVersion": "7", "labels": {POOL: "p"}}));
    }
}
