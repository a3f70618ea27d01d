"""What commands say where no ranks run."""

from types import SimpleNamespace

from allranks.cluster.features import NotebookHooks
from allranks.cluster.options import ClusterOptions
from allranks.magics.session import Session


def test_without_features_a_stop_without_ranks_says_so():
    assert Session(NotebookHooks(())).stop() == "No ranks are running."


class StartedCluster:
    """A cluster whose ranks are there at once: two, if no number is given."""

    launcher, gpus, roster = None, (), SimpleNamespace(phase="running")

    def __init__(self, n=None, **_):
        self.size = n or 2
        self.cells = SimpleNamespace(news=[], is_up=lambda _: True)
        self.hellos = {0: SimpleNamespace(host="h1", device="cpu", mpi="MPI")}

    def start(self, _): ...
    def stop(self): ...


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


def test_a_kernel_that_was_installed_for_a_number_of_ranks_starts_that_number(monkeypatch, capsys):
    monkeypatch.setattr("allranks.magics.session.Cluster", StartedCluster)
    session = Session(NotebookHooks(()))
    session.start_with(ClusterOptions(2))
    session.cluster(ClusterOptions(3))
    session.stop()
    assert session.cluster().size == 2
    assert "as many as before" not in capsys.readouterr().out
