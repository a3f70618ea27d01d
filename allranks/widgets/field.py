"""Where a person types what a rank asks for: the front end's own input field."""

from __future__ import annotations

import getpass
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import zmq

from allranks.widgets.text import of_this_process

#: What a front end sends for Ctrl-D.
_END = "\x04"
NOBODY = (
    "needs a user who can type, and this notebook runs without one. Set values in the notebook, "
    "and send them: %distributed push NAME"
)


class Field(Protocol):
    """Shows a prompt, and has what was typed some time later."""

    problem: str
    """Why nobody can type, or empty."""

    def ask(self, prompt: str, hidden: bool) -> None:
        """Shows a prompt; what was typed at an earlier one is forgotten."""

    def typed(self) -> str | None:
        """Returns what was typed, None as long as nothing was.

        Raises:
            EOFError: there is no more to read.
            KeyboardInterrupt: Ctrl-C was pressed instead.
        """


class KernelField:
    """The field of the front end that has sent the cell which runs now.

    Args:
        kernel: ipykernel's, of this process.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._request = kernel.get_parent("shell")
        self._to = kernel._parent_ident["shell"]
        self.problem = "" if self._request.get("content", {}).get("allow_stdin") else NOBODY

    def ask(self, prompt: str, hidden: bool) -> None:
        """Shows a prompt."""
        while self._answer() is not None:
            pass  # an answer to a prompt of a cell that was interrupted
        content = {"prompt": prompt, "password": hidden}
        kernel = self._kernel
        kernel.session.send(
            kernel.stdin_socket, "input_request", content, self._request, ident=self._to
        )

    def typed(self) -> str | None:
        """Returns what was typed."""
        typed = self._answer()
        if typed == _END:
            raise EOFError
        return typed

    def _answer(self) -> str | None:
        _, reply = self._kernel.session.recv(self._kernel.stdin_socket, zmq.NOBLOCK)
        return None if reply is None else str(reply["content"].get("value", ""))


class TerminalField:
    """The terminal itself, or what a script reads: asking waits there, in the main thread."""

    problem = ""

    def __init__(self) -> None:
        self._typed: str | None = None
        self._raised: BaseException | None = None

    def ask(self, prompt: str, hidden: bool) -> None:
        """Shows a prompt, and returns when it was answered."""
        sys.stdout.flush()
        try:
            with _interruptible():
                self._typed = getpass.getpass(prompt) if hidden else input(prompt)
        except OSError as closed:
            self._raised = EOFError(str(closed))  # as where a test has taken standard input away
        except (EOFError, KeyboardInterrupt) as raised:
            self._raised = raised
        if self._raised is not None:
            sys.stdout.write("\n")  # nobody has typed the end of the prompt's line

    def typed(self) -> str | None:
        """Returns what was typed."""
        raised, self._raised = self._raised, None
        if raised is not None:
            raise raised
        typed, self._typed = self._typed, None
        return typed


@contextmanager
def _interruptible() -> Iterator[None]:
    """Within, Ctrl-C raises, as everywhere in Python."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def field() -> Field:
    """Returns the field that belongs to what runs now."""
    kernel = of_this_process()
    return TerminalField() if kernel is None else KernelField(kernel)
