"""Two notebooks at once have ranks, variables and results of their own."""

CELL = (
    "import time\nimport numpy as np\ntotal = 0.0\n"
    "for i in range(200):\n    total += float(allreduce(np.full(1000, own), op=Sum)[0])\n"
    "    if i % 50 == 0: time.sleep(0.05)\ntotal"
)


def test_two_notebooks_compute_at_once_and_the_end_of_one_leaves_the_other_at_work(
    notebook, new_notebook
):
    one, other = new_notebook(), notebook
    first = one.start_on_ranks("own = 1.0", "-n 3")
    second = other.start_on_ranks("own = 5.0")
    assert first.wait().status == second.wait().status == "ok"
    # On a busy machine they take long enough for a panel.
    first, second = (each.start_on_ranks(CELL, "--view plain") for each in (one, other))
    assert first.wait().text == "ranks 0–2 → 600.0\n"
    assert second.wait().text == "ranks 0–3 → 4000.0\n"
    assert not set(one.pids().values()) & set(other.pids().values())
    assert not one.note_files() & other.note_files()
    one.start_on_ranks("print('here')\nwhile True:\n    barrier()").wait_for("here")
    source = f"import time\nprint('here')\ntime.sleep(1)\n{CELL}"
    cell = other.start_on_ranks(source, "--view plain")
    cell.wait_for("here")
    one.kill9()
    one.check_nothing_left()
    assert cell.wait().text == "ranks 0–3 │ here\n          → 4000.0\n"
    other.interrupt()
    assert other.on_ranks("own").text == "ranks 0–3 → 5.0\n"
