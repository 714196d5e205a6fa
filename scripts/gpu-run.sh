#!/usr/bin/env bash
# The run.sh of a bundle that scripts/gpu-bundle.sh made: unpacks it in a folder of
# its own and runs what the arguments say (run.sh -help). It needs bash,
# tar, coreutils, and xz or python3.
set -euo pipefail
bundle=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/bundle.tar.xz
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
chmod 755 "$room" # tests may run a part of themselves as another user

unpack() {
	if command -v xz >/dev/null; then
		xz -dc "$bundle"
	elif command -v python3 >/dev/null; then
		python3 -c 'import lzma, shutil, sys
shutil.copyfileobj(lzma.open(sys.argv[1]), sys.stdout.buffer, 1 << 20)' "$bundle"
	else
		echo "run.sh: neither xz nor python3 is here to unpack $bundle with: install one" >&2
		return 1
	fi
}
unpack | tar -C "$room" -xf -
"$room/gpurun" "$room" "$@"
