"""Which launchers there are, and what a name after ``--on`` means.

It is a launcher's name, or the name of a place: what an administrator, or a user, has written once
in ``allranks.toml``. Each table there is a place, with what ``--on`` stands for, and variables for
its ranks:

    [gpu-node]
    on = "slurm --partition gpu --gpus-per-node 4 --nodes 1 --ntasks-per-node 4"
    about = "one node with four GPUs"
    environment = { NCCL_SOCKET_IFNAME = "ib0" }

A table with a command that reaches hosts is a launcher: ``--on pods:ranks-0:4,ranks-1:4``.

    [pods]
    reach = "kubectl exec -i {host} --"
"""

from __future__ import annotations

import importlib
import os
import shlex
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from allranks import installed
from allranks.cluster.launchers.command import CommandLauncher
from allranks.cluster.launchers.launcher import LocalLauncher, MultiHostLauncher
from allranks.errors import AllranksError, UsageError

AnyLauncher = LocalLauncher | MultiHostLauncher

#: In the order in which they are listed. A module is imported when its launcher is named.
BUILT_IN = {
    "local": "allranks.cluster.launchers.launcher:LocalLauncher",
    "ssh": "allranks.cluster.launchers.command:SshLauncher",
    "slurm": "allranks.cluster.launchers.slurm:SlurmLauncher",
    "pbs": "allranks.cluster.launchers.pbs_lsf:PbsLauncher",
    "lsf": "allranks.cluster.launchers.pbs_lsf:LsfLauncher",
    "dask": "allranks.cluster.launchers.ray_dask:DaskLauncher",
    "ray": "allranks.cluster.launchers.ray_dask:RayLauncher",
}
#: The entry points by which other distributions add theirs, in the same form.
GROUP = "allranks.launchers"

#: Names another file, instead of all others.
SITES = "ALLRANKS_SITES"
_FILE = "allranks.toml"
_KEYS = {"on": str, "reach": str, "about": str, "environment": dict}


def default() -> str:
    for name, value in BUILT_IN.items():
        if _load(value).is_default(os.environ):
            return name
    return "local"


def takes_options(name: str | None) -> bool:
    """Whether a launcher, or a named place, has options of its own: a batch system's.

    True for an unknown name: `named` refuses it, and lists the launchers.
    """
    _, kind, _, _ = _resolve(name or "local")
    return kind is None or kind.takes_options


def named(name: str) -> AnyLauncher:
    """Returns the launcher, or that of the named place, with the options after the name."""
    environment, kind, where, options = _resolve(name)
    if (
        kind is None
        or (where is None and kind.takes_where and not kind.where_is_optional)
        or (where is not None and not kind.takes_where)
        or (options and not kind.takes_options)
    ):
        reaching = [place.launcher for place in places().values() if place.launcher is not None]
        kinds = [*available().values(), *reaching]
        known = [one.example or f"--on {one.name}" for one in kinds]
        lines = [
            f"expected a launcher, found {name!r}. Available: {', '.join(known)}. "
            "To see what can be used here: %distributed launchers"
        ]
        lines += [f"{path} was not read: permission denied" for path in unreadable()]
        raise UsageError("\n".join([*lines, *left_out().values()]))
    made = kind(where or "", options)
    if isinstance(made, MultiHostLauncher):
        made.place_environment = environment
    return made


def _resolve(
    name: str,
) -> tuple[Mapping[str, str], type[AnyLauncher] | None, str | None, list[str]]:
    """Returns variables for the ranks, the launcher, what follows its colon, and its options."""
    first, *options = _words(name)
    # Built-in launchers start even if a file of named places cannot be read.
    known = {} if first.partition(":")[0] in BUILT_IN else places()
    place = known.get(first)
    environment = place.environment if place is not None else {}
    if place is not None and place.on:
        first, *before = _words(place.on)
        options = before + options
    word, colon, where = first.partition(":")
    kind: type[AnyLauncher] | None
    if word in known and known[word].launcher is not None:
        kind, environment = known[word].launcher, known[word].environment | environment
    else:
        kind = find(word)
    return environment, kind, where if colon else None, options


def find(name: str) -> type[AnyLauncher] | None:
    if name in BUILT_IN:
        return _load(BUILT_IN[name])
    return _of_others()[0].get(name)


def available() -> dict[str, type[AnyLauncher]]:
    """Returns the classes of all launchers by their names, the built-in ones first."""
    return {name: _load(value) for name, value in BUILT_IN.items()} | _of_others()[0]


def left_out() -> dict[str, str]:
    """Returns, by launcher, why a launcher of another distribution cannot be loaded."""
    return _of_others()[1]


def _load(value: str) -> type[AnyLauncher]:
    module, _, name = value.partition(":")
    found: type[AnyLauncher] = getattr(importlib.import_module(module), name)
    return found


@cache
def _of_others() -> tuple[dict[str, type[AnyLauncher]], dict[str, str]]:
    """Looks once, in 4 to 50 ms, and only for a name that is neither built in nor a place's."""
    found: dict[str, type[AnyLauncher]] = {}
    problems: dict[str, str] = {}
    for entry in installed.entry_points(GROUP):
        try:
            if entry.name in BUILT_IN or entry.name in found:
                raise TypeError(f"there is another launcher {entry.name}")
            kind = entry.load()
            if not (isinstance(kind, type) and issubclass(kind, MultiHostLauncher | LocalLauncher)):
                raise TypeError(f"{entry.value} is neither a MultiHostLauncher nor a LocalLauncher")
            if getattr(kind, "name", None) != entry.name:
                raise TypeError(f"{entry.value} has no name = {entry.name!r}")
            found[entry.name] = kind
        except Exception as error:
            source = f" of {entry.dist.name}" if entry.dist is not None else ""
            problems[entry.name] = (
                f"expected the launcher {entry.name}{source} to be loadable, found "
                f"{type(error).__name__}: {error}. It is left out: install it again, or remove it"
            )
            warnings.warn(problems[entry.name], stacklevel=2)
    return found, problems


@dataclass(frozen=True)
class Listed:
    """A launcher or a named place, its purpose, and why it cannot be used here, if so."""

    name: str
    about: str
    why_not: str = ""
    is_place: bool = False


def listed() -> list[Listed]:
    found = [
        Listed(name, f"{kind.example}  {kind.about}".strip(), _why_not(kind))
        for name, kind in available().items()
    ]
    for place in places().values():
        about = f"{place.about or place.on or place.reach}  ({place.file})"
        if place.launcher is not None:
            about = f"{place.launcher.example}  {about}"
        found.append(Listed(place.name, about, _why_not(place), is_place=True))
    return found


def _why_not(what: type[AnyLauncher] | NamedPlace) -> str:
    try:
        if isinstance(what, NamedPlace):
            what = what.launcher or type(named(what.name))
        what.check()
    except AllranksError as error:
        return str(error)
    except Exception as error:  # another distribution's code
        return f"its check failed: {type(error).__name__}: {error}"
    return ""


def text() -> str:
    """Returns the list as lines, with an arrow at the default."""
    lines = []
    first = default()
    for one in listed():
        mark = "→" if one.name == first else " "
        lines.append(f"{mark} {one.name:<10} {one.about}")
        if one.why_not:
            lines.append(f"             not available: {one.why_not}")
    lines += [f"  {problem}" for problem in left_out().values()]
    lines += [f"  {path} was not read: permission denied" for path in unreadable()]
    return "\n".join(lines)


def _words(name: str) -> list[str]:
    try:
        words = shlex.split(name)
    except ValueError as error:
        raise UsageError(
            f"expected a launcher, found {name!r}: {error}. Type for example: --on ssh:h1:2,h2:2"
        ) from error
    return words or [""]


@dataclass(frozen=True)
class NamedPlace:
    """A named place, and the file that defines it."""

    name: str
    on: str
    file: str
    about: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    reach: str = ""

    @property
    def launcher(self) -> type[CommandLauncher] | None:
        """The launcher of a table with a command that reaches hosts."""
        if not self.reach:
            return None
        example = f"--on {self.name}:HOST:2,HOST:2"
        own = {"name": self.name, "about": self.about, "example": example, "reach": self.reach}
        return type("CommandLauncher", (CommandLauncher,), own)


def files() -> list[str]:
    """Returns the files that may define places; an earlier file has precedence."""
    named = os.environ.get(SITES)
    if named:
        return [named]
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    folders = os.path.join(home, "allranks"), os.path.join(sys.prefix, "etc"), "/etc/allranks"
    return [os.path.join(folder, _FILE) for folder in folders]


def unreadable() -> list[str]:
    """Returns the files that this user may not read. They are skipped."""
    found = []
    for path in files():
        try:
            open(path, "rb").close()
        except PermissionError:
            found.append(path)
        except OSError:
            pass  # places() reports the problem
    return found


def places() -> dict[str, NamedPlace]:
    """Returns the places by their names; files that this user may not read are skipped."""
    import tomllib  # loading the extension does not need it

    found: dict[str, NamedPlace] = {}
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
            found.setdefault(name, _place(path, name, table))
    return found


def _place(path: str, name: str, table: Any) -> NamedPlace:
    if name in BUILT_IN:
        raise UsageError(
            f"expected a name of its own for every place in {path}, found [{name}], which is a "
            "launcher's. Give the place another name"
        )
    if not isinstance(table, dict) or ("on" in table) == ("reach" in table):
        raise UsageError(
            f"expected a table for every place in {path}, with on or reach, found {name}. Write "
            f'for example: [{name}] and below it: on = "slurm --partition gpu"'
        )
    for key, value in table.items():
        if not isinstance(value, _KEYS.get(key, ())):
            raise UsageError(
                f"expected {', '.join(_KEYS)} under [{name}] in {path}, found {key} = {value!r}. "
                "Correct it"
            )
    reach = table.get("reach", "")
    if "on" not in table and "{host}" not in reach:
        raise UsageError(
            f"expected {{host}} in reach under [{name}] in {path}, found {reach!r}. Write for "
            'example: reach = "docker exec -i {host}"'
        )
    environment = {key: str(value) for key, value in table.get("environment", {}).items()}
    about = table.get("about", "")
    return NamedPlace(name, table.get("on", ""), path, about, environment, reach)
