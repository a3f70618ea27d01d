#!/bin/bash
# Runs a command where the students of a class have accounts, in namespaces of its own that end with it, and with the
# program that has started it:
#
#   students.sh FOLDER PYTHON_HOME STUDENT… -- COMMAND…
#
# FOLDER gets their homes; they see it as /srv. Accounts need no change of the machine: /etc/passwd is another one here.
set -euo pipefail
if [ "${1:-}" != inside ]; then
  exec setpriv --pdeathsig KILL unshare --mount --pid --fork --mount-proc --propagation private --kill-child=KILL "$0" inside "$@"
fi
folder=$2 python=$3; shift 3
cp /etc/passwd /etc/group "$folder"
uid=20000
while [ "$1" != -- ]; do
  uid=$((uid + 1))
  echo "$1:x:$uid:$uid::/srv/$1:/bin/bash" >> "$folder/passwd"
  echo "$1:x:$uid:" >> "$folder/group"
  mkdir -m 700 "$folder/$1"; chown "$uid:$uid" "$folder/$1"
  shift
done
shift
mount --bind "$folder/passwd" /etc/passwd; mount --bind "$folder/group" /etc/group
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount --bind "$folder" /srv # a short path: that of a kernel's socket may have at most 107 bytes
# A home of root's with the interpreter in it is closed to students: here it has nothing else.
closed=$python
while [ "$closed" != / ] && [ $((0$(stat -c %a "$closed") & 1)) = 1 ]; do closed=$(dirname "$closed"); done
if [ "$closed" != / ]; then
  mkdir "$folder/python"; mount --bind "$python" "$folder/python"
  mount -t tmpfs -o mode=755 tmpfs "$closed"
  mkdir -p "$python"; mount --bind "$folder/python" "$python"
fi
# Not exec: the first process of a namespace has to reap those that others leave.
"$@" &
wait $!
