"""Keeps what is installed in an environment, and gives it to other clones on this machine.

    python tests/environments.py keep .venv-mpich constraints.txt tests/mpi/requirements.txt
    python tests/environments.py restore .venv-mpich constraints.txt tests/mpi/requirements.txt

Behind the folder stands what was installed: files, whose content counts, and other words. The
Python counts too. ``restore`` wants an environment that has just been made; it ends with 1 if
nothing was kept for it, or if more than pip is in it.

What is kept has the same files, as hard links: that takes seconds, and no space while a clone has
them. Where links cannot be made nothing is kept. What has not been used for 30 days is removed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

CACHE = "XDG_CACHE_HOME"
_UNUSED_SECONDS = 30 * 24 * 3600
_FROM = "kept-from"
#: What each new environment has, and what stays: stamps, which make touches.
_OWN = ("lib64", "pyvenv.cfg", _FROM, ".made", ".test", ".lab")
_OWN_PROGRAMS = ("python", "activate", "Activate")
_WITH_PIP = ("pip", "setuptools", "pkg_resources", "_distutils_hack", "distutils-precedence")


def place(folder: Path, what: list[str]) -> Path:
    """Returns where an environment of this folder's name, with this in it, is kept."""
    parts = [sys.version, sys.base_prefix, sysconfig.get_platform()]
    parts += [Path(word).read_text() if Path(word).is_file() else word for word in what]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    cache = os.environ.get(CACHE) or Path.home() / ".cache"
    return Path(cache, "allranks-environments", f"{folder.name}-{key}")


def keep(folder: Path, kept: Path) -> None:
    """Keeps an environment, unless such a one is kept already."""
    if kept.exists():
        return
    kept.parent.mkdir(parents=True, exist_ok=True)
    for other in kept.parent.iterdir():
        if other.stat().st_mtime < time.time() - _UNUSED_SECONDS:
            shutil.rmtree(other, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=kept.parent) as new:
        link(folder, Path(new, "kept"))
        Path(new, "kept", _FROM).write_text(str(folder))
        os.rename(Path(new, "kept"), kept)


def restore(folder: Path, kept: Path) -> bool:
    """Fills a new environment with what is kept; returns whether it did."""
    (packages,) = folder.glob("lib/python*/site-packages")
    if any(not path.name.startswith((*_WITH_PIP, "__pycache__")) for path in packages.iterdir()):
        return False
    if not (kept / _FROM).exists():
        return False
    os.utime(kept)
    with tempfile.TemporaryDirectory(dir=folder) as beside:
        new = Path(beside, "new")
        link(kept, new)
        name_clone(new, Path((kept / _FROM).read_text()).parent, folder.parent)
        # The packages last, in one step: without them all the environment counts as new. With the
        # kept pip, since the environment may have another one.
        lib = Path(beside, "lib")
        os.rename(new / "lib", lib)
        shutil.copytree(new, folder, True, copy_function=os.replace, dirs_exist_ok=True)
        os.rename(folder / "lib", Path(beside, "before"))
        os.rename(lib, folder / "lib")
    return True


def link(source: Path, target: Path) -> None:
    """Makes links to all files of an environment but its own."""

    def own(place: str, names: list[str]) -> list[str]:
        if Path(place) == source:
            return [name for name in names if name in _OWN or name.startswith(".gpu-")]
        programs = Path(place) == source / "bin"
        return [name for name in names if programs and name.startswith(_OWN_PROGRAMS)]

    shutil.copytree(source, target, True, own, os.link)


def name_clone(folder: Path, before: Path, after: Path) -> None:
    """Names this clone in the files of an environment, in place of the one that they come from."""
    for path in naming_a_clone(folder):
        content = path.read_bytes()
        if bytes(before) in content and b"\0" not in content:
            mode = path.stat().st_mode
            path.unlink()  # others have this file too
            path.write_bytes(content.replace(bytes(before), bytes(after)))
            path.chmod(mode)


def naming_a_clone(folder: Path) -> Iterator[Path]:
    """The programs, and what an editable installation writes."""
    patterns = (
        "bin/*",
        "lib/*/site-packages/*.pth",
        "lib/*/site-packages/*.dist-info/direct_url.json",
    )
    for pattern in patterns:
        yield from (p for p in folder.glob(pattern) if p.is_file() and not p.is_symlink())


def main(does: str, name: str, *what: str) -> int:
    folder = Path(name).absolute()
    try:
        kept = place(folder, [*what])
        if does == "restore":
            return 0 if restore(folder, kept) else 1
        keep(folder, kept)
    except OSError as error:
        print(f"{does} {name}: {error}. It is installed in each clone.", file=sys.stderr)
        return int(does == "restore")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
