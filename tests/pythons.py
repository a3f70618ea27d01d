"""Runs tests on every Python that is found, each with an environment of its own.

python tests/pythons.py                                # the unit tests on each from 3.11 on
python tests/pythons.py --suites tests/unit,tests/faults python3.12
python tests/pythons.py --newest                       # on the newest one, unless that runs this
python tests/pythons.py --list python3.12              # this path, and those of the others found

Looks on PATH and among what pyenv and uv have installed; of several of one version it takes the
newest. A Python for which a dependency has no wheel is named, and counts as failed only where it
was asked for.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PLACE = REPOSITORY / ".venv-pythons"
NAMES = [f"python3.{minor}" for minor in range(11, 20)]
INSTALLED = (".pyenv/versions/*/bin/python3", ".local/share/uv/python/*/bin/python3")
#: Of what constraints.txt lists, something has no wheel for a later Python.
CONSTRAINED = (3, 14)
SAYS = "import ensurepip, sys, venv; print(*sys.version_info[:3], sys.executable)"

Version = tuple[int, ...]


def candidates() -> list[str]:
    """Every path at which a Python may be."""
    folders = os.environ.get("PATH", "").split(os.pathsep)
    on_path = [os.path.join(folder, name) for folder in folders for name in NAMES]
    return on_path + [str(path) for pattern in INSTALLED for path in Path.home().glob(pattern)]


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
        if full >= (3, 11):
            newest[full[:2]] = max(newest.get(full[:2], ((), "")), (full, executable.strip()))
    return {kind: newest[kind][1] for kind in sorted(newest)}


def run(python: str, name: str, suites: list[str]) -> str:
    """Returns how the suites have ended in an environment with the tests' packages."""
    print(f"── Python {name}: {python}", flush=True)
    inside = PLACE / name / "bin" / "python"
    if not inside.exists():
        subprocess.run([python, "-m", "venv", inside.parents[1]], check=True)
    pip = [inside, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-compile"]
    wanted = ["--editable", f"{REPOSITORY}[test]"]
    if tuple(map(int, name.split("."))) <= CONSTRAINED:
        wanted += ["--constraint", str(REPOSITORY / "constraints.txt")]
    # What has to be compiled is no wheel, and says little of allranks.
    if subprocess.run([*pip, "--prefer-binary", *wanted]).returncode:
        return "a dependency could not be installed"
    # Its cache would be that of a run on another Python.
    command = [inside, "-m", "pytest", "-q", "-p", "no:cacheprovider", *suites]
    return "failed" if subprocess.run(command, cwd=REPOSITORY).returncode else "passed"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pythons", nargs="*", metavar="PYTHON", help="those; else all there are")
    parser.add_argument("--newest", action="store_true", help="only on the newest, if not on this")
    parser.add_argument("--list", action="store_true", help="only list PYTHON and all there are")
    parser.add_argument("--suites", default="tests/unit", metavar="A,B", help="(tests/unit)")
    said = parser.parse_args()
    if said.list:
        print(*dict.fromkeys(said.pythons + list(found(candidates()).values())[::-1]), sep="\n")
        return 0
    pythons = found(said.pythons or candidates())
    if said.newest:
        newest = max(pythons)
        pythons = {} if newest == sys.version_info[:2] else {newest: pythons[newest]}
    names = {".".join(map(str, kind)): python for kind, python in pythons.items()}
    suites = said.suites.split(",")
    results = {name: run(python, name, suites) for name, python in names.items()}
    for name, result in results.items():
        print(f"Python {name}: {result}")
    asked = bool(said.pythons)
    bad = [r for r in results.values() if r == "failed" or (asked and r != "passed")]
    return len(bad) if results or said.newest else 1


if __name__ == "__main__":
    sys.exit(main())
