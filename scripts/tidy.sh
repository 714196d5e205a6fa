#!/usr/bin/env bash
# Runs `go mod tidy` in every module, and passes it the arguments: scripts/tidy.sh -diff
#
# The go command tidies without go.work, and so would look for the root where modules are
# published. It gets copies of go.mod and go.sum that say where the root is.
set -euo pipefail
scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$scripts")
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
export GOWORK=off
for module in $("$scripts/modules.sh"); do
	cd "$root/$module"
	cp go.mod go.sum "$tmp/"
	go mod edit "-replace=github.com/cuvmm/cuvmm=$root" "$tmp/go.mod"
	go mod tidy "-modfile=$tmp/go.mod" "$@"
	go mod edit -dropreplace=github.com/cuvmm/cuvmm "$tmp/go.mod"
	for file in go.mod go.sum; do
		cmp -s "$tmp/$file" $file || cp "$tmp/$file" $file
	done
done
