"""What may come of a step, and whether what came of it is true."""

from __future__ import annotations

import re
import time

from tests.fuzz.grammar import Case, check
from tests.fuzz.ranks import PROBE, numbers, unfold
from tests.fuzz.sessions import Ended, Session

_LATE_SECONDS = 30.0
_HIDDEN = re.compile(r"… ([\d,]+) lines .* are not shown")
_SAID_LOST = re.compile(r"variables .{0,60}(is|are) lost", re.DOTALL)
_REPLACED = re.compile(r"ranks? (\d[\d, –]*) (?:was|were) replaced and ha(?:s|ve) no variables")
_FAILED = ("CellFailed", "CellInterrupted", "CellTimeout")


def judge(case: Case, ended: Ended, session: Session, step: int) -> None:
    """Raises where a cell did not end as it may, or not as is said of it.

    Raises:
        Fault: it did not.
    """
    ran = set(case.ranks if case.ranks is not None else range(session.size))
    may = (*case.ends, "RankDied") if "ClusterLost" in case.ends else case.ends
    _check(ended.how in may, "end", f"{may}, found {ended.how}", ended)
    for part in case.says if ended.how != "ok" or case.ends == ("ok",) else ():
        _check(part in ended.text, "words", f"the words {part!r}", ended)
    wrong = any(etype == "WrongResult" for _, etype, _ in ended.reports)
    _check(not wrong, "wrong result", "right results", ended)
    if case.begins:
        _check_ranks(case, ended, ran, session.witness.heard("reached", step))
        _check_output(case, ended, session, step)
    if case.failed is not None and ended.how in _FAILED:
        failed = {rank: etype for rank, etype, waiting in ended.reports if not waiting}
        _check(failed == dict(case.failed), "blame", f"{dict(case.failed)}, found {failed}", ended)
    if case.values is not None and ended.how == "ok":
        _check(ended.values == list(case.values), "values", f"{case.values}", ended)
    if case.shows is not None:
        rich, rank = case.shows
        labels = [label for shown, label in ended.bundles if rich in shown]
        missing = ended.bundles or ended.how != "ok"
        _check(bool(labels) or not missing, "display", f"{rich} of {rank}", ended)
        for label in labels[:1]:
            of = set(map(int, re.findall(r"\d+", label)))
            _check(of == {rank}, "label", f"{rich} of {rank}: {label}", ended)


def _check_ranks(case: Case, ended: Ended, ran: set[int], reached: set[int]) -> None:
    """A rank that has not reached its last line is never said to have finished."""
    told = {rank for rank, *_ in ended.reports}
    if ended.how == "ok":
        _check(reached == ran, "lie", f"ranks {ran - reached} to have failed, found ok", ended)
    elif ended.how in _FAILED and ended.reports:
        silent = ran - reached - told
        _check(not silent, "lie", f"a report of ranks {silent}, found one of {told}", ended)
        blamed = told & reached
        may = case.after_end or case.presses or case.timeout
        _check(bool(may) or not blamed, "lie", f"ranks {blamed} to have finished", ended)


def _check_output(case: Case, ended: Ended, session: Session, step: int) -> None:
    """All that ranks wrote is shown, behind the right ranks and in order, or counted."""
    said = unfold(ended.text)
    began, reached = (session.witness.heard(word, step) for word in ("began", "reached"))
    # An interrupt may come between the witness and the line.
    if not case.presses and not case.timeout:
        for rank in began:
            _check(f"begin {step} of {rank}" in said.get(rank, ()), "output", "its begin", ended)
    for rank in reached if case.speaks and ended.how == "ok" else ():
        _check(f"end {step} of {rank}" in said.get(rank, ()), "output", "its end", ended)
    for rank, lines in said.items():
        for line in lines:
            owner = re.fullmatch(rf"(?:begin|end) {step} of (\d+)|line {step} (\d+) \d+", line)
            if owner is not None:
                of = int(owner[1] or owner[2])
                _check(of == rank, "label", f"{line!r} of rank {of}, found of {rank}", ended)
    if case.lines and ended.how == "ok":
        _check_lines(case, ended, said, step)


def _check_lines(case: Case, ended: Ended, said: dict[int, list[str]], step: int) -> None:
    ranks = case.ranks if case.ranks is not None else sorted(said)
    shown = 0
    for rank in ranks:
        text = "\n".join(said.get(rank, ()))
        found = [int(n) for n in re.findall(rf"^line {step} {rank} (\d+)$", text, re.M)]
        _check(found == sorted(set(found)), "order", f"the lines of rank {rank} in order", ended)
        shown += len(found)
    hidden = sum(int(count.replace(",", "")) for count in _HIDDEN.findall(ended.text))
    total = case.lines * len(ranks)
    # Lines that several ranks share are not counted here, so that hidden ones are at least these.
    right = shown + hidden >= total if hidden else shown == total
    _check(right, "lost output", f"{total} lines, found {shown} + {hidden}", ended)


def follow(case: Case, ended: Ended, session: Session, step: int, n: int) -> None:
    """Runs the cell whose result is known; sets the ranks up again where that was allowed.

    What that cell shows is added to what the step has shown.

    Raises:
        Fault: its result is another one, or variables are lost that are not said to be, or kept
            that are said to be lost.
    """
    if case.forgets:
        session.restart(session.size)
        session.set_up()
        return
    said_lost = bool(_SAID_LOST.search(ended.text)) or ended.how == "ClusterLost"
    session.revive()
    if _replaced(ended, session):
        session.set_up()
        probe(session, step, n)
        return
    # What is put right below it may still be in force: a replaced print, for one.
    found = _probed(session, step, n, case.speaks or not case.undo)
    forgotten = {value is None for value in found.values}
    _check(len(forgotten) == 1, "kept", f"all or nothing: {found.values}", ended)
    kept = forgotten == {False}
    if not kept:
        _check(case.lost is not False, "kept", "variables that are kept, found none", ended)
        session.set_up()
        found = _probed(session, step, n)
    _check(said_lost != kept, "lie", f"what is said of variables, found kept: {kept}", ended)
    _check(not kept or case.lost is not True, "kept", "the variables to be lost", ended)
    ended.text += found.text
    _check_probe(found, session)


def _replaced(ended: Ended, session: Session) -> bool:
    """Returns whether some ranks are new, and others not; the new ones are said to be."""
    if not session.heals:
        return False
    kept = session.cell("'_probe' in globals()", wants_values=True)
    ended.text += kept.text  # a late line may be shown by this cell
    new = {rank for rank, has in enumerate(kept.values) if not has}
    said = {rank for found in _REPLACED.findall(ended.text) for rank in numbers(found)}
    _check(new == said or len(new) == session.size, "lie", f"{said} to be new: {new}", ended)
    return 0 < len(new) < session.size


def probe(session: Session, step: int, n: int) -> None:
    """Runs the cell whose result is known, which computes with ``n`` numbers.

    Raises:
        Fault: it fails, is silent, or its result is another one.
    """
    _check_probe(_probed(session, step, n), session)


def _probed(session: Session, step: int, n: int, speaks: bool = True) -> Ended:
    found = session.cell(PROBE.format(n=n, step=step), wants_values=True)
    right = found.how == "ok" and len(found.values) == session.size
    check(right, "next cell", f"the one after it: {found.how}\n{found.text}")
    said = unfold(found.text)
    for rank, value in enumerate(found.values) if speaks else ():
        heard = value is None or f"probe {step} of {rank}" in said.get(rank, ())
        check(heard, "silence", f"expected the next cell's line of rank {rank}\n{found.text}")
    return found


def _check_probe(found: Ended, session: Session) -> None:
    session.steps += 1
    size, total = session.size, sum(range(1, session.size + 1))
    expected = [
        (rank, size, session.pids[rank], rank, session.steps, True, total) for rank in range(size)
    ]
    right = list(map(tuple, found.values)) == expected
    check(right, "known result", f"expected {expected}, found {found.values}\n{found.text}")


def await_late(case: Case, ended: Ended, session: Session, step: int) -> None:
    """Waits until lines that are written when their cell has ended are shown, by a later cell.

    Raises:
        Fault: they are not, or under another rank's name.
    """
    said = unfold(ended.text)
    deadline = time.monotonic() + _LATE_SECONDS
    while True:
        wrong = [
            rank
            for rank in range(session.size)
            if [line for line in said.get(rank, ()) if line.startswith(f"late {step} {rank} ")]
            != [f"late {step} {rank} {i}" for i in range(case.late)]
        ]
        if not wrong:
            return
        text = f"expected {case.late} lines of ranks {wrong}: {said}"
        check(time.monotonic() < deadline, "late output", text)
        time.sleep(0.05)
        for rank, lines in unfold(session.cell("None").text).items():
            said.setdefault(rank, []).extend(lines)


def _check(holds: bool, kind: str, expected: str, ended: Ended) -> None:
    text = ended.text
    shown = text if len(text) < 4000 else f"{text[:2000]}\n⋮\n{text[-2000:]}"
    check(holds, kind, f"expected {expected}\nreports {ended.reports}\n{shown}")
