//! A small cluster on the mock API server: what Kubernetes does with the objects of a pool.
//!
//! An image with `crash` in its name ends again and again (with `model` too because of its model), one with `missing` cannot be pulled, one with
//! `fetches` does not start while workers say that they fetch their model.

use super::fleet::Life;
use super::{Fleet, MockApi};
use crate::clock::Clock;
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::task::JoinHandle;

/// The extended resource that workers ask for.
pub(crate) const DEVICE: &str = "example.com/gpu";
/// One step of the cluster.
pub(crate) const TICK: Duration = Duration::from_millis(200);
/// Ticks until a container that starts is ready.
const START_TICKS: u32 = 5;
/// Where time begins.
const EPOCH: i64 = 1_700_000_000;

/// The cluster; its parts go on until it is dropped.
pub(crate) struct Cluster {
    pub(crate) api: MockApi,
    pub(crate) fleet: Arc<Fleet>,
    pub(crate) clock: Clock,
    pub(crate) devices: Arc<AtomicU32>,
    task: JoinHandle<()>,
}

/// What a kubelet knows of one pod.
#[derive(Clone, Debug)]
struct Run {
    image: String,
    ticks: u32,
    restarts: u32,
    ip: String,
}

/// Everything that takes part in a tick.
struct Machinery {
    api: MockApi,
    fleet: Arc<Fleet>,
    clock: Clock,
    devices: Arc<AtomicU32>,
    runs: Mutex<(BTreeMap<String, Run>, u32)>,
    /// Version of the store at the last tick that changed nothing: garbage comes from changes.
    calm: AtomicU64,
}

// === impl Cluster ===

impl Cluster {
    /// A cluster with so many devices.
    pub(crate) fn new(devices: u32) -> Self {
        let (api, fleet, devices) = (MockApi::new(), Arc::new(Fleet::new()), Arc::new(AtomicU32::new(devices)));
        let clock = Clock::from_runtime(Timestamp::from_second(EPOCH).unwrap());
        api.set_now(clock.now());
        let machinery = Machinery {
            api: api.clone(),
            fleet: Arc::clone(&fleet),
            clock: clock.clone(),
            devices: Arc::clone(&devices),
            runs: Mutex::default(),
            calm: AtomicU64::new(0),
        };
        machinery.tick();
        let task = tokio::spawn(async move {
            loop {
                tokio::time::sleep(TICK).await;
                machinery.tick();
            }
        });
        Self { api, fleet, clock, devices, task }
    }

    /// Pods with this value of the component label.
    pub(crate) fn pods(&self, component: &str) -> Vec<Value> {
        let all = self.api.all("pods").into_iter();
        all.filter(|pod| pod["metadata"]["labels"]["app.kubernetes.io/component"] == component).collect()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.task.abort();
    }
}

// === impl Machinery ===

fn text(object: &Value, path: &str) -> String {
    object.pointer(path).and_then(Value::as_str).unwrap_or_default().to_owned()
}

fn meta(object: &Value) -> (String, String, String) {
    (text(object, "/metadata/namespace"), text(object, "/metadata/name"), text(object, "/metadata/uid"))
}

fn is_set(object: &Value, path: &str) -> bool {
    object.pointer(path).is_some_and(|value| !value.is_null())
}

fn condition(kind: &str, status: bool, at: &str, former: &Value) -> Value {
    let word = if status { "True" } else { "False" };
    let same = former.as_array().into_iter().flatten().find(|it| it["type"] == kind && it["status"] == word);
    json!({"type": kind, "status": word, "lastTransitionTime": same.map_or_else(|| json!(at), |it| it["lastTransitionTime"].clone())})
}

impl Machinery {
    fn tick(&self) {
        self.api.set_now(self.clock.now());
        self.nodes();
        let version = self.api.version();
        if self.calm.swap(version, Ordering::Relaxed) != version {
            self.collect_garbage();
            self.deployments();
            self.schedule();
        }
        for pod in self.api.all("pods") {
            self.kubelet(&pod);
        }
    }

    fn nodes(&self) {
        let devices = self.devices.load(Ordering::Relaxed).to_string();
        let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n"}, "status": {
            "allocatable": {"pods": "1000", DEVICE: devices}, "conditions": [{"type": "Ready", "status": "True"}]}});
        self.api.put("nodes", node);
    }

    fn deployments(&self) {
        for deployment in self.api.all("deployments") {
            if is_set(&deployment, "/metadata/deletionTimestamp") {
                continue;
            }
            let (namespace, name, uid) = meta(&deployment);
            for at in 0..deployment["spec"]["replicas"].as_u64().unwrap_or(1) {
                let pod = format!("{name}-{at}");
                if self.api.get("pods", &namespace, &pod).is_none() {
                    let mut template = deployment["spec"]["template"].clone();
                    template["apiVersion"] = json!("v1");
                    template["kind"] = json!("Pod");
                    template["metadata"]["name"] = json!(pod);
                    template["metadata"]["namespace"] = json!(namespace);
                    template["metadata"]["ownerReferences"] =
                        json!([{"apiVersion": "apps/v1", "kind": "Deployment", "name": name, "uid": uid, "controller": true}]);
                    template["status"] = json!({"phase": "Pending"});
                    self.api.put("pods", template);
                }
            }
        }
    }

    fn schedule(&self) {
        let pods = self.api.all("pods");
        let asks = |pod: &Value| -> u32 {
            pod["spec"]["containers"][0]["resources"]["limits"][DEVICE].as_str().map_or(0, |count| count.parse().unwrap())
        };
        let mut used: u32 = pods.iter().filter(|pod| is_set(pod, "/spec/nodeName")).map(asks).sum();
        for pod in pods.iter().filter(|pod| !is_set(pod, "/spec/nodeName") && !is_set(pod, "/metadata/deletionTimestamp")) {
            let (namespace, name, _) = meta(pod);
            if asks(pod) > 0 && used + asks(pod) > self.devices.load(Ordering::Relaxed) {
                let at = self.clock.time();
                self.api.change("pods", &namespace, &name, |pod| {
                    let mut refused = condition("PodScheduled", false, &at.0.to_string(), &pod["status"]["conditions"]);
                    refused["message"] = json!(format!("0/1 nodes are available: 1 Insufficient {DEVICE}."));
                    pod["status"]["conditions"] = json!([refused]);
                });
                continue;
            }
            used += asks(pod);
            self.api.change("pods", &namespace, &name, |pod| pod["spec"]["nodeName"] = json!("n"));
        }
    }

    fn kubelet(&self, pod: &Value) {
        if !is_set(pod, "/spec/nodeName") {
            return;
        }
        let (namespace, name, uid) = meta(pod);
        let (worker, image) = (text(pod, "/spec/containers/0/name") == "worker", text(pod, "/spec/containers/0/image"));
        let run = self.run(&uid, &image);
        if is_set(pod, "/metadata/deletionTimestamp") {
            let over = text(pod, "/metadata/deletionTimestamp").parse::<Timestamp>().is_ok_and(|at| at <= self.clock.now());
            self.advance(&run, &name, &uid, run.ticks > START_TICKS, true);
            if over || self.fleet.in_flight(&run.ip) == 0 {
                self.fleet.live(&run.ip, None, true);
                self.api.remove("pods", &namespace, &name);
            }
            return;
        }
        let waiting = match () {
            () if image.contains("missing") => Some("ImagePullBackOff"),
            () if image.contains("crash") && run.ticks > 2 => Some("CrashLoopBackOff"),
            () => None,
        };
        let fetches = image.contains("fetches") && self.fleet.fetches();
        let started = run.ticks > START_TICKS && waiting.is_none() && !fetches;
        let line = json!({"fields": {"error": "nobody has it", "about": if image.contains("model") { "model" } else { "else" }}});
        let ended = json!({"terminated": {"exitCode": 1, "reason": "Error", "message": format!("{line}\n")}});
        let last = if waiting == Some("CrashLoopBackOff") { ended } else { Value::Null };
        if worker {
            self.advance(&run, &name, &uid, started, false);
        }
        let at = self.clock.time().0.to_string();
        self.api.change("pods", &namespace, &name, |pod| {
            let former = pod["status"]["conditions"].clone();
            let gates = pod["spec"]["readinessGates"].as_array().cloned().unwrap_or_default();
            let open = |gate: &Value| {
                let conditions = former.as_array().into_iter().flatten();
                conditions.into_iter().any(|it| it["type"] == gate["conditionType"] && it["status"] == "True")
            };
            let ready = started && gates.iter().all(open);
            let mut conditions: Vec<Value> = former.as_array().cloned().unwrap_or_default();
            conditions.retain(|it| !["PodScheduled", "ContainersReady", "Ready"].contains(&it["type"].as_str().unwrap_or_default()));
            for (kind, status) in [("PodScheduled", true), ("ContainersReady", started), ("Ready", ready)] {
                conditions.push(condition(kind, status, &at, &former));
            }
            let state = waiting.map_or_else(|| json!({"running": {}}), |reason| json!({"waiting": {"reason": reason}}));
            let container = text(pod, "/spec/containers/0/name");
            pod["status"] = json!({"phase": "Running", "podIP": run.ip, "conditions": conditions, "containerStatuses": [{"name": container,
                "image": image, "imageID": "", "ready": started, "started": started, "restartCount": run.restarts, "state": state, "lastState": last}]});
        });
    }

    /// One tick of a container: a changed image starts it anew.
    fn run(&self, uid: &str, image: &str) -> Run {
        let mut runs = self.runs.lock().unwrap_or_else(PoisonError::into_inner);
        let (known, addresses) = &mut *runs;
        let run = known.entry(uid.to_owned()).or_insert_with(|| {
            *addresses += 1;
            Run {
                image: image.to_owned(),
                ticks: 0,
                restarts: 0,
                ip: format!("10.{}.{}.{}", *addresses >> 16, *addresses >> 8 & 255, *addresses & 255),
            }
        });
        run.ticks += 1;
        if run.image != image {
            (run.image, run.ticks, run.restarts) = (image.to_owned(), 0, run.restarts + 1);
        }
        run.clone()
    }

    /// One tick of a worker's process.
    fn advance(&self, run: &Run, name: &str, uid: &str, ready: bool, leaves: bool) {
        let incarnation = blake3::hash(format!("{uid}/{}", run.restarts).as_bytes()).as_bytes()[..8].to_vec();
        let life = Life { name: name.to_owned(), incarnation, ready_ticks: u32::from(ready), draining: leaves, in_flight: 0 };
        self.fleet.live(&run.ip, Some(life), leaves);
    }

    fn collect_garbage(&self) {
        let all = self.api.everything();
        let uids: BTreeSet<String> = all.values().map(|object| text(object, "/metadata/uid")).collect();
        let owners = |object: &Value| -> Vec<String> {
            let owners = object.pointer("/metadata/ownerReferences").and_then(Value::as_array).cloned().unwrap_or_default();
            owners.iter().map(|owner| text(owner, "/uid")).collect()
        };
        for ((plural, namespace, name), object) in &all {
            let finalizers: Vec<String> = object
                .pointer("/metadata/finalizers")
                .and_then(Value::as_array)
                .into_iter()
                .flatten()
                .filter_map(|it| it.as_str().map(str::to_owned))
                .collect();
            let uid = text(object, "/metadata/uid");
            let dependents: Vec<_> = all.iter().filter(|(_, it)| owners(it).contains(&uid)).collect();
            let without = |finalizer: &str| {
                self.api.change(plural, namespace, name, |object| {
                    let kept: Vec<&String> = finalizers.iter().filter(|it| *it != finalizer).collect();
                    object["metadata"]["finalizers"] = json!(kept);
                });
            };
            if is_set(object, "/metadata/deletionTimestamp") && finalizers.iter().any(|it| it == "foregroundDeletion") {
                for (key, dependent) in &dependents {
                    if !is_set(dependent, "/metadata/deletionTimestamp") {
                        self.api.delete(&key.0, &key.1, &key.2, "Foreground");
                    }
                }
                if dependents.is_empty() {
                    without("foregroundDeletion");
                }
                continue;
            }
            if finalizers.iter().any(|it| it == "orphan") {
                for (key, _) in &dependents {
                    self.api.change(&key.0, &key.1, &key.2, |object| {
                        object["metadata"].as_object_mut().map(|metadata| metadata.remove("ownerReferences"));
                    });
                }
                without("orphan");
                continue;
            }
            let lost = !owners(object).is_empty() && owners(object).iter().all(|owner| !uids.contains(owner));
            if lost && !is_set(object, "/metadata/deletionTimestamp") {
                self.api.delete(plural, namespace, name, "Background");
            }
        }
    }
}
