"""The variables ``rc``, ``dv``, ``view``, before ranks have started."""

from types import SimpleNamespace

import pytest
from IPython.core.completer import provisionalcompleter
from IPython.core.interactiveshell import InteractiveShell

from allranks.features.ipyparallel import px_names
from allranks.features.ipyparallel.px_magics import PxMagics
from allranks.features.ipyparallel.px_names import variables


class Session:
    """Notes whether the ranks have started."""

    def __init__(self):
        self.running = None

    def where(self):
        return ""

    def cluster(self):
        self.running = SimpleNamespace(size=2, client=Client)
        return self.running


class Client(list):
    """Both the client and its view."""

    ids = (0, 1)
    executor = session = 3

    def __init__(self):
        super().__init__(self.ids)


@pytest.fixture
def others(monkeypatch):
    """The ranks of other notebooks, by their files."""
    found = {}
    monkeypatch.setattr(px_names, "connection_files", lambda _, only_here: found)
    return found


@pytest.fixture
def session(others):
    return Session()


NAMES = [("rc", "client", "ids"), ("dv", "view", "apply_sync"), ("view", "view", "apply_sync")]


@pytest.mark.parametrize(("name", "what", "method"), NAMES, ids=[name for name, *_ in NAMES])
def test_a_look_at_one_starts_no_ranks(session, name, what, method):
    one, shell = variables(session)[name], InteractiveShell()
    shown, _ = shell.display_formatter.format(one)
    line = f"<ipyparallel {what}: no ranks; the next %%px, or the first use, starts them>"
    assert shown == {"text/plain": line}
    assert shell.inspector.info(one)["string_form"] == line
    shell.user_ns[name] = one
    with provisionalcompleter():
        for text in (f"{name}.{method}.", f"{name}."):
            found = [one.text for one in shell.Completer.completions(text, len(text))]
    assert method in found
    assert "Docstring" in shell.object_inspect_text(f"{name}.{method}")
    assert one
    assert method in dir(one)
    for other in ("getdoc", "shape"):
        assert not hasattr(one, other)
    assert session.running is None


@pytest.mark.parametrize("use", [len, list, lambda one: one.ids, lambda one: one[:]])
def test_the_first_use_starts_them(session, use):
    assert use(variables(session)["rc"]) in (2, [0, 1], (0, 1))
    assert session.running is not None


def use_px(session):
    magics = SimpleNamespace(session=session, send=lambda *_: session.cluster())
    PxMagics(InteractiveShell(), magics).px("1")


@pytest.mark.parametrize("use", [lambda session: len(variables(session)["rc"]), use_px])
def test_what_starts_ranks_beside_those_of_another_notebook_says_how_to_use_those(
    session, others, use, capsys
):
    others["file"] = "4 ranks of /course/lab.ipynb"
    for _ in range(2):
        use(session)
    session.running, session.where = None, lambda: "watched"  # by %distributed attach
    use(session)
    assert capsys.readouterr().out == (
        "Starting ranks of this notebook, beside 4 ranks of /course/lab.ipynb. To use those in "
        "place of these, type: %distributed stop   and then: %distributed attach\n"
    )


@pytest.mark.parametrize(("name", "part"), [("dv", "executor"), ("rc", "session")])
def test_what_no_class_has_starts_them_too(session, name, part):
    class View(Client):
        def __getitem__(self, key):
            return self

    session.cluster = lambda: SimpleNamespace(client=View)
    assert getattr(variables(session)[name], part) == 3


def test_its_text_names_the_ranks_that_run(session):
    session.cluster()
    assert repr(variables(session)["rc"]) == "<ipyparallel client of ranks 0–1>"
