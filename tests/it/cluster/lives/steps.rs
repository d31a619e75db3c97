//! Steps: what happens to a pool in one life, drawn from a seed. Each step stands for itself, so that a life can be replayed in whole or in part.

use serde_json::{Value, json};
use std::fmt;

/// What a user asks for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Wish {
    pub replicas: u32,
    /// Tag of the worker's image; `bad` never comes up.
    pub image: &'static str,
    /// A setting that is a flag of the worker.
    pub tokens: u32,
    pub mode: &'static str,
    pub away: Amount,
    pub more: Amount,
    pub paused: bool,
}

/// A number of workers or a share of the wished ones.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Amount {
    Count(u32),
    Percent(u32),
}

/// One thing that happens.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Happens {
    /// The user edits the pool.
    Edit(Wish),
    /// The worker at this place, counted round, ends for good.
    Ends(usize),
    /// It is evicted.
    Evicted(usize),
    /// Its process crashes and starts anew.
    Crashes(usize),
    /// A router is deleted; its Deployment makes another one.
    RouterDeleted(usize),
    /// A node has so many devices from now on.
    Devices(usize, u32),
    /// The operator is killed and started again.
    OperatorKilled,
}

/// Something that happens, and whether the next thing waits until all is at rest, or until so many things have moved.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Step {
    pub happens: Happens,
    pub then: Then,
}

/// How long a step is given.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Then {
    Rest,
    Moves(u64),
}

/// A stream of numbers that a seed determines (SplitMix64).
pub struct Dice(u64);

/// The worker images of a life.
const IMAGES: [&str; 4] = ["1", "2", "3", "bad"];
const MODES: [&str; 4] = ["Auto", "InPlace", "SurgeFree", "Surge"];
/// Nodes of a life, and devices that each begins with.
pub const NODES: [&str; 2] = ["gpu-0", "gpu-1"];
pub const DEVICES: u32 = 4;

// === impl Amount ===

impl Amount {
    fn json(self) -> Value {
        match self {
            Self::Count(count) => json!(count),
            Self::Percent(percent) => json!(format!("{percent}%")),
        }
    }

    pub fn is_zero(self) -> bool {
        matches!(self, Self::Count(0) | Self::Percent(0))
    }
}

// === impl Wish ===

impl Wish {
    /// What a life begins with.
    pub fn first() -> Self {
        let (away, more) = (Amount::Count(1), Amount::Count(1));
        Self { replicas: 2, image: "1", tokens: 256, mode: "Auto", away, more, paused: false }
    }

    pub fn image(&self) -> String {
        format!("kvasir.test/worker:{}", self.image)
    }

    /// Fewest routable workers that the user accepts.
    pub fn floor(&self) -> u32 {
        let away = match self.away {
            Amount::Count(count) => count,
            Amount::Percent(percent) => (self.replicas * percent / 100).max(u32::from(percent > 0)),
        };
        self.replicas.saturating_sub(away)
    }

    /// Most pods that the user pays for.
    pub fn most(&self) -> u32 {
        self.replicas
            + match self.more {
                Amount::Count(count) => count,
                Amount::Percent(percent) => (self.replicas * percent).div_ceil(100),
            }
    }

    /// As a merge patch of the pool's spec.
    pub fn spec(&self) -> Value {
        json!({
            "replicas": self.replicas,
            "images": {"worker": self.image()},
            "engine": {"maxBatchTokens": self.tokens},
            "rollout": {"mode": self.mode, "maxUnavailable": self.away.json(), "maxSurge": self.more.json()},
            "paused": self.paused,
        })
    }

    fn is_valid(&self) -> bool {
        let takes = matches!(self.mode, "InPlace" | "SurgeFree");
        !(self.away.is_zero() && (takes || self.more.is_zero()) || self.mode == "Surge" && self.more.is_zero())
    }

    fn changed(&self, dice: &mut Dice) -> Self {
        loop {
            let mut wish = self.clone();
            match dice.below(6) {
                0 => wish.replicas = dice.below(5) as u32,
                1 => wish.image = IMAGES[dice.below(4)],
                2 => wish.tokens = 256 + 64 * dice.below(4) as u32,
                3 => {
                    wish.mode = MODES[dice.below(4)];
                    wish.away = [Amount::Count(0), Amount::Count(1), Amount::Count(2), Amount::Percent(50)][dice.below(4)];
                    wish.more = [Amount::Count(0), Amount::Count(1), Amount::Count(2), Amount::Percent(25)][dice.below(4)];
                }
                4 => {
                    wish.image = IMAGES[dice.below(3)];
                    wish.tokens = 256 + 64 * dice.below(4) as u32;
                    wish.replicas = 1 + dice.below(4) as u32;
                }
                _ => wish.paused = dice.below(4) == 0,
            }
            if wish.is_valid() && wish != *self {
                return wish;
            }
        }
    }
}

// === impl Dice ===

impl Dice {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A number under `limit`.
    pub fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % limit as u64) as usize
    }
}

/// The steps of a seed's life.
pub fn life(seed: u64, count: usize) -> Vec<Step> {
    let mut dice = Dice::new(seed);
    let mut wishes = vec![Wish::first()];
    let mut steps = Vec::new();
    while steps.len() < count {
        let last = wishes[wishes.len() - 1].clone();
        let happens = match dice.below(12) {
            0..=4 => Happens::Edit(last.changed(&mut dice)),
            // Back to what was asked for a while ago.
            5 | 6 => Happens::Edit(wishes[wishes.len() - 1 - dice.below(wishes.len().min(3))].clone()),
            7 => Happens::Ends(dice.below(8)),
            8 => Happens::Evicted(dice.below(8)),
            9 => Happens::Crashes(dice.below(8)),
            10 => Happens::Devices(dice.below(2), [1, 2, 4, 4][dice.below(4)]),
            _ if dice.below(3) == 0 => Happens::OperatorKilled,
            _ => Happens::RouterDeleted(dice.below(2)),
        };
        if let Happens::Edit(wish) = &happens {
            wishes.push(wish.clone());
        }
        let then = if dice.below(2) == 0 { Then::Rest } else { Then::Moves(dice.below(12) as u64) };
        steps.push(Step { happens, then });
    }
    steps
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.happens {
            Happens::Edit(wish) => write!(
                f,
                "edit: {} x {} tokens {} {} away {:?} more {:?}{}",
                wish.replicas,
                wish.image,
                wish.tokens,
                wish.mode,
                wish.away,
                wish.more,
                if wish.paused { " paused" } else { "" }
            )?,
            other => write!(f, "{other:?}")?,
        }
        write!(f, ", then {:?}", self.then)
    }
}
