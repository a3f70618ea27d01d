"""``%%ensemble`` on four real ranks: what members find, what they leave, and what is kept of it.

Grids of values, the best member and predictions are on docs/ensemble.md.
"""

import re

import pytest


@pytest.fixture(scope="module")
def notebook(own_kernel):
    own_kernel.run("%distributed start -n 4").ok()
    return own_kernel


def run(notebook, line, body, timeout=60):
    cell = notebook.run(f"%%ensemble {line}\n{body}", timeout).ok()
    return cell


def test_a_list_of_dictionaries_from_the_notebook_and_a_random_search(notebook):
    notebook.run("configs = [dict(kind='a', f=abs), dict(kind='b', f=lambda x: x + 1)]")
    run(notebook, "configs x=-3,4", "result = f(x)")
    assert notebook.value("[m.result for m in runs]") == "[3, 4, -2, 5]"
    notebook.run("rates = [0.5, 0.25]")
    run(notebook, "lr={rates}", "result = 2 * lr")
    assert notebook.value("[m.result for m in runs]") == "[1.0, 0.5]"
    run(notebook, "lr=log:1e-4:1e-1 --random 6 --seed 2 -o drawn", "result = lr")
    assert notebook.value("all(1e-4 <= m.result <= 1e-1 for m in drawn), len(drawn)") == "(True, 6)"


def test_a_plain_view_ends_with_a_table_above_what_the_members_said(notebook):
    cell = run(notebook, "x=0:2 --view plain --metric loss", "log(loss=x)\nprint('said', x)")
    table, said = (shown["text/plain"] for shown in cell.displays)
    assert table.startswith("2 of 2 finished, ")
    assert re.findall(r"^ +(\d)  (\d)  finished +\d +(\S+)", table, re.M) == [
        ("0", "0", "0"),
        ("1", "1", "1"),
    ]
    assert said == "member 0 │ said 0\nmember 1 │ said 1"


def test_a_member_is_alone_with_its_variables_and_collectives(notebook, tmp_path):
    notebook.run(
        "%%distributed\nbase = [1]\nscale = 10\ndef scaled(): return scale * x, rank, size"
    )
    body = "scale = 100 + x\nnew = 1\nresult = (scaled(), base, 'scale' in globals())\ndel base"
    run(notebook, "x=0:8", body)
    assert notebook.value("runs[5].result") == "((525, 0, 1), [1], True)"
    cell = notebook.run("%%distributed\nscale, base, 'new' in globals(), 'x' in globals(), size")
    assert cell.text == "ranks 0–3 → (10, [1], False, False, 4)\n"
    assert notebook.run("%%distributed\nint(allreduce(rank, op=Sum))").text == "ranks 0–3 → 6\n"
    body = f"""
import os, time
import numpy as np
end = time.monotonic() + 60
while member == 0 and len(os.listdir({str(tmp_path)!r})) < 11 and time.monotonic() < end:
    time.sleep(0.05)
# It does not hold up the others.
assert member or len(os.listdir({str(tmp_path)!r})) == 11
total = allreduce(np.ones(3), op=Sum)
barrier()
both = comm.allgather(member)
result = (rank, size, local_rank, total.tolist(), both)
open(os.path.join({str(tmp_path)!r}, str(member)), "w").close()
"""
    run(notebook, "x=0:12", body)
    assert (
        notebook.value("[m.result == (0, 1, 0, [1.0] * 3, [m.number]) for m in runs].count(True)")
        == "12"
    )


def test_ranks_per_member_train_data_parallel_inside_their_own_set(notebook):
    body = """
import numpy as np
part = add_process_set([0])
share = np.full(2, member + rank)
result = dict(
    place=(rank, size), sum=allreduce(share, op=Sum), root=broadcast(share, 1),
    objects=comm.allgather(rank), world=MPI.COMM_WORLD.allreduce(member), own=MPI.COMM_SELF.size,
    alone=float(allreduce(1.0, process_set=part)) if rank == 0 else None,
)
log(step=0, loss=member + rank)
"""
    run(notebook, "x=0:6 --ranks-per-member 2", body)
    assert notebook.value("[m.result['place'] for m in runs]") == str([(0, 2)] * 6)
    assert notebook.value("[m.result['sum'].tolist() for m in runs]") == str(
        [[2 * m + 1] * 2 for m in range(6)]
    )
    assert notebook.value("[m.result['root'].tolist()[0] - m.number for m in runs]") == str([1] * 6)
    assert notebook.value("{tuple(m.result['objects']) for m in runs}") == "{(0, 1)}"
    assert notebook.value("[(m.result['world'], m.result['own']) for m in runs]") == str(
        [(2 * m, 1) for m in range(6)]
    )
    assert notebook.value("{m.ranks for m in runs} <= {(0, 1), (2, 3)}") == "True"
    assert notebook.value("[m.history['loss'].values[0] for m in runs][3]") == "np.float64(3.0)"
    cell = notebook.run("%%distributed\nMPI.COMM_WORLD is comm, comm.size")
    assert cell.text == "ranks 0–3 → (True, 4)\n"


def test_a_member_of_two_ranks_that_fails_in_a_collective_spoils_no_other(notebook):
    body = """
import numpy as np
if x == 1 and rank == 1: raise ValueError("one of two")
result = float(allreduce(np.full(3, rank + 1.0), op=Sum)[0])
"""
    run(notebook, "x=0:6 --ranks-per-member 2", body).says("5 of 6 finished, 1 failed")
    assert notebook.value("runs.failed[0].error") == "'ValueError: one of two'"
    assert notebook.value("[m.result for m in runs]") == "[3.0, None, 3.0, 3.0, 3.0, 3.0]"
    told = notebook.run("print(runs.failed[0].traceback)").text
    assert told.startswith("rank 1 (")
    assert re.search(r"ranks 0–1 of member 1 are ranks (0–1|2–3) of the cluster", told)
    assert notebook.run("%%distributed\nint(allreduce(rank, op=Sum))").text == "ranks 0–3 → 6\n"


@pytest.mark.parametrize("each", [1, 4])
def test_a_member_that_leaves_a_collective_unfinished_spoils_no_later_ensemble(notebook, each):
    left = """
import numpy as np
handle = allreduce_async(np.ones(3))
if rank == 0: raise ValueError("left")
synchronize(handle)
"""
    for _ in range(2):
        notebook.run(f"%%ensemble x=0:8 --ranks-per-member {each}\n{left}")
        assert notebook.value("len(runs.failed)") == "8"
        run(notebook, f"x=0:8 --ranks-per-member {each}", "result = float(allreduce(1.0, op=Sum))")
        assert notebook.value("{m.result for m in runs}") == f"{{{float(each)}}}"


def test_a_member_that_fails_stops_no_other_and_runs_again_when_asked(notebook, tmp_path):
    flag = tmp_path / "mended"
    body = f"""
import os
if x % 3 == 1 and not os.path.exists({str(flag)!r}): raise ValueError(f"x is {{x}}")
with open({str(tmp_path / "ran")!r}, "a") as ran: ran.write(f"{{x}}\\n")
result = x
"""
    grid = f"x=0:6 --store {tmp_path / 'store'}"
    cell = run(notebook, grid, body).says("4 of 6 finished, 2 failed")
    assert re.search(r"1 +1 +failed .* ValueError: x is 1", cell.text)
    assert notebook.value("[m.number for m in runs.failed]") == "[1, 4]"
    shown = notebook.run("print(runs.failed[1].traceback)").text
    assert "ValueError: x is 4" in shown
    assert "----> " in shown
    flag.touch()
    run(notebook, grid, body)
    assert notebook.value("[m.number for m in runs.failed]") == "[1, 4]"
    run(notebook, f"{grid} --retry-failed", body)
    assert notebook.value("[m.result for m in runs]") == "[0, 1, 2, 3, 4, 5]"
    assert sorted((tmp_path / "ran").read_text().split()) == list("012345")


def test_cells_that_fail_as_a_whole(notebook):
    notebook.run("%%ensemble x=0:3\nresult = 1 / 0").fails("CellFailed").says(
        "all members 0–2 failed; the first: ZeroDivisionError", "----> 2 result = 1 / 0"
    )
    assert notebook.value("len(runs.failed)") == "3"
    cell = notebook.run("%%ensemble x=0:3\nprint('ran')\nresult = (")
    assert cell.error_name == "InvalidCell"
    assert "the cell was not run on any rank" in cell.error_value
    notebook.run("del runs\nruns = 3")
    cell = notebook.run("%%ensemble x=1\npass")
    assert "found int there already. Type for example: -o runs2" in cell.error_value
    run(notebook, "x=1 -o runs", "pass")
    assert notebook.value("len(runs)") == "1"


def test_what_members_write_and_log_is_known_by_member(notebook):
    cell = run(notebook, "x=0:3", "print('same')\nprint('x is', x)\nx")
    assert "members 0–2 │ same" in cell.text
    assert "member 1    │ x is 1" in cell.text
    # The value of a last expression is no result.
    assert notebook.value("runs[0].result is None") == "True"
    run(notebook, "x=0:5", "for step in range(300): log(step=step, loss=x + 1 / (step + 1))")
    assert (
        notebook.value("[len(m.history['loss'].steps) for m in runs]")
        == "[300, 300, 300, 300, 300]"
    )
    assert notebook.value("runs[3].history['loss'].values[0]") == "np.float64(4.0)"
    assert notebook.value("runs.best('loss').number") == "0"


def test_members_have_all_of_ipython_and_an_end(notebook):
    run(notebook, "x=0:3 --timeout 10", "import time\nif x == 1: time.sleep(60)\nresult = x")
    assert (
        notebook.value("runs[1].error, runs[0].result") == "('it exceeded its timeout of 10 s', 0)"
    )
    body = """
import asyncio
await asyncio.sleep(0.01)
lines = !echo {x}
%time y = x + 1
result = lines[0], y
"""
    run(notebook, "x=5,6", body)
    assert notebook.value("[m.result for m in runs]") == "[('5', 6), ('6', 7)]"


def test_a_number_as_result_orders_the_members_and_the_table_says_so(notebook):
    cell = run(notebook, "x=1,2 -o numbers", "log(acc=1 / x)\nlog(f1=x)\nresult = float(x)")
    order = "by the highest result; another order: --metric acc, or runs.best('acc')"
    assert f"★ the best of those that have finished, {order}" in cell.text
    assert notebook.value("numbers.order()") == repr(order)


def test_the_table_stays_in_the_notebook_and_a_result_may_be_sent(notebook):
    run(notebook, "x=1,2 -o numbers", "result = float(x)")
    refused = notebook.run("%distributed push numbers")
    assert "numbers cannot be sent to the ranks" in refused.error_value
    notebook.run("%distributed on").ok()
    try:
        missing = notebook.run("numbers.best()").text
        assert "numbers exists in the notebook, and cannot be copied to the ranks" in missing
        notebook.run("%%local\nbest = numbers.best().result\n%distributed push best").ok()
        assert notebook.run("best").text == "ranks 0–3 → 2.0\n"
    finally:
        notebook.run("%distributed off").ok()


def test_what_cannot_be_sent_or_kept_is_said_of_its_member(notebook):
    run(notebook, "x=1", "result = {'n': 3, 'g': (i for i in [1])}")
    assert notebook.value("runs[0].metrics") == "{'n': 3}"
    cell = notebook.run("runs[0].result")
    assert cell.error_name == "UsageError"
    assert "expected a result that can be sent and kept, found in member 0" in cell.error_value
    notebook.run("import threading\nodd = [dict(x=1), dict(x=threading.Lock()), dict(x=2)]")
    run(notebook, "odd", "result = x")
    assert notebook.value("[m.state for m in runs]") == "['finished', 'failed', 'finished']"
    assert "x cannot be sent to a rank" in notebook.value("runs[1].error")


def test_members_are_added_and_stopped_while_others_run(notebook, tmp_path):
    go = str(tmp_path / "go")
    notebook.run(f"""
import asyncio, os
async def meddle():
    while 'more' not in globals() or more.requests is None or more[0].state != 'running':
        await asyncio.sleep(0.02)
    more.add("x=100:102")
    more.add(x=7)
    more.stop(0)
    more.stop(9)
    open({go!r}, "w").close()
task = asyncio.ensure_future(meddle())
""")
    waits = f"while x == 0 or x < 10 and x != 7 and not os.path.exists({go!r}): time.sleep(0.02)"
    run(notebook, "x=0:10 -o more", f"import os, time\n{waits}\nresult = x")
    assert notebook.value("len(more), more[0].state, more[9].state") == "(13, 'stopped', 'stopped')"
    assert notebook.value("[m.result for m in more[10:]]") == "[100, 101, 7]"
    assert notebook.value("len(more.finished)") == "11"
    assert "has ended, so nothing can be added" in notebook.run("more.add(x=1)").text


def test_stopping_all_keeps_what_has_finished_and_fails_no_cell(notebook):
    notebook.run("""
async def halt():
    while not ('halted' in globals() and len(halted.finished) >= 3):
        await asyncio.sleep(0.02)
    halted.stop()
task = asyncio.ensure_future(halt())
""")
    cell = run(notebook, "x=0:12 -o halted", "import time\nif x > 2: time.sleep(600)\nresult = x")
    assert "3 of 12 finished, 9 stopped" in cell.text
    assert notebook.value("[m.result for m in halted.finished]") == "[0, 1, 2]"


def test_poor_members_are_stopped_early(notebook):
    notebook.run("import importlib.util")
    if notebook.value("importlib.util.find_spec('optuna') is None") == "True":
        pytest.skip("optuna is missing: pip install 'allranks[early]'")
    # Those that are poor end only when they are stopped.
    body = """
import time
from itertools import count
for step in range(60) if lr < 4 else count():
    log(step=step, loss=lr + 1 / (step + 1))
    time.sleep(0.02)
result = "through"
"""
    run(notebook, "lr=0:12 --stop halving --metric loss --grace 5", body)
    assert notebook.value("{m.state for m in runs[4:]}") == "{'stopped early'}"
    assert notebook.value("runs[0].result, runs.best('loss').number") == "('through', 0)"
    assert notebook.value("min(len(m.history['loss'].steps) for m in runs) >= 5") == "True"


@pytest.mark.parametrize("magic", ["%%time", "%%capture kept"])
def test_below_another_magic_an_ensemble_is_not_awaited_and_runs(notebook, magic):
    notebook.run(f"{magic}\n%%ensemble x=0:5\nresult = x")
    assert notebook.value("[m.result for m in runs]") == "[0, 1, 2, 3, 4]"


def test_a_live_panel_is_told_its_members_and_leaves_a_table(notebook):
    cell = run(notebook, "x=0:6", "import time\nlog(loss=x)\ntime.sleep(0.4)\nresult = x")
    opened, *_, closed = [comm["msg_type"] for comm in cell.comms]
    assert (opened, closed) == ("comm_open", "comm_close")
    html = cell.displays[0]["text/html"]
    assert "data:image/svg+xml;base64," in html
    assert html.count("<tr>") == 7
    picture, script, _ = html.partition("<script>")
    assert script
    assert not re.search("<script|<style|widget", picture)
    cell = notebook.run("%%ensemble x=0:2 --view plain\nimport time; time.sleep(1); print('hi')")
    assert cell.comms == []
    cell.says("2 of 2 finished", "members 0–1 │ hi")
