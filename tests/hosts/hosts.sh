#!/bin/bash
# Several "hosts" on one machine: each is a network, mount, UTS, IPC and PID namespace with its own
# hostname, address 10.77.0.N (or fd77::N), /tmp, /dev/shm, /run and sshd; a bridge in a namespace of its own joins them.
# Nothing is added to the machine's own network. Needs: root with CAP_SYS_ADMIN and CAP_NET_ADMIN,
# kernel: NET_NS PID_NS UTS_NS IPC_NS VETH BRIDGE; Debian: iproute2 util-linux openssh-server openssh-client procps
#
#   hosts.sh up 3              h0 (login: run the notebook here), h1, h2
#   hosts.sh on h1 CMD ...     run CMD on a host
#   hosts.sh cut h2 | mend h2  pull the cable: packets vanish, no RST, no FIN
#   hosts.sh rate h2 1gbit | rate h2 off               token bucket, both ways
#   hosts.sh freeze h2 | thaw h2                       SIGSTOP / SIGCONT of every process of the host
#   hosts.sh crash h2          power off: cable first, then every process, so that no FIN leaves
#   hosts.sh boot h2           power on again
#   hosts.sh down              every process, namespace and file is gone
set -euo pipefail
BASE=${HOSTS_BASE:?}       # a folder that is made, and removed at the end
SHARE=${HOSTS_SHARE:?}     # folders that all hosts see at the same path, with colons between
P=${HOSTS_PREFIX:?}        # how the names of namespaces and links begin
NET=${HOSTS_NET:-10.77.0}   # fd77:: for hosts that have IPv6 only

address() { case $NET in *:) echo "$NET$(($1+10))" ;; *) echo "$NET.$(($1+10))" ;; esac; }
mac() { printf '02:00:00:00:00:%02x' "$1"; }
names() { for f in "$BASE"/*/init.pid; do [ -e "$f" ] && basename "$(dirname "$f")"; done; }
pid_of() { cat "$BASE/$1/init.pid"; }
on() { local h=$1; shift; exec nsenter -t "$(pid_of "$h")" -n -m -u -i -p -- \
  env -u TMPDIR bash -c 'cd "$0" 2>/dev/null || cd /; exec "$@"' "$PWD" "$@"; }
start_host() {  # name number
  local h=$1 i=$2 d=$BASE/$1 ns=$P-$1
  mkdir -p "$d/tmp" "$d/var"
  ip netns add "$ns"
  ip link add "$P$i" netns "$P-sw" type veth peer name eth0 address "$(mac "$i")" netns "$ns"
  ip -n "$P-sw" link set "$P$i" master br0 up
  case $NET in
    # At once: without duplicate address detection, which takes two seconds.
    *:) ip -n "$ns" addr add "$(address "$i")/64" dev eth0 nodad ;;
    *) ip -n "$ns" addr add "$(address "$i")/24" dev eth0 ;;
  esac
  ip -n "$ns" link set eth0 up; ip -n "$ns" link set lo up
  if [ -e "$BASE/neighbours" ]; then ip -n "$ns" -batch "$BASE/neighbours"; fi
  HOST=$h DIR=$d SHARE=$SHARE BASE=$BASE setsid -f ip netns exec "$ns" \
    unshare --mount --uts --ipc --pid --fork --mount-proc --propagation private --kill-child=KILL \
    bash -c '
      set -e
      hostname $HOST
      keep=$BASE/keep; i=0
      mount -t tmpfs -o mode=755 tmpfs /run; mkdir /run/ah-keep   # private: this mount namespace only
      IFS=: read -ra shared <<< "$SHARE"
      for s in "${shared[@]}"; do mkdir -p /run/ah-keep/$i; mount --bind "$s" /run/ah-keep/$i; i=$((i+1)); done
      mkdir /run/ah-keep/base; mount --bind "$BASE" /run/ah-keep/base
      mount -t tmpfs -o mode=1777 tmpfs /dev/shm
      mount -t tmpfs -o mode=1777 tmpfs /tmp
      i=0; for s in "${shared[@]}"; do mkdir -p "$s"; mount --bind /run/ah-keep/$i "$s"; i=$((i+1)); done
      mkdir -p "$BASE"; mount --bind /run/ah-keep/base "$BASE"
      mkdir -p /root/.ssh; mount --bind $BASE/ssh /root/.ssh
      mount --bind $BASE/etc-hosts /etc/hosts
      mkdir -p /run/sshd; chmod 755 /run/sshd
      /usr/sbin/sshd -f $BASE/sshd_config -E $DIR/sshd.log -o PidFile=$DIR/sshd.pid
      until [ -s $DIR/sshd.pid ]; do sleep .05; done  # it listens a moment after the command has ended
      touch $DIR/ready
      trap : TERM INT
      while :; do sleep 3600 & wait $! || :; done
    ' > "$d/init.log" 2>&1 < /dev/null
  for _ in $(seq 1200); do [ -e "$d/ready" ] && break; sleep .05; done
  [ -e "$d/ready" ] || { cat "$d/init.log"; exit 1; }
  # the init of the PID namespace: the one process that is pid 1 in there
  for p in $(ip netns pids "$ns"); do
    if [ "$(awk '/^NSpid:/{print $NF}' /proc/$p/status 2>/dev/null)" = 1 ]; then echo "$p" > "$d/init.pid"; fi
  done
  [ -s "$d/init.pid" ]
}
case ${1:-} in
up)
  n=${2:-2}; [ ! -e "$BASE" ] || { echo "$BASE exists: hosts.sh down first"; exit 1; }
  mkdir -p "$BASE/ssh"; chmod 700 "$BASE" "$BASE/ssh"
  ssh-keygen -q -t ed25519 -N '' -f "$BASE/ssh/id_ed25519"; ssh-keygen -q -t ed25519 -N '' -f "$BASE/hostkey"
  cp "$BASE/ssh/id_ed25519.pub" "$BASE/ssh/authorized_keys"; chmod 600 "$BASE/ssh/authorized_keys"
  { echo "127.0.0.1 localhost"; for i in $(seq 0 $((n-1))); do echo "$(address "$i") h$i"; done; } > "$BASE/etc-hosts"
  for i in $(seq 0 $((n-1))); do echo "h$i,$(address "$i") $(cut -d' ' -f1,2 "$BASE/hostkey.pub")"; done > "$BASE/ssh/known_hosts"
  cat > "$BASE/sshd_config" <<S
HostKey $BASE/hostkey
PermitRootLogin prohibit-password
AuthorizedKeysFile /root/.ssh/authorized_keys
UsePAM no
StrictModes no
MaxStartups 200
S
  # The kernel counts the neighbours of all namespaces together, 1,024 at most, but not permanent ones.
  if [ "$n" -gt 30 ]; then
    for i in $(seq 0 $((n-1))); do echo "neigh replace $(address "$i") lladdr $(mac "$i") dev eth0 nud permanent"; done > "$BASE/neighbours"
  fi
  ip netns add "$P-sw"; ip -n "$P-sw" link add br0 type bridge; ip -n "$P-sw" link set br0 up
  for i in $(seq 0 $((n-1))); do start_host "h$i" "$i"; done; names ;;
on) shift; on "$@" ;;
cut)  ip -n "$P-sw" link set "$P${2#h}" nomaster ;;
mend) ip -n "$P-sw" link set "$P${2#h}" master br0 ;;
rate)
  i=${2#h}
  ip netns exec "$P-sw" tc qdisc del dev "$P$i" root 2>/dev/null || :
  ip netns exec "$P-$2" tc qdisc del dev eth0 root 2>/dev/null || :
  if [ "$3" != off ]; then
    ip netns exec "$P-sw" tc qdisc add dev "$P$i" root tbf rate "$3" burst 256kb latency 50ms
    ip netns exec "$P-$2" tc qdisc add dev eth0 root tbf rate "$3" burst 256kb latency 50ms
  fi ;;
freeze|thaw)
  s=STOP; [ "$1" = thaw ] && s=CONT
  # One that has ended since it was listed needs no signal.
  init=$(pid_of "$2")
  for p in $(ip netns pids "$P-$2"); do [ "$p" = "$init" ] || kill -$s "$p" 2>/dev/null || [ ! -e "/proc/$p" ]; done ;;
crash) ip -n "$P-sw" link set "$P${2#h}" nomaster; kill -9 "$(pid_of "$2")"; rm "$BASE/$2/init.pid" ;;
boot)
  for p in $(ip netns pids "$P-$2"); do kill -9 "$p" 2>/dev/null || :; done
  ip -n "$P-sw" link del "$P${2#h}"; ip netns del "$P-$2"; rm -f "$BASE/$2/ready" "$BASE/$2/sshd.pid"; start_host "$2" "${2#h}" ;;
down)
  for h in $(names); do kill -9 "$(pid_of "$h")" 2>/dev/null || :; done
  for ns in $(ip netns list | awk '{print $1}' | grep "^$P-" || :); do
    for p in $(ip netns pids "$ns"); do kill -9 "$p" 2>/dev/null || :; done
    ip netns del "$ns"
  done
  # What was killed may still be ending, and writing.
  for _ in $(seq 100); do sleep .2; rm -rf "$BASE" 2>/dev/null && break; done
  [ ! -e "$BASE" ] ;;
*) sed -n '2,18p' "$0"; exit 2 ;;
esac
