"""A profile of real ranks: what it shows of a cell, and that no cell is any different for it."""

import re

UNEVEN = """
import time

def works():
    seen = looks[0]
    while looks[0] < seen + 5:
        sum(range(1000))

barrier()
if rank == 3:
    works()
allreduce(1.0, op=Sum)
"""
#: On the ranks: a line that waits for ``looks[0] >= 2`` has been seen by the profile.
LOOKS = """
import time
from allranks.features.profile.rank import Sampler
looks, look = [0], Sampler._look
def counted(self):
    looks[0] += 1
    return look(self)
Sampler._look = counted
"""


def test_a_profile_shows_which_rank_is_at_what(notebook):
    notebook.on_ranks(LOOKS).ok()
    cell = notebook.on_ranks(UNEVEN, "--profile").ok()
    notebook.on_ranks("Sampler._look = look").ok()
    shown = next(d for d in cell.displays if d["text/plain"].startswith("profile of ranks 0–3"))
    assert re.search(r"^≠ works In\[\d+\]:\d+ .*: rank 3 [\d.]+ m?s", shown["text/plain"], re.M)
    # The others have waited longer; whether as long as each other depends on when they began.
    found = re.search(
        r"^≠ allreduce \(allranks\): (ranks? .*), rank 3 [\d.]+ \w+$", shown["text/plain"], re.M
    )
    assert found, shown["text/plain"]
    assert "rank 3" not in found[1]
    assert 'usemap="#allranks-' in shown["text/html"]


def test_a_cell_is_profiled_where_it_is_asked_for_also_if_it_fails(notebook):
    notebook.on_ranks("import threading; [t.name for t in threading.enumerate()]").says(
        "allranks-wire"
    ).lacks("allranks-sampler", "profile of")
    notebook.on_ranks(LOOKS).ok()
    cell = notebook.on_ranks(
        "looks[0] = 0\nwhile looks[0] < 2: time.sleep(0.1)\n1 / 0", "--profile"
    )
    assert "ZeroDivisionError" in cell.text
    assert re.search(r"In\[\d+\]:3  while looks\[0\] < 2: time.sleep\(0.1\)", cell.text)
    notebook.on_ranks("Sampler._look = look").ok()
    cell = notebook.on_ranks("1", "--profile --save /nowhere/at/all.txt")
    assert "expected a file in an existing folder" in cell.text
    assert "→" not in cell.text


def test_seconds_of_the_next_cell_are_shown_while_it_still_runs(notebook, tmp_path):
    file = tmp_path / "stacks.txt"
    said = notebook.run(f"%distributed profile 3 --save {file}").text
    assert "The first 3 s of the next cell on the ranks will be profiled." in said
    cell = notebook.start_on_ranks("import time\nfor _ in range(6000): time.sleep(0.1)")
    notebook.pump(lambda: "profile of ranks 0–3" in cell.text, 60, "the profile", cell)
    assert not cell.done
    notebook.interrupt()
    cell.wait()
    assert cell.error_name == "CellInterrupted"
    assert cell.text.count("profile of") == 1
    for rank in range(4):
        assert re.search(
            rf"^rank {rank};In\[\d+\]:3  for _ in .*sleep\(0.1\) \d+$", file.read_text(), re.M
        )


def test_functions_that_the_notebook_calls_are_profiled_from_their_first_line(notebook):
    cell = notebook.run(
        "def nap():\n"
        "    import time\n"
        "    from allranks.features.profile.rank import Sampler\n"
        "    seen, look = [], Sampler._look\n"
        "    Sampler._look = lambda self: (seen.append(1), look(self))[1]\n"
        "    while len(seen) < 2: time.sleep(0.05)\n"
        "    Sampler._look = look\n"
        "    return rank\n"
        "cluster = get_ipython().magics_manager.registry['DistributedMagics'].session.running\n"
        "seen, options = [], {'seconds': 0.0, 'save': None}\n"
        "_ = cluster.cells.hooks.command('profile', options, seen.extend)\n"
        "cluster.run(nap), [s for p in seen for s in p.stacks if 'nap' in str(s)]"
    ).ok()
    assert cell.text.count("('nap (__main__)',)") == cell.text.count("nap (") == 4, cell.text


def test_a_cell_that_runs_is_profiled_from_beside_it(notebook):
    notebook.run(
        "import threading, time\n"
        "def beside(magic=get_ipython().run_line_magic):\n"
        "    while not cluster.roster.busy: time.sleep(0.05)\n"
        "    magic('distributed', 'profile 3')\n"
        "cluster = get_ipython().magics_manager.registry['DistributedMagics'].session.running\n"
        "threading.Thread(target=beside).start()"
    )
    cell = notebook.start_on_ranks("import time\nfor _ in range(6000): time.sleep(0.1)")
    notebook.pump(lambda: "profile of ranks 0–3" in cell.text, 60, "the profile", cell)
    assert not cell.done
    notebook.interrupt()
    cell.wait()
    assert cell.text.count("profile of") == 1
