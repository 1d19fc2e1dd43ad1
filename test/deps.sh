#!/bin/sh
# Installs the Debian packages that the real node and its tests need, as far as
# they are missing, and says so. Root on Debian 12 or later; running it again
# changes nothing.
set -eu

packages="libseccomp-dev pkg-config runc conmon containernetworking-plugins busybox-static
podman buildah skopeo bats jq procps ca-certificates e2fsprogs xfsprogs mount strace"

missing=""
for p in $packages; do
	case $(dpkg-query -W -f='${db:Status-Status}' "$p" 2>/dev/null || true) in
	installed) ;;
	*) missing="$missing $p" ;;
	esac
done
if [ -z "$missing" ]; then
	exit 0
fi
if [ "$(id -u)" != 0 ]; then
	echo "deps: root is needed to install:$missing" >&2
	exit 1
fi
echo "deps: installing$missing"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# shellcheck disable=SC2086 # a list of words
apt-get install -y -qq --no-install-recommends $missing >/dev/null
