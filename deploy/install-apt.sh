#!/bin/sh
# install-apt.sh COMMAND PACKAGE...: installs Debian packages when COMMAND is not there.
# As root it runs apt-get, and starts no service that they bring; everybody else is told what to ask for.
set -eu
command=$1
shift
command -v "$command" >/dev/null 2>&1 && exit 0

if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
	echo "weir needs $command: install it (Debian: apt-get install $*) and try again" >&2
	exit 1
fi
echo "installing $*" >&2
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
	trap 'rm -f "$policy"' EXIT
	printf '#!/bin/sh\nexit 101\n' >"$policy"
	chmod +x "$policy"
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq </dev/null >&2
apt-get install -y -qq --no-install-recommends "$@" </dev/null >&2
command -v "$command" >/dev/null 2>&1 || {
	echo "$* installed, and there is still no $command" >&2
	exit 1
}
