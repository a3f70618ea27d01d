"""Where real ranks' time went: for whom each waited, what it imported, what a step took."""

import re
from functools import partial

import pytest

from tests.kernel import patched

SLOW = """
import time
from allranks import collectives
before = len(collectives.records())
time.sleep(0.5)
for step in range(30):
    time.sleep(0.03 * rank)
    allreduce(1.0, op=Sum, name="loss")
    log(step=step, loss=0.5)
print("waited", sum(one.wait_seconds for one in collectives.records()[before:]))
"""
IMPORTS = """
import pathlib, sys
folder = pathlib.Path("modules"); folder.mkdir(exist_ok=True)
source = "import os, time\\nwhile not os.path.exists('go'): time.sleep(0.1)"
(folder / "slow_module.py").write_text(source)
sys.path.insert(0, str(folder))
barrier()
import slow_module
log(loss=1.0)
"""


def seconds(row: str) -> list[float]:
    units = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}
    return [float(n) * units[unit] for n, unit in re.findall(r"([\d.]+) (s|ms|µs)\b", row)]


def test_a_cell_that_waits_says_for_whom_and_how_long_a_step_takes(notebook):
    cell = notebook.run(f"%%distributed{SLOW}")
    said = cell.text
    kinds = r"^time of each rank\n +all +start-up +computing +waiting +transfer$"
    head = re.search(kinds, said, re.MULTILINE)
    assert head, said
    row = re.search(r"^ +rank 0 .*  waits for rank 1 [\d.]+ m?s.*$", said, re.MULTILINE)
    assert row, said
    whole, start_up, computing, waiting, transfer = seconds(row[0].partition("waits for")[0])
    # A share is told as one of 256, and shown with three digits.
    near = partial(pytest.approx, abs=0.05 + whole / 100)
    assert start_up + computing + waiting + transfer == near(whole)
    assert start_up > 0.4  # it has slept for 0.5 s
    waited = float(re.search(r"^rank 0 +│ waited ([\d.]+)$", said, re.MULTILINE)[1])
    assert waiting == near(waited)
    (for_rank_1,) = seconds(row[0].partition("waits for rank 1 ")[2].partition(",")[0])
    assert for_rank_1 == near(waited)
    assert re.search(r"^a step, mean of \d+\n +all +computing +waiting +transfer$", said, re.M), (
        said
    )

    # The next cell counts as short, however slow the machine is.
    def on_ranks(source):
        return notebook.run(f"%%distributed\n{source}")

    with patched(on_ranks, "allranks.engine.telemetry._STRIP_SECONDS", 60):
        said = on_ranks("log(loss=1.0); allreduce(1.0)").text
    assert "loss" in said
    assert "computing" not in said


def test_a_slow_import_is_shown_in_a_line_and_counted_for_itself(notebook):
    cell = notebook.start(f"%%distributed{IMPORTS}")
    line = "importing slow_module on ranks 0–1 ░"
    notebook.pump(lambda: line in cell.text, 60, "the line", cell)
    assert not cell.done
    (notebook.cwd / "go").touch()
    said = cell.wait().text
    assert "importing slow_module" not in said
    for rank in range(2):
        assert re.search(rf"rank {rank} .*imports slow_module [\d.]+ m?s", said), said


GROWS = """
import sys, time
from allranks.engine.telemetry import TelemetrySender
looks, look = [], TelemetrySender.rss_nbytes
def rss_nbytes(self):
    found = look(self)
    # The answer to the notebook's question after two seconds is in no chart.
    if sys._getframe(1).f_code.co_name != "_status":
        looks.append(found)
    return found
def seen(least, most):
    while not (looks and least <= looks[-1] <= most): time.sleep(0.01)
if rank == 1:
    TelemetrySender.rss_nbytes = rss_nbytes
    seen(0, 10**12)
    first = looks[-1]
    full = b"1" * 300_000_000
    seen(first + 280_000_000, 10**12)
    del full
    seen(0, first + 20_000_000)
    TelemetrySender.rss_nbytes = look
log(loss=1.0)
"""


def test_memory_that_grows_is_shown_with_its_most(notebook):
    said = notebook.run(f"%%distributed{GROWS}").text
    table = re.search(r"^memory\n +first +most +last\n(?:.*\n)?( +rank 1 .*)$", said, re.MULTILINE)
    assert table, said
    first, most, last = (float(size) for size in re.findall(r"([\d.]+) MB", table[1]))
    assert most - first > 250
    assert most - last > 250
