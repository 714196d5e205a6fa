#!/usr/bin/env bash
# Tests every module of the repository. Arguments go to each `go test`: scripts/test.sh -race -short
# Packages whose paths match the regular expression in EXCEPT are left out.
#
# `go test ./...` stops at the border of a module, also with a go.work.
set -euo pipefail
scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$scripts/.."

failed=()
while read -r module; do
	if ! packages=$(cd "$module" && go list ./...); then
		failed+=("$module")
		continue
	fi
	[ -z "${EXCEPT-}" ] || packages=$(grep -vE "$EXCEPT" <<<"$packages" || true)
	if [ -z "$packages" ]; then
		echo "module $module: no packages to test"
	else
		echo "module $module: go test $* ./...${EXCEPT:+, but $EXCEPT}"
		mapfile -t packages <<<"$packages"
		(cd "$module" && go test "$@" "${packages[@]}") || failed+=("$module")
	fi
done < <("$scripts/modules.sh")

if [ ${#failed[@]} -gt 0 ]; then
	echo "failed in module: ${failed[*]} (. is the root)" >&2
	exit 1
fi
