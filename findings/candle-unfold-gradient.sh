#!/usr/bin/env bash
# unfold into windows that do not overlap puts gradients in the wrong places.
#
# Expected: windows of two rows of a 4 × 2 tensor are a view of all of its elements, so the
# gradient of an element is that of its place in the windows. Seen: gradients are handed back in
# the order of the windows, as by a reshape; four of the eight are at another element. (Windows
# that overlap are an error in the backward.)
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
    let xs = Var::from_tensor(&Tensor::arange(0f32, 8., &Cpu)?.reshape((4, 2))?)?;
    let windows = xs.unfold(0, 2, 2)?.contiguous()?;
    // The gradient of Σ w · (w held fixed) is w, so that of x is x.
    let gradients = (&windows * windows.detach())?.sum_all()?.backward()?;
    let gradient = gradients.get(&xs).expect("a gradient").flatten_all()?.to_vec1::<f32>()?;
    println!("windows {:?}", windows.to_vec3::<f32>()?);
    println!("expected a gradient of [0, 1, 2, 3, 4, 5, 6, 7], got {gradient:?}");
    assert_eq!(gradient, [0., 2., 1., 3., 4., 6., 5., 7.]);
    Ok(())
}
END
cargo run --quiet
