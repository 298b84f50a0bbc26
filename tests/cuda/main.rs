//! The layer on a GPU, against the CPU path, the `f64` oracle, and itself. Without a GPU, or a
//! driver that stands for one, these tests fail.

#[path = "../common/mod.rs"]
mod common;

mod arguments;
mod around;
mod bits;
mod devices;
mod edges;
mod masks;
mod pairs;
mod ranks;
mod shards;
mod values;

use candle::{DType, Device, Module, Result, Tensor, Var};
use candle_nn::{AdamW, Optimizer, Sequential, VarBuilder, VarMap};
use candle_powernorm::{
    power_norm, Communicator, GroupScaling, LossScale, PowerNorm, PowerNormConfig, Ranks, Recipe,
    Statistics,
};
use common::distributed::{self, on_threads, Rank};
use common::gpu::{config, gpu, same_bits, same_state, Echo, PATHS};
use common::recording::replay;
use common::{
    assert_close, assert_finite, assert_relative, assert_same_bits, assert_zero, bits, forward,
    layer, layer_on, message, precision, run, state, tensor, thinned, thinned_in_turn, to_f64, var,
    Batch, Bound, Data, Outcome, Twin, CPU, DTYPES,
};
use std::collections::HashMap;

/// A layer for each way to walk the kernels, in each dtype.
fn layers() -> impl Iterator<Item = ((usize, Option<usize>), (DType, DType))> {
    thinned(
        PATHS
            .into_iter()
            .flat_map(|path| DTYPES.map(|dtypes| (path, dtypes))),
    )
}

/// What a layer and its batches may be besides their shape and dtype.
fn variants() -> Vec<(PowerNormConfig, bool)> {
    let mut variants = vec![];
    for recipe in [Recipe::Paper, Recipe::Fairseq] {
        for statistics in [Statistics::Running, Statistics::Batch] {
            for affine in [true, false] {
                for padded in [false, true] {
                    let config = PowerNormConfig {
                        recipe,
                        statistics,
                        affine,
                        ..config(None)
                    };
                    variants.push((config, padded));
                }
            }
        }
    }
    variants
}
