#!/usr/bin/env bash
# The Python package's tests on the software driver, beside Go processes on the same machine.
#
#	scripts/test-python.sh        all tests; also types, where mypy is installed
#	scripts/test-python.sh try    a publisher in Go and a follower in Python, for a moment
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
chmod 700 "$work"
go build -buildmode=c-shared -o "$work/libcuda.so.1" ./cmd/libcuda
export CUVMM_LIBCUDA=$work/libcuda.so.1 CUVMM_SIM="{\"Folder\": \"$work/machine\", \"Fabric\": {\"Channels\": [0]}}" CUVMM_DRIVER=sim PYTHONPATH=$PWD/python PYTHONDONTWRITEBYTECODE=1
mkdir -m 700 "$work/machine"
if [ "${1:-}" = try ]; then
	go build -o "$work/publisher" ./samples/11-ipc-server
	mkdir -m 700 "$work/meet"
	"$work/publisher" -dir "$work/meet" publish >"$work/publisher.log" &
	publisher=$!
	trap 'kill $publisher 2>/dev/null || true; rm -rf "$work"' EXIT
	while [ ! -S "$work/meet/server" ]; do # which the publisher makes when there is something to follow
		kill -0 $publisher 2>/dev/null || { cat "$work/publisher.log"; exit 1; }
		sleep 0.1
	done
	python3 python/samples/follow.py "$work/meet/server" numbers --generations 4
	exit
fi
go build -o "$work/peer" ./python/tests/peer
go build -o "$work" ./python/samples/embeddings ./python/samples/serve
go build -tags cuvmm_fault_hook -buildmode=c-shared -o "$work/libcuvmm.so" ./cmd/libcuvmm
go build -C cmd/cuvmm -o "$work/cuvmm" .
export CUVMM_TEST_COMMAND=$work/cuvmm CUVMM_TEST_PEER=$work/peer CUVMM_TEST_SAMPLES=$work
cd python
if command -v mypy >/dev/null; then
	mypy --cache-dir "$work/mypy" cuvmm tests samples/*.py
fi
python3 -X dev -W error::ResourceWarning -m unittest "$@"
# In a process of its own: two libraries with Go's runtime do not go together.
in_libcuvmm=(
	tests.test_allocators.CuPy
	tests.test_cookbook.Sleeps
	tests.test_libcuvmm
	tests.test_torch_extensible
	tests.test_torch_interrupts
	tests.test_torch_memory
	tests.test_torch_sleep
)
CUVMM_LIBCUVMM=$work/libcuvmm.so python3 -X dev -m unittest "${in_libcuvmm[@]}"
