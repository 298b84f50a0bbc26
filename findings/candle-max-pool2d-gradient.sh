#!/usr/bin/env bash
# The gradient of max_pool2d(2) is a quarter of the right one.
#
# Expected: the largest of four elements gets a gradient of 1. Seen: 0.25. The backward counts how
# many elements are largest by an average over the window, and multiplies by it where it should
# divide by the count.
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
use candle_core::{Device::Cpu, Result, Var};

fn main() -> Result<()> {
    let xs = Var::new(&[[[[1f32, 2.], [3., 4.]]]], &Cpu)?;
    let gradients = xs.max_pool2d(2)?.sum_all()?.backward()?;
    let gradient = gradients.get(&xs).expect("a gradient").flatten_all()?.to_vec1::<f32>()?;
    println!("the gradient of the largest of {:?} is {gradient:?}", xs.flatten_all()?.to_vec1::<f32>()?);
    assert_eq!(gradient, [0., 0., 0., 0.25]);
    Ok(())
}
END
cargo run --quiet
