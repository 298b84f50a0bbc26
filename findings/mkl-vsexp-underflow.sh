#!/usr/bin/env bash
# MKL's vsExp, which candle's `exp` and `softmax` call with its feature `mkl`, is slow where its result
# underflows.
#
# Expected: the exponential of a masked score, -1e9 or -100, takes as long as another: it is 0 or
# subnormal. Seen: half a million of them took 78 and 107 ms, and half a million exponentials of -1 took
# 0.17 ms. The exponential of minus infinity, which is 0 too, took 1.7 ms, and vsTanh is as fast for all
# of these. In a small GPT with a mask of -1e9, a softmax of candle took 4.5 times as long with this
# library as without it (benches/results/model.md).
#
# mkl 2026.2.0 from PyPI on x86-64, an Intel Xeon with AVX-512, 2026-11-30. Exits non-zero if this
# changes.
set -euo pipefail
project=$(mktemp -d)
trap 'rm -rf "$project"' EXIT
cd "$project"
python3 -m venv venv
venv/bin/pip install --quiet mkl==2026.2.0
cat >exp.py <<'END'
import ctypes
import glob
import sys
import time

[path] = glob.glob(f"{sys.prefix}/lib/libmkl_rt.so*")
mkl = ctypes.CDLL(path)
N = 1 << 19


def milliseconds(function, value):
    """The least of ten calls, and a result."""
    xs, ys = (ctypes.c_float * N)(*[value] * N), (ctypes.c_float * N)()
    times = []
    for _ in range(10):
        start = time.perf_counter()
        function(N, xs, ys)
        times.append((time.perf_counter() - start) * 1e3)
    return min(times), ys[0]


least = {}
for name in "vsExp", "vsTanh":
    for value in -1.0, -50.0, -100.0, -1e9, float("-inf"):
        least[name, value], result = milliseconds(getattr(mkl, name), value)
        print(f"{name}({value:g}) = {result:.3g}: {least[name, value]:.2f} ms")

usual = least["vsExp", -1.0]
for value in -100.0, -1e9:
    assert least["vsExp", value] > 100 * usual
assert least["vsExp", -50.0] < 5 * usual
assert least["vsExp", float("-inf")] < least["vsExp", -1e9] / 5
assert max(least["vsTanh", value] for value in (-100.0, -1e9)) < 5 * least["vsTanh", -1.0]
END
OMP_NUM_THREADS=1 LD_LIBRARY_PATH=venv/lib venv/bin/python exp.py
