//! The one error of this crate: what a caller handed to a kernel does not fit together.
//!
//! Kernels check shapes at the door and are infallible inside; a value of this type is a bug of the
//! caller or a hostile model file, never a passing condition.

/// Why a kernel refused to start. Nothing was written when one of these is returned.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// A buffer's length contradicts the shape given beside it.
    #[error("`{field}` holds {got} elements but the shape needs {want}; pass a buffer of exactly that length")]
    Length {
        /// The argument.
        field: &'static str,
        /// Its length.
        got: usize,
        /// The length that the shape needs.
        want: usize,
    },
    /// A row length that the format cannot hold.
    #[error(
        "`{field}` is {got}, not a multiple of {multiple}, the block length of {format}; the tensor's shape or type is wrong"
    )]
    Multiple {
        /// The argument.
        field: &'static str,
        /// Its value.
        got: usize,
        /// The block length.
        multiple: usize,
        /// The weight format.
        format: &'static str,
    },
    /// A size of zero or beyond the crate's named limit.
    #[error("`{field}` is {got}; it must lie in 1..={limit}")]
    Range {
        /// The argument.
        field: &'static str,
        /// Its value.
        got: usize,
        /// The largest permitted value.
        limit: usize,
    },
    /// An index beyond what it points into.
    #[error("`{field}` is {got} but there are only {count}")]
    Index {
        /// The argument.
        field: &'static str,
        /// Its value.
        got: usize,
        /// How many there are.
        count: usize,
    },
    /// The operating system gave no memory for a buffer.
    #[error("no memory for {bytes} bytes of `{field}`; lower the model's or the cache's size")]
    Memory {
        /// What the buffer was for.
        field: &'static str,
        /// Its size.
        bytes: usize,
    },
    /// The chosen instruction set does not exist on this machine.
    #[error("instruction set {isa} is not available on this machine; use `Isa::detect()`")]
    IsaUnavailable {
        /// Its name.
        isa: &'static str,
    },
}
