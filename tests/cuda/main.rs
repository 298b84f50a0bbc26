//! The layer on a GPU, against the CPU path, the `f64` oracle, and itself. Without a GPU, or a
//! driver that stands for one, these tests fail.

#[path = "../common/mod.rs"]
mod common;
#[path = "../devices/mod.rs"]
mod devices;

mod arguments;
mod candle_traps;
mod edges;
mod handles;
mod kernels;
mod pairs;
mod ranks;
mod values;

use candle::{DType, Device, Module, Tensor, Var};
use candle_nn::{AdamW, Optimizer, Sequential, VarBuilder, VarMap};
use candle_powernorm::{PowerNorm, Statistics, power_norm};
use common::distributed::{self, on_threads};
use common::gpu::gpu;
use common::recording::replay;
use common::*;

macro_rules! on_the_gpu {
    ($($case:ident),* $(,)?) => {
        $(#[test]
        fn $case() -> impl std::process::Termination {
            devices::$case(&gpu())
        })*
    };
}
devices::cases!(on_the_gpu);
