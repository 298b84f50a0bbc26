//! One row through each pass of each layer, for Valgrind to count its instructions.
//!
//! ```text
//! .ci/instructions          # counts, and compares with benches/results/instructions.md
//! ```
//!
//! Times on a shared machine vary by a tenth and more, while one row executes the same instructions
//! each time. So a change of the rows that costs a hundredth is seen, before it is measured.
//!
//! callgrind counts within the functions of a chunk of rows, and writes a total whenever
//! [`pass`] returns. This program prints the names of these totals, in their order. Arguments are
//! dtypes and numbers of columns.

use candle::{DType, Device, Module, Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use candle_powernorm::{PowerNormConfig, layer_norm, power_norm, rms_norm};
use std::alloc::{GlobalAlloc, Layout, System};
use std::hint::black_box;
use std::ptr::null_mut;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

const EPS: f64 = 1e-5;

/// Takes memory from the front of an arena, and gives nothing back, so that an allocation always
/// takes as many instructions. What other allocators do depends on all allocations before.
struct Arena;

const ARENA: Layout = match Layout::from_size_align(1 << 30, 4096) {
    Ok(layout) => layout,
    Err(_) => panic!("a size and an alignment"),
};
static START: OnceLock<usize> = OnceLock::new();
static USED: AtomicUsize = AtomicUsize::new(0);

// SAFETY: each allocation has a part of the arena for itself, aligned to 64 bytes, or is refused.
unsafe impl GlobalAlloc for Arena {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the size is not 0.
        let start = *START.get_or_init(|| unsafe { System.alloc_zeroed(ARENA) } as usize);
        let size = layout.size().next_multiple_of(64);
        let offset = USED.fetch_add(size, Ordering::Relaxed);
        match start != 0 && layout.align() <= 64 && offset + size <= ARENA.size() {
            true => (start + offset) as *mut u8,
            false => null_mut(),
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promises are those of `alloc`. No part of the arena was used before.
        unsafe { self.alloc(layout) }
    }

    unsafe fn dealloc(&self, _: *mut u8, _: Layout) {}
}

#[global_allocator]
static ALLOCATOR: Arena = Arena;

/// Runs a pass. callgrind knows this function by its name.
#[inline(never)]
fn pass<T>(run: impl Fn() -> Result<T>) -> Result<T> {
    black_box(run())
}

/// Counts `run` under this name. The call before it reads the environment, which is done once.
fn count<T>(name: &str, dtype: DType, cols: usize, run: impl Fn() -> Result<T>) -> Result<()> {
    run()?;
    pass(run)?;
    println!("{name}\t{}\t{cols}", dtype.as_str());
    Ok(())
}

/// Passes of one row of `cols` columns.
fn passes(dtype: DType, cols: usize) -> Result<()> {
    let vb = VarBuilder::from_varmap(&VarMap::new(), dtype, &Device::Cpu);
    // A row is random enough to need no second walk, and the same each time.
    let row: Vec<_> = (0..cols).map(|i| (i * i % 97) as f32 / 97. - 0.5).collect();
    let xs = Var::from_tensor(&Tensor::from_vec(row, (1, cols), &Device::Cpu)?.to_dtype(dtype)?)?;
    let residual = xs.as_tensor().copy()?;
    let backward = |name: &str, forward: &dyn Fn() -> Result<Tensor>| {
        let ys = forward()?;
        count(name, dtype, cols, || ys.backward())
    };

    let layer = layer_norm(cols, EPS, vb.pp("layer"))?;
    let rms = rms_norm(cols, EPS, vb.pp("rms"))?;
    let config = |warmup_steps| PowerNormConfig {
        warmup_steps,
        ..EPS.into()
    };
    let running = power_norm(cols, config(0), vb.pp("running"))?;
    let warming_up = power_norm(cols, config(1 << 20), vb.pp("warming_up"))?;

    count("layer_norm forward", dtype, cols, || layer.forward(&xs))?;
    count("layer_norm forward_residual", dtype, cols, || {
        layer.forward_residual(&xs, &residual)
    })?;
    backward("layer_norm backward", &|| layer.forward(&xs))?;
    count("rms_norm forward", dtype, cols, || rms.forward(&xs))?;
    count("rms_norm forward_residual", dtype, cols, || {
        rms.forward_residual(&xs, &residual)
    })?;
    backward("rms_norm backward", &|| rms.forward(&xs))?;
    count("power_norm evaluation", dtype, cols, || {
        running.forward_t(&xs, false)
    })?;
    count("power_norm forward", dtype, cols, || {
        running.forward_t(&xs, true)
    })?;
    backward("power_norm backward", &|| running.forward_t(&xs, true))?;
    count("power_norm warm-up forward", dtype, cols, || {
        warming_up.forward_t(&xs, true)
    })?;
    backward("power_norm warm-up backward", &|| {
        warming_up.forward_t(&xs, true)
    })?;
    Ok(())
}

fn main() -> Result<()> {
    let (mut dtypes, mut columns) = (vec![], vec![]);
    for argument in std::env::args()
        .skip(1)
        .filter(|argument| argument != "--bench")
    {
        match argument.parse() {
            Ok(cols) => columns.push(cols),
            Err(_) => dtypes.push(argument.parse::<DType>().map_err(candle::Error::wrap)?),
        }
    }
    for dtype in dtypes {
        for &cols in &columns {
            passes(dtype, cols)?;
        }
    }
    Ok(())
}
