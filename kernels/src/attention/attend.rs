//! Attention of a batch: tiles and, for few long sequences, partitions are spread over the threads.

use super::tile::{self, Partial, Queries, Source, TILE_ROWS};
use super::{KvPool, PARTITION};
use crate::error::KernelError;
use crate::isa::Isa;
use crate::matmul::shared::SharedMut;
use crate::pool::Pool;
use crate::vector::{Kernel, Lanes, dispatch};

/// The queries of one sequence: they follow those of the row before.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AttentionRow {
    /// Where the sequence's blocks begin in the tables.
    pub table: usize,
    /// How many blocks it has.
    pub blocks: usize,
    /// Absolute position of its first query.
    pub start: u32,
    /// How many queries, at consecutive positions.
    pub queries: u32,
}

/// Working memory, kept between calls.
#[derive(Default)]
pub struct AttentionScratch {
    tiles: Vec<Tile>,
    /// Results of single partitions, when partitions of a tile run apart.
    partials: Vec<Partial>,
}

/// Up to [`TILE_ROWS`] query rows of one key/value head.
#[derive(Clone, Copy)]
struct Tile {
    row: u32,
    kv_head: u32,
    /// First query row: token · group + head in the group.
    first: u32,
    count: u32,
    partitions: u32,
    /// Sum of the partitions of the tiles before.
    partitions_before: usize,
    /// Tokens of the batch before this row.
    tokens_before: usize,
}

/// Tiles per thread below which partitions run apart.
const TILES_PER_THREAD: usize = 4;

/// Most partial results kept (about 8 KiB each): longer work does not need finer tasks.
const MAX_PARTIALS: usize = 4_096;

/// Attention of every query over the keys and values of its sequence up to its own position.
///
/// `q` and `out` have a row per query: `heads` heads of the store's `head_dim`. `tables` holds the rows' block
/// tables. Keys and values up to the last query must have been [written](KvPool::write). Scores are scaled by
/// 1/√head_dim.
#[expect(clippy::too_many_arguments, reason = "the operands of one operation")]
pub fn attend(
    pool: &Pool,
    isa: Isa,
    kv: &KvPool,
    layer: usize,
    rows: &[AttentionRow],
    tables: &[u32],
    q: &[f32],
    heads: usize,
    scratch: &mut AttentionScratch,
    out: &mut [f32],
) -> Result<(), KernelError> {
    check(kv, layer, rows, tables, q, heads, out)?;
    scratch.cut(rows, kv.shape().kv_heads, heads / kv.shape().kv_heads);
    let batch = Batch { kv, layer, rows, tables, q, heads };
    let tiles = &scratch.tiles[..];
    let partitions = tiles.last().map_or(0, |tile| tile.partitions_before + tile.partitions as usize);
    let out = SharedMut::new(out);
    if tiles.len() >= pool.threads() * TILES_PER_THREAD
        || partitions == tiles.len()
        || partitions > MAX_PARTIALS
        || pool.threads() == 1
    {
        // Later queries see more keys: the long tasks come first.
        pool.run(tiles.len(), &|index| {
            let tile = &tiles[tiles.len() - 1 - index];
            let (source, queries) = (batch.source(tile), batch.queries(tile));
            dispatch(isa, Whole { batch: &batch, tile, source, queries, out: &out });
        });
        return Ok(());
    }
    let partials = &mut scratch.partials;
    if partials.len() < partitions {
        partials.resize_with(partitions, || Partial::EMPTY);
    }
    let shared = SharedMut::new(&mut partials[..partitions]);
    pool.run(partitions, &|index| {
        let tile = &tiles[tiles.partition_point(|tile| tile.partitions_before <= index) - 1];
        let (source, queries) = (batch.source(tile), batch.queries(tile));
        // SAFETY: a task has its own index.
        let into = unsafe { &mut shared.slice(index, 1)[0] };
        dispatch(isa, Single { source, queries, index: index - tile.partitions_before, into });
    });
    for tile in tiles {
        let parts = &mut partials[tile.partitions_before..][..tile.partitions as usize];
        dispatch(isa, Combine { batch: &batch, tile, queries: batch.queries(tile), parts, out: &out });
    }
    Ok(())
}

fn check(
    kv: &KvPool,
    layer: usize,
    rows: &[AttentionRow],
    tables: &[u32],
    q: &[f32],
    heads: usize,
    out: &[f32],
) -> Result<(), KernelError> {
    let shape = kv.shape();
    if layer >= shape.layers {
        return Err(KernelError::Index { field: "layer", got: layer, count: shape.layers });
    }
    if heads == 0 || !heads.is_multiple_of(shape.kv_heads) {
        return Err(KernelError::Multiple { field: "heads", got: heads, multiple: shape.kv_heads, format: "grouped attention" });
    }
    let tokens: usize = rows.iter().map(|row| row.queries as usize).sum();
    for (field, got) in [("q", q.len()), ("out", out.len())] {
        let want = tokens.saturating_mul(heads * shape.head_dim);
        if got != want {
            return Err(KernelError::Length { field, got, want });
        }
    }
    for row in rows {
        let table = row.table.checked_add(row.blocks).and_then(|end| tables.get(row.table..end));
        let Some(table) = table else {
            return Err(KernelError::Index { field: "table", got: row.table.saturating_add(row.blocks), count: tables.len() });
        };
        let end = row.start as usize + row.queries as usize;
        if end > table.len() * shape.block_size {
            return Err(KernelError::Index { field: "position", got: end, count: table.len() * shape.block_size });
        }
        if let Some(block) = table.iter().find(|block| **block as usize >= kv.blocks()) {
            return Err(KernelError::Index { field: "block", got: *block as usize, count: kv.blocks() });
        }
    }
    Ok(())
}

// === impl AttentionScratch ===

impl AttentionScratch {
    /// Nothing allocated yet.
    pub const fn new() -> Self {
        Self { tiles: Vec::new(), partials: Vec::new() }
    }

    fn cut(&mut self, rows: &[AttentionRow], kv_heads: usize, group: usize) {
        self.tiles.clear();
        let (mut partitions_before, mut tokens_before) = (0, 0);
        for (index, row) in rows.iter().enumerate() {
            let query_rows = row.queries as usize * group;
            for first in (0..query_rows).step_by(TILE_ROWS) {
                let count = TILE_ROWS.min(query_rows - first);
                let last = row.start as usize + (first + count - 1) / group;
                let partitions = (last / PARTITION + 1) as u32;
                for kv_head in 0..kv_heads as u32 {
                    let tile = Tile {
                        row: index as u32,
                        kv_head,
                        first: first as u32,
                        count: count as u32,
                        partitions,
                        partitions_before,
                        tokens_before,
                    };
                    self.tiles.push(tile);
                    partitions_before += partitions as usize;
                }
            }
            tokens_before += row.queries as usize;
        }
    }
}

/// What all tiles share; checked.
struct Batch<'a> {
    kv: &'a KvPool,
    layer: usize,
    rows: &'a [AttentionRow],
    tables: &'a [u32],
    q: &'a [f32],
    heads: usize,
}

impl<'a> Batch<'a> {
    fn group(&self) -> usize {
        self.heads / self.kv.shape().kv_heads
    }

    /// Where query row `i` of a tile begins in `q` and `out`.
    fn at(&self, tile: &Tile, i: usize) -> usize {
        let group = self.group();
        let query_row = tile.first as usize + i;
        let token = tile.tokens_before + query_row / group;
        let head = tile.kv_head as usize * group + query_row % group;
        (token * self.heads + head) * self.kv.shape().head_dim
    }

    fn source(&self, tile: &Tile) -> Source<'a> {
        let shape = self.kv.shape();
        let row = &self.rows[tile.row as usize];
        let head = tile.kv_head as usize * shape.head_dim * shape.block_size;
        let keys = &self.kv.as_slice()[self.layer * 2 * shape.layer_elements() + head..];
        Source {
            keys: keys.as_ptr(),
            values: keys[shape.layer_elements()..].as_ptr(),
            block_stride: shape.block_elements(),
            block_size: shape.block_size,
            head_dim: shape.head_dim,
            table: &self.tables[row.table..row.table + row.blocks],
        }
    }

    fn queries(&self, tile: &Tile) -> Queries {
        let head_dim = self.kv.shape().head_dim;
        let start = self.rows[tile.row as usize].start as usize;
        let mut queries = Queries {
            rows: tile.count as usize,
            q: [std::ptr::null(); TILE_ROWS],
            positions: [0; TILE_ROWS],
            scale: 1.0 / (head_dim as f32).sqrt(),
        };
        for i in 0..queries.rows {
            queries.q[i] = self.q[self.at(tile, i)..][..head_dim].as_ptr();
            queries.positions[i] = start + (tile.first as usize + i) / self.group();
        }
        queries
    }

    #[inline(always)]
    unsafe fn finish<V: Lanes>(&self, tile: &Tile, state: &Partial, out: &SharedMut<'_, f32>) {
        for i in 0..tile.count as usize {
            // SAFETY: each query row belongs to one tile, so no other task writes this part.
            unsafe { tile::finish::<V>(state, i, out.slice(self.at(tile, i), self.kv.shape().head_dim)) };
        }
    }
}

/// All partitions of a tile, one after another.
struct Whole<'a> {
    batch: &'a Batch<'a>,
    tile: &'a Tile,
    source: Source<'a>,
    queries: Queries,
    out: &'a SharedMut<'a, f32>,
}

/// One partition of a tile.
struct Single<'a> {
    source: Source<'a>,
    queries: Queries,
    index: usize,
    into: &'a mut Partial,
}

/// The partitions of a tile, computed apart.
struct Combine<'a> {
    batch: &'a Batch<'a>,
    tile: &'a Tile,
    queries: Queries,
    parts: &'a mut [Partial],
    out: &'a SharedMut<'a, f32>,
}

impl Kernel for Whole<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Lanes>(self) {
        let (mut state, mut next) = (Partial::EMPTY, Partial::EMPTY);
        // SAFETY: `check` has seen that tables, queries and blocks fit.
        unsafe {
            tile::partition::<V>(&self.source, &self.queries, 0, &mut state);
            for index in 1..self.queries.partitions() {
                tile::partition::<V>(&self.source, &self.queries, index, &mut next);
                tile::combine::<V>(&mut state, &next, &self.queries, index, self.source.head_dim);
            }
            self.batch.finish::<V>(self.tile, &state, self.out);
        }
    }
}

impl Kernel for Single<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Lanes>(self) {
        // SAFETY: `check` has seen that tables, queries and blocks fit.
        unsafe { tile::partition::<V>(&self.source, &self.queries, self.index, self.into) };
    }
}

impl Kernel for Combine<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Lanes>(self) {
        let Some((state, rest)) = self.parts.split_first_mut() else { return };
        // SAFETY: as above. The first partition is its own state.
        unsafe {
            for (index, next) in rest.iter().enumerate() {
                tile::combine::<V>(state, next, &self.queries, index + 1, self.batch.kv.shape().head_dim);
            }
            self.batch.finish::<V>(self.tile, state, self.out);
        }
    }
}
