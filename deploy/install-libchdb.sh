#!/bin/sh
# install-libchdb.sh: puts the ClickHouse engine into the cache, where weir looks for it, unless it is there or
# WEIR_LIBCHDB names one. It comes from npm; version and integrity are those of libchdb.lock.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
if [ -n "${WEIR_LIBCHDB:-}" ]; then
	[ -f "$WEIR_LIBCHDB" ] && exit 0
	echo "WEIR_LIBCHDB=$WEIR_LIBCHDB: there is no such file" >&2
	exit 1
fi
read -r package version integrity <"$here/../internal/embedded/clickhouse/libchdb.lock"
folder=${XDG_CACHE_HOME:-$HOME/.cache}/weir/libchdb-$version
[ -f "$folder/libchdb.so" ] && exit 0

if [ "$(uname -s)-$(uname -m)" != Linux-x86_64 ]; then
	echo "$package is for Linux on x86-64, and this is $(uname -s) on $(uname -m): name a libchdb.so with WEIR_LIBCHDB, or a ClickHouse server with WEIR_CLICKHOUSE_URL" >&2
	exit 1
fi
"$here/install-apt.sh" npm npm
mkdir -p "$folder"
work=$(mktemp -d "$folder/install.XXXXXX")
trap 'rm -rf "$work"' EXIT
echo "fetching $package $version (178 MB, once)" >&2
(cd "$work" && npm pack --silent --no-update-notifier "$package@$version" </dev/null >/dev/null)
tarball=$(echo "$work"/*.tgz)

want=$(printf '%s' "${integrity#sha512-}" | base64 -d | od -An -v -tx1 | tr -d ' \n')
got=$(sha512sum "$tarball" | cut -d' ' -f1)
if [ "$got" != "$want" ]; then
	echo "$package $version is not what it should be: sha512 $got, want $want" >&2
	exit 1
fi
tar -xzf "$tarball" -C "$work" package/libchdb.so
mv "$work/package/libchdb.so" "$folder/libchdb.so"
echo "the ClickHouse engine is in $folder" >&2
