//! How many threads candle takes on a CPU.

use std::env::{set_var, var_os};
use std::thread::available_parallelism;

/// Sets `CANDLE_NUM_THREADS` to 1, and `RAYON_NUM_THREADS` to the number of cores that the process may
/// use, unless the user has set them. To be called first, as candle and rayon read them once.
///
/// The threads of candle's own pool, for element-wise operations, spin while they wait: a trap on a
/// busy machine. And where the second variable is not set, each product of matrices counts the cores
/// anew. docs/guide/performance.md has figures of both.
// In edition 2021 the function is not unsafe.
#[allow(unused_unsafe)]
pub fn set_threads() {
    let allowed = available_parallelism().map_or(1, usize::from);
    let cores = candle::utils::get_num_threads().min(allowed);
    for (variable, count) in [("CANDLE_NUM_THREADS", 1), ("RAYON_NUM_THREADS", cores)] {
        if var_os(variable).is_none() {
            // SAFETY: no other thread runs yet that could read the environment.
            unsafe { set_var(variable, count.to_string()) };
        }
    }
}
