"""What commands say where no ranks run, and the names of `ranks`."""

import inspect
from types import SimpleNamespace

import pytest
from IPython.core.completer import provisionalcompleter
from IPython.core.interactiveshell import InteractiveShell

from allranks.cluster import features
from allranks.cluster.cluster import Cluster
from allranks.cluster.failures import ProcessExit
from allranks.cluster.features import NotebookHooks
from allranks.cluster.options import ClusterOptions
from allranks.cluster.state import ClusterState
from allranks.errors import UsageError
from allranks.magics.extension import load, loaded, unload
from allranks.magics.session import RanksProxy, Session, short_interrupts
from allranks.magics.shell import EveryCell
from allranks.records.wire import Hello


def test_without_features_a_stop_without_ranks_says_so():
    assert Session(NotebookHooks(())).stop() == "No ranks are running."


class Connected: ...


class StartedCluster:
    """A cluster whose ranks are there at once: two, if no number is given."""

    launcher, gpus, roster = None, (), SimpleNamespace(phase="running")

    def __init__(self, n=None, **_):
        self.size = n or 2
        self.cells = SimpleNamespace(news=[], is_up=lambda _: True, connection=Connected())
        self.hellos = {0: SimpleNamespace(host="h1", device="cpu", mpi="MPI")}

    def start(self, _): ...
    def stop(self): ...


def test_the_line_about_the_end_of_the_extension_is_there_only_if_ranks_ran(monkeypatch):
    monkeypatch.setattr("allranks.magics.session.Cluster", StartedCluster)
    session = Session(NotebookHooks(()))
    session.cluster(ClusterOptions(3))
    assert session.close() == "The ranks are stopped."
    assert session.close() == ""


@pytest.fixture
def no_features(monkeypatch):
    monkeypatch.setattr(features, "_registered", [])


@pytest.mark.usefixtures("no_features")
def test_the_user_reads_which_ranks_have_ended_with_the_extension(monkeypatch, capsys):
    monkeypatch.setattr("allranks.magics.session.Cluster", StartedCluster)
    shell = InteractiveShell()
    load(shell)
    loaded(shell).session.cluster()
    capsys.readouterr()
    unload(shell)
    assert capsys.readouterr().out == "The ranks are stopped.\n"


def test_after_a_stop_as_many_ranks_start_as_before_and_the_line_says_so(monkeypatch, capsys):
    monkeypatch.setattr("allranks.magics.session.Cluster", StartedCluster)
    session = Session(NotebookHooks(()))

    def started(n=None, **options):
        session.stop()
        size = session.cluster(ClusterOptions(n, **options)).size
        line, _ = capsys.readouterr().out.splitlines()
        assert line.startswith(f"allranks started ranks 0–{size - 1} on h1")
        return size, ", as many as before." in line

    assert started() == (2, False)
    assert started(4) == (4, False)
    assert started() == (4, True)
    # A stop without ranks does not forget it.
    session.stop()
    assert started() == (4, True)
    # Elsewhere, and on chosen GPUs, other numbers are usual; they do not count here.
    assert started(gpus="0") == (2, False)
    assert started(3, launcher="ssh:h1:3") == (3, False)
    assert started() == (4, True)


@pytest.mark.usefixtures("no_features")
def test_after_a_reload_of_the_extension_as_many_ranks_start_as_before(monkeypatch, capsys):
    monkeypatch.setattr("allranks.magics.session.Cluster", StartedCluster)
    shell = InteractiveShell()
    load(shell)
    loaded(shell).session.cluster(ClusterOptions(4))
    unload(shell)
    load(shell)
    capsys.readouterr()
    assert loaded(shell).session.cluster().size == 4
    assert ", as many as before." in capsys.readouterr().out
    unload(shell)
    # Another shell has not chosen that number.
    other = InteractiveShell()
    load(other)
    assert loaded(other).session.cluster().size == 2
    unload(other)


def test_a_kernel_that_was_installed_for_a_number_of_ranks_starts_that_number(monkeypatch, capsys):
    monkeypatch.setattr("allranks.magics.session.Cluster", StartedCluster)
    session = Session(NotebookHooks(()))
    session.start_with(ClusterOptions(2))
    session.cluster(ClusterOptions(3))
    session.stop()
    assert session.cluster().size == 2
    assert "as many as before" not in capsys.readouterr().out


def test_a_start_where_ranks_run_says_which_ones_and_what_they_have(monkeypatch, capsys):
    monkeypatch.setattr("allranks.magics.session.Cluster", StartedCluster)
    session = Session(NotebookHooks(()))
    session.start(ClusterOptions(4))
    started, names = capsys.readouterr().out.splitlines()
    assert started.startswith("allranks started ranks 0–3")
    session.start(ClusterOptions(4))
    assert capsys.readouterr().out.splitlines() == [
        "allranks already runs ranks 0–3 on h1 (CPU, MPI).",
        names,
    ]
    # A cell that starts none says nothing.
    session.cluster()
    assert capsys.readouterr().out == ""


def test_a_start_says_that_every_cell_runs_on_the_ranks_where_this_is_on(monkeypatch, capsys):
    monkeypatch.setattr("allranks.magics.session.Cluster", StartedCluster)
    session, toggle = Session(NotebookHooks(())), EveryCell(InteractiveShell())
    session.which_cells = toggle.text

    def line(count=4):
        session.start(ClusterOptions(count))
        return capsys.readouterr().out.splitlines()[0]

    assert line().endswith(" s.")
    toggle.on()
    every = "Every cell runs on them, until: %distributed off"
    assert line() == f"allranks already runs ranks 0–3 on h1 (CPU, MPI). {every}"
    session.stop()
    assert line(None).endswith(f" s, as many as before. {every}")
    toggle.off()
    assert line() == "allranks already runs ranks 0–3 on h1 (CPU, MPI)."
    # A kernel of ranks has no other mode.
    toggle.every_cell()
    assert line() == "allranks already runs ranks 0–3 on h1 (CPU, MPI)."


class WithVariables(Cluster):
    """Two ranks that were not started, with the variables that it is given."""

    def push(self, values, ranks=None):
        vars(self).setdefault("there", {}).update(values)

    def pull(self, names, ranks=None):
        return dict.fromkeys(range(2), self.there[names])


def proxy(running):
    return RanksProxy(SimpleNamespace(running=running, cluster=lambda: running, where=lambda: ""))


def test_ranks_have_their_variables_by_name():
    ranks = proxy(WithVariables(2))
    ranks["x"] = 3
    assert (ranks["x"], len(ranks)) == ({0: 3, 1: 3}, 2)


@pytest.mark.parametrize("key", [0, slice(None), "x + 1", ("x", "y")])
def test_what_names_no_variable_is_refused_with_what_to_type(key):
    with pytest.raises(UsageError, match=r"found .* Type for example: ranks\['x'\]"):
        proxy(WithVariables(2))[key]


def completions(shell, text):
    with provisionalcompleter():
        return {one.text for one in shell.Completer.completions(text, len(text))}


def test_a_completion_or_a_description_starts_no_ranks():
    started, shell = [], InteractiveShell()
    none = SimpleNamespace(
        running=None, cluster=lambda: started.append("ranks") or WithVariables(2)
    )
    shell.user_ns["ranks"] = RanksProxy(none)
    assert "map" in completions(shell, "ranks.")
    completions(shell, "ranks.map.")
    for name in ("ranks", "ranks.map"):
        assert "function" in shell.object_inspect_text(name)
    assert started == []
    shell.ex("ranks.map")
    assert started == ["ranks"]


def test_without_ranks_none_are_started_for_a_variable():
    ranks = proxy(None)
    assert len(ranks) == 0
    with pytest.raises(UsageError, match="begins with %%distributed, which starts ranks"):
        ranks["x"]


def test_an_unknown_name_of_ranks_says_how_to_get_a_variable():
    for ranks in (proxy(None), proxy(WithVariables(2))):
        with pytest.raises(AttributeError, match=r"ranks has no 'x'\. .*ranks\['x'\]"):
            _ = ranks.x


def test_the_help_of_ranks_has_examples():
    assert 'ranks["x"]' in inspect.getdoc(RanksProxy)


def test_values_without_names_are_refused_before_any_is_sent():
    with pytest.raises(
        UsageError, match=r"variables by name, found str\..*ranks.push\(\{'x': 3\}\)"
    ):
        Cluster(2).push("x", 3)


@pytest.mark.parametrize(
    ("replaces", "died", "said"),
    [
        (True, (), "The ranks keep running."),
        (True, (1,), "Ranks 0, 2 keep running."),
        (True, (1, 2), "Rank 0 keeps running."),
        (False, (1,), "No ranks are running; the next cell starts them."),
    ],
)
def test_an_interrupt_that_has_ended_ranks_does_not_say_that_they_run(replaces, died, said):
    roster = ClusterState(3)
    roster.connect(replaces)
    for rank in range(3):
        roster.apply(Hello(rank, 3, 0, 1, "here", 1 + rank, "cpu", "e", "m", "/none/log"))
    roster.set_phase("running")
    for rank in died:
        roster.apply(ProcessExit(rank, -9, pid=1 + rank))
    session = SimpleNamespace(running=SimpleNamespace(roster=roster))
    with pytest.raises(KeyboardInterrupt) as raised, short_interrupts(session, "It was pressed"):
        raise KeyboardInterrupt
    assert raised.value._render_traceback_() == [f"KeyboardInterrupt: It was pressed. {said}"]
