#!/bin/sh
# Make sure that an `etcd` binary is on PATH for the tests, and that none runs because of it.
set -u
. "$(dirname "$0")/debian-packages.sh"

how="To run the etcd tests, put an etcd 3.4 or newer on PATH: a distribution package such as etcd-server or etcd, or a release archive from the etcd project."

command -v etcd >/dev/null 2>&1 && exit 0
may_install etcd "$how" || exit 0
install_quietly etcd-server etcd etcd "$how"
exit 0
