#!/usr/bin/env bash
# `1. - &mask` of a U8 mask is all ones, and `&ids - 1.` of U32 ids is the ids.
#
# Expected: the inverted mask, and each id less one. Seen: a number beside a tensor of integers is
# first converted to the tensor's dtype, where −1 becomes 0. So 1 − mask is computed as 0 · mask +
# 1, ids − 1 as ids + 0, and ids / 2 as 0 · ids. A comparison with −1 is one with 0.
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
use candle_core::{Device::Cpu, Result, Tensor};

fn main() -> Result<()> {
    let mask = Tensor::new(&[1u8, 0, 1], &Cpu)?;
    let ids = Tensor::new(&[5u32, 6, 7], &Cpu)?;
    let inverted = (1. - &mask)?.to_vec1::<u8>()?;
    let before = (&ids - 1.)?.to_vec1::<u32>()?;
    let half = (&ids / 2.)?.to_vec1::<u32>()?;
    let above = mask.gt(-1.)?.to_vec1::<u8>()?;
    println!("1 - [1, 0, 1] = {inverted:?}; [5, 6, 7] - 1 = {before:?}; [5, 6, 7] / 2 = {half:?}");
    println!("[1, 0, 1] > -1: {above:?}; mean of the mask: {}", mask.mean_all()?.to_scalar::<u8>()?);
    assert_eq!(inverted, [1, 1, 1]);
    assert_eq!(before, [5, 6, 7]);
    assert_eq!(half, [0, 0, 0]);
    assert_eq!(above, [1, 0, 1]);
    assert_eq!(mask.mean_all()?.to_scalar::<u8>()?, 0);
    Ok(())
}
END
cargo run --quiet
