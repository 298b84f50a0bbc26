//! The kernels and their arguments. `build.rs` writes them from `kernels/params.cuh`, which
//! describes the fields, and from the table of entry points in `kernels/power_norm.cu`.

use crate::error::Error;
use candle::DType;

pub use generated::*;

/// An address in device memory; 0 for an array that does not exist.
pub type Address = u64;

/// The address of an array that exists only in some launches.
pub fn when(exists: bool, address: Address) -> Address {
    if exists { address } else { 0 }
}

// A struct of plain numbers may be passed to a kernel, and a kernel takes the struct that its table
// names. Both are promises to the compiler, made where build.rs reads the proof of them.
#[allow(unsafe_code)]
mod generated {
    use super::Address;
    use candle::cuda_backend::cudarc::driver::DeviceRepr;

    /// A kernel of `kernels/power_norm.cu`. It has an entry point for each dtype, and for each
    /// number of pieces of a thread if it walks over rows.
    ///
    /// # Safety
    ///
    /// `BODY` names a function there, and every entry point that calls the function takes one
    /// argument, a `Params` by value.
    pub unsafe trait Kernel {
        /// The kernel's argument.
        type Params: DeviceRepr;
        /// The name of the function, with which the names of its entry points begin.
        const BODY: &'static str;
        /// The most threads of a block.
        const MAX_THREADS: usize;
    }

    include!(concat!(env!("OUT_DIR"), "/params.rs"));
}

impl From<f64> for Number {
    fn from(number: f64) -> Self {
        Self {
            f64: number,
            f32: number as f32,
        }
    }
}

impl Dtype {
    /// The kernels' name for a dtype.
    pub fn of(dtype: DType) -> Result<Self, Error> {
        match dtype {
            DType::F32 => Ok(Self::F32),
            DType::F64 => Ok(Self::F64),
            DType::F16 => Ok(Self::F16),
            DType::BF16 => Ok(Self::Bf16),
            other => Err(Error::DType(other)),
        }
    }

    /// The suffix of an entry point's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F64 => "f64",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }

    pub fn bytes(self) -> usize {
        match self {
            Self::F64 => 8,
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// A of the kernels: the dtype that sums of rows of this dtype are taken in.
    pub fn sums(self) -> Self {
        match self {
            Self::F64 => Self::F64,
            Self::F32 | Self::F16 | Self::Bf16 => Self::F32,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::ptx::Modules;
    use super::*;

    /// `build.rs` reads names, fields and numbers in the kernels' sources. The compiled PTX says
    /// whether nvcc read the same: the size of each entry point's one argument, and the most
    /// threads of a block.
    #[test]
    fn arguments_are_those_that_nvcc_compiled() {
        let mut entries = 0;
        entries += check::<GroupRmsInv>();
        entries += check::<Normalize>();
        entries += check::<SumPartials>();
        entries += check::<UpdatePhi>();
        entries += check::<GroupDots>();
        entries += check::<NormalizeBwd>();
        entries += check::<LayerNormStatistics>();
        entries += check::<LayerNorm>();
        entries += check::<LayerNormDots>();
        entries += check::<LayerNormBwd>();
        entries += check::<UpdateNu>();
        assert_eq!(entries, Modules::compiled().entries().count());
    }

    /// Checks the entry points of a kernel, and returns how many there are.
    fn check<K: Kernel>() -> usize {
        let suffixes = ["f32", "f64", "f16", "bf16"];
        let entries = Modules::compiled().entries().filter(|(name, _)| {
            let suffix = name
                .strip_prefix(K::BODY)
                .and_then(|name| name.strip_prefix('_'));
            suffix.is_some_and(|suffix| suffixes.contains(&suffix.split('_').next().unwrap()))
        });
        entries
            .map(|(name, ptx)| {
                let arguments: Vec<&str> = ptx.split(".param .align 8 .b8 ").skip(1).collect();
                let [argument] = arguments[..] else {
                    panic!("{name} has the arguments {arguments:?}")
                };
                let bytes = size_of::<K::Params>();
                assert!(
                    argument.starts_with(&format!("{name}_param_0[{bytes}]")),
                    "{name}"
                );
                let threads = format!(".maxntid {}, 1, 1\n", K::MAX_THREADS);
                assert!(ptx.contains(&threads), "{name}");
            })
            .count()
    }
}
