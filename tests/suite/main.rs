//! The tests that need neither a GPU nor a process of their own, as one program. A test's name has
//! the file that it is in: `cargo test --test suite parity::`.
//!
//! Nothing in here sets what a process has once. Thread pools are local, and a test that needs
//! another environment starts this program again.

#[path = "../common/mod.rs"]
mod common;
#[path = "../devices/mod.rs"]
mod devices;

mod adapters;
mod candle_traps;
mod centring;
mod checkpoint;
mod distributed;
mod fold;
mod fused;
mod golden;
mod gradient;
mod gradient_check;
mod group_norm;
mod guide;
mod interchange;
mod layer;
mod lifecycle;
mod loss_scale;
mod micro_batches;
mod optim;
mod parity;
mod porting;
mod properties;
mod recalibration;
mod recipes;
mod rejections;
mod residual;
mod robustness;
mod row_norms;
mod soak;
mod threads;
mod training;
mod vars;
mod wide_rows;

use proptest::prelude::ProptestConfig;

/// A run of `cases` random cases. A failure prints its case, so no file has to record it.
fn cases(cases: u32) -> ProptestConfig {
    ProptestConfig {
        cases,
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}
