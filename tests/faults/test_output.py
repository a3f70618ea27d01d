"""Whatever ranks write is shown in order, bounded on screen and complete in their logs."""

import re

import pytest

LINES = 30_000


def lines_of(log, pattern):
    return [int(n) for n in re.findall(pattern, log.read_text(errors="replace"), re.MULTILINE)]


def test_a_flood_is_bounded_on_screen_and_complete_in_the_logs(notebook):
    cell = notebook.on_ranks(f"for i in range({LINES}): print('flood', i, 'of', rank)", timeout=120)
    assert cell.status == "ok"
    assert cell.iopub_nbytes < 2_000_000
    for rank in range(4):
        log = notebook.logs()[f"rank-{rank}.log"]
        assert lines_of(log, rf"^flood (\d+) of {rank}$") == list(range(LINES))
        shown = len(re.findall(rf"│ flood \d+ of {rank}$", cell.text, re.MULTILINE))
        assert 0 < shown < LINES
        said = re.search(rf"… ([\d,]+) lines .*not shown; .* in {re.escape(str(log))}", cell.text)
        assert int(said[1].replace(",", "")) + shown == LINES
        assert f"flood {LINES - 1} of {rank}" in cell.text


@pytest.mark.parametrize(
    "last", ["", "\nimport time; time.sleep(0.5)"], ids=["at the end", "before"]
)
def test_a_megabyte_of_stderr_is_counted_and_kept(notebook, last):
    """Also where its last lines were passed over before the cell ends, and are shown then."""
    cell = notebook.on_ranks(
        "import sys\nfor i in range(10_000): print(f'complaint {i:089d}', file=sys.stderr)" + last,
        "-r 2",
    ).ok()
    assert cell.iopub_nbytes < 2_000_000
    log = notebook.logs()["rank-2.log"]
    assert lines_of(log, r"^complaint 0*(\d+)$")[-10_000:] == list(range(10_000))
    shown = len(re.findall(r"! complaint", cell.text))
    said = re.search(r"… ([\d,]+) lines", cell.text)
    assert int(said[1].replace(",", "")) + shown == 10_000


def test_long_lines_are_bounded_on_screen(notebook):
    cell = notebook.on_ranks("print('x' * 1_000_000)\nprint('the end')").ok()
    assert cell.iopub_nbytes < 1_000_000
    assert "… 1.0 MB of long lines are not shown; the whole output is in /" in cell.text
    assert "x" * 1_000_000 + "\nthe end" in notebook.logs()["rank-0.log"].read_text()


@pytest.mark.parametrize(
    "write", ["sys.stdout.buffer.write({0}); sys.stdout.flush()", "os.write(1, {0})"]
)
def test_binary_rubbish_is_shown_as_such_and_kept(notebook, write):
    rubbish = bytes(range(256)) * 4 + b"\xff\xfe\x80\x1b[2J\x1b]0;title\x07\n"
    cell = notebook.on_ranks(f"import os, sys\n{write.format(rubbish)}\nprint('after')", "-r 1")
    assert cell.status == "ok"
    assert "\N{REPLACEMENT CHARACTER}" in cell.text
    assert cell.text.rstrip().endswith("│ after")
    assert not set(map(chr, range(32))) & set(cell.text) - {"\n", "\t"}
    assert rubbish in notebook.logs()["rank-1.log"].read_bytes()


def test_python_c_and_child_processes_write_in_one_order(notebook):
    cell = notebook.on_ranks(
        "import ctypes, os, subprocess, sys\nC = ctypes.CDLL(None)\n"
        "print('print')\nos.write(1, b'descriptor\\n')\nsubprocess.run(['echo', 'child'])\n"
        "C.puts(b'C'); C.fflush(None)\n!echo command\nprint('error', file=sys.stderr)\n"
        "os.system('echo system 1>&2')\nprint('end')"
    )
    shown = re.findall(r"[│!] (\w+)$", cell.text, re.MULTILINE)
    assert shown == ["print", "descriptor", "child", "C", "command", "error", "system", "end"]
    assert cell.text.startswith("ranks 0–3 │ print\n")
    cell = notebook.on_ranks("import ctypes\nctypes.CDLL(None).printf(b'buffered in C\\n')", "-r 0")
    assert "│ buffered in C" in cell.text


def test_lines_that_a_thread_writes_across_cells_are_shown_in_order(notebook):
    # In one piece: print() writes its arguments one by one, and a cell may end in between.
    source = (
        "import threading, time\ndef count():\n    for i in range(1500):\n"
        "        print(f'count {rank} {i}')\n        time.sleep(0.001)\n"
        "counting = threading.Thread(target=count); counting.start()"
    )
    shown = notebook.on_ranks(source).text
    over = False
    while not over:
        cell = notebook.on_ranks("counting.is_alive()")
        over = "True" not in cell.text
        shown += cell.text
    shown += notebook.on_ranks("").text
    for rank in range(4):
        found = [int(i) for i in re.findall(rf"count {rank} (\d+)", shown)]
        assert found == list(range(1500))


def test_text_below_a_picture_of_one_rank_is_shown_at_once(notebook):
    cell = notebook.start_on_ranks(
        "import time\nfrom IPython.display import HTML\ndisplay(HTML('<b>'))\nprint('below')\n"
        "time.sleep(600)",
        "-r 1",
    ).wait_for("│ below")
    notebook.interrupt()
    assert cell.wait().error_name == "CellInterrupted"


def test_the_logs_are_for_their_owner_only(notebook):
    for log in notebook.logs().values():
        assert oct(log.stat().st_mode & 0o777) == "0o600"
        assert oct(log.parent.stat().st_mode & 0o777) == "0o700"


PICTURE = """
import numpy as np
class Picture:
    def _repr_png_(self):
        return b"\\x89PNG\\r\\n\\x1a\\n", {"width": np.int64(1)}
class Table:
    def _repr_mimebundle_(self, include=None, exclude=None):
        return {"text/plain": "a table", "application/json": {"rows": np.float32(2)}}
"""


@pytest.mark.parametrize("then", ["", "import time\ntime.sleep(0.3)\n"])
def test_bytes_and_numpys_numbers_are_displayed_as_json_has_them(notebook, then):
    notebook.on_ranks(
        f"{PICTURE}display(Picture())\ndisplay(Picture(), display_id='p')\n{then}Table()"
    ).ok().says("a table")
    assert notebook.on_ranks("kept", "-r 1").text == "rank 1 → 10\n"
