"""What ranks keep is there again in the process that takes a dead rank's place.

The simplest case is on docs/failures.md.
"""

import os
import subprocess
from contextlib import ExitStack

import pytest

from tests.kernel import wait_until

pytestmark = pytest.mark.replaces
SIZE = 4
SENDS = "half.recv() if half.rank else half.send(7, 1)"
DIE = "import os\nif rank == 1: os._exit(5)\nbarrier()"
DURING = {
    "it copies": "class Dies:\n    def __reduce__(self): os._exit(5)\n"
    "step = Dies() if rank == 1 else 2\n",
    "it writes": "if rank == 1: os.replace = lambda *_, **__: os._exit(5)\nstep = 2\n",
}


@pytest.fixture(autouse=True)
def _fresh(notebook):
    notebook.run("%distributed heal on")
    notebook.on_ranks("import os\nimport numpy as np\nstep = 0\nmodel = None\nother = rank").ok()


def ok(cell):
    assert cell.status == "ok", cell.text
    return cell.text


@pytest.mark.parametrize("dying", DURING.values(), ids=DURING.keys())
def test_a_rank_that_dies_while(notebook, dying):
    """What was kept before counts, on that rank and on all others."""
    ok(notebook.on_ranks("step = 1\nkeep('step')"))
    cell = notebook.on_ranks(f"{dying}keep('step')\nbarrier()\nbarrier()")
    assert cell.error_name == "RankDied", cell.text
    assert "rank 1 was replaced, with step kept" in cell.text
    assert "rank 1 → 1" in notebook.on_ranks("step", "-r 1").text
    ok(notebook.on_ranks("step = 3\nkeep('step')"))
    notebook.on_ranks(DIE.replace("1", "2")).says("rank 2 was replaced, with step kept")
    assert "→ 3" in notebook.on_ranks("step").text


NOT_KEPT = {
    "keep(step=1, model=(i for i in range(rank)))": "model on rank 0 cannot be",
    "step = os.scandir() if rank == 2 else 1\nkeep('step')": "step on rank 2 cannot be",
    "keep('step', 'nowhere')": "has none named nowhere",
    "keep()": "keep() needs variables, found none",
    "keep([step])": "keep() needs names of variables, found list",
    "keep(**{'a' if rank else 'b': 1})": "rank 0 has b; rank 1 has a",
}


def test_what_cannot_be_kept_is_said_on_all_ranks_and_changes_nothing(notebook):
    ok(notebook.on_ranks("step = 5\nkeep('step')"))
    for source, expected in NOT_KEPT.items():
        cell = notebook.on_ranks(source).fails("CellFailed", "UsageError: keep()").says(expected)
        assert cell.error_value.startswith("ranks 0–3 of 4")
    notebook.on_ranks(DIE)
    notebook.on_ranks("step", "-r 1").says("rank 1 → 5")


def test_what_is_named_once_is_kept_after_each_cell(notebook):
    said = ok(notebook.run("%distributed keep step, other"))
    assert said == "step and other kept after each cell until: %distributed keep off\n"
    ok(notebook.on_ranks("step = 41"))
    ok(notebook.on_ranks("step += 1"))
    assert notebook.on_ranks("step = 'failed'\n1 / 0").status == "error"
    assert "with step and other kept" in notebook.on_ranks(DIE).text
    assert "rank 1 → (42, 1)" in ok(notebook.on_ranks("step, other", "-r 1"))
    ok(notebook.on_ranks(f"half = comm.Split(rank // 2)\n{SENDS}"))
    missing = notebook.on_ranks("del other")
    assert "step and other not kept: keep() needs variables" in ok(missing)
    assert "has none named other" in missing.text
    # It costs the cells no communicator.
    assert "ranks 1, 3 → 7" in ok(notebook.on_ranks(SENDS))
    assert "those kept before remain" in ok(notebook.run("%distributed keep off"))
    assert "not kept" not in ok(notebook.on_ranks("step = 43"))
    assert "rank 1 was replaced, with step and other kept" in notebook.on_ranks(DIE).text
    assert "rank 1 → 42" in ok(notebook.on_ranks("step", "-r 1"))


def test_every_so_many_seconds_is_not_after_each_cell(notebook):
    assert "once in 3600 s" in ok(notebook.run("%distributed keep step --every 3600"))
    ok(notebook.on_ranks("step = 1"))
    ok(notebook.on_ranks("step = 2"))
    notebook.on_ranks(DIE)
    assert "rank 1 → 1" in ok(notebook.on_ranks("step", "-r 1"))
    wrong = notebook.run("%distributed keep step --every -1")
    assert "--every expected 0 seconds or more, found -1" in wrong.error_value
    ok(notebook.run("%distributed keep off"))


def test_where_all_ranks_are_lost_the_fresh_ones_have_what_was_kept(notebook):
    ok(notebook.on_ranks("step = 10 + rank\nkeep('step')"))
    notebook.run("%distributed heal off")
    assert notebook.on_ranks(DIE).error_name == "ClusterLost"
    cell = notebook.on_ranks("print(step, 'other' in globals())")
    assert "ranks 0–3 have step kept" in ok(cell)
    assert "rank 3 │ 13 False" in cell.text
    ok(notebook.on_ranks("step += 1\nkeep('step')"))
    assert notebook.on_ranks("import os; os._exit(5)").error_name == "ClusterLost"
    assert "rank 3 │ 14" in ok(notebook.on_ranks("print(step)"))


def test_ranks_that_are_stopped_keep_nothing_and_leave_nothing(notebook):
    ok(notebook.on_ranks("keep('step')"))
    folders = notebook.kept_folders()
    assert {folder.stat().st_mode & 0o777 for folder in folders} == {0o700}
    notebook.run("%distributed stop")
    assert notebook.kept_folders() == []
    assert "ranks 0–3 │ False" in ok(notebook.on_ranks("print('step' in globals())", "-n 4"))


NOBODY = 65534
#: Another account: it takes the names of folders, and puts files there that run code when they are
#: unpickled. It holds them until its input ends.
ATTACK = """
import os, pickle, shutil, struct, sys
ran, *folders = sys.argv[1:]
class Runs:
    def __reduce__(self):
        return open, (ran, "w")
for folder in folders:
    os.mkdir(folder)
    os.chmod(folder, 0o777)
    for rank in range(4):
        head = pickle.dumps((0.0, {"step": Runs()}))
        for name in ("cells", "life", "training"):
            with open(f"{folder}/{name}-9-{rank}-of-4", "wb") as file:
                file.write(struct.pack("<2Q48x", 1, len(head)) + head)
print("taken", flush=True)
sys.stdin.read()
for folder in folders:
    shutil.rmtree(folder)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="not root: no other account can be tried")
@pytest.mark.parametrize("keeps", [False, True])
def test_another_account_that_takes_a_removed_folders_name_runs_nothing(notebook, tmp_path, keeps):
    ran = tmp_path / "ran"
    with ExitStack() as ends:
        for place in (*tmp_path.parents[:3], tmp_path, notebook.temporary):
            ends.callback(place.chmod, place.stat().st_mode & 0o7777)
            place.chmod(0o1777)
        if keeps:
            ok(notebook.on_ranks("keep(step=1)"))
        folders = notebook.kept_folders()
        assert len(folders) == 2
        notebook.run("%distributed heal off")
        assert notebook.on_ranks(DIE).error_name == "ClusterLost"
        # Where the ranks have kept nothing, the host agent removes it.
        wait_until(lambda: sum(folder.exists() for folder in folders) == int(keeps))
        free = [str(folder) for folder in folders if not folder.exists()]
        attacker = ends.enter_context(
            subprocess.Popen(
                ["/usr/bin/env", "python3", "-c", ATTACK, str(ran), *free],
                user=NOBODY,
                group=NOBODY,
                extra_groups=(),
                cwd="/",
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        )
        assert attacker.stdin is not None
        assert attacker.stdout is not None
        ends.callback(attacker.stdin.close)
        assert attacker.stdout.readline() == b"taken\n"
        cell = notebook.on_ranks("globals().get('step')")
        assert ("have step kept" in ok(cell)) == keeps, cell.text
        assert "ranks 0–3 → 1" in cell.text or not keeps
        ok(notebook.on_ranks("keep(step=2)"))
        notebook.run("%distributed heal on")
        notebook.on_ranks(DIE).says("rank 1 was replaced, with step kept")
        ok(notebook.on_ranks("barrier()"))
    assert not ran.exists()
