"""Runs JavaScript without a browser."""

from __future__ import annotations

import shutil
import subprocess

from tests.missing import skip_missing


def _path() -> str:
    try:
        from playwright._impl._driver import compute_driver_executable
    except ImportError:
        found = shutil.which("node")
        if found is None:
            skip_missing("JavaScript needs node or Playwright: pip install playwright")
        return found
    return str(compute_driver_executable()[0])


def node(*arguments: str) -> str:
    """Returns the output; fails with what node has printed."""
    command = [_path(), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout
