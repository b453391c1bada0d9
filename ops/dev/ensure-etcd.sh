#!/bin/sh
# Make sure that an `etcd` binary is on PATH for the tests. They start and stop their own etcd on free
# loopback ports with a data directory of their own, so all we want is the file: no service, no daemon.
#
# Debian's etcd-server package enables a service and starts it while it is being configured. We stop that
# without writing a policy-rc.d, which would hold back other packages too:
#   - where systemd runs, the unit is masked before the installation (starting a masked unit is refused),
#     and disabled and unmasked afterwards, so that an administrator may still start it on purpose;
#   - where it does not, the init script may be started; it is stopped and its run-level links are
#     disabled right after. A container whose image ships a policy-rc.d never starts it at all.
# At the end we look whether an etcd runs that did not run before, and say so loudly.
#
# This script never fails a build: without etcd the tests skip and say how to get one (under CI=true they
# fail instead). Only a daemon left behind is an error.
set -u

how="To run the etcd tests, put an etcd 3.4 or newer on PATH: a distribution package such as etcd-server or etcd, or a release archive from the etcd project."

say() { printf 'ensure-etcd: %s\n' "$1" >&2; }

# The pids of the etcds that run now, one per line. /proc is read directly since ps may be missing; a
# zombie, which a container without an init keeps for ever, has an empty command line and does not count.
running() {
    for comm in /proc/[0-9]*/comm; do
        read -r name 2>/dev/null <"$comm" || continue
        if [ "$name" = etcd ] && [ -n "$(tr -d '\0' 2>/dev/null <"${comm%comm}cmdline")" ]; then
            pid=${comm#/proc/}
            printf '%s\n' "${pid%/comm}"
        fi
    done
}

if command -v etcd >/dev/null 2>&1; then
    exit 0
fi
if [ ! -f /etc/debian_version ] || ! command -v apt-get >/dev/null 2>&1; then
    say "no etcd on PATH and this is not a Debian-like system. $how"
    exit 0
fi
if [ "$(id -u)" -ne 0 ]; then
    say "no etcd on PATH and not root, so nothing is installed. $how"
    exit 0
fi

before=$(running)
masked=""
if [ -d /run/systemd/system ] && systemctl mask --runtime etcd.service >/dev/null 2>&1; then
    masked=yes
fi

export DEBIAN_FRONTEND=noninteractive
if apt-get update -qq && apt-get install -y -qq --no-install-recommends etcd-server >/dev/null; then
    say "installed the distribution's etcd-server."
else
    say "apt-get could not install etcd-server (see above). $how"
fi

if [ -d /run/systemd/system ]; then
    systemctl disable etcd.service >/dev/null 2>&1
    [ -n "$masked" ] && systemctl unmask --runtime etcd.service >/dev/null 2>&1
elif [ -x /etc/init.d/etcd ]; then
    /etc/init.d/etcd stop >/dev/null 2>&1
    update-rc.d etcd disable >/dev/null 2>&1
fi

for pid in $(running); do
    case " $(printf '%s' "$before" | tr '\n' ' ') " in
        *" $pid "*) ;;
        *)
            say "etcd process $pid appeared during the installation; it is not ours to kill: stop the etcd service."
            exit 1
            ;;
    esac
done
exit 0
