"""The output of simulated ranks, and of their process: what is shown, and what is left out."""

from types import SimpleNamespace

from allranks.cluster.cell_run import HiddenView
from allranks.cluster.features import NotebookHooks
from allranks.cluster.state import ClusterState
from allranks.features.simulate.notebook import SimulatedRun
from allranks.features.simulate.output import RankOutput
from allranks.records.wire import Output


def test_the_end_of_a_line_that_is_too_long_is_shown(tmp_path):
    output = RankOutput(str(tmp_path / "rank-0.log"), limit_nbytes=400, ranks=1)
    output.write("out", "before\n")
    output.write("out", "x" * 1000 + "end\n")
    entries, lines, nbytes = output.take(final=True)
    end = "x" * 96 + "end\n"
    assert entries == [["out", "before\n"], ["hidden", 0, 904], ["out", end]]
    assert (lines, nbytes) == (0, 904)
    assert (tmp_path / "rank-0.log").read_text() == "before\n" + "x" * 1000 + "end\n"


def test_what_no_rank_has_written_is_shown_as_the_process_s_with_what_is_left_out():
    roster, lines = ClusterState(1), []
    connection = SimpleNamespace(
        size=2, roster=roster, hooks=NotebookHooks(()), ask_soon=None, log_dir="/logs",
        begin_cell=lambda cell, ranks, run: None, late=[],
    )  # fmt: skip
    run = SimulatedRun(1, range(2), connection, HiddenView(lambda batch: None, lines.append), None)
    shown = ["display", {"text/plain": "shown"}, {}, None]
    hidden = ["hidden", 2, 3000]
    connection.late.append(Output(0, 0, (["out", "late\n"],), 0, 0, 0))
    run.show_late()
    run.take(Output(0, 1, (["out", "a\nb"], hidden, ["err", "c\n"], shown), 2, 3000, 9000), [])
    who = "the process of the simulated ranks"
    assert lines == [
        f"{who} after its cell had ended: late",
        f"{who}: a",
        f"{who}: b",
        f"{who}: … 3,000 bytes are only in its log, /logs/rank-0.log",
        f"{who}: c",
        f"{who}: shown",
    ]
    assert not connection.late
