"""What a line asks of a cluster: behind a cell's magic, an ensemble's, or a command."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import dataclass, fields
from keyword import iskeyword
from typing import Any, TypeVar

from allranks.cluster import launchers
from allranks.cluster.cluster import Cluster
from allranks.errors import UsageError
from allranks.records.config import EVERY_GPU

Parsed = TypeVar("Parsed")
AnyCluster = TypeVar("AnyCluster", bound=Cluster)

#: The options that take a value, by their fields.
TYPED = {"n": "-n", "gpus": "--gpus", "launcher": "--on", "preload": "--preload"}


def check_out(name: str | None, example: str) -> None:
    """Says whether a value can be left under a name.

    Raises:
        UsageError: it is no name of a variable.
    """
    if name is not None and (not name.isidentifier() or iskeyword(name)):
        raise UsageError(
            f"expected the name of a variable after -o, found {name!r}. "
            f"Type for example: -o {example}"
        )


@dataclass(frozen=True)
class ClusterOptions:
    """What is asked of a cluster; None where nothing is said.

    ``n`` is the number of ranks, ``launcher`` the name of what starts them, ``preload`` the names
    of modules with commas between; where ``exclusive``, each rank needs a GPU of its own.
    """

    n: int | None = None
    gpus: str | None = None
    launcher: str | None = None
    preload: str | None = None
    exclusive: bool = False

    def over(self, before: ClusterOptions) -> ClusterOptions:
        """Returns the same, with what was asked ``before`` where nothing is said now."""
        # Other hosts have room for other numbers of ranks.
        same = self.launcher in (None, before.effective("launcher"))
        return ClusterOptions(
            before.n if self.n is None and same else self.n,
            self.gpus or before.gpus,
            self.launcher or before.launcher,
            before.preload if self.preload is None else self.preload,
            self.exclusive,
        )

    def effective(self, name: str) -> int | str | None:
        """Returns the value of an option of :data:`TYPED`, or what stands for it if left out."""
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
        return [*map(str, words), *(["--exclusive"] if self.exclusive else [])]

    def make(self, kind: type[AnyCluster] = Cluster) -> AnyCluster:  # type: ignore[assignment]
        """Returns such a cluster of this class, not started.

        Raises:
            UsageError: there can be none here.
            MissingDependency: a module to preload is not installed.
        """
        return kind(
            self.n,
            gpus=self.gpus,
            launcher=self.launcher,
            preload=self.preload or (),
            exclusive=self.exclusive,
        )

    @staticmethod
    def parse(parser: argparse.ArgumentParser, words: list[str], into: Parsed) -> Parsed:
        """Parses words; what the launcher among them takes for itself goes with its name."""
        parsed, more = parser.parse_known_args(words, namespace=into)
        launcher = getattr(parsed, "launcher", None)
        if more and not launchers.takes_options(launcher):
            parser.error(f"unrecognized arguments: {' '.join(more)}")
        if more:
            setattr(parsed, "launcher", f"{launcher} {shlex.join(more)}")  # noqa: B010
        return parsed

    @staticmethod
    def add_to(parser: argparse.ArgumentParser) -> None:
        """Has a parser read these options, each into the attribute of its field."""
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
            "--preload", metavar="MODULES", help="import these once, before the ranks are forked"
        )

    @classmethod
    def take_from(cls, parsed: dict[str, Any]) -> ClusterOptions:
        """Returns the options that a parser has read, and removes them from ``parsed``."""
        return cls(**{field.name: parsed.pop(field.name) for field in fields(cls)})
