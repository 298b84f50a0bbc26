//! The kernels as this machine's driver compiles them: each by itself, as the crate loads them.

use crate::common::gpu::gpu;
use candle::cuda_backend::WrapErr;
use candle::cuda_backend::cudarc::driver::CudaFunction;
use candle::{Device, Result};
use ptx::Modules;

// The crate has no public way to load a kernel that no call needs.
#[allow(dead_code)]
#[path = "../../src/device/cuda/ptx.rs"]
mod ptx;

/// The driver's attributes of a kernel that it compiled.
struct Compiled {
    registers: i32,
    local_bytes: i32,
    max_threads: i32,
    /// Compute capability of the PTX: 90 is 9.0.
    ptx: i32,
    /// Compute capability of the machine code.
    binary: i32,
}

impl Compiled {
    fn of(function: &CudaFunction) -> Result<Self> {
        Ok(Self {
            registers: function.num_regs().w()?,
            local_bytes: function.local_size_bytes().w()?,
            max_threads: function.max_threads_per_block().w()?,
            ptx: function.ptx_version().w()?,
            binary: function.binary_version().w()?,
        })
    }
}

fn load(gpu: &Device, kernel: &str) -> Result<Compiled> {
    let module = Modules::compiled().of(kernel).expect("a module");
    let key = format!("tests of candle_powernorm, {kernel}");
    let function = gpu
        .as_cuda_device()?
        .get_or_load_custom_func(kernel, &key, &module)?;
    Compiled::of(&function.into_cuda_function())
}

/// The most threads of the blocks that the crate launches: `.maxntid 512, 1, 1` in the PTX.
fn threads_of_blocks(ptx: &str) -> i32 {
    let (_, threads) = ptx.split_once(".maxntid ").expect("launch bounds");
    let threads = threads.split(',').next().unwrap_or_default();
    threads.trim().parse().expect("a number of threads")
}

/// The driver's compiler is not the one that the kernels were tuned with, and a first training step
/// loads only four kernels. This loads all of them and prints what the compiler made of each
/// (`--nocapture`). It fails if a kernel does not load, if its registers leave no room for a block
/// of the crate's size, or if it spills.
#[test]
fn every_kernel_loads() {
    let gpu = gpu();
    let mut kernels: Vec<_> = Modules::compiled().entries().collect();
    kernels.sort_unstable();
    assert!(!kernels.is_empty(), "no entry points in the compiled PTX");
    let mut failures = Vec::new();
    println!("| kernel | registers | local bytes | threads of a block | at most | PTX | binary |");
    println!("|---|--:|--:|--:|--:|--:|--:|");
    for (kernel, ptx) in kernels {
        let compiled = match load(&gpu, kernel) {
            Ok(compiled) => compiled,
            Err(error) => {
                failures.push(format!("{kernel} does not load: {error}"));
                continue;
            }
        };
        let threads = threads_of_blocks(ptx);
        let Compiled {
            registers,
            local_bytes,
            max_threads,
            ptx,
            binary,
        } = compiled;
        println!(
            "| {kernel} | {registers} | {local_bytes} | {threads} | {max_threads} | {ptx} | \
             {binary} |"
        );
        if max_threads < threads {
            failures.push(format!(
                "{kernel}: a block needs {threads} threads, and with {registers} registers a \
                 thread the driver allows {max_threads}"
            ));
        }
        if local_bytes > 0 {
            failures.push(format!(
                "{kernel}: expected no local memory, got {local_bytes} bytes a thread: the driver's compiler spills registers, which makes the kernel \
                 slower but not wrong. Please report it with this table"
            ));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
