#!/usr/bin/env bash
# Checks that candle-first-gradient.patch applies to the candle-core of Cargo.lock, and runs the
# tests of gradients with it: candle's own and this crate's. `--keep DIR` leaves the patched
# candle-core in DIR and tests nothing.
set -euo pipefail
repository=$(cd "$(dirname "$0")/../.." && pwd)
cd "$repository"
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
case ${1-} in
  --keep) patched=$(realpath -m "${2:?--keep takes a folder}") ;;
  '') patched=$out/candle-core ;;
  *) echo "usage: docs/upstream/check.sh [--keep DIR]" >&2; exit 2 ;;
esac

source=$(cargo metadata --format-version 1 | python3 -c '
import json, sys
packages = json.load(sys.stdin)["packages"]
print(next(p["manifest_path"] for p in packages if p["name"] == "candle-core"))')
mkdir -p "$(dirname "$patched")"
cp -r "$(dirname "$source")" "$patched"
patch -d "$patched" -p1 --forward --fuzz=0 <docs/upstream/candle-first-gradient.patch
# No member of a workspace around it.
printf '\n[workspace]\n' >>"$patched/Cargo.toml"
[[ ${1-} != --keep ]] || exit 0

cd "$patched"
cargo test --target-dir "$out/candle" --test grad_tests --test conv_tests --test custom_op_tests
# In a copy, because the patch changes Cargo.lock.
git -C "$repository" archive HEAD | tar -x --one-top-level="$out/crate"
cd "$out/crate"
cargo test --config "patch.crates-io.candle-core.path = '$patched'" --target-dir "$out/target" \
  --test suite -- gradient golden:: residual lifecycle:: training::
