//! Which vector instructions this machine has, asked once at start.
//!
//! A kernel is written once over lanes and compiled under the features of each set; results are equal
//! bits on all of them, so the choice is speed only and never part of a numeric identity.

use std::fmt;

/// An instruction set that the kernels are compiled for, slowest first.
///
/// | set | x86-64 features that it needs |
/// | --- | --- |
/// | `Scalar` | none (uses `fma` where the machine has it, else the C library's `fmaf`) |
/// | `Avx2` | `avx2`, `fma`, `f16c` |
/// | `Avx512` | those, and `avx512f`, `avx512bw`, `avx512dq`, `avx512vl`, `avx512vnni` |
///
/// Other architectures have `Scalar` only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// Plain Rust: the reference, and the only set outside x86-64.
    Scalar,
    /// AVX2 with FMA and half-precision conversion.
    Avx2,
    /// AVX-512 with the VNNI integer dot product.
    Avx512,
}

impl Isa {
    /// All sets, slowest first.
    pub const ALL: [Self; 3] = [Self::Scalar, Self::Avx2, Self::Avx512];

    /// The fastest set of this machine.
    pub fn detect() -> Self {
        if Self::Avx512.is_available() {
            Self::Avx512
        } else if Self::Avx2.is_available() {
            Self::Avx2
        } else {
            Self::Scalar
        }
    }

    /// Every set of this machine, slowest first; never empty.
    pub fn available() -> Vec<Self> {
        Self::ALL.into_iter().filter(|isa| isa.is_available()).collect()
    }

    /// Whether this machine can run it. The standard library caches the answer, so asking is cheap.
    pub fn is_available(self) -> bool {
        match self {
            Self::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => has_avx2(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                has_avx2()
                    && std::arch::is_x86_feature_detected!("avx512f")
                    && std::arch::is_x86_feature_detected!("avx512bw")
                    && std::arch::is_x86_feature_detected!("avx512dq")
                    && std::arch::is_x86_feature_detected!("avx512vl")
                    && std::arch::is_x86_feature_detected!("avx512vnni")
            }
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx2 | Self::Avx512 => false,
        }
    }

    /// Whether the scalar reference may be compiled with hardware FMA here.
    ///
    /// Without the feature `mul_add` calls the C library (about 22 ns each); the bits are the same.
    pub fn scalar_has_fma() -> bool {
        #[cfg(target_arch = "x86_64")]
        {
            std::arch::is_x86_feature_detected!("fma")
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            false
        }
    }

    /// The name used in logs, metrics and flags.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn has_avx2() -> bool {
    std::arch::is_x86_feature_detected!("avx2")
        && std::arch::is_x86_feature_detected!("fma")
        && std::arch::is_x86_feature_detected!("f16c")
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::Isa;

    #[test]
    fn detected_set_is_the_last_available_one() {
        let available = Isa::available();
        assert_eq!(available.first(), Some(&Isa::Scalar));
        assert_eq!(available.last(), Some(&Isa::detect()));
        assert!(available.is_sorted());
    }
}
