#!/bin/bash
# Real Slurm (Debian's slurmctld, slurmd, munge) on the "hosts" of hosts.sh: h0 = login node and slurmctld, h1… = compute nodes.
# Needs what hosts.sh needs, and: slurmctld slurmd slurm-client munge libpmix2 libpmi2-0   (Debian 12: Slurm 22.05.8)
#   slurm.sh up 3         hosts.sh up, munge and slurmd in every host, slurmctld in h0
#   slurm.sh on h0 sbatch …                 as in hosts.sh;  cut, mend, freeze, crash: hosts.sh with the same HOSTS_… variables
#   slurm.sh boot h2      switches a node on again after a crash
#   slurm.sh down
set -euo pipefail
H=$(dirname "$(readlink -f "$0")")/hosts.sh
BASE=${HOSTS_BASE:?}
CPUS=${SLURM_CPUS:-4}              # told to Slurm, whatever the machine has
serve() {  # number: munge, and slurmctld or slurmd
  local i=$1 h=h$1; mkdir -p "$BASE/$h/spool"
  "$H" on $h bash -c "
      mkdir -p /run/ah-munge && cp $BASE/slurm/munge.key /run/ah-munge/key && chown -R munge /run/ah-munge && chmod 755 /run/ah-munge && chmod 400 /run/ah-munge/key
      mount -t tmpfs -o mode=755 tmpfs /etc/slurm && cp $BASE/slurm/*.conf /etc/slurm/
      mkdir -p /run/munge && chmod 755 /run/munge && chown munge /run/munge
      setpriv --reuid munge --regid munge --clear-groups /usr/sbin/munged --key-file /run/ah-munge/key --pid-file /run/ah-munge/pid --seed-file /run/ah-munge/seed --log-file /run/ah-munge/log
      $( [ $i = 0 ] && echo '/usr/sbin/slurmctld -c' || echo "/usr/sbin/slurmd -N $h" )"
}
case ${1:-} in
up)
  n=${2:-3}; "$H" up "$n" > /dev/null
  mkdir -p "$BASE/slurm"; dd if=/dev/urandom of="$BASE/slurm/munge.key" bs=1 count=1024 status=none
  cat > "$BASE/slurm/slurm.conf" <<C
ClusterName=test
SlurmctldHost=h0
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
MpiDefault=none
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,batch_sched_delay=1,sched_min_interval=100000,bf_interval=2
ReturnToService=2
StateSaveLocation=$BASE/slurm/state
SlurmdSpoolDir=$BASE/%n/spool
SlurmctldPidFile=$BASE/slurm/slurmctld.pid
SlurmdPidFile=$BASE/%n/slurmd.pid
SlurmctldLogFile=$BASE/slurm/slurmctld.log
SlurmdLogFile=$BASE/%n/slurmd.log
SlurmctldTimeout=10
SlurmdTimeout=${SLURMD_TIMEOUT:-15}
MessageTimeout=10
KillWait=3
InactiveLimit=0
UnkillableStepTimeout=60
OverTimeLimit=0
NodeName=h[1-$((n-1))] CPUs=$CPUS RealMemory=4000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=60 State=UP OverSubscribe=NO
C
  echo CgroupPlugin=cgroup/v1 > "$BASE/slurm/cgroup.conf"   # ip netns exec hides /sys/fs/cgroup: no autodetection
  mkdir -p "$BASE/slurm/state"; chown munge "$BASE/slurm/munge.key"; chmod 400 "$BASE/slurm/munge.key"; chmod 711 "$BASE" "$BASE/slurm"
  for i in $(seq 0 $((n-1))); do
    serve "$i"
  done
  for _ in $(seq 400); do [ "$("$H" on h0 sinfo -h -t idle -o %D 2>/dev/null)" = $((n-1)) ] && break; sleep .2; done
  "$H" on h0 sinfo ;;
boot)
  "$H" boot "$2"; serve "${2#h}"
  for _ in $(seq 400); do [ "$("$H" on h0 sinfo -h -n "$2" -t idle -o %D 2>/dev/null)" = 1 ] && break; sleep .2; done ;;
down) "$H" down ;;
*) exec "$H" "$@" ;;
esac
