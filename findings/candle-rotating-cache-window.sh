#!/usr/bin/env bash
# How many keys a token sees through RotatingKvCache depends on how the text was split.
#
# Expected: with a window of 4, token 4 of a text sees tokens 1 to 4, whether tokens come one by
# one or in chunks. Seen: one by one it sees 4 keys. In a prompt of 8 tokens it sees 5, because
# the mask lets in one more than the window. In a chunk of 2 after 4 it sees 3, because the
# chunk's second token has already overwritten the key of token 1.
#
# candle-core and candle-nn 0.11.1, on a CPU, 2026-11-29. Exits non-zero if this changes.
# FINDINGS_TARGET_DIR may name a folder for builds that several of these scripts share.
set -euo pipefail
project=$(mktemp -d)
trap 'rm -rf "$project"' EXIT
cd "$project"
export CARGO_PROFILE_DEV_DEBUG=false CARGO_TARGET_DIR=${FINDINGS_TARGET_DIR:-$project/target}
cargo init --quiet --vcs none --edition 2024 --name finding
cargo add --quiet candle-core@=0.11.1 candle-nn@=0.11.1
cat >src/main.rs <<'END'
use candle_core::{Device::Cpu, Result, Tensor};
use candle_nn::kv_cache::RotatingKvCache;

/// The tokens that token 4 sees, in a text that comes in these chunks.
fn seen(chunks: &[usize]) -> Result<Vec<f32>> {
    let mut cache = RotatingKvCache::new(1, 4);
    let mut start = 0;
    for &n in chunks {
        let mask = cache.attn_mask(n, &Cpu)?;
        // A key is the token's position.
        let keys = Tensor::arange(start as f32, (start + n) as f32, &Cpu)?.reshape((1, n, 1))?;
        let (keys, _) = cache.append(&keys, &keys)?;
        let keys = keys.flatten_all()?.to_vec1::<f32>()?;
        if (start..start + n).contains(&4) {
            let hidden = match mask {
                Some(mask) => mask.get(4 - start)?.to_vec1::<u8>()?,
                None => vec![0; keys.len()],
            };
            let seen = keys.into_iter().zip(hidden).filter(|(_, hidden)| *hidden == 0);
            let mut seen: Vec<_> = seen.map(|(key, _)| key).collect();
            seen.sort_by(f32::total_cmp);
            return Ok(seen);
        }
        start += n;
    }
    unreachable!("each text has eight tokens")
}

fn main() -> Result<()> {
    for (chunks, expected) in [
        (&[1; 8][..], &[1., 2., 3., 4.][..]),
        (&[8], &[0., 1., 2., 3., 4.]),
        (&[4, 2, 2], &[2., 3., 4.]),
    ] {
        let seen = seen(chunks)?;
        println!("chunks {chunks:?}: token 4 sees {seen:?}");
        assert_eq!(seen, expected);
    }
    Ok(())
}
END
cargo run --quiet
