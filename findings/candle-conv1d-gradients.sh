#!/usr/bin/env bash
# conv1d has wrong gradients from two sequences on; the same convolution as conv2d has right ones.
#
# Expected: the gradients of the kernel by conv1d and by conv2d with a height of 1 agree. Seen:
# for one sequence they do, for two they differ by more than a tenth of their size. The backward
# calls conv1d with a transposed kernel, and conv1d reads a kernel that is not contiguous as if it
# were.
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
use candle_core::{Device::Cpu, Result, Tensor, Var};

fn main() -> Result<()> {
    for sequences in [1, 2] {
        let xs = Tensor::randn(0f64, 1., (sequences, 4, 9), &Cpu)?;
        let kernel = Var::randn(0f64, 1., (6, 4, 3), &Cpu)?;
        let dy = Tensor::randn(0f64, 1., (sequences, 6, 7), &Cpu)?;
        let gradient = |ys: Tensor| -> Result<Tensor> {
            let gradients = (ys * &dy)?.sum_all()?.backward()?;
            Ok(gradients.get(&kernel).expect("a gradient").clone())
        };
        let one = gradient(xs.conv1d(&kernel, 0, 1, 1, 1)?)?;
        let (plane, flat) = (xs.unsqueeze(2)?, kernel.unsqueeze(2)?);
        let two = gradient(plane.conv2d(&flat, 0, 1, 1, 1)?.squeeze(2)?)?;
        let largest = two.abs()?.max_all()?.to_scalar::<f64>()?;
        let error = (one - two)?.abs()?.max_all()?.to_scalar::<f64>()? / largest;
        println!("{sequences} sequences: conv1d and conv2d differ by {error:.1e} of the largest gradient");
        assert_eq!(error > 0.1, sequences == 2);
    }
    Ok(())
}
END
cargo run --quiet
