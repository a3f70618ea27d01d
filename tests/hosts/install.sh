#!/bin/sh
# Installs what hosts of namespaces, and a Slurm on them, are made of. Never fails: where nothing can
# be installed these tests are skipped, and say what to type.

[ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null || exit 0

missing=
for pair in ip:iproute2 /usr/sbin/sshd:openssh-server ssh:openssh-client ps:procps \
    tcpdump:tcpdump /usr/sbin/slurmctld:slurmctld /usr/sbin/slurmd:slurmd sbatch:slurm-client \
    /usr/sbin/munged:munge; do
    command -v "${pair%%:*}" >/dev/null || missing="$missing ${pair#*:}"
done
[ -z "$missing" ] || sh "$(dirname "$0")/../apt.sh" 'the tests on several hosts' $missing
