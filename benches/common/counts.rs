//! Counts of a GPU's work, as softgpu takes them.
#![allow(dead_code)] // each bench uses its share

use crate::softgpu::Softgpu;
use candle::{DType, Device, Result};
use serde_json::Value;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::iter::Sum;
use std::ops::AddAssign;

/// The source that names this crate's kernels.
const KERNELS: &str = include_str!("../../kernels/power_norm.cu");

const OURS: &str = "of this crate";
const MIB: f64 = (1 << 20) as f64;

/// Counts of a kernel, or of several.
#[derive(Clone, Copy, Default)]
pub struct Tally {
    pub launches: u64,
    /// Bytes that threads ask global memory for, and give it.
    pub bytes_read: u64,
    pub bytes_written: u64,
    /// 32-byte sectors that warps touch.
    pub sectors: u64,
    pub thread_instructions: u64,
    pub warp_instructions: u64,
    /// Passes of shared memory beyond the first of a warp's access.
    pub conflicts: u64,
    /// Arrivals of a warp at a barrier of its block.
    pub barriers: u64,
}

impl Tally {
    fn new(counts: &Value) -> Self {
        let number = |name: &str| counts[name].as_u64().expect("a count");
        let classes = counts["instructions"].as_array().expect("classes");
        Self {
            launches: number("launches"),
            bytes_read: number("bytes_loaded"),
            bytes_written: number("bytes_stored"),
            sectors: number("sectors_loaded") + number("sectors_stored"),
            thread_instructions: number("thread_instructions"),
            warp_instructions: classes.iter().filter_map(Value::as_u64).sum(),
            conflicts: number("bank_conflicts"),
            barriers: number("barriers"),
        }
    }

    /// Bytes that threads ask for and give.
    pub fn bytes(&self) -> u64 {
        self.bytes_read + self.bytes_written
    }

    /// Bytes of the sectors that warps touch. An address that all lanes read counts once: candle's
    /// kernels on strided tensors read shapes and strides in each thread, which the caches serve.
    pub fn sector_bytes(&self) -> u64 {
        32 * self.sectors
    }
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.launches += other.launches;
        self.bytes_read += other.bytes_read;
        self.bytes_written += other.bytes_written;
        self.sectors += other.sectors;
        self.thread_instructions += other.thread_instructions;
        self.warp_instructions += other.warp_instructions;
        self.conflicts += other.conflicts;
        self.barriers += other.barriers;
    }
}

impl<'a> Sum<&'a Tally> for Tally {
    fn sum<I: Iterator<Item = &'a Self>>(all: I) -> Self {
        all.fold(Self::default(), |mut sum, one| {
            sum += *one;
            sum
        })
    }
}

/// The counts of some work, alone.
pub struct Counts {
    /// Calls of the driver.
    pub calls: u64,
    by_function: Value,
    pub kernels: BTreeMap<String, Tally>,
}

impl Counts {
    pub fn of(
        softgpu: &Softgpu,
        device: &Device,
        work: impl FnOnce() -> Result<()>,
    ) -> Result<Self> {
        device.synchronize()?;
        softgpu.take_counts();
        let (done, calls) = softgpu.counting(None, work);
        done?;
        device.synchronize()?;
        let counts = softgpu.take_counts();
        let kernels = counts["kernels"].as_object().expect("kernels by name");
        let tallies = kernels
            .iter()
            .map(|(name, of)| (name.clone(), Tally::new(of)));
        Ok(Self {
            calls,
            by_function: counts["calls"].clone(),
            kernels: tallies.collect(),
        })
    }

    /// Calls of one function of the driver.
    pub fn calls_of(&self, function: &str) -> u64 {
        self.by_function[function].as_u64().unwrap_or(0)
    }

    pub fn sum(&self) -> Tally {
        self.kernels.values().sum()
    }

    /// Those of this crate's kernels.
    pub fn ours(&self) -> Tally {
        let ours = self.kernels.iter().filter(|(name, _)| is_ours(name));
        ours.map(|(_, tally)| tally).sum()
    }
}

/// Prints the MiB of sectors and the launches of each kind of kernel, a column for each of `all`.
pub fn print_kinds<'a>(all: impl Iterator<Item = (&'a str, &'a Counts)>) {
    let (names, counts): (Vec<_>, Vec<_>) = all.unzip();
    let least = counts
        .iter()
        .map(|one| one.sum().sector_bytes() / 100)
        .max();
    let mut kinds: BTreeMap<&str, Vec<Tally>> = BTreeMap::new();
    for (column, counts) in counts.iter().enumerate() {
        for (kernel, tally) in &counts.kernels {
            let row = kinds.entry(kind_of(kernel)).or_default();
            row.resize(names.len(), Tally::default());
            row[column] += *tally;
        }
    }
    let most = |row: &[Tally]| row.iter().map(Tally::sector_bytes).max();
    let (mut rows, few): (Vec<_>, Vec<_>) =
        (kinds.into_iter()).partition(|(kind, row)| *kind == OURS || most(row) >= least);
    rows.sort_by_key(|(_, row)| Reverse(most(row)));
    let others = |column: usize| few.iter().map(|(_, row)| &row[column]).sum();
    rows.push(("others", (0..names.len()).map(others).collect()));

    println!("| MiB of sectors (launches) | {} |", names.join(" | "));
    println!("|---|{}", "--:|".repeat(names.len()));
    for (kind, row) in rows {
        let cell =
            |one: &Tally| format!("{:.1} ({})", one.sector_bytes() as f64 / MIB, one.launches);
        let cells: Vec<_> = row.iter().map(cell).collect();
        println!("| {kind} | {} |", cells.join(" | "));
    }
}

/// A kernel's name without the dtypes at its end.
fn kind_of(kernel: &str) -> &str {
    let dtype = |end: &str| end.parse::<DType>().is_ok();
    match kernel.rsplit_once('_') {
        _ if is_ours(kernel) => OURS,
        Some((kind, end)) if dtype(end) => kind_of(kind),
        _ => kernel,
    }
}

/// `true` for a kernel of this crate: its source defines the name.
pub fn is_ours(kernel: &str) -> bool {
    KERNELS.contains(&format!("DEFINE({kernel},"))
}
