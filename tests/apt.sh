#!/bin/sh
# Installs Debian packages that tests need: sh tests/apt.sh "the browser tests" chromium
# Prints in one line what was installed, or why not. Never fails: the tests say what is missing.

purpose=$1
shift
export DEBIAN_FRONTEND=noninteractive
output=$(mktemp)
trap 'rm -f "$output"' EXIT

# Runs apt-get, and again while another process holds a lock. DPkg::Lock::Timeout covers dpkg's lock
# only, and not that of the package lists.
apt() {
    tries=60
    while ! apt-get -o DPkg::Lock::Timeout=300 "$@" >"$output" 2>&1; do
        tries=$((tries - 1))
        [ "$tries" -gt 0 ] && grep -q 'Could not get lock' "$output" || return 1
        sleep 5
    done
}

if apt update && apt install --yes --no-install-recommends "$@"; then
    echo "Installed for $purpose: $*."
else
    echo "Not installed for $purpose: $*. apt-get: $(grep -m 1 '^E:' "$output" || tail -n 1 "$output")"
fi
exit 0
