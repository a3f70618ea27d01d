"""Whatever ranks send that a notebook cannot read, decode or show, its cells end, and tell why.

What cannot be read ends its rank too: nothing says what else it would send.
"""

import pytest

from tests.faults.notebook import KEPT

SEND = """
import gc
from allranks.engine.wire import RankWire
(wire,) = [found for found in gc.get_objects() if type(found) is RankWire]
if rank == 1:
    with wire._lock:
        wire._events.send_multipart({frames})
"""
UNREADABLE = {
    "rubbish": "[b'rubbish', b'']",
    "deeper than any parser": "[b'[' * 1_000_000]",
    "another record": """[b'["Output", {"rank": 1}]']""",
    "no record": "[b'7']",
}
LOSE_REPLY = """
send = wire._send_all
def lose_reply(messages):
    replies = [message for message in messages if type(message[0]).__name__ == "Reply"]
    if replies:
        wire._send_all = send
    send([message for message in messages if rank != 1 or message not in replies])
wire._send_all = lose_reply
if rank == 1:
    wire._events.send_multipart([b'a reply that cannot be read'])
"""
LONE = {
    "an exception": ("raise ValueError('a \\ud83d b')", "ValueError: a \\ud83d b"),
    "a chain": (
        "try:\n    raise KeyError(chr(0xdfff) + 'a')\n"
        "except KeyError as error:\n    raise OSError('b') from error",
        "\\udfffa",
    ),
    "a file's name": ("exec(compile('1/0', 'a\\ud83d', 'exec'))", "ZeroDivisionError"),
    "a value": ("class A:\n    def __repr__(self):\n        return 'a\\ud83d'\nA()", "→ a\\ud83d"),
    "an update": (
        "h = display({'text/plain': 'a'}, raw=True, display_id='\\ud83d')\n"
        "h.update({'text/plain': 'a\\ud83d'}, raw=True)",
        "│ a\\ud83d",
    ),
    "a mime type": ("display({'text/\\ud83d': 'b', 'text/plain': 'a'}, raw=True)", "a"),
    "output": ("import sys\nprint('a\\ud83d')\nsys.stderr.write('b\\ud83d')", "│ a\\ud83d"),
    "a curve": ("log({'a\\ud83d': 1.0}, member='\\udead')", "a\\ud83d \\udead"),
    "a collective": (
        "allreduce(1.0, name='\\ud83d')\nprint(comm.allgather('a\\ud83d')[1])",
        "│ a\\ud83d",
    ),
}


@pytest.fixture(autouse=True)
def _ranks_live_on(notebook):
    yield
    notebook.on_ranks("pass").ok()
    assert notebook.on_ranks("kept").text == KEPT


@pytest.fixture
def _rank_1_is_replaced(notebook):
    yield
    notebook.on_ranks("kept").says("rank 0 → 0\n", "rank 2 → 20\n", "rank 3 → 30\n")
    notebook.on_ranks("kept = 10 * rank").ok()


@pytest.mark.replaces
@pytest.mark.usefixtures("_rank_1_is_replaced")
@pytest.mark.parametrize("frames", UNREADABLE.values(), ids=UNREADABLE.keys())
def test_a_message_that_cannot_be_read_ends_its_rank_alone_and_is_named(notebook, frames):
    waits = "    import time\n    time.sleep(60)"
    cell = notebook.on_ranks(SEND.format(frames=frames) + waits)
    assert cell.status == "error"
    cell.says("rank 1 (", ") died\n", "ended by allranks, because a message")


@pytest.mark.replaces
@pytest.mark.usefixtures("_rank_1_is_replaced")
def test_a_reply_that_cannot_be_read_ends_its_rank(notebook):
    find = SEND.partition("if rank")[0]
    cell = notebook.on_ranks(find + LOSE_REPLY)
    assert cell.status == "error"
    cell.says("rank 1 (", ") died\n", "ended by allranks, because a message")


def test_a_reply_that_cannot_be_shown_ends_its_cell_only(notebook):
    # A hook of the notebook's own fails, as one of another extension may.
    notebook.run("hooked = get_ipython().display_pub\nfail = lambda message: 1 / 0\n")
    cell = notebook.run(
        "hooked.register_hook(fail)\n"
        "get_ipython().run_cell_magic('distributed', '', 'from IPython.display import HTML\\n"
        'display(HTML(f"<b>{rank}</b>"))\')'
    )
    notebook.run("hooked.unregister_hook(fail)")
    assert cell.error_name == "ZeroDivisionError"


@pytest.mark.parametrize(("source", "shown"), LONE.values(), ids=LONE.keys())
def test_half_a_character_is_shown_as_python_writes_it(notebook, source, shown):
    cell = notebook.on_ranks(source).says(shown)
    assert cell.status == ("error" if "Error" in source or "1/0" in source else "ok"), cell.text


def test_a_rank_tells_its_status_in_a_file_whose_name_has_half_a_character(notebook, tmp_path):
    go = str(tmp_path / "go")
    waits = f"import os, time\nwhile not os.path.exists({go!r}): time.sleep(0.05)"
    source = f"exec(compile({waits!r}, 'a\\ud83d', 'exec'))"
    told = notebook.run(
        "import pathlib, threading, time\nfrom allranks.records import requests\n"
        "cluster = get_ipython().magics_manager.registry['DistributedMagics'].session.running\n"
        "found, told = {}, {}\n"
        "def take(answer): found[answer.rank] = (answer.problem, answer.content['doing'][0][0])\n"
        "def ask():\n"
        "    while not cluster.roster.busy: time.sleep(0.05)\n"
        "    while list(found.values()) != [('', 'running')] * 4:\n"
        "        cluster.cells.ask_soon(requests.STATUS, {}, take)\n"
        "        time.sleep(0.2)\n"
        "    told.update(found)\n"  # before an answer comes in which the cell is over
        f"    pathlib.Path({go!r}).touch()\n"
        "threading.Thread(target=ask, daemon=True).start()\n"
        f"cluster.run({source!r}, timeout=60)\n"
        "print(sorted(told.items()))"
    )
    assert told.stdout == f"{[(rank, ('', 'running')) for rank in range(4)]}\n", told.text
