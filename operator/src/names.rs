//! Names: what the objects of a pool are called and labelled.
//!
//! Owns the rule by which every name follows from the pool's, and the labels by which objects are found. Refuses to know what the objects are for.
//!
//! Invariants
//! 1. Every name is a DNS label of at most 63 characters, with room for a pod's index or the suffixes that a Deployment adds, so host names are
//!    never cut. A pool whose name is longer than [`STEM_BYTES_MAX`] goes by a stem that ends in a hash of the whole name.
//! 2. No two objects of one kind in a namespace get one name, whatever their pools are called: no suffix ends in another one.
//! 3. Labels that select pods never change over the life of a pool.

use std::collections::BTreeMap;

/// Longest pool name that stands in names as it is, in bytes: 63, less what a Deployment adds to its pods' names (17) and `-router` (7).
pub const STEM_BYTES_MAX: usize = 39;
/// Digits of the hash in the stem of a longer name.
const HASH_DIGITS: usize = 8;

/// Label: the pool that an object belongs to, by its stem.
pub const POOL: &str = "kvasir.dev/pool";
/// Label: what a pod of a pool does.
pub const COMPONENT: &str = "app.kubernetes.io/component";
/// Label: who made an object.
pub const MANAGED_BY: &str = "app.kubernetes.io/managed-by";
/// Value of [`MANAGED_BY`] on everything that the operator makes.
pub const MANAGER: &str = "kvasir-operator";

/// What a pod of a pool does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Component {
    /// Serves the model.
    Worker,
    /// Serves the draft model.
    Draft,
    /// Takes requests.
    Router,
}

/// The names of one pool's objects.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Names {
    stem: String,
}

// === impl Component ===

impl Component {
    /// Value of the label [`COMPONENT`].
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Worker => "worker",
            Self::Draft => "draft",
            Self::Router => "router",
        }
    }
}

// === impl Names ===

impl Names {
    /// Names for the pool of this name.
    pub fn new(pool: &str) -> Self {
        if pool.len() <= STEM_BYTES_MAX {
            return Self { stem: pool.to_owned() };
        }
        let hash = blake3::hash(pool.as_bytes()).to_hex();
        let kept = pool[..pool.floor_char_boundary(STEM_BYTES_MAX - HASH_DIGITS - 1)].trim_end_matches('-');
        Self { stem: format!("{kept}-{}", &hash[..HASH_DIGITS]) }
    }

    /// What stands for the pool in names and labels.
    pub fn stem(&self) -> &str {
        &self.stem
    }

    /// Pods and account of a component; for routers also Deployment, Service, Role, budget and policy.
    pub fn component(&self, component: Component) -> String {
        self.with(component.as_str())
    }

    /// Headless Service of the workers.
    pub fn workers(&self) -> String {
        self.with("workers")
    }

    /// Headless Service of the draft pods.
    pub fn drafts(&self) -> String {
        self.with("drafts")
    }

    /// Secret with what the pool's components show each other.
    pub fn bearer(&self) -> String {
        self.with("bearer")
    }

    /// Secret from which reuse domains are derived, where the pool names none.
    pub fn pool_secret(&self) -> String {
        self.with("pool-secret")
    }

    /// The one Secret that routers read: digests of tenants' keys and the pool secret.
    pub fn keys(&self) -> String {
        self.with("keys")
    }

    /// ConfigMap with the routers' flags.
    pub fn router_flags(&self) -> String {
        self.with("router-flags")
    }

    /// Headless Service through which routers are scraped.
    pub fn router_metrics(&self) -> String {
        self.with("router-metrics")
    }

    /// ServiceMonitor of workers and routers.
    pub fn monitor(&self) -> String {
        self.with("monitor")
    }

    /// ResourceClaimTemplate of this content; another content gets another name, because such a template cannot be changed.
    pub fn devices(&self, content_hash: &str) -> String {
        self.with(&format!("devices-{}", &content_hash[..content_hash.len().min(HASH_DIGITS)]))
    }

    /// Labels of every object of the pool.
    pub fn labels(&self) -> BTreeMap<String, String> {
        [
            ("app.kubernetes.io/name", "kvasir"),
            ("app.kubernetes.io/instance", &*self.stem),
            ("app.kubernetes.io/part-of", "kvasir"),
            (MANAGED_BY, MANAGER),
            (POOL, &*self.stem),
        ]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .into()
    }

    /// Labels of the objects of one component.
    pub fn component_labels(&self, component: Component) -> BTreeMap<String, String> {
        let mut labels = self.labels();
        labels.insert(COMPONENT.to_owned(), component.as_str().to_owned());
        labels
    }

    /// The least labels by which a component's pods are found.
    pub fn selector(&self, component: Component) -> BTreeMap<String, String> {
        [(COMPONENT.to_owned(), component.as_str().to_owned()), (POOL.to_owned(), self.stem.clone())].into()
    }

    fn with(&self, suffix: &str) -> String {
        format!("{}-{suffix}", self.stem)
    }
}

/// A label selector in text form.
pub fn selector_text(labels: &BTreeMap<String, String>) -> String {
    labels.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Every name that a pool's objects can have.
    fn all(names: &Names) -> Vec<String> {
        let mut all: Vec<String> = [Component::Worker, Component::Draft, Component::Router].map(|it| names.component(it)).into();
        all.extend([names.workers(), names.drafts(), names.bearer(), names.pool_secret(), names.keys(), names.router_flags()]);
        all.extend([names.router_metrics(), names.monitor(), names.devices("0123456789abcdef")]);
        all
    }

    fn is_label(text: &str) -> bool {
        let plain = text.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-');
        plain && (1..=63).contains(&text.len()) && !text.starts_with('-') && !text.ends_with('-')
    }

    proptest! {
        #[test]
        fn names_are_dns_labels_however_long_the_pools_name_is(pool in "[a-z]([-a-z0-9]{0,251}[a-z0-9])?") {
            let names = Names::new(&pool);
            for name in all(&names) {
                prop_assert!(is_label(&name), "{name}");
            }
            let largest = format!("{}-19999", names.component(Component::Worker));
            prop_assert!(is_label(&largest), "{largest}");
            // What a Deployment adds: a dash, ten digits of a hash, a dash, five letters.
            prop_assert!(names.component(Component::Router).len() + 17 <= 63);
            prop_assert!(names.component_labels(Component::Draft).values().all(|value| value.len() <= 63));
            prop_assert_eq!(names.stem() == pool, pool.len() <= STEM_BYTES_MAX);
        }
    }

    #[test]
    fn long_names_that_begin_alike_differ() {
        let (one, two) = (Names::new(&format!("{}-a", "x".repeat(60))), Names::new(&format!("{}-b", "x".repeat(60))));
        assert_ne!(one.stem(), two.stem());
        assert_eq!(one.stem().len(), STEM_BYTES_MAX);
        assert_eq!(Names::new(&"y".repeat(STEM_BYTES_MAX)).stem(), "y".repeat(STEM_BYTES_MAX));
    }

    #[test]
    fn no_suffix_ends_in_another_one() {
        // Else the pools `a` and `a-b` could want one name.
        let all = all(&Names::new("p"));
        let suffixes: Vec<&str> = all.iter().map(|name| &name[1..]).collect();
        for (at, one) in suffixes.iter().enumerate() {
            for (other_at, other) in suffixes.iter().enumerate() {
                assert!(at == other_at || !one.ends_with(other), "{one} ends in {other}");
            }
        }
    }

    #[test]
    fn selectors_are_the_least_and_stand_among_the_labels() {
        let names = Names::new("first");
        let (selector, labels) = (names.selector(Component::Worker), names.component_labels(Component::Worker));
        assert!(selector.iter().all(|(name, value)| labels.get(name) == Some(value)));
        assert_eq!(selector_text(&selector), "app.kubernetes.io/component=worker,kvasir.dev/pool=first");
    }
}
