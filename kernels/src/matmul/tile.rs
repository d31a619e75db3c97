//! One tile of quantised weights times a panel of rows: the inner loop of the worker.
//!
//! The order of operations per (row, column), which is the numeric contract of this crate:
//! for each block of 32 inputs, ascending,
//! `acc = fma(d_w · d_a, dot as f32, acc)`, where `dot` is an exact integer; then, for formats with minimums,
//! `acc = fma(m_w, d_a · Σ q, acc)`. `Q6_K` does the first step for each half of the block with its own `d_w`.
//! `d_w` and `m_w` are the format's exact f32 values. No other sum exists, so neither rows, threads nor lane
//! width can change a bit.

use super::activations::{Correction, Line, PANEL};
use super::lanes::{GROUP, GROUP_BYTES, GROUPS, Lanes, TILE};

/// One call's inputs: a tile, and the lines of `R` rows.
pub(crate) struct Panel {
    /// `blocks` blocks of the tile's codes.
    pub(crate) codes: *const u8,
    /// The tile's scales.
    pub(crate) scales: *const u8,
    /// Blocks of 32 inputs.
    pub(crate) blocks: usize,
    /// Line of the first row and block; the next block is `PANEL` lines on.
    pub(crate) lines: *const Line,
    pub(crate) target: Target,
}

/// Where the results go.
pub(crate) struct Target {
    /// First row, first column of the tile.
    pub(crate) out: *mut f32,
    /// Elements from a row to the next.
    pub(crate) stride: usize,
    /// Columns to store: fewer than `TILE` in the last tile of a matrix.
    pub(crate) columns: usize,
}

/// What tells the quantised formats apart, for the compiler.
pub(crate) trait Format {
    /// Bits of a code.
    const BITS: u32;
    /// Blocks that share one f16 scale.
    const SUBS: usize;
    /// Whether blocks have a minimum.
    const MINIMUM: bool;
    /// Factors of the shared scale.
    const FACTORS: Factors;
    /// Correction of the (first half of the) block.
    const CORRECTION: Correction;
}

/// How far ahead of use codes are asked for.
const PREFETCH_BYTES: usize = 2048;

/// What the shared scale is multiplied with.
pub(crate) enum Factors {
    /// Nothing.
    None,
    /// An unsigned byte for the scale and one for the minimum, per block.
    Block,
    /// A signed byte for each half of a block.
    Halves,
}

macro_rules! formats {
    ($($(#[$doc:meta])* $name:ident: $bits:literal, $subs:literal, $minimum:literal, $factors:ident, $correction:ident;)*) => {$(
        $(#[$doc])*
        pub(crate) struct $name;

        impl Format for $name {
            const BITS: u32 = $bits;
            const SUBS: usize = $subs;
            const MINIMUM: bool = $minimum;
            const FACTORS: Factors = Factors::$factors;
            const CORRECTION: Correction = Correction::$correction;
        }
    )*};
}

formats! {
    Q4_0: 4, 1, false, None, Eight;
    Q4_1: 4, 1, true, None, None;
    Q5_0: 5, 1, false, None, Sixteen;
    Q5_1: 5, 1, true, None, None;
    Q8_0: 8, 1, false, None, Half;
    Q4K: 4, 8, true, Block, None;
    Q5K: 5, 8, true, Block, None;
    Q6K: 6, 8, false, Halves, First;
}

/// Multiplies `R` rows and stores the sums.
///
/// # Safety
/// The instruction set of `L`; pointers as `Panel` says, for `R` rows of lines; `R` rows of `target` writable.
#[inline(always)]
pub(crate) unsafe fn multiply<L: Lanes, F: Format, const R: usize>(panel: &Panel) {
    for first in (0..TILE).step_by(L::WIDTH) {
        // SAFETY: the caller's promises, passed on.
        unsafe {
            let sums = columns::<L, F, R>(panel, first);
            store::<L, R>(&panel.target, first, sums);
        }
    }
}

/// Sums of `WIDTH` columns from `first`, over all blocks.
///
/// # Safety
/// As [`multiply`].
#[inline(always)]
unsafe fn columns<L: Lanes, F: Format, const R: usize>(panel: &Panel, first: usize) -> [L::F; R] {
    // SAFETY: the caller's promises; offsets stay in the tile as `weights` lays it out.
    unsafe {
        let mut acc = [L::zero(); R];
        let mut codes = panel.codes.add(first * GROUP);
        let mut scales = panel.scales;
        let mut lines = panel.lines;
        for _ in 0..panel.blocks / F::SUBS {
            let d = L::load_f16(scales.add(2 * first));
            scales = scales.add(2 * TILE);
            let mut m = L::zero();
            if F::MINIMUM {
                m = L::load_f16(scales.add(2 * first));
                scales = scales.add(2 * TILE);
            }
            for _ in 0..F::SUBS {
                if R <= 4 {
                    // Few rows wait for memory, and the hardware's own look-ahead ends at each page.
                    for register in 0..F::BITS as usize {
                        L::prefetch(codes.wrapping_add(PREFETCH_BYTES + register * GROUP_BYTES));
                    }
                }
                let w = unpack::<L, F>(codes);
                match F::FACTORS {
                    Factors::None => block::<L, F, R>(w, d, m, lines, &mut acc),
                    Factors::Block => {
                        let d = L::mul(d, L::load_u8(scales.add(first)));
                        let m = L::mul(m, L::load_u8(scales.add(TILE + first)));
                        scales = scales.add(2 * TILE);
                        block::<L, F, R>(w, d, m, lines, &mut acc);
                    }
                    Factors::Halves => {
                        let d0 = L::mul(d, L::load_i8(scales.add(first)));
                        let d1 = L::mul(d, L::load_i8(scales.add(TILE + first)));
                        scales = scales.add(2 * TILE);
                        halves::<L, F, R>(w, d0, d1, lines, &mut acc);
                    }
                }
                codes = codes.add(F::BITS as usize * GROUP_BYTES);
                lines = lines.add(PANEL);
            }
        }
        acc
    }
}

/// The eight groups of a block as bytes.
///
/// # Safety
/// The instruction set of `L`; a whole block is readable.
#[inline(always)]
unsafe fn unpack<L: Lanes, F: Format>(codes: *const u8) -> [L::B; GROUPS] {
    // SAFETY: a block has `BITS` registers.
    unsafe {
        let register = |g: usize| L::load_bytes(codes.add(g * GROUP_BYTES));
        if F::BITS == 8 {
            return std::array::from_fn(register);
        }
        let [a, b, c, d] = [register(0), register(1), register(2), register(3)];
        let low = [L::low(a), L::low(b), L::low(c), L::low(d)];
        let high = [L::high(a), L::high(b), L::high(c), L::high(d)];
        match F::BITS {
            5 => {
                let bits = register(4);
                [
                    L::merge::<4, 0x10>(low[0], bits),
                    L::merge::<3, 0x10>(low[1], bits),
                    L::merge::<2, 0x10>(low[2], bits),
                    L::merge::<1, 0x10>(low[3], bits),
                    L::merge::<0, 0x10>(high[0], bits),
                    L::merge::<-1, 0x10>(high[1], bits),
                    L::merge::<-2, 0x10>(high[2], bits),
                    L::merge::<-3, 0x10>(high[3], bits),
                ]
            }
            6 => {
                let (first, second) = (register(4), register(5));
                [
                    L::merge::<4, 0x30>(low[0], first),
                    L::merge::<2, 0x30>(low[1], first),
                    L::merge::<0, 0x30>(low[2], first),
                    L::merge::<-2, 0x30>(low[3], first),
                    L::merge::<4, 0x30>(high[0], second),
                    L::merge::<2, 0x30>(high[1], second),
                    L::merge::<0, 0x30>(high[2], second),
                    L::merge::<-2, 0x30>(high[3], second),
                ]
            }
            _ => [low[0], low[1], low[2], low[3], high[0], high[1], high[2], high[3]],
        }
    }
}

/// One block with one scale, all rows.
///
/// # Safety
/// The instruction set of `L`; `R` lines from `lines`.
#[inline(always)]
unsafe fn block<L: Lanes, F: Format, const R: usize>(
    w: [L::B; GROUPS],
    d: L::F,
    m: L::F,
    lines: *const Line,
    acc: &mut [L::F; R],
) {
    // SAFETY: the caller's promises.
    unsafe {
        let rows: [&Line; R] = std::array::from_fn(|r| &*lines.add(r));
        let corrections = rows.map(|line| std::ptr::from_ref(line.correction(F::CORRECTION)));
        let dots = dot::<L, F, R, GROUPS>(w, rows.map(|line| line.q.as_ptr()), corrections);
        for r in 0..R {
            acc[r] = L::fma(L::mul(d, L::splat(rows[r].scale)), L::to_float(dots[r]), acc[r]);
            if F::MINIMUM {
                acc[r] = L::fma(m, L::splat(rows[r].scaled_sum), acc[r]);
            }
        }
    }
}

/// One block with a scale for each half, all rows.
///
/// # Safety
/// As [`block`].
#[inline(always)]
unsafe fn halves<L: Lanes, F: Format, const R: usize>(
    w: [L::B; GROUPS],
    d0: L::F,
    d1: L::F,
    lines: *const Line,
    acc: &mut [L::F; R],
) {
    // SAFETY: the caller's promises.
    unsafe {
        let rows: [&Line; R] = std::array::from_fn(|r| &*lines.add(r));
        let [a, b, c, d, e, f, g, h] = w;
        let corrections = rows.map(|line| std::ptr::from_ref(line.correction(Correction::First)));
        let first = dot::<L, F, R, 4>([a, b, c, d], rows.map(|line| line.q.as_ptr()), corrections);
        let corrections = rows.map(|line| std::ptr::from_ref(line.correction(Correction::Second)));
        let second = dot::<L, F, R, 4>([e, f, g, h], rows.map(|line| line.q[16..].as_ptr()), corrections);
        for r in 0..R {
            let scale = L::splat(rows[r].scale);
            acc[r] = L::fma(L::mul(d0, scale), L::to_float(first[r]), acc[r]);
            acc[r] = L::fma(L::mul(d1, scale), L::to_float(second[r]), acc[r]);
        }
    }
}

/// [`Lanes::dot`] with the format's width of codes.
///
/// # Safety
/// As [`Lanes::dot`].
#[inline(always)]
unsafe fn dot<L: Lanes, F: Format, const R: usize, const N: usize>(
    codes: [L::B; N],
    q: [*const i8; R],
    corrections: [*const i32; R],
) -> [L::I; R] {
    // SAFETY: the caller's promises.
    unsafe {
        match F::BITS {
            4 => L::dot::<R, N, 4>(codes, q, corrections),
            5 => L::dot::<R, N, 5>(codes, q, corrections),
            6 => L::dot::<R, N, 6>(codes, q, corrections),
            _ => L::dot::<R, N, 8>(codes, q, corrections),
        }
    }
}

/// Writes the columns that exist, of every row.
///
/// # Safety
/// The instruction set of `L`; `target` writable.
#[inline(always)]
pub(crate) unsafe fn store<L: Lanes, const R: usize>(target: &Target, first: usize, sums: [L::F; R]) {
    let columns = target.columns.saturating_sub(first).min(L::WIDTH);
    for (row, sums) in sums.into_iter().enumerate() {
        // SAFETY: the row and `columns` of its elements from `first` exist.
        unsafe {
            let out = target.out.add(row * target.stride + first);
            if columns == L::WIDTH {
                L::store(out, sums);
            } else {
                let mut lanes = [0.0_f32; TILE];
                L::store(lanes.as_mut_ptr(), sums);
                std::ptr::copy_nonoverlapping(lanes.as_ptr(), out, columns);
            }
        }
    }
}
