//! Where a bench runs, and how Criterion is set up for passes of many milliseconds.

#[cfg(feature = "cuda")]
#[path = "gpu.rs"]
mod gpu;
#[path = "threads.rs"]
mod threads;
#[path = "unused.rs"]
mod unused;

use candle::Device;
use criterion::{Bencher, Criterion};
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::time::Duration;

/// A device, its name in ids, and the threads of a CPU.
pub struct Place {
    pub name: String,
    pub device: Device,
    pool: Option<ThreadPool>,
}

impl Place {
    /// One and two threads of a CPU, and with feature `cuda` a GPU.
    pub fn all() -> Vec<Self> {
        let cpu = |threads| {
            let pool = ThreadPoolBuilder::new().num_threads(threads).build();
            Self {
                name: format!("t{threads}"),
                device: Device::Cpu,
                pool: Some(pool.expect("a thread pool")),
            }
        };
        #[cfg_attr(not(feature = "cuda"), allow(unused_mut))]
        let mut places = vec![cpu(1), cpu(2)];
        #[cfg(feature = "cuda")]
        places.push(Self {
            name: "cuda".into(),
            device: gpu::queue(),
            pool: None,
        });
        places
    }

    /// Benches `passes` on the place's threads. It runs a number of passes, and returns their time.
    pub fn run(&self, bencher: &mut Bencher, passes: impl Fn(u64) -> Duration + Sync) {
        let mut sample = || bencher.iter_custom(&passes);
        match &self.pool {
            Some(pool) => pool.install(sample),
            None => sample(),
        }
    }
}

/// Runs the benches with one thread of candle's own, unless the environment sets them. `bench` gets
/// `true` if each pass is to run once only, with the argument `--test`.
pub fn main(bench: impl FnOnce(&mut Criterion, bool) -> candle::Result<()>) -> candle::Result<()> {
    threads::set_threads();
    unused::warn_of_unused(true);
    let mut criterion = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1))
        .configure_from_args();
    bench(&mut criterion, std::env::args().any(|arg| arg == "--test"))?;
    criterion.final_summary();
    Ok(())
}
