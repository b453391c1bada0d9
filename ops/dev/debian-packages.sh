# Sourced by the ensure-*.sh scripts: installs Debian packages whose services must not run afterwards.
#
# The tests start and stop their own servers on free loopback ports with folders of their own, so all we want is the
# programs: no service, no daemon. Debian's packages enable a service and start it while they are being configured. We
# stop that without writing a policy-rc.d, which would hold back other packages too:
#   - where systemd runs, the unit is masked before the installation (starting a masked unit is refused),
#     and disabled and unmasked afterwards, so that an administrator may still start it on purpose;
#   - where it does not, the init script may be started; it is stopped and its run-level links are
#     disabled right after. A container whose image ships a policy-rc.d never starts it at all.
# At the end we look whether a process runs that did not run before, and say so loudly.
#
# No ensure-*.sh script ever fails a build: without the programs the tests skip and say how to get them (under CI=true
# they fail instead). Only a daemon left behind is an error.

say() { printf '%s: %s\n' "$(basename "$0" .sh)" "$1" >&2; }

# The pids of the processes with one of the names $1 that run now, one per line. /proc is read directly since ps may be
# missing; a zombie, which a container without an init keeps for ever, has an empty command line and does not count.
running() {
    for comm in /proc/[0-9]*/comm; do
        read -r name 2>/dev/null <"$comm" || continue
        case " $1 " in
            *" $name "*) ;;
            *) continue ;;
        esac
        if [ -n "$(tr -d '\0' 2>/dev/null <"${comm%comm}cmdline")" ]; then
            pid=${comm#/proc/}
            printf '%s\n' "${pid%/comm}"
        fi
    done
}

# True where packages can be installed; else says why not, and $2, which tells how to get the programs $1.
may_install() {
    if [ ! -f /etc/debian_version ] || ! command -v apt-get >/dev/null 2>&1; then
        say "no $1 on PATH and this is not a Debian-like system. $2"
        return 1
    fi
    if [ "$(id -u)" -ne 0 ]; then
        say "no $1 on PATH and not root, so nothing is installed. $2"
        return 1
    fi
}

# Install the packages $1, whose services are $2 and whose daemons are $3; $4 tells how to get them otherwise.
install_quietly() {
    before=$(running "$3")
    masked=""
    for service in $2; do
        if [ -d /run/systemd/system ] && systemctl mask --runtime "$service.service" >/dev/null 2>&1; then
            masked="$masked $service"
        fi
    done
    export DEBIAN_FRONTEND=noninteractive
    # shellcheck disable=SC2086  # the packages are words
    if apt-get update -qq && apt-get install -y -qq --no-install-recommends $1 >/dev/null; then
        say "installed the distribution's $1."
    else
        say "apt-get could not install $1 (see above). $4"
    fi
    for service in $2; do
        if [ -d /run/systemd/system ]; then
            systemctl disable "$service.service" >/dev/null 2>&1
        elif [ -x "/etc/init.d/$service" ]; then
            "/etc/init.d/$service" stop >/dev/null 2>&1
            update-rc.d "$service" disable >/dev/null 2>&1
        fi
    done
    for service in $masked; do
        systemctl unmask --runtime "$service.service" >/dev/null 2>&1
    done
    for pid in $(running "$3"); do
        case " $(printf '%s' "$before" | tr '\n' ' ') " in
            *" $pid "*) ;;
            *)
                say "process $pid appeared during the installation; it is not ours to kill: stop its service ($2)."
                exit 1
                ;;
        esac
    done
}
