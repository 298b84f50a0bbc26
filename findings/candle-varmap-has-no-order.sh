#!/usr/bin/env bash
# Two maps of the same variables list them in different orders.
#
# Expected: all_vars lists variables in the order in which a model makes them, as PyTorch's
# parameters() does, so that an optimizer's state can be saved by position. Seen: the order is
# that of a hash map, which is random in each map, in one process too.
#
# candle-core and candle-nn 0.11.1, on a CPU, 2026-11-29. Exits non-zero if this changes.
# FINDINGS_TARGET_DIR may name a folder for builds that several of these scripts share.
set -euo pipefail
project=$(mktemp -d)
trap 'rm -rf "$project"' EXIT
cd "$project"
export CARGO_PROFILE_DEV_DEBUG=false CARGO_TARGET_DIR=${FINDINGS_TARGET_DIR:-$project/target}
cargo init --quiet --vcs none --edition 2024 --name finding
cargo add --quiet candle-core@=0.11.1 candle-nn@=0.11.1
cat >src/main.rs <<'END'
use candle_core::{DType, Device::Cpu, Result};
use candle_nn::{Init, VarBuilder, VarMap};
use std::collections::HashSet;

fn main() -> Result<()> {
    let mut orders = HashSet::new();
    for _ in 0..8 {
        let varmap = VarMap::new();
        let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Cpu);
        for size in 1..=8 {
            vb.get_with_hints(size, &format!("variable {size}"), Init::Const(0.))?;
        }
        let order: Vec<_> = varmap.all_vars().iter().map(|var| var.elem_count()).collect();
        println!("{order:?}");
        orders.insert(order);
    }
    assert!(orders.len() > 1);
    Ok(())
}
END
cargo run --quiet
