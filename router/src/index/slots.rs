//! Sets of worker slots: a few inline, many as bits.
//!
//! Most blocks sit on one or two workers, a hot shared prefix on all of them: both must be small and quick to intersect.

/// A growable bit set of slots.
#[derive(Clone, Default, Debug)]
pub(super) struct Bits(Vec<u64>);

/// Slots that hold one block in one tier.
#[derive(Clone, Debug)]
pub(super) enum Slots {
    /// Up to [`FEW`] slots, unordered; the first `len` count.
    Few { len: u8, slots: [u32; FEW] },
    /// More than [`FEW`].
    Many(Box<Bits>),
}

/// Slots kept inline; with one length byte the inline form is as large as the boxed form needs anyway.
const FEW: usize = 4;

// === impl Bits ===

impl Bits {
    pub(super) fn with_len(slots: usize) -> Self {
        Self(vec![0; slots.div_ceil(64)])
    }

    pub(super) fn set(&mut self, slot: u32) {
        let word = slot as usize / 64;
        if word >= self.0.len() {
            self.0.resize(word + 1, 0);
        }
        self.0[word] |= 1 << (slot % 64);
    }

    pub(super) fn clear(&mut self, slot: u32) {
        if let Some(word) = self.0.get_mut(slot as usize / 64) {
            *word &= !(1 << (slot % 64));
        }
    }

    pub(super) fn has(&self, slot: u32) -> bool {
        self.0.get(slot as usize / 64).is_some_and(|word| word >> (slot % 64) & 1 == 1)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.iter().all(|word| *word == 0)
    }

    pub(super) fn zero(&mut self) {
        self.0.fill(0);
    }

    /// Same members, whatever the capacities.
    pub(super) fn same(&self, other: &Self) -> bool {
        let (short, long) = if self.0.len() <= other.0.len() { (&self.0, &other.0) } else { (&other.0, &self.0) };
        long.iter().enumerate().all(|(index, word)| *word == short.get(index).copied().unwrap_or(0))
    }

    /// Members in ascending order.
    pub(super) fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.0.iter().enumerate().flat_map(|(index, word)| {
            let mut rest = *word;
            std::iter::from_fn(move || {
                (rest != 0).then(|| {
                    let bit = rest.trailing_zeros();
                    rest &= rest - 1;
                    index as u32 * 64 + bit
                })
            })
        })
    }

    fn count(&self) -> usize {
        self.0.iter().map(|word| word.count_ones() as usize).sum()
    }

    fn bytes(&self) -> usize {
        self.0.capacity() * 8
    }
}

// === impl Slots ===

impl Slots {
    pub(super) const fn new() -> Self {
        Self::Few { len: 0, slots: [0; FEW] }
    }

    pub(super) fn is_empty(&self) -> bool {
        match self {
            Self::Few { len, .. } => *len == 0,
            Self::Many(bits) => bits.is_empty(),
        }
    }

    pub(super) fn has(&self, slot: u32) -> bool {
        match self {
            Self::Few { len, slots } => slots[..*len as usize].contains(&slot),
            Self::Many(bits) => bits.has(slot),
        }
    }

    pub(super) fn insert(&mut self, slot: u32) {
        match self {
            Self::Few { len, slots } => {
                let used = *len as usize;
                if slots[..used].contains(&slot) {
                    return;
                }
                if used < FEW {
                    slots[used] = slot;
                    *len += 1;
                    return;
                }
                let mut bits = Bits::default();
                for held in slots.iter() {
                    bits.set(*held);
                }
                bits.set(slot);
                *self = Self::Many(Box::new(bits));
            }
            Self::Many(bits) => bits.set(slot),
        }
    }

    pub(super) fn remove(&mut self, slot: u32) {
        match self {
            Self::Few { len, slots } => {
                let used = *len as usize;
                if let Some(at) = slots[..used].iter().position(|held| *held == slot) {
                    slots[at] = slots[used - 1];
                    *len -= 1;
                }
            }
            Self::Many(bits) => {
                bits.clear(slot);
                // Half of the inline room: a set that hovers around the border does not flip back and forth.
                if bits.count() <= FEW / 2 {
                    let mut few = Self::new();
                    bits.iter().for_each(|held| few.insert(held));
                    *self = few;
                }
            }
        }
    }

    /// Adds to `out` the members that are also in `mask`.
    pub(super) fn intersect_into(&self, mask: &Bits, out: &mut Bits) {
        match self {
            Self::Few { len, slots } => {
                slots[..*len as usize].iter().filter(|slot| mask.has(**slot)).for_each(|slot| out.set(*slot));
            }
            Self::Many(bits) => {
                for ((out, held), mask) in out.0.iter_mut().zip(&bits.0).zip(&mask.0) {
                    *out |= held & mask;
                }
            }
        }
    }

    /// Removes every member of `dead`.
    pub(super) fn subtract(&mut self, dead: &Bits) {
        let gone: Vec<u32> = match self {
            Self::Few { len, slots } => slots[..*len as usize].iter().copied().filter(|slot| dead.has(*slot)).collect(),
            Self::Many(bits) => bits.iter().filter(|slot| dead.has(*slot)).collect(),
        };
        for slot in gone {
            self.remove(slot);
        }
    }

    /// Heap bytes behind this set.
    pub(super) fn heap_bytes(&self) -> usize {
        match self {
            Self::Few { .. } => 0,
            Self::Many(bits) => size_of::<Bits>() + bits.bytes(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn a_slot_set_behaves_like_a_plain_set_across_both_forms(
            steps in prop::collection::vec((any::<bool>(), 0u32..200), 0..200),
            dead in prop::collection::btree_set(0u32..200, 0..50),
        ) {
            let mut set = Slots::new();
            let mut plain = BTreeSet::new();
            for (insert, slot) in steps {
                if insert { set.insert(slot); plain.insert(slot); } else { set.remove(slot); plain.remove(&slot); }
                prop_assert_eq!(set.is_empty(), plain.is_empty());
            }
            let mut all = Bits::with_len(200);
            (0..200).for_each(|slot| all.set(slot));
            let mut out = Bits::with_len(200);
            set.intersect_into(&all, &mut out);
            prop_assert_eq!(out.iter().collect::<BTreeSet<_>>(), plain.clone());
            let mut bits = Bits::default();
            for slot in &dead {
                bits.set(*slot);
            }
            set.subtract(&bits);
            for slot in 0..200 {
                prop_assert_eq!(set.has(slot), plain.contains(&slot) && !dead.contains(&slot));
            }
        }
    }
}
