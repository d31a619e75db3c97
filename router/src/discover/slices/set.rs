//! Which endpoints a Service's slices name: a pure set that events of a watch change.
//!
//! Owns the rules of who is in. Refuses to know connections. Called by the watch for each event; returns what has changed.
//!
//! Rules
//! 1. In is who has an address and is not terminating. Readiness in the slice counts for nothing: a router acts on its own probe, and a worker must be
//!    probed by routers to become ready.
//! 2. Out is who is terminating anywhere: for a moment one pod may stand in two slices, and the one that says that it goes is the newer one.
//! 3. A pod with addresses of both families is one worker: its IPv4 address is used.
//! 4. A new list replaces the old one when it is complete; until then, and after a failure, the old one stands.
//!
//! Costs: each event is O(endpoints of the Service).

use super::PortChoice;
use crate::discover::{Change, Endpoint};
use k8s_openapi::api::discovery::v1::{Endpoint as SliceEndpoint, EndpointSlice};
use kube::runtime::watcher::Event;
use std::collections::{BTreeMap, BTreeSet, HashSet};

/// The slices of one Service and the endpoints that follow.
pub(super) struct SliceSet {
    port: PortChoice,
    slices: BTreeMap<String, Vec<Entry>>,
    /// A list that is not complete yet.
    arriving: Option<BTreeMap<String, Vec<Entry>>>,
    current: BTreeSet<Endpoint>,
    listed: bool,
    full: bool,
}

/// One endpoint of one slice.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Entry {
    /// Uid of the pod, where a pod is behind it.
    pod: Option<String>,
    /// Absent when it has no address that can be used.
    endpoint: Option<Endpoint>,
    ipv4: bool,
    going: bool,
}

/// Most endpoints of one Service; more are left out, and said. A router links to each of them.
pub(super) const ENDPOINTS_MAX: usize = 4_096;

// === impl SliceSet ===

impl SliceSet {
    pub(super) fn new(port: PortChoice) -> Self {
        Self { port, slices: BTreeMap::new(), arriving: None, current: BTreeSet::new(), listed: false, full: false }
    }

    /// How many endpoints are in.
    pub(super) fn len(&self) -> usize {
        self.current.len()
    }

    /// Takes one event in; leaves come before joins.
    pub(super) fn apply(&mut self, event: Event<EndpointSlice>) -> Vec<Change> {
        match event {
            Event::Init => {
                self.arriving = Some(BTreeMap::new());
                Vec::new()
            }
            Event::InitApply(slice) => {
                let (name, entries) = read(slice, &self.port);
                self.arriving.get_or_insert_default().insert(name, entries);
                Vec::new()
            }
            Event::InitDone => {
                self.slices = self.arriving.take().unwrap_or_default();
                let mut changes = self.difference();
                changes.push(if self.listed { Change::Fresh } else { Change::Listed });
                self.listed = true;
                changes
            }
            Event::Apply(slice) => {
                let (name, entries) = read(slice, &self.port);
                self.slices.insert(name, entries);
                self.difference()
            }
            Event::Delete(slice) => {
                self.slices.remove(&slice.metadata.name.unwrap_or_default());
                self.difference()
            }
        }
    }

    /// The watch broke: what has arrived of a list that is not complete says nothing.
    pub(super) fn interrupted(&mut self) {
        self.arriving = None;
    }

    fn difference(&mut self) -> Vec<Change> {
        let mut wanted = self.members();
        let full = wanted.len() > ENDPOINTS_MAX;
        if full {
            if !self.full {
                tracing::warn!(
                    endpoints = wanted.len(),
                    max = ENDPOINTS_MAX,
                    "the Service has too many endpoints; the last ones are left out"
                );
            }
            wanted = wanted.into_iter().take(ENDPOINTS_MAX).collect();
        }
        self.full = full;
        let left = self.current.difference(&wanted).cloned().map(Change::Leave);
        let joined = wanted.difference(&self.current).cloned().map(Change::Join);
        let changes = left.chain(joined).collect();
        self.current = wanted;
        changes
    }

    fn members(&self) -> BTreeSet<Endpoint> {
        let all = || self.slices.values().flatten();
        let going: HashSet<&Endpoint> = all().filter(|entry| entry.going).filter_map(|entry| entry.endpoint.as_ref()).collect();
        let going_pods: HashSet<&str> = all().filter(|entry| entry.going).filter_map(|entry| entry.pod.as_deref()).collect();
        let with_ipv4: HashSet<&str> = all().filter(|entry| entry.ipv4).filter_map(|entry| entry.pod.as_deref()).collect();
        let member = |entry: &Entry| {
            let endpoint = entry.endpoint.as_ref().filter(|endpoint| !going.contains(endpoint))?;
            let second =
                entry.pod.as_deref().is_some_and(|pod| going_pods.contains(pod) || !entry.ipv4 && with_ipv4.contains(pod));
            (!second).then(|| endpoint.clone())
        };
        all().filter_map(member).collect()
    }
}

/// Name and entries of one slice.
fn read(slice: EndpointSlice, choice: &PortChoice) -> (String, Vec<Entry>) {
    let name = slice.metadata.name.unwrap_or_default();
    let ports = slice.ports.unwrap_or_default();
    let port = match choice {
        PortChoice::Number(number) => Some(*number),
        PortChoice::Name(wanted) => {
            let tcp = |protocol: Option<&str>| protocol.is_none_or(|protocol| protocol == "TCP");
            let found = ports.iter().find(|port| port.name.as_deref() == Some(wanted) && tcp(port.protocol.as_deref()));
            found.and_then(|port| port.port).and_then(|port| u16::try_from(port).ok())
        }
    };
    if port.is_none() && !slice.endpoints.is_empty() {
        tracing::warn!(slice = name, port = %choice, "the slice has no such port; its endpoints are left out");
    }
    let ipv4 = slice.address_type == "IPv4";
    let entries = slice.endpoints.into_iter().map(|endpoint| entry(endpoint, port, ipv4)).collect();
    (name, entries)
}

fn entry(endpoint: SliceEndpoint, port: Option<u16>, ipv4: bool) -> Entry {
    let terminating = endpoint.conditions.and_then(|conditions| conditions.terminating).unwrap_or(false);
    // Only the first address has a meaning.
    let address = endpoint.addresses.into_iter().next().filter(|address| !address.is_empty());
    let parsed = address.as_ref().zip(port).and_then(|(address, port)| {
        let host = if address.contains(':') { format!("[{address}]") } else { address.clone() };
        Endpoint::parse(&format!("{host}:{port}"))
            .inspect_err(|error| tracing::warn!(%error, "a slice names an endpoint that cannot be used"))
            .ok()
    });
    Entry {
        pod: endpoint.target_ref.and_then(|target| target.uid),
        ipv4: ipv4 && parsed.is_some(),
        going: terminating || address.is_none(),
        endpoint: parsed,
    }
}
