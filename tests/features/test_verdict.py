"""Real cells with a known cause: it is named below them, with its rank.

On a busy machine a rank may be late because it has no core. Then no rank may be named, so these
tests first look whether the ranks had cores.
"""

from __future__ import annotations

import re

#: The ranks sleep, and so use little of the machine.
LOOP = """
import time
for step in range(60):
    time.sleep({sleep})
    allreduce(1.0, name="loss")
    log(step=step, loss={loss})
"""
MEMBER = """
for step in range(60):
    log(step=step, loss=float("nan") if rate == 2 and step >= 30 else 1.0)
"""
UNEVEN = """
import time
for step in range(30 if rank == 0 else 40):
    time.sleep(0.05)
    allreduce(1.0)
"""
#: The numbers that a rank brings to its reductions, and what is done with the sum.
NUMBERS = """
import time
import numpy as np
numbers, weights = np.random.default_rng({seed}), np.zeros(2000)
for step in range(100):
    time.sleep(0.012)
    weights -= 0.1 * allreduce(weights - {numbers}, name="gradients")
"""
_SECONDS = 300


def run(notebook, sleep, loss="1.0"):
    return notebook.on_ranks(LOOP.format(sleep=sleep, loss=loss), "-n 3", timeout=_SECONDS)


def line(cell, beginning):
    """The line of a verdict, which all ranks have in common."""
    found = re.findall(rf"^ranks 0–2 · ({beginning}.*)$", cell.text, re.MULTILINE)
    assert len(found) == 1, cell.text
    return found[0]


def had_cores(why, ranks=3):
    """Whether no rank had threads without a core for more than a fifth of the time."""
    rows = re.findall(r"^  rank \d .* (\d+)%(?:  |$)", why, re.MULTILINE)
    assert len(rows) == ranks, why
    return all(int(share) <= 20 for share in rows)


def test_a_slow_rank_is_named_below_the_cell(notebook):
    cell = run(notebook, "0.1 if rank == 1 else 0.02")
    why = notebook.run("%distributed why").text
    assert not re.search(r"rank [02] is (the slow one|late)", cell.text + why)
    if had_cores(why):
        said = line(cell, "rank 1 is the slow one: ")
        assert "the others wait" in said
        # The line may be left out, as of a machine that looks too late.
        assert "more, at" not in said or "`time.sleep(0.1 if rank == 1" in said
        assert re.match(r"In\[\d+\]: rank 1 is the slow one: ", why)


def test_no_other_rank_is_named_for_one_that_is_late_now_and_then(notebook):
    # How often it is late depends on the machine too: the unit tests show when it is named.
    cell = run(notebook, "1.5 if rank == 2 and step % 20 == 19 else 0.02")
    cell.ok()
    assert not re.search(r"rank [01] is (the slow one|late)", cell.text)


def test_ranks_that_all_wait_for_something_stand_still_and_ranks_that_sleep_do_not(notebook):
    loop = LOOP.format(sleep="0.1", loss="1.0")
    slept = notebook.on_ranks(loop, "-n 3", timeout=_SECONDS)
    assert "stand still" not in slept.text
    waits = "import select\n" + loop.replace("time.sleep(0.1)", "select.select([], [], [], 0.1)")
    cell = notebook.on_ranks(waits, "-n 3", timeout=_SECONDS)
    why = notebook.run("%distributed why").text
    if had_cores(why):
        assert "0.1)`: they wait" in line(cell, "all ranks stand still for ")


def test_a_loss_that_is_not_a_number_is_named_with_its_step(notebook):
    cell = run(notebook, "0.03", loss='float("nan") if rank == 1 and step >= 30 else 1.0')
    assert line(cell, "loss is NaN since step 30 on rank 1")


def test_the_member_of_an_ensemble_whose_loss_is_not_a_number_is_named(notebook):
    notebook.on_ranks("1", "-n 3", timeout=_SECONDS).ok()
    cell = notebook.run(f"%%ensemble rate=1,2,3\n{MEMBER}", timeout=_SECONDS)
    assert "loss is NaN in member 1 since step 30. " in cell.text


def test_the_rank_that_brings_nan_to_a_sum_is_named_before_it_is_spread(notebook):
    wrong = "numbers.normal(size=2000) * (np.nan if rank == 2 and step == 60 else 1)"
    source = NUMBERS.format(seed="[7, rank]", numbers=wrong)
    said = line(notebook.on_ranks(source, "-n 3", timeout=_SECONDS), "NaN or infinity ")
    assert said.startswith("NaN or infinity came first on rank 2: in the input of call 61 of ")
    assert "allreduce at gradients, which spread it to the other ranks" in said


def test_ranks_with_the_same_random_numbers_are_named(notebook):
    same, own = (
        notebook.on_ranks(
            NUMBERS.format(seed=seed, numbers="numbers.normal(size=2000)"), "-n 3", timeout=_SECONDS
        )
        for seed in ("7", "[7, rank]")
    )
    assert line(same, "every rank brings the same numbers to its reductions, in ")
    own.ok()
    assert "the same numbers" not in own.text


def test_a_check_raises_before_nan_is_spread(notebook):
    wrong = "import numpy as np\nx = np.ones(3)\nif rank == 1: x[2] = np.nan\ntotal = allreduce(x)"
    cell = notebook.on_ranks(wrong, "-n 3 --check nan", timeout=_SECONDS)
    assert cell.status == "error"
    said = r"NotFinite: allreduce at .* found nan in 1 of 3 places, the first at \(2,\). No data"
    assert re.search(said, cell.text)
    assert re.search(r"rank 1 .*raised NotFinite at line 5", cell.text)
    # Only the cell with the option is checked.
    notebook.on_ranks(wrong, "-n 3", timeout=_SECONDS).ok()


def test_a_cell_that_breaks_python_does_not_fail_for_its_verdict(notebook):
    cell = run(notebook, '[0.1, globals().update({1: []}), setattr(__builtins__, "open", None)][0]')
    cell.ok()


def test_different_numbers_of_steps_are_counted(notebook):
    cell = notebook.on_ranks(UNEVEN, "-n 3", timeout=_SECONDS)
    assert cell.status == "error"
    said = line(cell, "the ranks have different numbers of steps: rank 0 ended after 30 calls ")
    assert "`allreduce(1.0)`" in said


def test_two_cells_are_compared(notebook):
    numbers = [run(notebook, sleep).execution_count for sleep in ("0.2", "0.03")]
    text = notebook.run("%distributed why {} {}".format(*numbers)).text
    assert re.match(rf"In\[{numbers[1]}\] is .* In\[{numbers[0]}\]", text), text


def test_a_cell_that_was_not_judged_is_refused(notebook):
    cell = notebook.run("%distributed why 9999")
    assert cell.status == "error"
    assert "and '9999' is none of them. Type for example: %distributed why 12" in cell.text


def test_it_can_be_switched_off(notebook):
    notebook.run("%distributed restart -n 3 --verdict off", timeout=_SECONDS)
    cell = run(notebook, "0.03", loss='float("nan") if step >= 30 else 1.0')
    assert "is NaN since" not in cell.text
    notebook.run("%distributed restart -n 3 --verdict on", timeout=_SECONDS)
