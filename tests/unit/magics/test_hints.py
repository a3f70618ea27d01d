"""The part of an error that says where its name exists, or how to load its magic."""

import json
import threading
from contextlib import ExitStack
from types import SimpleNamespace

import numpy
import pytest
from IPython.core.error import UsageError as UnknownMagic

from allranks.errors import AllranksError, CellFailed, Report
from allranks.magics.hints import OF_VIEW, Hints, where_names_are
from allranks.magics.session import RanksProxy
from allranks.widgets import ring

COPY = "exists in the notebook. To copy it to the ranks: %distributed push"


def undefined(rank, name, line=None, etype="NameError"):
    message, line = f"name '{name}' is not defined", name if line is None else line
    return Report(rank, "vm", "cpu", etype, message, (), 2, line, waiting=False)


def hints(names, *reports, ran=2, **here):
    return where_names_are(reports, range(ran), names, **here)


def test_a_variable_of_the_notebook_is_copied_to_all_ranks_or_to_those_that_lack_it():
    every = [undefined(rank, "x") for rank in range(2)]
    assert hints({"x": 3}, *every) == [f"x {COPY} x"]
    assert hints({"x": 3}, *every, ran=8) == [f"x {COPY} x -r 0-1"]
    assert hints({"x": 3, "y": 4}, undefined(0, "x"), undefined(1, "y")) == [
        f"x {COPY} x -r 0",
        f"y {COPY} y -r 1",
    ]


def test_a_name_that_only_replaced_ranks_lack_may_have_been_lost():
    lost = hints({}, undefined(1, "model"), replaced=[1])
    assert lost == [
        "rank 1 was replaced, and lacks what cells had made before. If a cell made model then, "
        "run it again."
    ]
    every = [undefined(rank, "model") for rank in range(2)]
    assert hints({}, *every, replaced=[1]) == []
    assert hints({}, undefined(1, "model")) == []
    assert hints({"model": 3}, undefined(1, "model"), replaced=[1]) == [f"model {COPY} model -r 1"]


def test_a_variable_that_cannot_be_copied_is_used_in_the_notebook():
    names = {"client": threading.Lock(), "x": 3, "large": numpy.zeros(25_000_000)}
    assert hints(names, undefined(0, "client"), ran=1) == [
        "client exists in the notebook, and cannot be copied to the ranks. "
        "Type it in a cell without %%distributed"
    ]
    begin = "Begin the cell with: %%local"
    assert hints(names, undefined(0, "client"), ran=1, here=begin) == [
        f"client exists in the notebook, and cannot be copied to the ranks. {begin}"
    ]
    assert hints(names, undefined(0, "x"), ran=1, here=begin) == [
        f"x {COPY} x\nTo use it in the notebook: begin the cell with: %%local"
    ]
    (large,) = hints(names, undefined(0, "large"), ran=1)
    assert large.endswith("To copy it to the ranks (200 MB each): %distributed push large")


def test_a_module_is_imported_and_not_copied():
    names, said = {"np": numpy, "json": json}, "is a module that the notebook has imported"
    assert hints(names, undefined(0, "np", "np.ones(3)")) == [
        f"np {said}, and not the ranks. Begin the cell with: import numpy as np"
    ]
    assert hints(names, undefined(0, "json"))[0].endswith("Begin the cell with: import json")
    # A view runs on the ranks what a cell of the notebook has: an import there does not help.
    assert hints(names, undefined(0, "np"), here=OF_VIEW) == [
        f'np {said}, and not the ranks. Import it there, or type: ranks.run("import numpy as np")'
    ]
    assert hints({"x": 3}, undefined(0, "x"), ran=1, here=OF_VIEW) == [f"x {COPY} x"]


def test_what_runs_in_the_notebook_is_not_copied():
    names = {"ranks": RanksProxy(None), "ring": ring}
    assert hints(names, undefined(0, "ranks", "ranks.size"), undefined(1, "ring", "ring()")) == [
        "ranks runs in the notebook. Type it in a cell without %%distributed",
        "ring runs in the notebook. Type it in a cell without %%distributed",
    ]
    begin = "Begin the cell with: %%local"
    assert hints(names, undefined(0, "ring", "ring()"), here=begin) == [
        f"ring runs in the notebook. {begin}"
    ]


@pytest.mark.parametrize(
    "report",
    [
        undefined(0, "y"),
        undefined(0, "x", "library.function()"),
        undefined(0, "x", etype="ValueError"),
    ],
    ids=["not there", "of a library", "of another kind"],
)
def test_another_error_gets_no_hint(report):
    assert hints({"x": 3}, report) == []


class Shell:
    """A shell that notes the errors that it shows."""

    def __init__(self):
        self.user_ns, self.user_ns_hidden, self.shown = {}, {"In": []}, []

    def showtraceback(self, exc_tuple=None, *_, **__):
        error = exc_tuple[1]
        self.shown.append("\n".join([str(error), *getattr(error, "__notes__", [])]))

    def fails(self, source, names=None):
        try:
            exec(source, self.user_ns if names is None else names)
        except Exception as error:
            self.showtraceback((type(error), error, error.__traceback__))
        return self.shown[-1]


@pytest.fixture
def shell():
    return Shell()


@pytest.fixture
def session():
    def find(command, source):
        assert command == "find"  # a description may be that of a magic
        if source == "busy":
            raise AllranksError("they do not answer")
        if source == "interrupted":
            raise KeyboardInterrupt
        ranks = {"model": (2,), "x": (0, 1, 2), "np": (0, 1, 2)}.get(source, ())
        return {rank: {"module": "numpy" if source == "np" else ""} for rank in ranks}

    return SimpleNamespace(running=None, hooks=SimpleNamespace(command=find))


@pytest.fixture
def loaded(shell, session):
    with ExitStack() as undo:
        yield Hints(shell, session, SimpleNamespace(is_on=False), undo)


@pytest.mark.usefixtures("loaded")
def test_a_name_that_each_rank_has_is_named_in_the_notebook_without_ranks(shell):
    assert shell.fails("allreduce(1)") == (
        "name 'allreduce' is not defined\n"
        "allreduce exists on the ranks: begin the cell with %%distributed"
    )
    assert shell.fails("model") == "name 'model' is not defined"


@pytest.mark.usefixtures("loaded")
def test_a_variable_of_ranks_is_named_with_those_that_have_answered(shell, session):
    session.running = SimpleNamespace(size=3)
    assert shell.fails("x") == (
        "name 'x' is not defined\nx exists on ranks 0–2: begin the cell with %%distributed, "
        "or copy it, a value for each rank: x = %distributed pull x"
    )
    assert shell.fails("model") == (
        "name 'model' is not defined\n"
        "model exists on rank 2: begin the cell with %%distributed -r 2, "
        "or copy it, a value for each rank: model = %distributed pull model -r 2"
    )
    # A module cannot be copied.
    assert shell.fails("np.ones(3)") == (
        "name 'np' is not defined\nnp is a module that ranks 0–2 have imported, and not the "
        "notebook. Begin the cell with: import numpy as np"
    )
    assert shell.fails("other") == "name 'other' is not defined"
    for name in ("busy", "interrupted"):
        assert shell.fails(name) == f"name '{name}' is not defined"


@pytest.mark.usefixtures("loaded")
def test_a_mistake_of_a_module_gets_no_hint(shell):
    assert shell.fails("allreduce(1)", names={}) == "name 'allreduce' is not defined"


def test_a_magic_of_allranks_px_is_named_with_what_loads_it(shell, loaded):
    loaded.px = frozenset({"px"})
    for magic in ("Cell magic `%%{}` not found.", "Line magic function `%{}` not found."):
        for name, more in (("px", " %load_ext allranks.px"), ("py", "")):
            error = UnknownMagic(magic.format(name))
            shell.showtraceback((UnknownMagic, error, None))
            assert shell.shown[-1].startswith(magic.format(name))
            assert shell.shown[-1].endswith(more or "found.")


@pytest.mark.usefixtures("loaded")
def test_a_typing_error_in_the_name_of_our_magic_is_named(shell):
    for asked, meant in (("distributd", " Did you mean %distributed?"), ("env2", " not found.")):
        error = UnknownMagic(f"Line magic function `%{asked}` not found.")
        shell.showtraceback((UnknownMagic, error, None))
        assert shell.shown[-1].endswith(meant)


def test_without_the_extension_the_shell_shows_errors_as_before(shell, session):
    with ExitStack() as undo:
        Hints(shell, session, SimpleNamespace(is_on=False), undo)
    assert vars(shell).keys() == {"user_ns", "user_ns_hidden", "shown"}
    assert shell.fails("allreduce(1)") == "name 'allreduce' is not defined"


def test_a_failed_cell_has_the_hints_below_its_report(shell, loaded):
    shell.user_ns.update(x=3, **shell.user_ns_hidden)
    error = CellFailed("short", "the report", [undefined(0, "x"), undefined(1, "In")])
    loaded.explain(error, (0, 1))
    assert error.text == f"the report\n\nx {COPY} x -r 0"


@pytest.mark.usefixtures("loaded")
def test_an_error_is_shown_also_where_its_hint_fails_or_its_caller_names_it(shell, session):
    session.running = object()
    error = NameError("own", name=["no text"])
    assert shell.fails("raise error", shell.user_ns | {"error": error}) == "own"
    shell.user_ns["error"] = error
    assert shell.fails("raise error") == "own"
    shell.showtraceback(exc_tuple=(NameError, error, None))
    assert shell.shown[-1] == "own"


def test_a_failed_cell_is_reported_whatever_a_variable_of_its_name_is(shell, loaded):
    class Meta(type):
        @property
        def __module__(cls):
            raise RuntimeError

    shell.user_ns["x"] = Meta("Odd", (), {})()
    error = CellFailed("short", "the report", [undefined(0, "x")])
    loaded.explain(error, (0, 1))
    assert error.text == "the report"
