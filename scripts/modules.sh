#!/usr/bin/env bash
# Prints the folder of every module of the repository, relative to its root, the root (.) first.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
find . \( -name .git -o -name testdata -o -name vendor -o -path ./build -o -path ./.gpu \) -prune -o -name go.mod -print |
	sed 's|/go\.mod$||; s|^\./||' | LC_ALL=C sort
