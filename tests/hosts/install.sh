#!/bin/sh
# Installs what hosts of namespaces, and a Slurm on them, are made of, where that can be done.
# Never fails: without it these tests are skipped, and say what to type.

[ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null || exit 0

missing=
for pair in ip:iproute2 /usr/sbin/sshd:openssh-server ssh:openssh-client ps:procps \
    tcpdump:tcpdump /usr/sbin/slurmctld:slurmctld /usr/sbin/slurmd:slurmd sbatch:slurm-client \
    /usr/sbin/munged:munge; do
    command -v "${pair%%:*}" >/dev/null || missing="$missing ${pair#*:}"
done
[ -n "$missing" ] || exit 0

echo "Installing$missing for the tests on several hosts."
export DEBIAN_FRONTEND=noninteractive
{ apt-get update && apt-get install --yes --no-install-recommends $missing; } >/dev/null 2>&1
exit 0
