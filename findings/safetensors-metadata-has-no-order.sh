#!/usr/bin/env bash
# The same tensors with the same metadata make a different file each time.
#
# Expected: a format that sorts its tensors, so that a checksum tells whether a checkpoint
# changed. Seen: the tensors are sorted, but the metadata is written in the order of a hash map,
# which is random in each map: eight files of equal contents have up to eight different bytes.
# Without metadata, or with one entry, they are equal.
#
# safetensors 0.8.0, on a CPU, 2026-11-29. Exits non-zero if this changes.
# FINDINGS_TARGET_DIR may name a folder for builds that several of these scripts share.
set -euo pipefail
project=$(mktemp -d)
trap 'rm -rf "$project"' EXIT
cd "$project"
export CARGO_PROFILE_DEV_DEBUG=false CARGO_TARGET_DIR=${FINDINGS_TARGET_DIR:-$project/target}
cargo init --quiet --vcs none --edition 2024 --name finding
cargo add --quiet safetensors@=0.8.0
cat >src/main.rs <<'END'
use safetensors::tensor::{Dtype, TensorView, serialize};
use std::collections::{HashMap, HashSet};

fn main() {
    let files = |entries: usize| -> usize {
        let file = || {
            let metadata: HashMap<_, _> =
                (0..entries).map(|k| (format!("key {k}"), format!("value {k}"))).collect();
            let tensor = TensorView::new(Dtype::F32, vec![1], &[0; 4]).expect("a tensor");
            serialize([("tensor", tensor)], Some(metadata)).expect("a file")
        };
        (0..8).map(|_| file()).collect::<HashSet<_>>().len()
    };
    let (one, six) = (files(1), files(6));
    println!("eight files of one entry: {one} different; of six entries: {six} different");
    assert!(one == 1 && six > 1);
}
END
cargo run --quiet
