#!/usr/bin/env bash
# Each product of matrices on Linux reads all of /proc/cpuinfo, and CANDLE_NUM_THREADS does not say how
# many threads it takes.
#
# Expected: the number of threads is found once, as candle's own thread pool finds it. Seen: matmul
# asks num_cpus::get_physical each time, which keeps nothing, unless RAYON_NUM_THREADS is set. On two
# processors a product of two numbers takes 56 us instead of 0.2, and the kernel's text grows with the
# number of processors. A convolution is such a product too.
#
# candle-core 0.11.1 on Linux without candle's own list of preferred processors, 2026-11-30. Exits
# non-zero if this changes. FINDINGS_TARGET_DIR may name a folder for builds that several of these
# scripts share.
set -euo pipefail
project=$(mktemp -d)
trap 'rm -rf "$project"' EXIT
cd "$project"
export CARGO_PROFILE_DEV_DEBUG=false CARGO_TARGET_DIR=${FINDINGS_TARGET_DIR:-$project/target}
cargo init --quiet --vcs none --edition 2024 --name finding
cargo add --quiet candle-core@=0.11.1
cat >src/main.rs <<'END'
use candle_core::{Device::Cpu, Result, Tensor};

/// Bytes that this process has read, from files and from the kernel.
fn bytes_read() -> usize {
    let io = std::fs::read_to_string("/proc/self/io").unwrap();
    let bytes = io.lines().find_map(|line| line.strip_prefix("rchar: "));
    bytes.unwrap().parse().unwrap()
}

fn main() -> Result<()> {
    const N: usize = 1000;
    let cpuinfo = std::fs::read("/proc/cpuinfo")?.len();
    let x = Tensor::new(&[[2f32]], &Cpu)?;
    x.matmul(&x)?;
    let (before, start) = (bytes_read(), std::time::Instant::now());
    for _ in 0..N {
        x.matmul(&x)?;
    }
    let time = start.elapsed() / N as u32;
    let bytes = (bytes_read() - before) / N;
    let setting = std::env::args().nth(1).unwrap();
    println!("{setting}: {time:?} and {bytes} bytes read a product; /proc/cpuinfo has {cpuinfo}");
    let reads = bytes + 100 > cpuinfo;
    assert_eq!(reads, !setting.starts_with("RAYON"));
    Ok(())
}
END
cargo build --quiet --release
program=$CARGO_TARGET_DIR/release/finding
env -u RAYON_NUM_THREADS -u CANDLE_NUM_THREADS "$program" "no variable"
env -u RAYON_NUM_THREADS CANDLE_NUM_THREADS=1 "$program" CANDLE_NUM_THREADS=1
env -u CANDLE_NUM_THREADS RAYON_NUM_THREADS=1 "$program" RAYON_NUM_THREADS=1
