"""The prompts of a rank, without a notebook."""

import io
import sys
import threading
from types import SimpleNamespace

import pytest

from allranks.features.prompts import rank as prompts
from allranks.features.prompts.notebook import TerminalField
from allranks.records.wire import Typed
from tests.unit.interrupts import HEARD, pressed_at


@pytest.fixture
def found(monkeypatch):
    monkeypatch.setattr(prompts, "in_rank", lambda: True)
    monkeypatch.setattr(prompts.scope, "asks", lambda *_: None)
    found = prompts.FEATURE()
    wire = SimpleNamespace(send_output=lambda: None, send=lambda prompt: None)
    found._rank = SimpleNamespace(
        rank=0, cell=lambda: 1, interrupts=SimpleNamespace(count=0), wire=wire
    )
    return found


def test_a_prompt_gets_its_answer_wherever_an_earlier_one_was_interrupted(found):
    wire = found._rank.wire

    def at_once(prompt):
        typed = Typed(1, prompt.number, f"answer {prompt.number}", "")
        found.message_received(typed, [])

    def from_another_thread(prompt):
        receiver = threading.Thread(target=at_once, args=(prompt,), daemon=True)
        receiver.start()
        receiver.join(60)
        assert not receiver.is_alive(), "an interrupt has left a lock held"

    step, goes_on = 1, True
    while goes_on:
        wire.send = at_once
        goes_on = pressed_at(step, found.input, events=HEARD)
        wire.send = from_another_thread
        assert found.input("again") == f"answer {found._number}"
        step += 1
    assert step > 10


def test_a_prompt_that_nobody_answers_is_a_line_of_its_own(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    field = TerminalField()
    field.ask("ipdb> ", hidden=False)
    assert capsys.readouterr().out == "ipdb> \n"
    with pytest.raises(EOFError):
        field.typed()


def test_the_traceback_of_an_interrupted_prompt_does_not_show_its_wait(found, monkeypatch):
    monkeypatch.setattr(prompts, "_POLL_SECONDS", 0)
    monkeypatch.setattr(prompts, "walk_stack", lambda frame: [])
    contexts = []

    def asks():
        try:
            found.input("never answered")
        except KeyboardInterrupt as pressed:
            contexts.append(pressed.__context__)
            raise

    for step in range(1, 60):
        pressed_at(step, asks, events=HEARD)
    assert contexts
    assert set(contexts) == {None}
