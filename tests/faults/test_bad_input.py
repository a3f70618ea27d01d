"""What cannot be run is refused in words that say what to type; nothing is sent or lost."""

import pytest

from tests.faults.notebook import KEPT
from tests.kernel import patched, wait_until

pytestmark = pytest.mark.usefixtures("_ranks_live_on")


@pytest.mark.parametrize("options", ["--on local", "--gpus all", "--on local --gpus all -n 4"])
def test_an_option_that_names_what_runs_is_no_conflict(notebook, options):
    assert notebook.on_ranks("kept", options).text == KEPT


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("%%distributed -n 0", "expected between 1 and"),
        ("%%distributed --gpus 7", "--gpus"),
        ("%%distributed --on moon", "Available: --on local"),
        ("%%ensemble", "expected at least one parameter, found none"),
        ("%%ensemble x=0:2 --ranks-per-member 3", "3 expected a divisor of the 4 ranks"),
        ("%%ensemble x=0:2 --retry-failed -o no", "expected an ensemble in no, found none"),
        ("%%ensemble x=0:2 -n 2", "-n 2 was given, but 4 ranks are running"),
        ("%%ensemble nowhere", "a variable of the notebook that holds a list of dictionaries"),
        ("restart --on moon", "expected a launcher, found 'moon'"),
        ("restart --gpus 7", "--gpus"),
        ("start -n 2", "4 ranks are running"),
        ("log -r 7", "expected ranks between 0 and 3"),
        ("last " + 5000 * "9", "expected one cell number, found 9999"),
        ("detach-on-exit 10000000000d", "expected a time of at most 365d, found '10000000000d'"),
        ("keep 2x", "expected the names of variables, found 2x"),
        ("push nowhere", "expected names of the notebook's variables, found none named nowhere"),
        ("pull nowhere", "rank 0 has no variable named nowhere"),
        ("pull comm", "that the notebook can read, found on rank 0: it is MPI's"),
        ("pull kept -r 4", "expected ranks between 0 and 3"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_runs(notebook, typed, said):
    cell = f"{typed}\nprint('ran')\nkept = 0" if typed[0] == "%" else f"%distributed {typed}"
    notebook.run(cell).fails("UsageError", said).lacks("Traceback", "│ ran")


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("%distributed", "  restart         ends the ranks and starts them again"),
        ("%distributed log --help", "usage: %distributed log"),
        ("%%distributed -n 4 -h\nkept = 'overwritten'", "--timeout SECONDS"),
        ("%%ensemble --help", "--ranks-per-member K"),
    ],
)
def test_help_is_printed_and_nothing_runs(notebook, typed, shown):
    notebook.run(typed).ok().says(shown)


def completes(notebook, source, expected):
    """The kernel waits half a second for a rank: if it is late, Tab is pressed again."""
    wait_until(lambda: notebook.complete(source) == expected, lambda: f"{expected} for {source!r}")


def describes(notebook, source, expected):
    """The same for Shift-Tab, and two seconds."""
    wait_until(lambda: expected in notebook.inspect(source), lambda: f"{expected} for {source!r}")


def test_tab_completes_commands_and_options(notebook):
    assert notebook.complete("%distributed sta") == ["start", "status"]
    assert "--timeout" in notebook.complete("%%distributed --t")
    completes(notebook, "%%distributed\nkep", ["kept"])


NAMES = """class Stuck:
    "Its text never ends."
    def __repr__(self):
        while True: pass
if rank == 2: only_there, stuck = 2.5, Stuck()
def added(left, right=1):
    "Adds."
    return left + right
"""


def test_names_of_a_rank_are_completed_and_described_while_it_is_idle_or_runs_a_cell(notebook):
    notebook.on_ranks(NAMES).ok()
    completes(notebook, "%%rank 2\nonly_th", ["only_there"])
    assert notebook.complete("%%distributed -r 0,2\nonly_th") == []
    notebook.run("%distributed inspect 2").says("rank 2")
    completes(notebook, "%%distributed\nonly_th", ["only_there"])
    notebook.run("%distributed inspect 9").fails("UsageError", "expected ranks between 0 and 3")
    assert "left + right" in notebook.on_ranks("added??").says("rank 2 │ Signature").text
    # A text that never ends is left out, and the rank goes on.
    describes(notebook, "%%distributed\nstuck", "Its text never ends.")
    describes(notebook, "%%distributed\nonly_there", "2.5")
    # jedi raises if its cache is damaged; IPython then completes no attributes.
    damage = "import jedi, time; jedi.Interpreter.complete, whole = None, jedi.Interpreter.complete"
    notebook.on_ranks(damage).ok()
    completes(notebook, "%%distributed\ntime.slee", ["time.sleep"])
    notebook.on_ranks("jedi.Interpreter.complete = whole").ok()

    sleeps = notebook.start("%%distributed\nimport time\nprint('begun')\ntime.sleep(1000)")
    sleeps.wait_for("ranks 0–3 │ begun")
    completes(notebook, "%%distributed\nonly_th", ["only_there"])
    completes(notebook, "%%distributed\ntime.slee", ["time.sleep"])
    assert notebook.complete("%%distributed\nnowhere.slee") == []
    describes(notebook, "%%distributed\nadded", "Arguments: left, right")
    describes(notebook, "%%distributed\nadded", "Adds.")
    describes(notebook, "%%distributed\nonly_there", "Value:     2.5")
    assert notebook.inspect("%%distributed\nnowhere") == ""
    completes(notebook, "%distributed sta", ["start", "status"])
    notebook.interrupt()
    sleeps.wait().fails("CellInterrupted")
    notebook.run("%distributed inspect 0")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("lock", "expected a last expression that can be pickled, found on rank 0: lock"),
        ("comm", "that the notebook can read, found on rank 0: it is MPI's"),
    ],
)
def test_a_value_that_cannot_be_sent_is_named_and_the_cell_has_run(notebook, value, said):
    notebook.on_ranks(
        f"import threading\nmade, lock = {value!r}, threading.Lock()\n{value}", "-o unsent"
    ).fails("UsageError", said)
    assert notebook.run("unsent").error_name == "NameError"
    assert notebook.on_ranks("made").text == f"ranks 0–3 → {value!r}\n"
    assert notebook.value("'mpi4py.MPI' in __import__('sys').modules") == "False"


def test_a_failed_cell_leaves_the_value_of_the_one_before(notebook):
    notebook.on_ranks("rank", "-o kept_value")
    notebook.on_ranks("1 / 0", "-o kept_value")
    assert notebook.value("kept_value") == "[0, 1, 2, 3]"


def test_a_name_of_the_other_side_is_named_with_the_way_to_it(notebook):
    notebook.run("only_here = 3\nfrom allranks.widgets import ring").ok()
    copy = "only_here exists in the notebook. To copy it to the ranks: %distributed push only_here"
    notebook.on_ranks("only_here").fails("CellFailed").says(f"\n\n{copy}\n")
    notebook.on_ranks("ranks.size").says("ranks runs in the notebook. Type it in a cell without")
    notebook.run("allreduce(kept)").says("allreduce exists on the ranks: begin the cell with")
    # The kernel waits half a second for the rank.
    longer = "dict.fromkeys(_module._SECONDS, 60.0)"
    with patched(notebook.run, "allranks.features.completion.notebook._SECONDS", longer):
        here = "kept exists on ranks 0–3: begin the cell with"
        notebook.run("kept").fails("NameError").says(here)
    # A magic on the ranks is no variable.
    notebook.run("print(env)").fails("NameError").lacks("exists on the ranks")
    notebook.on_ranks("from allranks.widgets import ring\nring()").says(
        "ring() expected the notebook, found a cell of the ranks. Type it in a cell without"
    )
    notebook.on_ranks("%%ensemble x=0:2\nx").says("found %%ensemble, which is a magic of the")
