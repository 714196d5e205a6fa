#!/usr/bin/env bash
# usage: scripts/python-wheel.sh DIR [OPTION...]
#
# Leaves in DIR the wheel of the Python package with libcuvmm in it, for this platform. The
# options are for the pip of ${PYTHON:-python3}, which builds it: with --no-build-isolation it
# takes setuptools and wheel as they are installed.
set -euo pipefail
[ $# -ge 1 ] || { echo "usage: scripts/python-wheel.sh DIR [OPTION...]" >&2; exit 2; }
mkdir -p "$1"
out=$(cd "$1" && pwd)
shift
cd "$(dirname "${BASH_SOURCE[0]}")/.."
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
mkdir "$tmp/cuvmm"
cp python/pyproject.toml python/setup.py python/README.md python/LICENSE "$tmp/"
cp python/cuvmm/*.py python/cuvmm/py.typed "$tmp/cuvmm/"
go build -buildmode=c-shared -trimpath -ldflags='-s -w' -o "$tmp/cuvmm/libcuvmm.so" ./cmd/libcuvmm
"${PYTHON:-python3}" -m pip wheel "$@" --no-deps --wheel-dir "$out" "$tmp"
