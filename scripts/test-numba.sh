#!/usr/bin/env bash
# Numba's own tests of the driver on the software driver's libcuda. What Numba needs NVIDIA's
# compiler for is skipped, and listed at the end. It takes Debian's python3-numba.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# One of Numba's tests launches a kernel of its own, for which a file of Go stands. An
# overlay adds that to the library without changing its folder.
cat >"$work/overlay.json" <<END
{"Replace": {"$PWD/cmd/libcuda/numba.go": "$PWD/cmd/libcuda/testdata/numba/kernel.go"}}
END
go build -buildmode=c-shared -overlay "$work/overlay.json" -o "$work/libcuda.so.1" ./cmd/libcuda
export NUMBA_CUDA_DRIVER=$work/libcuda.so.1 NUMBA_CACHE_DIR=$work PYTHONDONTWRITEBYTECODE=1
export CUVMM_SIM='{"DriverVersion": 13010, "Devices": [{"Memory": 1073741824}, {"Memory": 1073741824}]}'
tests=$PWD/cmd/libcuda/testdata/numba/run.py
cd "$work"
/usr/bin/python3 "$tests"
