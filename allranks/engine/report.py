"""What a person reads of an exception on one rank: the cell's own lines, and the traceback."""

from __future__ import annotations

import linecache
import os
import socket
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import cast

from allranks.collectives.calls.callsite import LIBRARY, OURS, kind_of
from allranks.errors import RankLeft, Report

_NAME_CHARACTERS = 200
_MESSAGE_CHARACTERS = 2000
_TRACEBACK_CHARACTERS = 20_000
_KEPT_FRAMES = 10
_MOST_CHAINED = 30
#: Stands for what an exception says where it takes too long to say it.
INTERRUPTED_TEXT = "<str() of it was interrupted>"
#: The file of what dataclasses and their like make.
_GENERATED = "<string>"
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def is_a(error: object, kinds: type | tuple[type, ...]) -> bool:
    """Whether an object is of a kind; a user's exception may make ``isinstance`` raise."""
    return issubclass(type(error), kinds)


def has_succeeded(error: BaseException) -> bool:
    """Whether it is a sys.exit() that reports no error: a program that ends so has succeeded."""
    return is_a(error, SystemExit) and vars(SystemExit)["code"].__get__(error) in (None, 0)


def traceback_of(error: BaseException) -> TracebackType | None:
    """Returns where an exception was raised, whatever its class makes of ``__traceback__``."""
    found: TracebackType | None = vars(BaseException)["__traceback__"].__get__(error)
    return found


def cell_line(tb: TracebackType | None, is_cell: str) -> tuple[int | None, str]:
    """Returns the number and text of the innermost line of the cell that a traceback passes."""
    line: tuple[int | None, str] = (None, "")
    for frame, number in traceback.walk_tb(tb):
        if frame.f_code.co_filename == is_cell:
            line = (number, linecache.getline(is_cell, number).strip())
    return line


def without_own_frames(tb: TracebackType | None, *others: str) -> bool:
    """Ends a traceback at the last frame that is not in this package; returns whether there is one.

    What this package calls of a library is not to blame either: TensorFlow, which calls it back.

    Args:
        tb: the traceback.
        others: parts of the names of further files whose frames are not to blame.
    """
    last, ours = None, False
    while tb is not None:
        file = tb.tb_frame.f_code.co_filename
        kind = kind_of(file)
        passes = kind == LIBRARY or file == _GENERATED
        ours = kind == OURS or (ours and passes) or any(other in file for other in others)
        if not ours:
            last = tb
        tb = tb.tb_next
    if last is not None:
        last.tb_next = None
    return last is not None


def without_middle(tb: TracebackType | None) -> None:
    """Takes the middle out of a long traceback: IPython takes seconds for a thousand frames."""
    chain = []
    while tb is not None:
        chain.append(tb)
        tb = tb.tb_next
    if len(chain) > 2 * _KEPT_FRAMES:
        chain[_KEPT_FRAMES - 1].tb_next = chain[-_KEPT_FRAMES]


def is_beyond_ipython(error: BaseException) -> bool:
    """Whether IPython hides an exception, or takes for ever: it is its own cause, or a group.

    So are very many that were raised one after the other.
    """
    try:
        chains = _chain(error, by_cause=True), _chain(error, by_cause=False)
    except Exception:  # a class may have a ``__cause__`` of its own
        return True
    return any(
        len(chain) > _MOST_CHAINED or isinstance(chain[-1], BaseExceptionGroup) for chain in chains
    )


def _chain(error: BaseException, by_cause: bool) -> list[BaseException]:
    """Returns an exception and those behind it, as far as they can be shown as IPython does."""
    chain = [error]
    while len(chain) <= _MOST_CHAINED and not isinstance(chain[-1], BaseExceptionGroup):
        before = (chain[-1].__cause__ if by_cause else None) or chain[-1].__context__
        if before is None:
            break
        chain.append(before)
    return chain


def plain(error: BaseException, cell_file: str) -> list[str]:
    """Returns a traceback as Python prints it, from the cell on."""
    try:
        lines = traceback.format_exception(type(error), error, from_cell(error, cell_file.__eq__))
    except Exception:
        lines = [f"{type(error).__name__}: {text_of(error)}"]
    return "".join(lines).splitlines()


def shown_with(error: BaseException) -> list[BaseException]:
    """Returns an exception and those that a traceback of it shows too, the first dozens of them."""
    found, new = [error], [error]
    while new and len(found) <= _MOST_CHAINED:
        one = new.pop(0)
        try:
            behind = [one.__cause__, one.__context__]
            behind += one.exceptions if isinstance(one, BaseExceptionGroup) else ()
        except Exception:  # a class may have a ``__cause__`` of its own
            continue
        for other in behind:
            if is_a(other, BaseException) and not any(other is known for known in found):
                found.append(cast(BaseException, other))
                new.append(found[-1])
    return found


def without_text(error: BaseException, cell_file: str, text: str) -> list[str]:
    """Returns a traceback as Python prints it, from the cell on, and asks no exception anything.

    Args:
        error: what was raised.
        cell_file: the file name that IPython compiled the cell under.
        text: what stands for its own text.
    """
    frames = traceback.format_tb(from_cell(error, cell_file.__eq__))
    lines = ["Traceback (most recent call last):\n", *frames, f"{type(error).__name__}: {text}"]
    return "".join(lines).splitlines()


def from_cell(error: BaseException, is_cell: Callable[[str], bool]) -> TracebackType | None:
    """Returns where an exception was raised, from the first frame whose file is a cell's on."""
    raised_at = tb = traceback_of(error)
    while tb is not None and not is_cell(tb.tb_frame.f_code.co_filename):
        tb = tb.tb_next
    return tb or raised_at


def report(
    error: BaseException,
    formatted: list[str],
    rank: int,
    device: str,
    cell_file: str,
    more: str = "",
    text: str | None = None,
) -> Report:
    """Returns the report of an exception that ended a cell.

    Args:
        error: what was raised.
        formatted: the traceback as IPython shows it, lines with colour codes.
        rank: this process's rank.
        device: what the rank computes on.
        cell_file: the file name that IPython compiled the cell under.
        more: what this rank knows beside what the exception says.
        text: what the exception says; it is asked where this is None.
    """
    line, source = cell_line(traceback_of(error), cell_file)
    if is_a(error, SyntaxError):
        said = cast(SyntaxError, error)
        if said.filename == cell_file:
            line, source = said.lineno, (said.text or "").strip()
    return Report(
        rank=rank,
        host=socket.gethostname(),
        device=device,
        etype=_bounded(type(error).__name__, _NAME_CHARACTERS),
        message=(text_of(error) if text is None else text) + (f"\n{more}" if more else ""),
        traceback=(
            _bounded("\n".join([*formatted, more] if more else formatted), _TRACEBACK_CHARACTERS),
        ),
        line=line,
        source_line=_bounded(source, _MESSAGE_CHARACTERS),
        # A rank that could not go on because another one left did not fail: it was waiting.
        waiting=is_a(error, RankLeft),
    )


def text_of(error: BaseException) -> str:
    """Returns what an exception says, within bounds; a user's ``__str__`` may do anything."""
    try:
        return _bounded(str(error), _MESSAGE_CHARACTERS)
    except KeyboardInterrupt:
        return INTERRUPTED_TEXT
    except BaseException as problem:
        return f"<its text cannot be shown: {type(problem).__name__}>"


def _bounded(text: str, most: int) -> str:
    """Returns a text, or its two ends around the count of what is left out."""
    left_out = len(text) - most
    if left_out <= 0:
        return text
    return f"{text[: most // 2]}\x1b[0m … {left_out:,} characters … {text[-(most // 2) :]}"
