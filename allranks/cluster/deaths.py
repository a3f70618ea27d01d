"""How ranks died, told in words: which one, of what, and what it said last."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from allranks.cluster.failures import ending
from allranks.records.log import end_of
from allranks.records.ranks import label
from allranks.records.wire import Hello

_OTHERS_SECONDS = 1.0
#: For what the others still have to say, once it is known which rank died of itself.
_KNOWN_SECONDS = 0.2
_SHOWN_LINES = 12
_SHOWN_NBYTES = 16 * 1024


@dataclass(frozen=True)
class End:
    """The end of a rank, of the launcher (rank -1) or of the nursery (rank -2).

    Of several nurseries, the ``host`` is named, and ``why`` nothing of the cluster is left there.
    """

    rank: int
    code: int
    by_launcher: bool
    at: float = field(default_factory=time.monotonic)
    host: str = ""
    why: str = ""

    @classmethod
    def of(cls, name: str, fields: Mapping[str, Any]) -> End:
        """Returns the end that a nursery's event tells."""
        rank = {"exit": fields.get("rank", -3), "launcher_exit": -1}.get(name, -2)
        return cls(
            rank,
            fields.get("code", 0),
            fields.get("by_launcher", False),
            host=fields.get("host", ""),
            why=fields.get("why", ""),
        )


def culprits(ends: Sequence[End]) -> list[End]:
    """Returns the ranks that died of themselves: the launcher ended the others for it."""
    return [end for end in ends if end.rank >= 0 and not end.by_launcher][:1]


def all_over(ends: Sequence[End], size: int) -> bool:
    """Whether no more is to be expected: all ranks have ended, or time enough has passed."""
    if not ends:
        return False
    ended = {end.rank for end in ends}
    patience = _KNOWN_SECONDS if culprits(ends) else _OTHERS_SECONDS
    return len(ended - {-1}) >= size or -2 in ended or time.monotonic() - ends[0].at > patience


def describe(ends: Sequence[End]) -> str:
    """Returns what ended first, in a sentence; empty where nothing has ended."""
    for end in culprits(ends):
        return f"Rank {end.rank} {ending(end.code)}."
    for end in sorted(ends, key=lambda end: not end.why):
        if end.why:
            return f"Host {end.host} {end.why}."
        what = {-1: "The launcher", -2: "The cluster's own process"}.get(
            end.rank, f"Rank {end.rank}"
        )
        return f"{what} {ending(end.code)}."
    return "No process has ended; the start took too long."


def last_lines(log_dir: str, ends: Sequence[End], launcher_text: str) -> str:
    """Returns the last lines of the rank that died, else of the launcher and the nursery."""
    for end in culprits(ends):
        said = _tail(os.path.join(log_dir, f"rank-{end.rank}.log"))
        if said:
            return f"Its last lines:\n{said}"
    said = "\n".join(launcher_text.strip().splitlines()[-_SHOWN_LINES:])
    said = said or _tail(os.path.join(log_dir, "nursery.log"))
    return f"The launcher's last lines:\n{said}" if said else ""


def loss(
    ends: Sequence[End],
    hellos: Mapping[int, Hello],
    launcher_text: str,
    size: int,
    shown: bool,
    cause: str = "",
) -> str:
    """Returns what died, where, of what, its last lines unless shown, and what is lost with it.

    Where the job of all ranks was ended, that is the ``cause``.
    """
    found = culprits(ends)
    log_dir = os.path.dirname(next(iter(hellos.values())).log)
    lost = f"the variables of all {size} ranks are" if size > 1 else "its variables are"
    said = ""
    if cause:
        what = f"{cause}; the ranks ended with it"
    elif found:
        hello = hellos[found[0].rank]
        what = f"rank {hello.rank} ({hello.host}, pid {hello.pid}, {hello.device}) "
        what += ending(found[0].code)
        others = [rank for rank in range(size) if rank != hello.rank]
        what += f"; MPI ended {label(others)} with it" if others else ""
        said = "" if shown else last_lines(log_dir, ends, "")
    else:
        what = f"{describe(ends).removesuffix('.')}; the ranks ended with it"
        said = last_lines(log_dir, ends, launcher_text)
    parts = [f"{what}, and {lost} lost.", said]
    parts.append(f"The next cell starts a fresh cluster. The logs are in {log_dir}")
    return "\n".join(filter(None, parts))


def unseen(path: str, offset: int) -> str:
    """Returns what a rank wrote and did not get to send, at most its last 16 KiB."""
    try:
        return end_of(path, _SHOWN_NBYTES, offset)
    except OSError:
        return ""  # the log is on another host


def _tail(path: str) -> str:
    return "\n".join(unseen(path, 0).strip().splitlines()[-_SHOWN_LINES:])
