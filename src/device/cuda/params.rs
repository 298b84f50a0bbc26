//! The arguments of the kernels, as `kernels/params.cuh` declares them.

use crate::error::Error;
use candle::DType;
use cudarc::driver::DeviceRepr;

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

/// Declares the structs of `kernels/params.cuh`, in its order of fields. The test below compares
/// their layouts with nvcc's.
macro_rules! structs {
    ($(struct $name:ident { $($field:ident: $type:ty,)* })*) => {
        $(
            #[doc = concat!("`", stringify!($name), "` of `kernels/params.cuh`.")]
            #[derive(Debug, Clone, Copy, Default)]
            #[repr(C)]
            pub struct $name {
                $(pub $field: $type,)*
            }

            // SAFETY: plain numbers in the layout of C, in which nvcc has them, as a test compares.
            unsafe impl DeviceRepr for $name {}
        )*

        /// The layout that nvcc must find: the size of each struct and the offset of each of its fields.
        #[cfg(test)]
        fn layouts() -> Vec<(&'static str, usize)> {
            vec![$(
                (concat!("sizeof(", stringify!($name), ")"), size_of::<$name>()),
                $((
                    concat!("offsetof(", stringify!($name), ", ", stringify!($field), ")"),
                    std::mem::offset_of!($name, $field),
                ),)*
            )*]
        }
    };
}

structs! {
    struct Vector {
        data: Address,
        dtype: i64,
    }

    struct Tiling {
        rows: i64,
        cols: i64,
        chunk_rows: i64,
        groups: i32,
        group_len: i32,
        span: i32,
        groups_per_tile: i32,
        tiles_per_group: i32,
        vectorized: i32,
        stages: i32,
        ahead: i32,
        stage_bytes: i32,
        ring_bytes: i32,
    }

    struct NormalizeParams {
        tiling: Tiling,
        x: Address,
        residual: Address,
        sum: Address,
        y: Address,
        keep: Address,
        weight: Vector,
        bias: Vector,
        phi: Vector,
        inv_rms: Address,
        factors: Address,
        partials: Address,
        kept: Address,
        group_scaling: FactorOrigin,
        eps: f64,
        group_eps: f64,
    }

    struct SumPartialsParams {
        partials: Address,
        kept: Address,
        rows: i64,
        cols: i64,
        chunks: i64,
        stride: i64,
        totals: Address,
        count: Address,
    }

    struct UpdatePhiParams {
        totals: Address,
        all_totals: Address,
        partials: Address,
        all_partials: Address,
        kept: Address,
        rows: i64,
        cols: i64,
        chunks: i64,
        phi: Vector,
        batch_phi: Address,
        inv_rms: Address,
        gamma: Address,
        count: Address,
        eps: f64,
        by_batch: i64,
        guard: i64,
        cumulative: i64,
        moving: i64,
        old_share: f64,
        new_share: f64,
        alpha: f64,
        beta: f64,
    }

    struct NormalizeBwdParams {
        tiling: Tiling,
        x: Address,
        dy: Address,
        dsum: Address,
        dx: Address,
        keep: Address,
        weight: Vector,
        correction: Vector,
        inv_rms: Address,
        batch_phi: Address,
        count: Address,
        factors: Address,
        dots: Address,
        partials: Address,
        group_scaling: FactorOrigin,
        correction_scale: f64,
        eps: f64,
    }

    struct UpdateNuParams {
        partials: Address,
        totals: Address,
        cols: i64,
        chunks: i64,
        weight: Vector,
        inv_rms: Address,
        gamma: Address,
        count: Address,
        lambda: Address,
        ema_gz: Vector,
        dweight: Vector,
        dbias: Vector,
        beta: f64,
        unscale: f64,
        guard: i64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cuda::cut::{BLOCK, MAX_STAGES, WARP};
    use std::process::Command;

    fn assertion((expression, value): (&str, usize)) -> String {
        format!(
            "static_assert({expression} == {value}, \"{value} in src/device/cuda/params.rs\");\n"
        )
    }

    /// Compiles assertions about `kernels/params.cuh`. Gives what nvcc said where it refused.
    fn nvcc(asserts: &str) -> Result<(), String> {
        let folder = tempfile::tempdir().unwrap();
        let source = folder.path().join("layout.cu");
        let text = format!("#include <cstddef>\n#include \"params.cuh\"\n{asserts}");
        std::fs::write(&source, text).unwrap();
        let kernels = concat!(env!("CARGO_MANIFEST_DIR"), "/kernels");
        let output = Command::new("nvcc")
            .args(["-std=c++17", "-ptx", "-I", kernels, "-o"])
            .arg(folder.path().join("layout.ptx"))
            .arg(source)
            .output()
            .expect("nvcc, which compiled the kernels, on the PATH");
        match output.status.success() {
            true => Ok(()),
            false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
        }
    }

    /// nvcc lays the arguments of the kernels out as Rust does.
    #[test]
    fn arguments_are_laid_out_as_nvcc_has_them() {
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
        let all = layouts().into_iter().chain(numbers);
        nvcc(&all.map(assertion).collect::<String>()).unwrap();
        // A field elsewhere would be noticed.
        let elsewhere = (
            "offsetof(Tiling, span)",
            std::mem::offset_of!(Tiling, span) + 4,
        );
        let refusal = nvcc(&assertion(elsewhere)).unwrap_err();
        assert!(
            refusal.contains("in src/device/cuda/params.rs"),
            "{refusal}"
        );
    }
}
