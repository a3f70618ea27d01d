"""Shows the prompts of ranks in the front end's own input field, one after the other."""

from __future__ import annotations

import getpass
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import zmq

from allranks.cluster.features import ClusterContext, NotebookFeature
from allranks.records import requests
from allranks.records.deferred import interruptible
from allranks.records.ranks import label
from allranks.records.wire import Answer, Prompt, Record, Typed

_IN_AN_ENSEMBLE = (
    "cannot ask for input in an ensemble: run the member's cell with %%distributed -r 0"
)
#: A front end sends this for Ctrl-D.
_END = "\x04"
NOBODY = (
    "needs a user who can type, and this notebook runs without one. Set values in the notebook, "
    "and send them: %distributed push NAME"
)


class Field(Protocol):
    """Shows a prompt, and has the answer some time later."""

    #: Why no input is possible, or empty.
    problem: str

    def ask(self, prompt: str, hidden: bool) -> None:
        """Shows a prompt; the answer to an earlier one is dropped."""

    def typed(self) -> str | None:
        """Returns the answer, None until it comes; raises EOFError or KeyboardInterrupt."""


class KernelField:
    """The field of the front end that has sent the cell which runs now."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._request = kernel.get_parent("shell")
        self._to = kernel._parent_ident["shell"]
        self.problem = "" if self._request.get("content", {}).get("allow_stdin") else NOBODY

    def ask(self, prompt: str, hidden: bool) -> None:
        while self._answer() is not None:
            pass  # an answer to a prompt of a cell that was interrupted
        content = {"prompt": prompt, "password": hidden}
        kernel = self._kernel
        kernel.session.send(
            kernel.stdin_socket, "input_request", content, self._request, ident=self._to
        )

    def typed(self) -> str | None:
        typed = self._answer()
        if typed == _END:
            raise EOFError
        return typed

    def _answer(self) -> str | None:
        _, reply = self._kernel.session.recv(self._kernel.stdin_socket, zmq.NOBLOCK)
        return None if reply is None else str(reply["content"].get("value", ""))


class TerminalField:
    """The terminal, or the standard input of a script: `ask` waits there, in the main thread."""

    problem = ""

    def __init__(self) -> None:
        self._typed: str | None = None
        self._raised: BaseException | None = None

    def ask(self, prompt: str, hidden: bool) -> None:
        # Returns when it was answered.
        sys.stdout.flush()
        try:
            with interruptible():
                self._typed = getpass.getpass(prompt) if hidden else input(prompt)
        except OSError as closed:
            self._raised = EOFError(str(closed))  # as where a test has taken standard input away
        except (EOFError, KeyboardInterrupt) as raised:
            self._raised = raised
        if self._raised is not None:
            sys.stdout.write("\n")  # the prompt's line has no end yet

    def typed(self) -> str | None:
        raised, self._raised = self._raised, None
        if raised is not None:
            raise raised
        typed, self._typed = self._typed, None
        return typed


#: For this time after an answer to a debugger, its next prompt precedes other ranks' prompts.
_GOES_ON_SECONDS = 0.5
#: A prompt is shown below other ranks' earlier output. This is how long it waits for that.
_ABOVE_SECONDS = 2.0
_CHOICE = re.compile(r"\s*%distributed\s+debug\s+(?:-r|--ranks)[ =]*(\d+)\s*")
_FOR_ALL = re.compile(r"\s*%distributed\s+all(?: (.*))?")


class PromptQueue:
    """Shows the prompts of one cell and sends the answers.

    ``above`` is called before a prompt is shown, to show earlier output. ``say`` shows
    a line about the cell as a whole.
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
        #: The ranks that have not sent their output before the last prompt yet.
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
    def asking(self) -> set[int]:
        return {*self._waiting, *([self._shown.rank] if self._shown is not None else [])}

    @property
    def open(self) -> bool:
        return self._shown is not None or bool(self._waiting)

    def take(self, prompt: Prompt, others: Iterable[int]) -> bool:
        """Adds a prompt; returns whether the other ranks are to send their output."""
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
        self._unheard.discard(rank)

    def left(self, rank: int) -> None:
        self._waiting.pop(rank, None)
        if self._shown is not None and self._shown.rank == rank:
            self._shown = None

    def interrupt(self) -> None:
        # The interrupt ends the prompts of all ranks.
        self._interrupted = True
        self._waiting.clear()

    def step(self) -> None:
        """Shows the next prompt, or sends an answer; may raise KeyboardInterrupt."""
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
        # Asks this rank next; the one that was asked waits again.
        assert self._shown is not None
        self._waiting[self._shown.rank] = self._shown
        self._shown = None
        if rank not in self._waiting:
            self._say(f"rank {rank} is not asking for input; choose from {label(self._waiting)}.")
            rank = list(self._waiting)[-1]
        self._next, self._next_until = rank, 0.0


class NotebookPrompts(NotebookFeature):
    """Has the user answer the prompts of the cell that runs."""

    records = (Prompt,)
    in_cells = False  # until a rank asks for input

    def __init__(self) -> None:
        self._queue: PromptQueue | None = None
        self._in_ensemble = self._polls = False
        self._interrupts = 0

    def started(self, cluster: ClusterContext) -> None:
        self._send = cluster.send

    def ranks_reserved(self) -> None:
        # Members run side by side, and each would ask.
        self._in_ensemble = self.in_cells = True

    def cell_started(self) -> None:
        assert self.cell is not None
        self._in_ensemble = self._polls = False
        self._interrupts = 0
        self._queue = PromptQueue(
            # Of the front end that has sent the cell.
            TerminalField() if self.cell.kernel is None else KernelField(self.cell.kernel),
            self._answer,
            self.cell.show_output,
            self.cell.notice,
        )

    def message_received(self, record: Record, payloads: list[bytes]) -> None:
        assert isinstance(record, Prompt)
        if self.cell is not None and not self.in_cells:
            self.in_cells = True
            self.cell_started()
        cell, queue = self.cell, self._queue
        if cell is None or queue is None:
            if self._in_ensemble:
                typed = Typed(record.cell, record.number, "", _IN_AN_ENSEMBLE)
                self._send((record.rank,), typed)
            return
        if record.cell != cell.number:
            return  # of a cell that was interrupted: the interrupt ends the prompt
        self._drop_stale(queue)
        others = tuple(rank for rank in cell.pending() if rank != record.rank)
        if queue.take(record, others):
            cell.ask_soon(requests.SEND, {}, self._sent_output, others)
        if not self._polls:
            self._polls = True
            cell.poll(self._poll)

    def cell_finished(self) -> None:
        # The queue refers to the view of the cell.
        self._queue, self.in_cells = None, False

    def stopped(self) -> None:
        self._queue = None

    def _answer(self, rank: int, typed: Typed) -> None:
        self._send((rank,), typed)

    def _sent_output(self, answer: Answer) -> None:
        if self._queue is not None:
            self._queue.heard(answer.rank)

    def _poll(self) -> bool:
        if self._queue is None:
            return False
        self._drop_stale(self._queue)
        self._queue.step()
        return self._queue.open

    def _drop_stale(self, queue: PromptQueue) -> None:
        assert self.cell is not None
        if self.cell.interrupts() != self._interrupts:
            self._interrupts = self.cell.interrupts()
            queue.interrupt()
        for rank in queue.asking - set(self.cell.pending()):
            queue.left(rank)


FEATURE = NotebookPrompts
