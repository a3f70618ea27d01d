"""The prompts at which ranks of a cell wait: one after the other is answered by a person."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable

from allranks.records.ranks import label
from allranks.records.wire import Prompt, Typed
from allranks.widgets.field import Field

#: Where a debugger has been answered, its next prompt goes before those of other ranks for so long.
_GOES_ON_SECONDS = 0.5
#: What other ranks have written before a prompt stands above it, unless they do not answer so long.
_ABOVE_SECONDS = 2.0
_CHOICE = re.compile(r"\s*%distributed\s+debug\s+(?:-r|--ranks)[ =]*(\d+)\s*")
_FOR_ALL = re.compile(r"\s*%distributed\s+all(?: (.*))?")


class Prompts:
    """Shows the prompts of one cell and sends what is typed.

    Args:
        field: where it is typed.
        send: sends an answer to a rank.
        above: called before a prompt is shown, to show what was written before it.
        say: shows a line about the cell as a whole.
    """

    def __init__(
        self,
        field: Field,
        send: Callable[[int, Typed], None],
        above: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        self._field = field
        self._send = send
        self._above = above
        self._say = say
        self._waiting: dict[int, Prompt] = {}
        self._shown: Prompt | None = None
        self._show_at = 0.0
        #: The ranks that have not sent yet what they wrote before the last prompt.
        self._unheard: set[int] = set()
        self._next = -1
        self._next_until = 0.0
        self._told: set[int] = set()
        #: The ranks of the cell, and how often each was answered.
        self._ranks: set[int] = set()
        self._answered: Counter[int] = Counter()
        #: By question: the answer for all ranks, and those that have not had it yet.
        self._for_all: dict[str, tuple[str, set[int]]] = {}
        self._interrupted = False

    @property
    def open(self) -> bool:
        """Whether a rank waits for what is typed."""
        return self._shown is not None or bool(self._waiting)

    def take(self, prompt: Prompt, others: Iterable[int]) -> bool:
        """Takes in that a rank asks; returns whether the others are to send what they wrote.

        Args:
            prompt: what it asks.
            others: the ranks that are in the cell beside it.
        """
        if self._field.problem:
            self._send(prompt.rank, Typed(prompt.cell, prompt.number, "", self._field.problem))
            return False
        if self._interrupted and not prompt.interrupted:
            return False  # the interrupt that is on its way ends it
        self._ranks = {prompt.rank, *others}
        answer, unanswered = self._for_all.get(prompt.text, ("", set()))
        if prompt.rank in unanswered:
            unanswered.discard(prompt.rank)
            self._answer(prompt, answer, "")
            return False
        self._waiting[prompt.rank] = prompt
        if prompt.rank == self._next:
            return False  # its debugger goes on
        self._unheard = set(others)
        self._show_at = time.monotonic() + _ABOVE_SECONDS
        return True

    def heard(self, rank: int) -> None:
        """Takes in that a rank has sent what it wrote before the last prompt."""
        self._unheard.discard(rank)

    def left(self, rank: int) -> None:
        """Takes in that a rank has left the cell: it asks no longer."""
        self._waiting.pop(rank, None)
        if self._shown is not None and self._shown.rank == rank:
            self._shown = None

    def interrupt(self) -> None:
        """Takes in that all ranks are interrupted: who asks is not shown, as it asks no longer."""
        self._interrupted = True
        self._waiting.clear()

    def step(self) -> None:
        """Shows the next prompt, or sends on what was typed.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed at the prompt.
        """
        if self._shown is None and self._waiting:
            self._show()
        if self._shown is None:
            return
        try:
            typed = self._field.typed()
        except EOFError:
            self._answer(self._shown, "", EOFError.__name__)
            return
        if typed is None:
            return
        choice = _CHOICE.fullmatch(typed)
        if choice:
            self._choose(int(choice[1]))
        elif for_all := _FOR_ALL.fullmatch(typed):
            self._answer_all(self._shown, for_all[1] or "")
        else:
            self._answer(self._shown, typed, "")

    def _show(self) -> None:
        rank = self._next
        if rank not in self._waiting:
            now = time.monotonic()
            if now < self._next_until or (self._unheard and now < self._show_at):
                return
            rank = min(self._waiting, key=lambda rank: (self._answered[rank], rank))
        shown = self._shown = self._waiting.pop(rank)
        others = set(self._waiting) - self._told
        if others:
            self._told |= others
            verb = "asks" if len(others) == 1 else "ask"
            self._say(
                f"{label(others)} {verb} for input too, after {label((rank,))}. "
                f"To choose, answer with: %distributed debug -r {min(others)}. "
                "To give all ranks the same answer: %distributed all ANSWER"
            )
        self._above()
        self._field.ask(f"{label((rank,))} │ {shown.text}", shown.hidden)

    def _answer_all(self, shown: Prompt, text: str) -> None:
        """Each rank that asks the same, now or later in the cell, gets the answer once."""
        self._for_all[shown.text] = text, self._ranks - {shown.rank}
        same = [prompt for prompt in self._waiting.values() if prompt.text == shown.text]
        for prompt in (shown, *same):
            self._waiting.pop(prompt.rank, None)
            self._for_all[shown.text][1].discard(prompt.rank)
            self._answer(prompt, text, "")

    def _answer(self, prompt: Prompt, text: str, problem: str) -> None:
        if self._shown is prompt:
            self._shown = None
            self._next = prompt.rank if prompt.goes_on else -1
            self._next_until = time.monotonic() + _GOES_ON_SECONDS if prompt.goes_on else 0.0
        self._told.discard(prompt.rank)
        self._answered[prompt.rank] += 1
        self._send(prompt.rank, Typed(prompt.cell, prompt.number, text, problem))

    def _choose(self, rank: int) -> None:
        """Another rank is asked now; the one that was waits again."""
        assert self._shown is not None
        self._waiting[self._shown.rank] = self._shown
        self._shown = None
        if rank not in self._waiting:
            self._say(f"rank {rank} is not asking for input; choose from {label(self._waiting)}.")
            rank = list(self._waiting)[-1]
        self._next, self._next_until = rank, 0.0
