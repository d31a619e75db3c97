//! The vector vocabulary that the tile kernels are written in.
//!
//! A lane is an output column, so every operation is elementwise and no implementation can reorder a sum.
//! Integer operations are exact; float operations are single IEEE operations with default rounding. Hence
//! two implementations that compute the same lanes give the same bits.
//!
//! Every method is `inline(always)` and is compiled inside a caller that enables the features it needs.
#![allow(clippy::cast_ptr_alignment, reason = "every load and store of these modules is an unaligned one")]

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
pub(crate) mod scalar;

/// Inputs that share a 32-bit group of a column: the step of the integer dot product.
pub(crate) const GROUP: usize = 4;

/// Columns of a tile.
pub(crate) const TILE: usize = 16;

/// Bytes of one group of all columns of a tile.
pub(crate) const GROUP_BYTES: usize = GROUP * TILE;

/// Groups of a block of 32 inputs.
pub(crate) const GROUPS: usize = 8;

/// `WIDTH` lanes at a time.
///
/// # Safety
/// Every method requires the instruction set of the implementation, and pointers valid for the bytes that
/// its doc names. No alignment is required.
pub(crate) trait Lanes {
    /// `WIDTH` floats.
    type F: Copy;
    /// `WIDTH` 32-bit integers.
    type I: Copy;
    /// `WIDTH · GROUP` bytes.
    type B: Copy;

    /// Lanes of a vector: `TILE` or a divisor of it.
    const WIDTH: usize;

    /// Most rows of activations that the registers hold beside one tile.
    const MAX_ROWS: usize;

    unsafe fn zero() -> Self::F;
    unsafe fn splat(value: f32) -> Self::F;
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    /// `a · b + c`, rounded once.
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// Reads `WIDTH` floats.
    unsafe fn load_f32(p: *const u8) -> Self::F;
    /// Reads `WIDTH` binary16 values.
    unsafe fn load_f16(p: *const u8) -> Self::F;
    /// Reads `WIDTH` bfloat16 values.
    unsafe fn load_bf16(p: *const u8) -> Self::F;
    /// Reads `WIDTH` unsigned bytes.
    unsafe fn load_u8(p: *const u8) -> Self::F;
    /// Reads `WIDTH` signed bytes.
    unsafe fn load_i8(p: *const u8) -> Self::F;
    /// Writes `WIDTH` floats; any NaN becomes the one canonical NaN, because which payload and sign an
    /// operation on NaNs gives depends on the instruction set.
    unsafe fn store(p: *mut f32, value: Self::F);

    /// Nearest float of each integer, ties to even.
    unsafe fn to_float(value: Self::I) -> Self::F;

    /// Asks for the cache line at `p`, which may be any address.
    fn prefetch(p: *const u8);

    /// Reads `WIDTH · GROUP` bytes.
    unsafe fn load_bytes(p: *const u8) -> Self::B;
    /// Low four bits of each byte.
    unsafe fn low(bytes: Self::B) -> Self::B;
    /// High four bits of each byte.
    unsafe fn high(bytes: Self::B) -> Self::B;
    /// `codes | (bits << S & MASK)` for `S ≥ 0`, `codes | (bits >> −S & MASK)` otherwise; per byte.
    unsafe fn merge<const S: i32, const MASK: u8>(codes: Self::B, bits: Self::B) -> Self::B;

    /// `Σ (code − offset) · q` of each column over the groups of `codes`, exact in 32 bits, for `R` rows.
    ///
    /// `q[r]` points at `GROUP · N` activations in −127..=127 and `correction[r]` at `−offset · Σ q`. No code
    /// is larger than `2^BITS − 1`; codes of 8 bits have the offset 128.
    unsafe fn dot<const R: usize, const N: usize, const BITS: u32>(
        codes: [Self::B; N],
        q: [*const i8; R],
        correction: [*const i32; R],
    ) -> [Self::I; R];
}

/// What every NaN becomes before it leaves a kernel.
pub(crate) const CANONICAL_NAN: f32 = f32::from_bits(0x7fc0_0000);
