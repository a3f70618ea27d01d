"""What a user asks of a cluster, and the checks of it before anything is sent."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import os
import resource
import shlex
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from keyword import iskeyword
from operator import index
from typing import Any, TypeVar

from IPython.core.inputtransformer2 import TransformerManager

from allranks.cluster import launchers
from allranks.errors import MissingDependency, UsageError
from allranks.installed import pip_install
from allranks.records.config import EVERY_GPU, MAX_RANKS, max_ranks

_PLACE = "rank size local_rank local_size cross_rank cross_size comm MPI device"
_OPERATIONS = """
    init shutdown is_initialized is_homogeneous
    allreduce grouped_allreduce reducescatter grouped_reducescatter reduce
    allgather grouped_allgather gather scatter broadcast alltoall barrier send recv join
    allreduce_async grouped_allreduce_async reducescatter_async grouped_reducescatter_async
    reduce_async allgather_async grouped_allgather_async gather_async scatter_async
    broadcast_async alltoall_async poll synchronize
    broadcast_object allgather_object same_on_all_ranks
    ReduceOp Average Sum Min Max Product Adasum Compression
    ProcessSet global_process_set add_process_set remove_process_set
    empty records timeline keep
"""
#: The names that each rank has in its cells. Listed, because the notebook cannot import the
#: collectives; a test compares the list with what a cell finds.
GIVEN = frozenset(f"{_PLACE} {_OPERATIONS} log".split())


def check_preload(names: str | Sequence[str]) -> tuple[str, ...]:
    """Returns the names of modules that can be imported before the ranks are forked.

    ``names`` may be one text with commas. Raises UsageError for a name that is not a module's,
    MissingDependency for a module that is not installed.
    """
    if isinstance(names, str):
        names = names.split(",") if names else ()
    try:
        chosen = tuple(name.strip() for name in names)
    except (TypeError, AttributeError):
        raise _no_names(names) from None
    for name in chosen:
        if not all(part.isidentifier() for part in name.split(".")):
            raise _no_names(name)
        package = name.partition(".")[0]
        if importlib.util.find_spec(package) is None:
            raise MissingDependency(
                f"expected {package} to preload, found none installed. Type: {pip_install(package)}"
            )
    return chosen


def _no_names(found: object) -> UsageError:
    return UsageError(
        f"expected names of modules, found {found!r}. Type for example: --preload pandas"
    )


_FILE = "<cell>"


def below_magic(magic: str, cell: str) -> str:
    """Returns a cell for the ranks: its magic becomes a comment, which keeps the line numbers.

    A magic below it, as ``%%timeit``, has to be the first line.
    """
    return cell if cell.lstrip().startswith("%%") else f"# {magic}".rstrip() + f"\n{cell}"


def check_source(text: str) -> None:
    """Raises SyntaxError, with the cell's own line numbers; all of IPython's syntax is allowed."""
    transformed = TransformerManager().transform_cell(text)
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    try:
        compile(transformed, _FILE, "exec", flags=flags, dont_inherit=True)
    except (RecursionError, MemoryError) as error:
        reason = str(error) or "too complex to parse"  # Python 3.11 gives no reason
        raise SyntaxError(f"{reason}. Split the long expression into several lines") from None


def explain_syntax(error: SyntaxError, number: int) -> str:
    """Returns the error, its line under it, and that nothing has run."""
    told = "".join(traceback.format_exception_only(error))
    told = told.replace(f'File "{_FILE}"', f"Cell In[{number}]").rstrip()
    return f"the cell was not run on any rank.\n{told}"


def check_timeout(timeout: float | None, name: str = "timeout", link: str = "=") -> None:
    """Raises UsageError unless it is a time limit; ``link`` joins name and value in the text."""
    try:
        fits = timeout is None or timeout > 0
    except TypeError:
        fits = False
    if not fits:
        found = f"{timeout:g}" if isinstance(timeout, float) else repr(timeout)
        raise UsageError(
            f"expected {name} in seconds above 0, found {found}. Type for example: {name}{link}60"
        )


#: The descriptors that the start needs in this process, about; each rank needs two more.
_FILES, _FILES_A_RANK = 24, 2


def check_open_files(size: int) -> None:
    """Raises UsageError if this process may not open the files that the ranks need."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/dev/fd"))
    needed = used + _FILES + _FILES_A_RANK * size
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise UsageError(
            f"expected a limit of {needed} open files or more, found {limit}, of which the "
            f"notebook has opened {used}. Type in the shell that starts it: ulimit -n 4096"
        )


def choose_size(n: int | None, gpus: Sequence[object]) -> int:
    """Returns the number of ranks: by default one per GPU; without GPUs 2 to 4, by the cores."""
    cores = os.cpu_count() or 1
    most = max(128, 16 * cores)
    allowed = max_ranks() or most
    size = min(allowed, len(gpus) or max(2, min(4, cores))) if n is None else n
    try:
        fits = 1 <= index(size) <= most
    except TypeError:
        fits = False
    if not fits:
        raise UsageError(
            f"expected between 1 and {most} ranks on this machine, found {size!r}. "
            f"Type for example: %%distributed -n {min(4, allowed)}"
        )
    return check_allowed(index(size))


def check_allowed(size: int) -> int:
    """Returns the size. Raises UsageError if it is more than ``ALLRANKS_MAX_RANKS``."""
    allowed = max_ranks()
    if allowed is not None and size > allowed:
        raise UsageError(
            f"expected at most {allowed} ranks, as {MAX_RANKS} allows here, found {size}. "
            f"Type for example: %%distributed -n {allowed}"
        )
    return size


Parsed = TypeVar("Parsed")
Made = TypeVar("Made")

#: The options that take a value, by their fields.
TYPED = {"n": "-n", "gpus": "--gpus", "launcher": "--on", "preload": "--preload"}


def check_out(name: str | None, example: str) -> None:
    if name is not None and (not name.isidentifier() or iskeyword(name)):
        raise UsageError(
            f"expected the name of a variable after -o, found {name!r}. "
            f"Type for example: -o {example}"
        )


@dataclass(frozen=True)
class StartOption:
    """An option that a feature adds to the start of ranks: ``--name CHOICE``.

    The chosen value is the value of the environment variable ``variable`` in every rank.
    """

    name: str
    variable: str
    choices: tuple[str, ...]
    help: str

    @cached_property
    def field(self) -> str:
        return f"start_{self.name}"


@dataclass(frozen=True)
class CellOption:
    """An option ``--name`` that a feature adds to ``%%distributed``.

    A cell with it is run by the feature's ``command``, not by the ranks. With ``prepares``, ranks
    run it: ``command(options)``, with a dictionary of those of its options that were given, refuses
    wrong ones before ranks are started, and returns a function that prepares the next cell.
    ``arguments`` are those of argparse's ``add_argument``.
    """

    name: str
    command: str
    arguments: Mapping[str, Any]
    prepares: bool = False

    @cached_property
    def field(self) -> str:
        return f"cell_{self.name}"


CELL_OPTIONS: dict[str, CellOption] = {}
"""The options of features for a cell; `allranks.cluster.features.register` sets them."""

START_OPTIONS: dict[str, StartOption] = {}
"""The options of features, by name; `allranks.cluster.features.register` sets them."""


@dataclass(frozen=True)
class LineCommand:
    """A command that a feature adds: ``%distributed NAME WORDS``.

    ``about`` is its line in the list of commands, ``words`` describes its arguments as in
    ``"RANK"``; without it, arguments are refused. The feature's ``command(name, words)`` returns a
    text to print. With ``arguments``, names and options of argparse's ``add_argument``, it gets a
    dictionary of their values in place of the words; with ``chooses_ranks`` also that of ``-r``.
    """

    name: str
    about: str
    words: str = ""
    words_about: str = ""
    arguments: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    chooses_ranks: bool = False


LINE_COMMANDS: dict[str, LineCommand] = {}
"""The commands of features, by name; `allranks.cluster.features.register` sets them."""


@dataclass(frozen=True)
class ClusterOptions:
    """The options of a cluster; None for one that is left out.

    ``preload`` is the names of modules with commas between; with ``exclusive``, each rank needs a
    GPU of its own. ``settings`` are the options of features: pairs of an option and its value.
    """

    n: int | None = None
    gpus: str | None = None
    launcher: str | None = None
    preload: str | None = None
    exclusive: bool = False
    settings: tuple[tuple[str, str], ...] = ()

    def over(self, before: ClusterOptions) -> ClusterOptions:
        """Returns these options; for those left out, the ones of ``before``."""
        # Other hosts have room for other numbers of ranks.
        same = self.launcher in (None, before.effective("launcher"))
        return ClusterOptions(
            before.n if self.n is None and same else self.n,
            self.gpus or before.gpus,
            self.launcher or before.launcher,
            before.preload if self.preload is None else self.preload,
            self.exclusive,
            tuple({**dict(before.settings), **dict(self.settings)}.items()),
        )

    def effective(self, name: str) -> int | str | None:
        """Returns the value of an option of :data:`TYPED`, or its default if left out."""
        said: int | str | None = getattr(self, name)
        if said is None and name == "launcher":
            return launchers.default()
        if said is None and name == "gpus":
            return EVERY_GPU
        return said

    def words(self) -> list[str]:
        """Returns the words that ask for the same."""
        said = [(option, getattr(self, name)) for name, option in TYPED.items()]
        words = [word for option, value in said if value is not None for word in (option, value)]
        words += [word for name, value in self.settings for word in (f"--{name}", value)]
        return [*map(str, words), *(["--exclusive"] if self.exclusive else [])]

    def make(self, kind: Callable[..., Made]) -> Made:
        """Returns a cluster of the class ``kind`` with these options, not started."""
        return kind(
            self.n,
            gpus=self.gpus,
            launcher=self.launcher,
            preload=self.preload or (),
            exclusive=self.exclusive,
            settings={
                START_OPTIONS[name].variable: value
                for name, value in self.settings
                if name in START_OPTIONS
            },
        )

    @staticmethod
    def parse(parser: argparse.ArgumentParser, words: list[str], into: Parsed) -> Parsed:
        """Parses words; words that the launcher among them accepts go with its name."""
        parsed, more = parser.parse_known_args(words, namespace=into)
        launcher = getattr(parsed, "launcher", None)
        if more and not launchers.takes_options(launcher):
            parser.error(f"unrecognized arguments: {' '.join(more)}")
        if more:
            setattr(parsed, "launcher", f"{launcher} {shlex.join(more)}")  # noqa: B010
        return parsed

    @staticmethod
    def add_to(parser: argparse.ArgumentParser) -> None:
        """Adds these options to a parser, each into the attribute of its field."""
        parser.add_argument(
            "-n", type=int, help="number of ranks; default: one per GPU, or per core"
        )
        parser.add_argument("--gpus", help="the GPUs for the ranks: all, none, 0 or 0,1")
        parser.add_argument(
            "--exclusive", action="store_true", help="fail if ranks would share a GPU"
        )
        parser.add_argument(
            "--on",
            dest="launcher",
            metavar="LAUNCHER",
            help="where the ranks run: local, ssh:h1:2,h2:2, slurm …, a named place",
        )
        parser.add_argument(
            "--preload", metavar="MODULES", help="modules to import once, before the ranks start"
        )
        for option in START_OPTIONS.values():
            parser.add_argument(
                f"--{option.name}", dest=option.field, choices=option.choices, help=option.help
            )

    @classmethod
    def take_from(cls, parsed: dict[str, Any]) -> ClusterOptions:
        """Returns the options that a parser has read, and removes them from ``parsed``."""
        asked = {name: parsed.pop(known.field, None) for name, known in START_OPTIONS.items()}
        settings = tuple((name, value) for name, value in asked.items() if value is not None)
        names = [field.name for field in fields(cls) if field.name != "settings"]
        return cls(**{name: parsed.pop(name) for name in names}, settings=settings)


def unquoted(word: str) -> str:
    quoted = len(word) > 1 and word[0] == word[-1] and word[0] in "\"'"
    return word[1:-1] if quoted else word


def names_first(parser: argparse.ArgumentParser, found: Sequence[str]) -> list[str]:
    """Moves options to the end: before a name, argparse would take it as their value."""
    names: list[str] = []
    options: list[str] = []
    flags = {word for word, one in parser._option_string_actions.items() if one.nargs == 0}
    rest = iter(found)
    for word in rest:
        if not word.startswith("-"):
            names.append(word)
            continue
        options.append(word)
        if word not in flags and "=" not in word and (value := next(rest, None)) is not None:
            options.append(unquoted(value))
    return names + options
