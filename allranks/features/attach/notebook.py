"""``%distributed detach``, ``attach`` and others, and a session that does them."""

from __future__ import annotations

from typing import Any

from allranks.cluster import cluster
from allranks.cluster.options import LineCommand
from allranks.errors import UsageError
from allranks.features.attach import sessions
from allranks.features.attach.ownership import Ownership

_TIME = "for example 90s, 30m, 2h or 1d"


class NotebookAttach(Ownership):
    """Leaves the ranks of a notebook to others, and attaches to theirs."""

    commands = frozenset({"session"})
    line_commands = (
        LineCommand(
            "detach-on-exit",
            "keeps the ranks running for a time after the kernel ends: 30m, or off",
            "TIME|off",
            _TIME,
        ),
        LineCommand(
            "detach",
            "leaves the ranks running for a time, or stops watching those of another notebook",
            "TIME",
            _TIME,
        ),
        LineCommand(
            "attach",
            "takes over detached ranks, or watches those of another notebook",
            "NAME",
            "the name of one cluster",
        ),
        LineCommand(
            "clusters",
            "lists your clusters on this machine, and the notebooks that use or watch them",
        ),
    )

    def command(self, name: str, *arguments: Any) -> Any:
        if name == "session":
            # Here: scripts need no magics.
            from allranks.features.attach.shared_session import SharedSession

            return SharedSession(*arguments)
        if name == "clusters":
            return sessions.listing()
        (words,) = arguments
        if len(words) > 1:
            wanted = next(one.words_about for one in self.line_commands if one.name == name)
            raise UsageError(
                f"expected {wanted}, found {' '.join(words)}. Type for example: "
                f"%distributed {name} {words[0]}"
            )
        return getattr(cluster.session, name.replace("-", "_"))("".join(words))


FEATURE = NotebookAttach
