//! The arguments of the kernels, one struct a kernel. `build.rs` makes the structs from
//! `kernels/params.cuh`, where their fields are described.

use crate::error::Error;
use candle::cuda_backend::cudarc::driver::DeviceRepr;
use candle::DType;

include!(concat!(env!("OUT_DIR"), "/params.rs"));

/// An address in device memory; 0 for an array that is not there.
pub type Address = u64;

/// The address of an array that is there only in some launches.
pub fn when(is_there: bool, address: Address) -> Address {
    if is_there {
        address
    } else {
        0
    }
}

/// The number of a dtype in `kernels/params.cuh`.
pub fn number(dtype: DType) -> Result<i64, Error> {
    match dtype {
        DType::F32 => Ok(0),
        DType::F64 => Ok(1),
        DType::F16 => Ok(2),
        DType::BF16 => Ok(3),
        other => Err(Error::InputDType(other)),
    }
}

/// `FactorOrigin` of `kernels/params.cuh`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(i32)]
pub enum FactorOrigin {
    #[default]
    None = 0,
    InTile = 1,
    Given = 2,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cuda::cut::{BLOCK, MAX_STAGES, WARP};

    /// Numbers that the header and Rust both have.
    #[test]
    fn numbers_are_those_of_the_kernels() {
        let dtype = |dtype| number(dtype).unwrap() as usize;
        let numbers = [
            ("F32", dtype(DType::F32)),
            ("F64", dtype(DType::F64)),
            ("F16", dtype(DType::F16)),
            ("BF16", dtype(DType::BF16)),
            ("MAX_STAGES", MAX_STAGES),
            ("MAX_WARPS", BLOCK / WARP),
            ("NO_GROUPS", FactorOrigin::None as usize),
            ("IN_TILE", FactorOrigin::InTile as usize),
            ("GIVEN", FactorOrigin::Given as usize),
        ];
        let header = include_str!("../../../kernels/params.cuh");
        let words: Vec<&str> = header.split([' ', '\n', ',', ';']).collect();
        for (name, number) in numbers {
            let number = number.to_string();
            let given = words.windows(3).find(|words| words[..2] == [name, "="]);
            assert_eq!(given.map(|words| words[2]), Some(&*number), "{name}");
        }
    }
}
