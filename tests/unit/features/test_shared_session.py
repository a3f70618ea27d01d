"""What commands say where no ranks run."""

from types import SimpleNamespace

from allranks.cluster.features import NotebookHooks
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
