"""What commands say where no ranks run."""

from types import SimpleNamespace

import pytest

from allranks.cluster.features import NotebookHooks
from allranks.errors import UsageError
from allranks.features.attach import sessions
from allranks.features.attach.notebook import NotebookAttach


def stopped() -> str:
    said: str = NotebookHooks([NotebookAttach]).command("session", NotebookHooks(())).stop()
    return said


def test_a_stop_without_ranks_names_those_that_are_detached(monkeypatch):
    detached = SimpleNamespace(holder=0, size=4, name="7f3a9c21")
    monkeypatch.setattr(sessions, "running", lambda *_: [detached])
    assert stopped() == (
        "No ranks are running. Earlier ones are detached: ranks 0–3 of 7f3a9c21. "
        "To list them: %distributed clusters"
    )
    monkeypatch.setattr(sessions, "running", lambda *_: [])
    assert stopped() == "No ranks are running."


def test_attach_takes_one_word():
    with pytest.raises(UsageError, match="expected the name of one cluster, found 7f3a 9c21"):
        NotebookHooks([NotebookAttach]).command("attach", ["7f3a", "9c21"])
