#!/bin/sh
# Finds a Chromium for the browser tests, or installs one. Never fails: without one they are skipped.
#
# $CHROMIUM comes first, then PATH, then a Chromium that Playwright has fetched before. Only then is one
# installed: by the distribution when root, else by Playwright.

python=${PYTHON:-python3}
here=$(dirname "$0")

found() {
    "$python" "$here/chromium.py"
}

found 2>/dev/null && exit 0
[ -z "$CHROMIUM" ] || { found || exit 0; }

if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
    sh "$here/../apt.sh" 'the browser tests' chromium
    found 2>/dev/null && exit 0
    # Ubuntu's package is a stub for a snap, which a container cannot run.
    dependencies=--with-deps
fi
echo 'Installing Chromium for the browser tests by Playwright.'
"$python" -m playwright install $dependencies chromium 2>&1 | tail -n 1

found || true
