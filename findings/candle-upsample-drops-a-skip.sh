#!/usr/bin/env bash
# Upsampling a tensor by upsample_nearest2d deletes the gradient of the tensor's other uses.
#
# Expected: a loss of Σ upsample(x) + Σ x repeated twice in each direction has a gradient of 4 + 4
# at each element. Seen: 4, because the backward of the upsampling sets the gradient where all
# others add to it. Which one is lost depends on the order of the two terms in the graph.
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
    let xs = Var::new(&[[[[1f32, 2.], [3., 4.]]]], &Cpu)?;
    let gradient = |up: Tensor| -> Result<Vec<f32>> {
        let loss = (up.sum_all()? + xs.repeat((1, 1, 2, 2))?.sum_all()?)?;
        loss.backward()?.get(&xs).expect("a gradient").flatten_all()?.to_vec1()
    };
    let shared = gradient(xs.upsample_nearest2d(4, 4)?)?;
    let own = gradient(xs.affine(1., 0.)?.upsample_nearest2d(4, 4)?)?;
    println!("of the tensor itself: {shared:?}; of a copy of it: {own:?}");
    assert_eq!(shared, [4.; 4]);
    assert_eq!(own, [8.; 4]);
    Ok(())
}
END
cargo run --quiet
