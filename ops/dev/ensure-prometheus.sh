#!/bin/sh
# Make sure that `prometheus` and `promtool` are on PATH for the tests, and that none runs because of it.
set -u
. "$(dirname "$0")/debian-packages.sh"

how="To run the tests with Prometheus, put prometheus and promtool 2.42 or newer on PATH: a distribution package such as prometheus, or a release archive from the Prometheus project."

command -v prometheus >/dev/null 2>&1 && command -v promtool >/dev/null 2>&1 && exit 0
may_install prometheus "$how" || exit 0
install_quietly prometheus prometheus prometheus "$how"
exit 0
