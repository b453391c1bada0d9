#!/bin/sh
# Make sure that `chromium` and `chromedriver` are on PATH, for the tests of the lighthouse's page. Neither is a
# service: nothing is started. This script never fails a build: without them those tests skip and say how to get
# them (under CI=true they fail instead).
set -u

how="To run the tests of the page, put chromium (or google-chrome) and chromedriver of one version on PATH."

say() { printf 'ensure-chromium: %s\n' "$1" >&2; }

if command -v chromium >/dev/null 2>&1 && command -v chromedriver >/dev/null 2>&1; then
    exit 0
fi
if command -v google-chrome >/dev/null 2>&1 && command -v chromedriver >/dev/null 2>&1; then
    exit 0
fi
if [ ! -f /etc/debian_version ] || ! command -v apt-get >/dev/null 2>&1; then
    say "no chromium with its driver on PATH and this is not a Debian-like system. $how"
    exit 0
fi
if [ "$(id -u)" -ne 0 ]; then
    say "no chromium with its driver on PATH and not root, so nothing is installed. $how"
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
if apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium chromium-driver >/dev/null; then
    say "installed the distribution's chromium and chromium-driver."
else
    say "apt-get could not install chromium (see above). $how"
fi
exit 0
