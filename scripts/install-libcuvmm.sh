#!/usr/bin/env bash
# Builds libcuvmm and installs it as C libraries are: the header, the shared object with its
# soname, and a file for pkg-config. As make install does, it reads DESTDIR, PREFIX
# (/usr/local), LIBDIR ($PREFIX/lib) and INCLUDEDIR ($PREFIX/include):
#
#	PREFIX=$HOME/.local scripts/install-libcuvmm.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
prefix=${PREFIX:-/usr/local}
lib=${LIBDIR:-$prefix/lib} include=${INCLUDEDIR:-$prefix/include} root=${DESTDIR:-}
header=cmd/libcuvmm/libcuvmm.h
version=$(sed -n 's/^replace github.com\/cuvmm\/cuvmm v\(.*\) => \.$/\1/p' go.work)
abi=$(sed -n 's/^#define CUVMM_VERSION //p' $header)
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT

# The linker knows the library by its soname, so that one of another CUVMM_VERSION can be installed beside it.
go build -buildmode=c-shared -trimpath "-ldflags=-s -w -extldflags=-Wl,-soname,libcuvmm.so.$abi" -o "$tmp/libcuvmm.so" ./cmd/libcuvmm
cat >"$tmp/libcuvmm.pc" <<END
prefix=$prefix
libdir=$lib
includedir=$include

Name: libcuvmm
Description: A memory pool on the CUDA driver's virtual memory management
Version: $version
Libs: -L\${libdir} -lcuvmm
Cflags: -I\${includedir}
END

install -d "$root$lib/pkgconfig" "$root$include"
install -m 644 $header "$root$include/libcuvmm.h"
install -m 755 "$tmp/libcuvmm.so" "$root$lib/libcuvmm.so.$version"
ln -sf "libcuvmm.so.$version" "$root$lib/libcuvmm.so.$abi"
ln -sf "libcuvmm.so.$abi" "$root$lib/libcuvmm.so"
install -m 644 "$tmp/libcuvmm.pc" "$root$lib/pkgconfig/libcuvmm.pc"
