"""Finds the Chromium that the browser tests drive.

Run as a script, prints its path, or says on stderr what to type and exits with 1.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")

MISSING = """\
The browser tests need a Chromium; found none in $CHROMIUM, on PATH or among Playwright's.
Type one of:
    apt-get install chromium                              (Debian, as root)
    .venv/bin/python -m playwright install chromium       (anywhere with the library libatomic)
    make test CHROMIUM=/path/to/chromium"""


def find_chromium() -> str | None:
    """Returns the first Chromium that starts, or None."""
    chosen = os.environ.get("CHROMIUM")
    candidates = [chosen] if chosen else [*map(shutil.which, NAMES), _playwrights_own()]
    return next((path for path in candidates if path and _starts(path)), None)


def _playwrights_own() -> str | None:
    from playwright.sync_api import sync_playwright

    try:
        with sync_playwright() as playwright:
            path = playwright.chromium.executable_path
    except Exception:  # its program lacks a library of the system; it has named it on stderr
        return None
    return path if Path(path).exists() else None


def _starts(path: str) -> bool:
    # Ubuntu's /usr/bin/chromium-browser may be a stub that only says "install the snap".
    try:
        answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return answer.returncode == 0 and "chrom" in answer.stdout.lower()


if __name__ == "__main__":
    path = find_chromium()
    if path is None:
        sys.exit(MISSING)
    print(f"Chromium for the browser tests: {path}")
