//! The arguments of the kernels, as `kernels/params.cuh` declares them.

/// An address in device memory; 0 for an array that is not there.
pub type Address = u64;

/// A dtype the kernels know, by its number in `kernels/params.cuh`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[repr(i64)]
pub enum Dtype {
    #[default]
    F32 = 0,
    F64 = 1,
    F16 = 2,
    BF16 = 3,
}

impl Dtype {
    /// Bytes of an element.
    pub fn size(self) -> usize {
        match self {
            Dtype::F64 => 8,
            Dtype::F32 => 4,
            Dtype::F16 | Dtype::BF16 => 2,
        }
    }

    /// The dtype its sums are taken in: A of the kernels.
    pub fn sums(self) -> Self {
        match self {
            Dtype::F64 => Dtype::F64,
            _ => Dtype::F32,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Dtype::F32 => "f32",
            Dtype::F64 => "f64",
            Dtype::F16 => "f16",
            Dtype::BF16 => "bf16",
        }
    }

    /// V of the kernels: elements in a 16-byte access.
    pub fn piece(self) -> usize {
        16 / self.size()
    }
}

/// `GroupScaling` of `kernels/params.cuh`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(i32)]
pub enum GroupScaling {
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
        )*

        /// The layout that nvcc must find: the size of each struct and the offsets of its fields.
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
        dtype: Dtype,
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
        group_scaling: GroupScaling,
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
        update: i64,
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
        group_scaling: GroupScaling,
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

/// The one argument of a kernel.
#[derive(Debug, Clone, Copy)]
pub enum Params {
    Normalize(NormalizeParams),
    SumPartials(SumPartialsParams),
    UpdatePhi(UpdatePhiParams),
    NormalizeBwd(NormalizeBwdParams),
    UpdateNu(UpdateNuParams),
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
        let numbers = [
            ("F32", Dtype::F32 as usize),
            ("F64", Dtype::F64 as usize),
            ("F16", Dtype::F16 as usize),
            ("BF16", Dtype::BF16 as usize),
            ("MAX_STAGES", MAX_STAGES),
            ("MAX_WARPS", BLOCK / WARP),
            ("NO_GROUPS", GroupScaling::None as usize),
            ("IN_TILE", GroupScaling::InTile as usize),
            ("GIVEN", GroupScaling::Given as usize),
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
