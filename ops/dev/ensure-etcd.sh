#!/bin/sh
# Make sure that `etcd` and `etcdctl` are on PATH for the tests, and that no etcd runs because of it.
set -u
. "$(dirname "$0")/debian-packages.sh"

how="To run the etcd tests, put etcd and etcdctl 3.4 or newer on PATH: distribution packages such as etcd-server and etcd-client, or a release archive from the etcd project."

command -v etcd >/dev/null 2>&1 && command -v etcdctl >/dev/null 2>&1 && exit 0
may_install etcd "$how" || exit 0
install_quietly "etcd-server etcd-client" etcd etcd "$how"
exit 0
