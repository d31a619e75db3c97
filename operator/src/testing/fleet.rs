//! Routers and workers that answer, as far as a controller asks them.

use crate::admin::{Admin, AdminError, Cordon, Described, Drained, Registered, RegisteredWorker};
use kvasir_proto::auth::BearerSecret;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// One life of a worker's process.
#[derive(Clone, Debug)]
pub(crate) struct Life {
    pub(crate) name: String,
    pub(crate) incarnation: Vec<u8>,
    /// Whether its container is ready, and since how many ticks.
    pub(crate) ready_ticks: u32,
    pub(crate) draining: bool,
    pub(crate) in_flight: u32,
}

#[derive(Default)]
struct State {
    /// Workers by address without port.
    lives: BTreeMap<String, Life>,
    cordoned: BTreeSet<Vec<u8>>,
    /// Requests that a worker has when it is routable.
    load: u32,
    /// Ticks until routers know a ready worker.
    registers_after: u32,
    silent_routers: bool,
    metrics: String,
    /// What workers that start say of their model.
    fetched: Option<u32>,
    /// Requests that were open when their worker was taken away.
    cut: u32,
    drains: u32,
}

/// Everyone that can be asked.
pub(crate) struct Fleet(Mutex<State>);

// === impl Fleet ===

impl Fleet {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(State { load: 3, registers_after: 2, ..State::default() }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Requests that a worker gets as soon as routers take it.
    pub(crate) fn set_load(&self, load: u32) {
        self.state().load = load;
    }

    /// Lets routers be silent, or answer again.
    pub(crate) fn set_silent(&self, silent: bool) {
        self.state().silent_routers = silent;
    }

    /// Lets no router take any worker, or take them as usual.
    pub(crate) fn set_blind(&self, blind: bool) {
        self.state().registers_after = if blind { u32::MAX } else { 2 };
    }

    /// What routers count.
    pub(crate) fn set_metrics(&self, text: String) {
        self.state().metrics = text;
    }

    /// How much of their model workers that start have fetched.
    pub(crate) fn set_fetched(&self, percent: Option<u32>) {
        self.state().fetched = percent;
    }

    pub(crate) fn fetches(&self) -> bool {
        self.state().fetched.is_some()
    }

    /// Requests that were cut so far.
    pub(crate) fn cut(&self) -> u32 {
        self.state().cut
    }

    /// Requests open on a worker.
    pub(crate) fn in_flight(&self, ip: &str) -> u32 {
        self.state().lives.get(ip).map_or(0, |life| life.in_flight)
    }

    /// Drains that were told.
    pub(crate) fn drains(&self) -> u32 {
        self.state().drains
    }

    /// One tick of a worker's process: `None` ends it; `ends` lets its streams come to their ends.
    pub(crate) fn live(&self, ip: &str, life: Option<Life>, leaves: bool) {
        let mut state = self.state();
        let (load, after) = (state.load, state.registers_after);
        let Some(mut life) = life else {
            if let Some(life) = state.lives.remove(ip) {
                state.cut += life.in_flight;
            }
            return;
        };
        let same = state.lives.get(ip).filter(|old| old.incarnation == life.incarnation).cloned();
        if same.is_none() {
            let cut = state.lives.get(ip).map_or(0, |old| old.in_flight);
            state.cut += cut;
        }
        if let Some(old) = same {
            (life.draining, life.in_flight, life.ready_ticks) =
                (old.draining || leaves, old.in_flight, if life.ready_ticks > 0 { old.ready_ticks + 1 } else { 0 });
        }
        let cordoned = state.cordoned.contains(&life.incarnation);
        if life.draining || cordoned {
            life.in_flight = life.in_flight.saturating_sub(1);
        } else if life.ready_ticks > after {
            life.in_flight = load;
        }
        state.lives.insert(ip.to_owned(), life);
    }
}

fn refuse(address: &str, method: &'static str) -> AdminError {
    AdminError::Call {
        address: address.to_owned(),
        method,
        code: "unavailable".to_owned(),
        message: "nobody is there".to_owned(),
    }
}

fn host(address: &str) -> &str {
    address.rsplit_once(':').map_or(address, |(host, _)| host)
}

#[tonic::async_trait]
impl Admin for Fleet {
    async fn workers(&self, router: &str, _secret: &BearerSecret) -> Result<Registered, AdminError> {
        let state = self.state();
        if state.silent_routers {
            return Err(refuse(router, "Workers"));
        }
        let known = state.lives.iter().filter(|(_, life)| life.ready_ticks > state.registers_after);
        let workers = known.map(|(ip, life)| RegisteredWorker {
            uid: life.name.clone(),
            incarnation: life.incarnation.clone(),
            address: format!("http://{ip}:7401"),
            refusal: (life.draining || state.cordoned.contains(&life.incarnation)).then(|| "draining".to_owned()),
            in_flight: life.in_flight / 2,
        });
        Ok(Registered { complete: true, workers: workers.collect(), ..Registered::default() })
    }

    async fn cordon(&self, router: &str, _secret: &BearerSecret, cordon: &Cordon<'_>) -> Result<u32, AdminError> {
        let mut state = self.state();
        if state.silent_routers {
            return Err(refuse(router, "Cordon"));
        }
        state.cordoned.insert(cordon.incarnation.to_vec());
        Ok(state.lives.values().find(|life| life.name == cordon.worker).map_or(0, |life| life.in_flight / 2))
    }

    async fn metrics(&self, router: &str) -> Result<String, AdminError> {
        let state = self.state();
        if state.silent_routers { Err(refuse(router, "/metrics")) } else { Ok(state.metrics.clone()) }
    }

    async fn drain(&self, worker: &str, _secret: &BearerSecret, _deadline: Duration) -> Result<Drained, AdminError> {
        let mut state = self.state();
        let life = state.lives.get_mut(host(worker)).ok_or_else(|| refuse(worker, "Drain"))?;
        life.draining = true;
        let in_flight = life.in_flight;
        state.drains += 1;
        Ok(Drained { in_flight })
    }

    async fn fetched(&self, _worker: &str) -> Result<Option<u32>, AdminError> {
        Ok(self.state().fetched)
    }

    async fn describe(&self, worker: &str, _secret: &BearerSecret) -> Result<Described, AdminError> {
        let state = self.state();
        state.lives.get(host(worker)).ok_or_else(|| refuse(worker, "Describe"))?;
        Ok(Described { model: "m".to_owned(), weights: "d1".to_owned(), tokenizer: "t1".to_owned() })
    }
}
