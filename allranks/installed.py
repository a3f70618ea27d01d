"""What other distributions add to allranks: their entry points, and how to install them. Standard
library only.

Notebooks and scripts also import modules from the folder where they run. Metadata there must not
make allranks import anything by itself, so only the folders of the environment count. Those are
what Python makes of its own settings: folders for installations, ``.pth`` files and ``PYTHONPATH``.
What code adds to ``sys.path``, in ``sitecustomize``, in an ``import`` line of a ``.pth`` file or
in a cell, does not count, because these cannot be distinguished. ``PYTHONPATH`` makes it count.
"""

from __future__ import annotations

import importlib.metadata
import os
import site
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

#: Packages that an extra of allranks installs, with what they need there.
_EXTRAS = {"tensorflow": "allranks[tensorflow]", "keras": "allranks[tensorflow]"}


def pip_install(package: str) -> str:
    """Returns the command that installs a package."""
    return f"pip install '{_EXTRAS.get(package, package)}'"


def entry_points(group: str) -> list[importlib.metadata.EntryPoint]:
    """Returns the entry points of a group, of distributions in the environment's own folders."""
    own = set(map(os.path.realpath, _folders()))
    path = [each for each in sys.path if each and os.path.realpath(each) in own]
    found: list[importlib.metadata.EntryPoint] = []
    names = set[str]()
    for distribution in importlib.metadata.distributions(path=path):
        entries = [entry for entry in distribution.entry_points if entry.group == group]
        # Of a distribution that is there twice, Python imports the first one.
        if entries and distribution.name not in names:
            names.add(distribution.name)
            found += entries
    return found


def _folders() -> Iterator[str]:
    """Yields where Python looks for distributions, whatever the current folder is."""
    installed = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    installed += site.getsitepackages()
    if site.ENABLE_USER_SITE:
        installed.append(site.getusersitepackages())
    for folder in dict.fromkeys(installed):
        yield folder
        yield from _named_in(folder)
    if not sys.flags.ignore_environment:
        yield from filter(os.path.isabs, os.environ.get("PYTHONPATH", "").split(os.pathsep))


def _named_in(folder: str) -> Iterator[str]:
    # The sources of distributions that are installed for development.
    for file in Path(folder).glob("*.pth"):
        try:
            lines = file.read_text("utf-8", "replace").splitlines()
        except OSError:
            continue
        for line in lines:
            if line.strip() and not line.startswith(("#", "import ", "import\t")):
                yield os.path.join(folder, line.rstrip())
