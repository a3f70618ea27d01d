"""Named places: what an administrator, or a user, has written down once in ``allranks.toml``.

Each table is a place, and says what ``--on`` would be, and what its ranks find in their
environment:

    [gpu-node]
    on = "slurm --partition gpu --gpus-per-node 4 --nodes 1 --ntasks-per-node 4"
    about = "one node with four GPUs"
    environment = { NCCL_SOCKET_IFNAME = "ib0" }
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from typing import Any

from allranks.errors import UsageError

#: Names another file, instead of all others.
SITES = "ALLRANKS_SITES"
#: What ``--on`` knows by itself: no place can have such a name.
BUILT_IN = ("local", "ssh", "slurm", "pbs", "lsf")
_FILE = "allranks.toml"
_KEYS = {"on": str, "about": str, "environment": dict}


@dataclass(frozen=True)
class Site:
    """A named place, and the file that it stands in."""

    name: str
    on: str
    file: str
    about: str = ""
    environment: dict[str, str] = field(default_factory=dict)


def files() -> list[str]:
    """Returns where places may be written down; what stands in an earlier file counts."""
    named = os.environ.get(SITES)
    if named:
        return [named]
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    folders = os.path.join(home, "allranks"), os.path.join(sys.prefix, "etc"), "/etc/allranks"
    return [os.path.join(folder, _FILE) for folder in folders]


def unreadable() -> list[str]:
    """Returns the files that this user may not read, and that are passed over."""
    return [path for path in files() if _may_not_read(path)]


def _may_not_read(path: str) -> bool:
    try:
        open(path, "rb").close()
    except PermissionError:
        return True
    except OSError:
        pass  # whoever looks for a place in it says so
    return False


def sites() -> dict[str, Site]:
    """Returns the places by their names; files that this user may not read are passed over.

    Raises:
        UsageError: a file cannot be read, or says what nobody understands.
    """
    import tomllib  # to load the extension does not take it

    found: dict[str, Site] = {}
    for path in files():
        try:
            with open(path, "rb") as text:
                tables = tomllib.load(text)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            continue
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise UsageError(
                f"expected named places in {path}, found {error}. Correct that file"
            ) from error
        for name, table in tables.items():
            found.setdefault(name, _site(path, name, table))
    return found


def _site(path: str, name: str, table: Any) -> Site:
    if name in BUILT_IN:
        raise UsageError(
            f"expected a name of its own for every place in {path}, found [{name}], which is a "
            "launcher's. Give the place another name"
        )
    if not isinstance(table, dict) or not isinstance(table.get("on"), str):
        raise UsageError(
            f"expected a table for every place in {path}, found {name}. Write for example: "
            f'[{name}] and below it: on = "slurm --partition gpu"'
        )
    for key, value in table.items():
        if not isinstance(value, _KEYS.get(key, ())):
            raise UsageError(
                f"expected {', '.join(_KEYS)} under [{name}] in {path}, found {key} = {value!r}. "
                "Correct it"
            )
    environment = {key: str(value) for key, value in table.get("environment", {}).items()}
    return Site(name, table["on"], path, table.get("about", ""), environment)
