#!/usr/bin/env bash
# The gradient of gelu in f16 is NaN from |x| = 41 on, where its output is right.
#
# Expected: 1, as at 40 and as gelu_erf and silu give. Seen: NaN, because the backward computes
# x³, which overflows f16, and multiplies it by 1 − tanh² = 0.
#
# candle-core 0.11.1, on a CPU, 2026-11-29. Exits non-zero if this changes.
# FINDINGS_TARGET_DIR may name a folder for builds that several of these scripts share.
set -euo pipefail
project=$(mktemp -d)
trap 'rm -rf "$project"' EXIT
cd "$project"
export CARGO_PROFILE_DEV_DEBUG=false CARGO_TARGET_DIR=${FINDINGS_TARGET_DIR:-$project/target}
cargo init --quiet --vcs none --edition 2024 --name finding
cargo add --quiet candle-core@=0.11.1
cat >src/main.rs <<'END'
use candle_core::{DType, Device::Cpu, Result, Tensor, Var};

fn main() -> Result<()> {
    let xs = Tensor::new(&[40f32, 41.], &Cpu)?.to_dtype(DType::F16)?;
    let run = |f: fn(&Tensor) -> Result<Tensor>| -> Result<(Vec<f32>, Vec<f32>)> {
        let xs = Var::from_tensor(&xs)?;
        let ys = f(&xs)?;
        let gradients = ys.sum_all()?.backward()?;
        let read = |t: &Tensor| t.to_dtype(DType::F32)?.to_vec1::<f32>();
        Ok((read(&ys)?, read(gradients.get(&xs).expect("a gradient"))?))
    };
    for (name, f) in [("gelu_erf", Tensor::gelu_erf as fn(&Tensor) -> _), ("silu", Tensor::silu)] {
        let (ys, gradient) = run(f)?;
        println!("{name} at 40 and 41: {ys:?}, gradient {gradient:?}");
        assert_eq!(gradient, [1., 1.]);
    }
    let (ys, gradient) = run(Tensor::gelu)?;
    println!("gelu at 40 and 41: {ys:?}, gradient {gradient:?}");
    assert!(ys == [40., 41.] && gradient[0] == 1. && gradient[1].is_nan());
    Ok(())
}
END
cargo run --quiet
