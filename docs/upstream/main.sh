#!/usr/bin/env bash
# Runs the suite on the main branch of candle, or on a checkout of candle:
#
#     docs/upstream/main.sh [CHECKOUT]
set -euo pipefail
repository=$(cd "$(dirname "$0")/../.." && pwd)
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
candle=$(realpath -m "${1-$out/candle}")
[[ -n ${1-} ]] || git clone --quiet --depth 1 https://github.com/huggingface/candle "$candle"
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' "$candle/Cargo.toml")

# In a copy, because this changes Cargo.toml and Cargo.lock.
git -C "$repository" archive HEAD | tar -x --one-top-level="$out/crate"
cd "$out/crate"
# Cargo uses a patch only if it has the version that is asked for. Main may have any version, even one
# older than the last release.
sed -i "s/^\(candle.*\)\"0\.11\"/\1\"=$version\"/" Cargo.toml ports/Cargo.toml
{
  printf '\n[patch.crates-io]\n'
  for name in core nn transformers; do
    printf 'candle-%s = { path = "%s/candle-%s" }\n' "$name" "$candle" "$name"
  done
} >>Cargo.toml
cargo tree --package candle-powernorm --invert candle-core --depth 0 | tee "$out/tree"
grep -qF "($candle/candle-core)" "$out/tree" || { echo "the patch is not used"; exit 1; }
cargo test --package candle-powernorm --target-dir "$out/target" --lib --test suite
