#!/bin/sh
# Make sure that Slurm's programs and munged are on PATH for the tests, and that none runs because of it.
set -u
. "$(dirname "$0")/debian-packages.sh"

how="To run the tests with Slurm, put slurmctld, slurmd, sbatch and munged on PATH: the distribution's packages slurmctld, slurmd, slurm-client and munge."

missing=
for program in slurmctld slurmd sbatch munged; do
    command -v "$program" >/dev/null 2>&1 || missing=$program
done
[ -n "$missing" ] || exit 0
may_install "$missing" "$how" || exit 0
install_quietly "slurmctld slurmd slurm-client munge" "slurmctld slurmd munge" "slurmctld slurmd munged" "$how"
exit 0
