#!/bin/sh
# Sees to it that the browser tests find a Chromium. Never fails: without one they are skipped.
#
# A Chromium of the user's comes first ($CHROMIUM, then PATH), then one that Playwright has fetched
# before; only then is one installed, from the distribution when root, else by Playwright.

python=${PYTHON:-python3}

found() {
    "$python" "$(dirname "$0")/chromium.py"
}

found 2>/dev/null && exit 0
[ -z "$CHROMIUM" ] || { found || exit 0; }

echo 'No Chromium found: installing one for the browser tests.'
if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
    export DEBIAN_FRONTEND=noninteractive
    { apt-get update && apt-get install --yes --no-install-recommends chromium; } >/dev/null 2>&1
    found 2>/dev/null && exit 0
    # Ubuntu's package is a stub for a snap, which a container cannot run.
    "$python" -m playwright install --with-deps chromium >/dev/null 2>&1
else
    "$python" -m playwright install chromium >/dev/null 2>&1
fi

found || true
