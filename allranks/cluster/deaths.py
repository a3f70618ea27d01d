"""How ranks died, told in words: which one, of what, and what it said last."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from allranks.cluster.failures import DEATH, ending
from allranks.errors import Report
from allranks.records.ranks import label
from allranks.records.requests import end_of
from allranks.records.wire import Hello

_OTHERS_SECONDS = 1.0
#: For what the others still have to say, once it is known which rank died of itself.
_KNOWN_SECONDS = 0.2
_SHOWN_LINES = 12
_LAST_LINES, _LAST_CHARACTERS = 3, 300
_SHOWN_NBYTES = 16 * 1024


@dataclass(frozen=True)
class End:
    """The end of a rank, of the launcher (rank -1) or of the nursery (rank -2).

    Of several nurseries, the ``host`` is named, and ``why`` nothing of the cluster is left there.
    ``memory`` says of a rank that was killed whether memory was short.
    """

    rank: int
    code: int
    by_launcher: bool
    at: float = field(default_factory=time.monotonic)
    host: str = ""
    why: str = ""
    memory: str = ""
    pid: int = 0

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
            memory=fields.get("memory", ""),
            pid=fields.get("pid", 0),
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
        return f"Rank {end.rank} {ending(end.code, end.memory)}."
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
        said = tail(os.path.join(log_dir, f"rank-{end.rank}.log"))
        if said:
            return f"Its last lines:\n{said}"
    said = "\n".join(launcher_text.strip().splitlines()[-_SHOWN_LINES:])
    said = said or tail(os.path.join(log_dir, "nursery.log"))
    return f"The launcher's last lines:\n{said}" if said else ""


def stuck(log_dir: str, missing: Iterable[int]) -> str:
    """Returns where ranks are that have not come up, as their logs tell; empty where none does."""
    lines = []
    for rank in missing:
        path = os.path.join(log_dir, f"rank-{rank}.log")
        # All threads of it, each with its innermost call on top; the main thread comes last.
        *_, last = unseen(path, 0).split("(most recent call first):\n")
        place = last.splitlines()[0].strip() if last.startswith("  File ") else ""
        if place:
            lines.append(f"Rank {rank} is at {place}")
        elif not length(path):
            lines.append(f"Rank {rank} has written nothing: its log is empty or missing")
    return "\n".join(lines[:_SHOWN_LINES])


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
        what += ending(found[0].code, found[0].memory)
        others = [rank for rank in range(size) if rank != hello.rank]
        verb = "was" if len(others) == 1 else "were"
        what += f"; {label(others)} {verb} killed with it" if others else ""
        said = "" if shown else last_lines(log_dir, ends, "")
    else:
        what = f"{describe(ends).removesuffix('.')}; the ranks ended with it"
        said = last_lines(log_dir, ends, launcher_text)
    parts = [f"{what}, and {lost} lost.", said]
    parts.append(f"The next cell starts a fresh cluster. The logs are in {log_dir}")
    return "\n".join(filter(None, parts))


def how(end: End, line: str, words: str) -> str:
    """Returns how a rank died, in words that follow its name: of what, where, its last words."""
    where = f", last seen at {line}" if line else ""
    said = words.splitlines()[-_LAST_LINES:]
    last = f"; its last lines: {' │ '.join(said)[-_LAST_CHARACTERS:]}" if said else ""
    return f"{ending(end.code, explain=False)}{where}{last}"


def report(end: End, hello: Hello, line: str, words: str) -> Report:
    """Returns the report of a cell on a rank that died in it, and its last words."""
    number, _, source = line.partition("  ")
    where = number.rpartition(":")[2]
    return Report(
        rank=end.rank,
        host=hello.host,
        device=hello.device,
        etype=DEATH,
        message=ending(end.code, explain=False),  # the traceback explains the signal
        traceback=(
            f"pid {hello.pid} {ending(end.code, end.memory)}. The log is {hello.log}",
            *([f"Its last lines:\n{words}"] if words and end.code < 0 else []),
        ),
        line=int(where) if where.isdigit() else None,
        source_line=source.strip(),
        waiting=False,
    )


def unseen(path: str, offset: int) -> str:
    """Returns what a rank wrote and did not get to send, at most its last 16 KiB."""
    try:
        return end_of(path, _SHOWN_NBYTES, offset)
    except OSError:
        return ""  # the log is on another host


def length(path: str) -> int:
    """Returns how long a log is; 0 where it is on another host."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def tail(path: str, offset: int = 0) -> str:
    """Returns the last lines of a log, of what stands behind ``offset``."""
    return "\n".join(unseen(path, offset).strip().splitlines()[-_SHOWN_LINES:])
