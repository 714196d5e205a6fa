#!/usr/bin/env bash
# usage: scripts/gpu-bundle.sh DIR [PACKAGE...]
#
# Leaves in DIR run.sh and one archive, with which a machine that has a GPU and
# its driver, but neither Go nor the sources, runs every test, benchmark and
# sample of the repository that can use a GPU, or the tests, benchmarks and programs
# of the named packages (by folder: vmm, cuda/sim, samples/...). `DIR/run.sh -help` says how. Together
# they take at most 48 MiB.
set -euo pipefail
limit=$((48 << 20))

fail() {
	echo "gpu-bundle: $*" >&2
	exit 1
}

scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$scripts")
if [ $# -eq 0 ] || [[ $1 == -* ]]; then
	fail "usage: scripts/gpu-bundle.sh DIR [PACKAGE...]"
fi
for tool in go xz tar; do
	command -v "$tool" >/dev/null || fail "$tool is not installed"
done
mkdir -p "$1"
dir=$(cd "$1" && pwd)
shift
packages=("$@")
rm -f "$dir/run.sh" "$dir/bundle.tar.xz"
[ -z "$(ls -A "$dir")" ] || fail "$dir holds files that are no part of a bundle: name an empty folder"

# with_driver lists the packages of the module here whose test or program contains the
# real driver.
driver=github.com/cuvmm/cuvmm/csrc
with_driver() {
	go list -test -f "{{\$p := .ImportPath}}{{range .Deps}}{{if eq . \"$driver\"}}{{\$p}}{{end}}{{end}}" ./... | sed 's/\.test$//'
	echo "$driver"
}

declare -A matched=()
wanted() {
	local pattern hit=
	if [ ${#packages[@]} -eq 0 ]; then
		grep -qxF "$2" <<<"$on_gpu"
		return
	fi
	for pattern in "${packages[@]}"; do
		if [ "$1" = "$pattern" ] || [[ $pattern == */... && $1/ == "${pattern%...}"* ]]; then
			matched[$pattern]=1 hit=1
		fi
	done
	[ -n "$hit" ]
}

stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
chmod 755 "$stage"
touch "$stage/packages"
flags=(-trimpath -buildvcs=false '-ldflags=-s -w')
(cd "$root/tools" && CGO_ENABLED=0 go build "${flags[@]}" -o "$stage/gpurun" ./gpurun)

for module in $("$scripts/modules.sh"); do
	[ "$module" != tools ] || continue # for whoever develops the library, away from any GPU
	on_gpu=$(cd "$root/$module" && with_driver)
	listing=$(cd "$root/$module" && go list -f '{{.Dir}}|{{.ImportPath}}|{{.Name}}|{{if or .TestGoFiles .XTestGoFiles}}tests{{end}}' ./...)
	while IFS='|' read -r folder import name tests; do
		package=${folder#"$root"}
		package=${package#/}
		package=${package:-.}
		if [ -z "$folder" ] || ! wanted "$package" "$import"; then
			continue
		fi
		kinds=
		if [ "$tests" = tests ]; then
			mkdir -p "$stage/$package"
			(cd "$folder" && go test -c "${flags[@]}" -o "$stage/$package/package.test" .)
			[ ! -d "$folder/testdata" ] || cp -R "$folder/testdata" "$stage/$package/"
			kinds+=' tests'
		fi
		# Other programs do nothing without arguments.
		if [ "$name" = main ] && { [ ${#packages[@]} -gt 0 ] || [[ $package == samples/* ]]; }; then
			mkdir -p "$stage/$package"
			(cd "$folder" && go build "${flags[@]}" -o "$stage/$package/program" .)
			kinds+=' program'
		fi
		[ -z "$kinds" ] || echo "$package$kinds" | tee -a "$stage/packages"
	done <<<"$listing"
done
for pattern in ${packages[@]+"${packages[@]}"}; do
	[ -n "${matched[$pattern]-}" ] || fail "there is no package $pattern: name its folder, as in vmm or samples/..."
done
[ -s "$stage/packages" ] || fail "none of the packages has a test or is a program: nothing to bundle"

# Test binaries resemble one another: with a window that spans them all, each
# further one adds little.
tar -C "$stage" --owner=0 --group=0 --sort=name -cf - . | xz --lzma2=preset=6,dict=256MiB >"$dir/bundle.tar.xz"
cp "$scripts/gpu-run.sh" "$dir/run.sh"

size=$(($(stat -c %s "$dir/bundle.tar.xz") + $(stat -c %s "$dir/run.sh")))
printf '%d packages, %d MiB packed into %d.%d MiB: %s\n' "$(wc -l <"$stage/packages")" $(($(du -sk "$stage" | cut -f1) >> 10)) \
	$((size >> 20)) $(((size * 10 >> 20) % 10)) "$dir"
[ $size -le $limit ] || fail "that is over $((limit >> 20)) MiB: bundle some of the packages (scripts/gpu-bundle.sh DIR PACKAGE...)"
