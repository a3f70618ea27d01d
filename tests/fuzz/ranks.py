"""What the ranks are given beside a statement: a witness, and a cell whose result is known."""

from __future__ import annotations

import re
from pathlib import Path

from tests.fuzz.grammar import Case

SETUP = """
import os, sys, time
import numpy as np

def _make(folder, rank, size, allreduce, Sum, comm, np, os):
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    descriptor = os.open(f"{{folder}}/{{rank}}", flags, 0o600)
    write, getpid, pid = os.write, os.getpid, os.getpid()
    # What a cell may replace by its name is looked up before.
    show, of_all_ranks = print, sum(range(size))

    def witness(word, step):
        # Past everything that a cell may have replaced; a child is no witness of its parent.
        if getpid() == pid:
            write(descriptor, f"{{word}} {{step}}\\n".encode())

    def probe(kept, n, step, np=np):
        kept["steps"] += 1
        total = allreduce(np.arange(float(n)) + rank, op=Sum)
        right = np.array_equal(total, np.arange(float(n)) * size + of_all_ranks)
        lot = comm.allreduce(rank + 1)
        show(f"probe {{step}} of {{rank}}")
        return rank, size, getpid(), kept["rank"], kept["steps"], bool(right), int(lot)

    def right(got, expected, what):
        got, expected = np.asarray(got), np.asarray(expected)
        if got.dtype != expected.dtype or not np.array_equal(got, expected):
            raise WrongResult(f"{{what}}: expected {{expected!r:.200}}, found {{got!r:.200}}")

    return witness, probe, right

class WrongResult(Exception):
    pass

kept = {{"rank": rank, "steps": 0}}
_witness, _probe, _right = _make({folder!r}, rank, size, allreduce, Sum, comm, np, os)
float(allreduce(np.ones(100_000), op=Sum)[0])  # what is made once is made now
"""
PROBE = "_probe(kept, {n}, {step}) if '_probe' in globals() else None"


def cell(case: Case, step: int, before: str) -> str:
    """Returns a case's whole source: witnesses on top and below, right statements before it."""
    if not case.begins:
        return case.source
    head = f'_witness("began", {step}); print("begin {step} of", rank)'
    tail = f'print("end {step} of", rank); _witness("reached", {step})'
    return "\n".join(filter(None, [head, before, case.source, tail, case.last])) + "\n"


class Witness:
    """What ranks wrote past their cells: how far each came.

    Args:
        folder: where a file a rank is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def heard(self, word: str, step: int) -> set[int]:
        """Returns the ranks that said a word in a step."""
        return {
            int(path.name)
            for path in self.folder.iterdir()
            if f"{word} {step}" in path.read_text().splitlines()
        }


_ROW = re.compile(r"^(?:ranks? (?P<ranks>\d[\d–, ]*?) +| +)(?P<mark>[│!→·])(?: (?P<text>.*))?$")


def unfold(text: str) -> dict[int, list[str]]:
    """Returns what each rank has written on standard output, as labelled text shows it."""
    said: dict[int, list[str]] = {}
    ranks: tuple[int, ...] = ()
    for line in text.splitlines():
        row = _ROW.match(line)
        if row is None:
            continue
        if row["ranks"]:
            ranks = numbers(row["ranks"])
        if row["mark"] == "│":
            for rank in ranks:
                said.setdefault(rank, []).append(row["text"] or "")
    return said


def numbers(text: str) -> tuple[int, ...]:
    """Returns the numbers of a label or an option, as 0, 2 and 3 of ``0, 2–3`` or ``0,2-3``."""
    found: list[int] = []
    for part in text.replace(" ", "").replace("-", "–").split(","):
        first, _, last = part.partition("–")
        found.extend(range(int(first), int(last or first) + 1))
    return tuple(found)
