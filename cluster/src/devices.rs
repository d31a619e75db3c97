//! Devices that nodes offer by dynamic resource allocation, made by hand: the real scheduler allocates them to claims.
//!
//! For played nodes only: a real kubelet removes slices of its own node that no plugin of it registered.

use crate::Error;
use crate::cluster::Cluster;
use k8s_openapi::api::resource::v1::{
    CELDeviceSelector, Device, DeviceAttribute, DeviceCapacity, DeviceClass, DeviceClassSpec, DeviceSelector, ResourcePool,
    ResourceSlice, ResourceSliceSpec,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::Api;
use kube::api::{ObjectMeta, PostParams};
use std::collections::BTreeMap;

/// One device of a node.
#[derive(Clone, Debug)]
pub struct DeviceSpec {
    name: String,
    attributes: BTreeMap<String, DeviceAttribute>,
    capacity: BTreeMap<String, DeviceCapacity>,
}

// === impl DeviceSpec ===

impl DeviceSpec {
    /// A device without properties; the name is unique on its node.
    pub fn new(name: &str) -> Self {
        Self { name: name.to_owned(), attributes: BTreeMap::new(), capacity: BTreeMap::new() }
    }

    /// An attribute for `matchAttribute` and CEL, such as `link` or `example.com/link`; without a domain it belongs to the driver.
    pub fn attribute(mut self, name: &str, value: &str) -> Self {
        let value = DeviceAttribute { string: Some(value.to_owned()), ..DeviceAttribute::default() };
        self.attributes.insert(name.to_owned(), value);
        self
    }

    /// How much of something it has, such as `memory`.
    pub fn capacity(mut self, name: &str, quantity: &str) -> Self {
        let value = DeviceCapacity { value: Quantity(quantity.to_owned()), ..DeviceCapacity::default() };
        self.capacity.insert(name.to_owned(), value);
        self
    }

    fn device(&self) -> Device {
        Device {
            name: self.name.clone(),
            attributes: Some(self.attributes.clone()),
            capacity: Some(self.capacity.clone()),
            ..Device::default()
        }
    }
}

// === impl Cluster ===

impl Cluster {
    /// Offers the devices of a played node, as the driver named `driver` would. One slice holds 128 devices at most.
    pub async fn offer_devices(&self, node: &str, driver: &str, devices: &[DeviceSpec]) -> Result<(), Error> {
        let slice = ResourceSlice {
            metadata: ObjectMeta { name: Some(format!("{node}-{}", driver.replace('/', "-"))), ..ObjectMeta::default() },
            spec: ResourceSliceSpec {
                driver: driver.to_owned(),
                node_name: Some(node.to_owned()),
                pool: ResourcePool { name: node.to_owned(), generation: 1, resource_slice_count: 1 },
                devices: Some(devices.iter().map(DeviceSpec::device).collect()),
                ..ResourceSliceSpec::default()
            },
        };
        let slices = Api::<ResourceSlice>::all(self.client().await?);
        let made = slices.create(&PostParams::default(), &slice).await;
        made.map(drop).map_err(Error::api(format!("offer the devices of node `{node}`")))
    }

    /// A class of devices, chosen by a CEL expression such as `device.driver == "gpu.example.com"`.
    pub async fn device_class(&self, name: &str, expression: &str) -> Result<(), Error> {
        let selector = DeviceSelector { cel: Some(CELDeviceSelector { expression: expression.to_owned() }) };
        let class = DeviceClass {
            metadata: ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() },
            spec: DeviceClassSpec { selectors: Some(vec![selector]), ..DeviceClassSpec::default() },
        };
        let classes = Api::<DeviceClass>::all(self.client().await?);
        classes.create(&PostParams::default(), &class).await.map(drop).map_err(Error::api(format!("create class `{name}`")))
    }
}
