"""Runs tests on every Python that is found, each with an environment of its own.

python tests/pythons.py                                # the unit tests on each from 3.11 on
python tests/pythons.py --suites tests/unit,tests/faults python3.12
python tests/pythons.py --newest                       # on the newest one, unless that runs this

Looks on PATH and among what pyenv and uv have installed; of several of one version it takes the
newest. A Python for which a dependency has no wheel is named, and counts as failed only where it
was asked for.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PLACE = REPOSITORY / ".venv-pythons"
OLDEST = (3, 11)
NAMES = [f"python3.{minor}" for minor in range(OLDEST[1], 20)]
INSTALLED = (
    "~/.pyenv/versions/*/bin/python3",
    "~/.local/share/uv/python/*/bin/python3",
)
SAYS = "import sys, venv; print(*sys.version_info[:3], sys.executable)"

Version = tuple[int, ...]


def candidates() -> Iterator[str]:
    """Every path at which a Python may be."""
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        yield from (os.path.join(folder, name) for name in NAMES)
    for pattern in INSTALLED:
        path = Path(pattern).expanduser()
        root = Path(*path.parts[: path.parts.index("*")])
        yield from map(str, sorted(root.glob(str(path.relative_to(root)))))


def found(paths: Iterable[str]) -> dict[Version, str]:
    newest: dict[Version, tuple[Version, str]] = {}
    for path in paths:
        try:
            said = subprocess.run([path, "-c", SAYS], capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if said.returncode != 0:
            continue
        *numbers, executable = said.stdout.split(maxsplit=3)
        full = tuple(map(int, numbers))
        kind = full[:2]
        if kind >= OLDEST and (kind not in newest or newest[kind][0] < full):
            newest[kind] = full, executable.strip()
    return {kind: newest[kind][1] for kind in sorted(newest)}


def prepared(python: str, kind: Version) -> Path | None:
    """Returns the Python of an environment with the tests' packages, or None where pip fails."""
    place = PLACE / ".".join(map(str, kind))
    inside = place / "bin" / "python"
    if not inside.exists():
        subprocess.run([python, "-m", "venv", place], check=True)
    pip = [inside, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    wanted = ["--constraint", REPOSITORY / "constraints.txt", "--editable", f"{REPOSITORY}[test]"]
    # What has to be compiled is no wheel, and says little of allranks.
    return None if subprocess.run([*pip, "--prefer-binary", *wanted]).returncode else inside


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pythons", nargs="*", metavar="PYTHON", help="those; else all there are")
    parser.add_argument("--newest", action="store_true", help="only on the newest, if not on this")
    parser.add_argument("--suites", default="tests/unit", metavar="A,B", help="(tests/unit)")
    said = parser.parse_args()
    results = {}
    pythons = found(said.pythons or candidates())
    if said.newest:
        newest = max(pythons)
        pythons = {} if newest == sys.version_info[:2] else {newest: pythons[newest]}
    for kind, python in pythons.items():
        name = ".".join(map(str, kind))
        print(f"── Python {name}: {python}", flush=True)
        inside = prepared(python, kind)
        if inside is None:
            results[name] = "a dependency could not be installed"
            continue
        command = [inside, "-m", "pytest", "-q", *said.suites.split(",")]
        done = subprocess.run(command, cwd=REPOSITORY)
        results[name] = "passed" if done.returncode == 0 else "failed"
    for name, result in results.items():
        print(f"Python {name}: {result}")
    asked = bool(said.pythons)
    bad = [r for r in results.values() if r == "failed" or (asked and r != "passed")]
    return len(bad) if results or said.newest else 1


if __name__ == "__main__":
    sys.exit(main())
