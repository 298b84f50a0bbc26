#!/usr/bin/env bash
# An LSTM with `Direction::Backward` reads its input forwards.
#
# Expected: the state beside the first token comes last and depends on all tokens. Seen: it is the
# state after that token alone. The setting changes only the names of the weights.
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
use candle_core::{DType, Device::Cpu, Result, Tensor};
use candle_nn::rnn::{Direction, LSTMConfig, RNN, lstm};
use candle_nn::{VarBuilder, VarMap};

fn main() -> Result<()> {
    let varmap = VarMap::new();
    let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Cpu);
    let config = LSTMConfig { direction: Direction::Backward, ..Default::default() };
    let lstm = lstm(2, 3, config, vb)?;
    let xs = Tensor::randn(0f32, 1., (1, 4, 2), &Cpu)?;
    let first = |xs: &Tensor| lstm.seq(xs)?[0].h().to_vec2::<f32>();
    let (all, alone) = (first(&xs)?, first(&xs.narrow(1, 0, 1)?)?);
    println!("names: {:?}", varmap.data().lock().unwrap().keys().collect::<Vec<_>>());
    println!("state beside the first of four tokens: {all:?}; of that token alone: {alone:?}");
    assert_eq!(all, alone);
    Ok(())
}
END
cargo run --quiet
