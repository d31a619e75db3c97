//! Addresses of one cluster, as a function of its place: two clusters on one machine never share one.
//!
//! Owns the ranges. Refuses to know how they are set up (see `space`). Clusters without nodes use loopback only.

use std::net::Ipv4Addr;

/// How many clusters fit on a machine at once; the ranges below hold for places under it.
pub(crate) const PLACES: u8 = 16;
/// Real nodes of one cluster.
pub(crate) const NODES_MAX: usize = 8;

/// Addresses and names of the cluster in this place.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    place: u8,
}

// === impl Plan ===

impl Plan {
    pub(crate) const fn new(place: u8) -> Self {
        Self { place }
    }

    /// The bridge on the host; interface names have 15 characters at most.
    pub(crate) fn bridge(self) -> String {
        format!("kvasir{}", self.place)
    }

    /// The host's end of a node's cable.
    pub(crate) fn cable(self, node: usize) -> String {
        format!("kvasir{}n{node}", self.place)
    }

    /// The host on the bridge: API server and whatever a test serves.
    pub(crate) const fn host(self) -> Ipv4Addr {
        Ipv4Addr::new(10, 213, self.place, 1)
    }

    /// A node on the bridge.
    pub(crate) const fn node(self, node: usize) -> Ipv4Addr {
        Ipv4Addr::new(10, 213, self.place, 10 + node as u8)
    }

    /// Pods of one node.
    pub(crate) fn node_pods(self, node: usize) -> String {
        format!("10.{}.{node}.0/24", 128 + self.place)
    }

    /// Pods of the cluster.
    pub(crate) fn pods(self) -> String {
        format!("10.{}.0.0/16", 128 + self.place)
    }

    /// Pod addresses that played nodes hand out: the upper half, which no real node uses.
    pub(crate) fn played_pod(self, number: u32) -> Ipv4Addr {
        let [third, fourth] = (0x8000 | (number & 0x7fff) as u16).to_be_bytes();
        Ipv4Addr::new(10, 128 + self.place, third, fourth)
    }

    /// Pod addresses that played nodes hand out when the test serves them itself: loopback, where every address can be listened on.
    pub(crate) fn served_pod(self, number: u32) -> Ipv4Addr {
        let [third, fourth] = (1 + (number & 0x7fff) as u16).to_be_bytes();
        Ipv4Addr::new(127, 64 + self.place, third, fourth)
    }

    /// ClusterIPs.
    pub(crate) fn services(self) -> String {
        format!("10.{}.0.0/16", 160 + self.place)
    }

    /// ClusterIP of the service `kubernetes`, always the first one.
    pub(crate) const fn api_service(self) -> Ipv4Addr {
        Ipv4Addr::new(10, 160 + self.place, 0, 1)
    }

    /// Folder of a node in each cgroup hierarchy.
    pub(crate) fn cgroup(self, node: usize) -> String {
        format!("{}{node}", self.cgroup_prefix())
    }

    /// What all of them begin with.
    pub(crate) fn cgroup_prefix(self) -> String {
        format!("kvasir{}-n", self.place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn no_two_clusters_and_no_two_nodes_share_an_address_or_a_name() {
        let mut seen = BTreeSet::new();
        for place in 0..PLACES {
            let plan = Plan::new(place);
            let mut names = vec![plan.bridge(), plan.host().to_string(), plan.services(), plan.pods()];
            for node in 0..NODES_MAX {
                names.extend([plan.cable(node), plan.node(node).to_string(), plan.node_pods(node), plan.cgroup(node)]);
                assert!(plan.cable(node).len() <= 15, "the kernel's limit on interface names");
            }
            for name in names {
                assert!(seen.insert(name.clone()), "{name} is given twice");
            }
        }
    }

    #[test]
    fn played_pods_stay_out_of_the_ranges_of_real_nodes() {
        let plan = Plan::new(3);
        for number in [0, 1, 255, 256, 0x7fff, 0x8000] {
            let [_, second, third, _] = plan.played_pod(number).octets();
            assert_eq!(second, 131);
            assert!(usize::from(third) >= NODES_MAX);
            let served = plan.served_pod(number);
            assert!(served.is_loopback() && served.octets()[1] == 67 && served.octets()[2..] != [0, 0], "{served}");
        }
    }
}
