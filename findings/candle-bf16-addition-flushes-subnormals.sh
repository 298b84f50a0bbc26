#!/usr/bin/env bash
# On processors with AVX512-BF16, adding 0 to a small bf16 tensor makes it 0.
#
# Expected: x + 0 = x, as elsewhere, and as a tensor of fewer than 32 elements has it. Seen: sums
# below 2^-126, the smallest normal number, are 0 in each whole block of 32 elements, because the
# addition narrows them by an instruction that flushes subnormal numbers. Autograd's first gradients
# are such additions to zeros.
#
# candle-core 0.11.1, on a CPU, 2026-11-29. Exits non-zero if this changes, and does nothing on other
# processors.
# FINDINGS_TARGET_DIR may name a folder for builds that several of these scripts share.
set -euo pipefail
grep -qw avx512_bf16 /proc/cpuinfo || { echo "this processor has no AVX512-BF16"; exit; }
project=$(mktemp -d)
trap 'rm -rf "$project"' EXIT
cd "$project"
export CARGO_PROFILE_DEV_DEBUG=false CARGO_TARGET_DIR=${FINDINGS_TARGET_DIR:-$project/target}
cargo init --quiet --vcs none --edition 2024 --name finding
cargo add --quiet candle-core@=0.11.1 half@2
cat >src/main.rs <<'END'
use candle_core::{DType, Device::Cpu, Result, Tensor};
use half::bf16;

fn main() -> Result<()> {
    let small = bf16::from_bits(0x0040); // 2^-127
    let after = |len: usize| -> Result<Vec<bf16>> {
        let xs = Tensor::full(small, len, &Cpu)?;
        (&xs + Tensor::zeros(len, DType::BF16, &Cpu)?)?.to_vec1()
    };
    let (few, many) = (after(31)?, after(33)?);
    println!("{small:e} + 0: {:e} of 31 elements", few[0]);
    println!("{small:e} + 0: {:e} and, in the last place, {:e} of 33", many[0], many[32]);
    assert!(few.iter().all(|&x| x == small));
    assert!(many[..32].iter().all(|x| x.to_bits() == 0) && many[32] == small);
    Ok(())
}
END
cargo run --quiet
