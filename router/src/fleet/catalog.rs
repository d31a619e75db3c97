//! Which models can be asked for: what the workers serve, by name.
//!
//! Pure. When workers serve one name under several identities (a rollout is under way) the identity with most ready workers is offered: equal
//! requests then meet equal state. A model whose workers are all away stays listed, so that its callers are told to come back and not that
//! there is no such model.

use crate::view::Readiness;
use kvasir_core::ModelIdentity;
use kvasir_door::{Catalog, ServedModel};
use std::collections::BTreeMap;

/// Builds the catalog out of each worker's readiness and models.
pub(super) fn build<'a>(workers: impl Iterator<Item = (&'a Readiness, &'a [ServedModel])>) -> Catalog {
    let mut names: BTreeMap<&str, BTreeMap<ModelIdentity, (u32, ServedModel)>> = BTreeMap::new();
    for (readiness, models) in workers {
        for model in models {
            let (ready, offered) =
                names.entry(&model.name).or_default().entry(model.identity).or_insert_with(|| (0, model.clone()));
            *ready += u32::from(*readiness == Readiness::Ready);
            // Workers of one identity may have pools of different sizes.
            offered.capacity = offered.capacity.max(model.capacity);
            offered.created = offered.created.min(model.created);
        }
    }
    let best = |identities: BTreeMap<ModelIdentity, (u32, ServedModel)>| {
        identities.into_values().max_by_key(|(ready, model)| (*ready, model.created)).map(|(_, model)| model)
    };
    Catalog { models: names.into_values().filter_map(best).collect() }
}
