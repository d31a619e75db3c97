//! Products of activations with weight matrices, `out = x · Wᵀ`, in a fixed order of operations.
//!
//! Owns: packed weights, the quantisation of activations, how a product is cut over threads. Refuses to
//! know: layers, batches of requests. Called by the forward passes for every linear layer and the head.
//!
//! Invariants
//! - A row of the result depends on that row of `x` and the weights alone: never on the rows beside it, the
//!   threads or the instruction set. The orders are told in [`tile`] and [`dense`].
//! - A row of `x` with a NaN or an infinity gives NaN in its own row only. Every NaN in a result is the
//!   canonical one (`0x7fc00000`).
//! - No allocation once the scratch has seen the largest shape.
//!
//! Costs: every tile of weights is read from memory once per [`CHUNK_BYTES`] of activations; up to 8 rows
//! share each register load of weights.

mod activations;
mod dense;
mod dispatch;
mod lanes;
pub(crate) mod shared;
mod tile;
mod weights;

pub use activations::Scratch;
pub use weights::Weights;

use std::ops::Range;

use activations::{Line, PANEL};
use dense::Rows;
use dispatch::Kernels;
use lanes::TILE;
use shared::SharedMut;
use tile::{Panel, Target};

use crate::error::KernelError;
use crate::isa::Isa;
use crate::pool::Pool;
use crate::quant::{MAX_DIM, SUB_LEN, WeightType};

/// Most products of one [`matmul_group`].
pub const MAX_GROUP: usize = 8;

/// Most rows of one call.
const MAX_ROWS: usize = MAX_DIM;

/// Quantised activations that should stay in a core's cache while the tiles pass by.
const CHUNK_BYTES: usize = 512 * 1024;

/// Most tasks per thread that a product is cut into: evens out threads that lose time to others.
const TASKS_PER_THREAD: usize = 16;

/// Bytes of weights (times rows that pass) that make a task worth claiming: about a microsecond.
const TASK_BYTES: usize = 16 * 1024;

/// Activations per thread from which quantising them is worth waking the pool.
const PARALLEL_QUANTIZE: usize = 8 * 1024;

/// One product of a group: weights, and where its result goes.
#[derive(Debug)]
pub struct Product<'a> {
    /// The weights, `n × k`.
    pub weights: &'a Weights,
    /// The result, `m × n`, row after row.
    pub out: &'a mut [f32],
}

/// `out = x · Wᵀ` for `m` rows of `k` activations; `out` gets `m` rows of `n`.
///
/// `m` may be 0. Errors name the buffer or size that does not fit, or the missing instruction set.
pub fn matmul(
    pool: &Pool,
    isa: Isa,
    w: &Weights,
    x: &[f32],
    m: usize,
    scratch: &mut Scratch,
    out: &mut [f32],
) -> Result<(), KernelError> {
    matmul_group(pool, isa, x, m, scratch, &mut [Product { weights: w, out }])
}

/// Several products of the same activations in one run of the pool (queries, keys and values; gate and up).
///
/// Gives the bits of one [`matmul`] each; quantises the activations and wakes the threads once. All
/// weights have the same `k`; at most [`MAX_GROUP`] products.
pub fn matmul_group(
    pool: &Pool,
    isa: Isa,
    x: &[f32],
    m: usize,
    scratch: &mut Scratch,
    products: &mut [Product<'_>],
) -> Result<(), KernelError> {
    check(isa, x, m, products)?;
    let Some(k) = products.first().map(|product| product.weights.k()) else { return Ok(()) };
    if m == 0 {
        return Ok(());
    }
    let quantised = products.iter().any(|product| is_quantised(product.weights.weight_type()));
    let blocks = if quantised { k / SUB_LEN } else { 0 };
    let lines = scratch.lines(m, blocks)?;
    if quantised {
        quantize(pool, isa, x, m, blocks, lines);
    }
    let plan = Plan::new(pool, isa, x, m, lines, products);
    pool.run(plan.tasks(), &|task| plan.run(task));
    Ok(())
}

fn is_quantised(ty: WeightType) -> bool {
    !matches!(ty, WeightType::F32 | WeightType::F16 | WeightType::BF16)
}

fn check(isa: Isa, x: &[f32], m: usize, products: &[Product<'_>]) -> Result<(), KernelError> {
    if !isa.is_available() {
        return Err(KernelError::IsaUnavailable { isa: isa.name() });
    }
    if products.len() > MAX_GROUP {
        return Err(KernelError::Range { field: "products", got: products.len(), limit: MAX_GROUP });
    }
    if m > MAX_ROWS {
        return Err(KernelError::Range { field: "m", got: m, limit: MAX_ROWS });
    }
    for product in products {
        let weights = product.weights;
        let (want_x, want_out) = (m.saturating_mul(weights.k()), m.saturating_mul(weights.n()));
        if x.len() != want_x {
            return Err(KernelError::Length { field: "x", got: x.len(), want: want_x });
        }
        if product.out.len() != want_out {
            return Err(KernelError::Length { field: "out", got: product.out.len(), want: want_out });
        }
    }
    Ok(())
}

/// Fills the panels of lines from the rows of `x`.
fn quantize(pool: &Pool, isa: Isa, x: &[f32], m: usize, blocks: usize, lines: &mut [Line]) {
    let panel_values = PANEL * blocks * SUB_LEN;
    let one = |panel: usize, lines: &mut [Line]| {
        let values = &x[panel * panel_values..];
        dispatch::quantize(isa, &values[..values.len().min(panel_values)], blocks, lines);
    };
    let panels = m.div_ceil(PANEL);
    if x.len() < PARALLEL_QUANTIZE * 2 {
        lines.chunks_exact_mut(PANEL * blocks).enumerate().for_each(|(panel, lines)| one(panel, lines));
        return;
    }
    let shared = SharedMut::new(lines);
    pool.run(panels, &|panel| {
        // SAFETY: each task has its own panel.
        one(panel, unsafe { shared.slice(panel * PANEL * blocks, PANEL * blocks) });
    });
}

/// A product cut into tasks: runs of tiles (of all products in a row) times chunks of rows.
struct Plan<'a> {
    isa: Isa,
    x: &'a [f32],
    m: usize,
    lines: &'a [Line],
    parts: [Option<Part<'a>>; MAX_GROUP],
    /// Tiles of all products.
    tiles: usize,
    tiles_per_task: usize,
    /// Rows that pass by a run of tiles before the next run: whole panels.
    chunk: usize,
}

/// Tiles that one task takes: enough to be worth a claim, few enough that all threads end together.
fn tiles_per_task(tiles: usize, tile_bytes: usize, threads: usize) -> usize {
    let share = tiles / (threads * TASKS_PER_THREAD);
    let worth = TASK_BYTES.div_ceil(tile_bytes).min(tiles.div_ceil(threads));
    let most = share.max(worth).max(1);
    // A division without remainder gives every thread the same number of equal tasks.
    let even = (most.div_ceil(2)..=most).rev().find(|&run| tiles.is_multiple_of(run * threads));
    even.unwrap_or(most)
}

/// One product of the group.
struct Part<'a> {
    weights: &'a Weights,
    kernels: Kernels,
    out: SharedMut<'a, f32>,
}

impl<'a> Plan<'a> {
    fn new(pool: &Pool, isa: Isa, x: &'a [f32], m: usize, lines: &'a [Line], products: &'a mut [Product<'_>]) -> Self {
        let row_bytes = (x.len() / m * 2).max(1);
        let chunk = (CHUNK_BYTES / row_bytes).next_multiple_of(PANEL).max(PANEL).min(m.next_multiple_of(PANEL));
        let tiles = products.iter().map(|product| product.weights.tiles()).sum::<usize>();
        let bytes = products.iter().map(|product| product.weights.bytes()).sum::<usize>();
        // A register of weights serves a panel of rows at about the price of two.
        let work = (bytes / tiles).max(1) * chunk.min(m).div_ceil(PANEL / 2);
        let tiles_per_task = tiles_per_task(tiles, work, pool.threads());
        let mut parts = [const { None }; MAX_GROUP];
        for (part, product) in parts.iter_mut().zip(products) {
            let kernels = dispatch::kernels(isa, product.weights.weight_type());
            *part = Some(Part { weights: product.weights, kernels, out: SharedMut::new(product.out) });
        }
        Self { isa, x, m, lines, parts, tiles, tiles_per_task, chunk }
    }

    fn tasks(&self) -> usize {
        self.tiles.div_ceil(self.tiles_per_task) * self.m.div_ceil(self.chunk)
    }

    /// Tasks ascend through all runs of tiles of the first chunk, then of the next.
    fn run(&self, task: usize) {
        let runs = self.tiles.div_ceil(self.tiles_per_task);
        let rows = task / runs * self.chunk;
        let rows = rows..(rows + self.chunk).min(self.m);
        let first = task % runs * self.tiles_per_task;
        let last = (first + self.tiles_per_task).min(self.tiles);
        let mut start = 0;
        for part in self.parts.iter().flatten() {
            let end = start + part.weights.tiles();
            for tile in first.max(start)..last.min(end) {
                self.multiply(part, tile - start, rows.clone());
            }
            start = end;
        }
    }

    /// One tile times the rows of a chunk, in calls of as many rows as the registers hold.
    fn multiply(&self, part: &Part<'_>, tile: usize, rows: Range<usize>) {
        let most = dispatch::max_rows(self.isa);
        for row in rows.clone().step_by(most) {
            let count = most.min(rows.end - row);
            match &part.kernels {
                // SAFETY: the set is available; `panel` tells a whole tile of this format, the lines of `count`
                // rows and their place in the result.
                Kernels::Panels(kernels) => unsafe { kernels[count - 1](&self.panel(part, tile, row)) },
                // SAFETY: as above, with the rows themselves.
                Kernels::Rows(kernels) => unsafe { kernels[count - 1](&self.rows(part, tile, row, count)) },
            }
        }
    }

    /// A tile and the rows from `row`, all in one panel: the most rows of a call divide a panel's, and chunks
    /// are whole panels.
    fn panel(&self, part: &Part<'_>, tile: usize, row: usize) -> Panel {
        let blocks = part.weights.k() / SUB_LEN;
        let (codes, scales) = part.weights.tile(tile);
        let lines = &self.lines[row / PANEL * PANEL * blocks..][..PANEL * blocks];
        Panel {
            codes: codes.as_ptr(),
            scales: scales.as_ptr(),
            blocks,
            lines: lines[row % PANEL..].as_ptr(),
            target: self.target(part, tile, row),
        }
    }

    /// A tile and `count` rows from `row`.
    fn rows(&self, part: &Part<'_>, tile: usize, row: usize, count: usize) -> Rows {
        let k = part.weights.k();
        let x = self.x[row * k..(row + count) * k].as_ptr();
        let (weights, _) = part.weights.tile(tile);
        Rows { weights: weights.as_ptr(), k, x, target: self.target(part, tile, row) }
    }

    /// Where a tile's results from `row` on go. No other task has this tile and these rows.
    fn target(&self, part: &Part<'_>, tile: usize, row: usize) -> Target {
        let n = part.weights.n();
        let at = row * n + tile * TILE;
        debug_assert!(at < self.m * n, "row {row} and tile {tile} lie in the result");
        Target { out: part.out.as_mut_ptr().wrapping_add(at), stride: n, columns: TILE.min(n - tile * TILE) }
    }
}

#[cfg(test)]
mod tests;
