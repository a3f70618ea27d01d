"""What a rank asks a person: typed through the kernel's own channel, by turns, left at any time."""

import itertools
import re

import pytest

from tests.kernel import LINE_HOLD, patched, time_that_jumps

pytestmark = pytest.mark.usefixtures("_ranks_live_on")
LAB = {"cellId": "5e1a"}
PROMPTS = "allranks.features.prompts.notebook"


def ask(notebook, source, options="", metadata=LAB):
    """Runs a cell where somebody can type."""
    return notebook.start(f"%%distributed {options}\n{source}", typing=True, metadata=metadata)


def typed(cell, *lines, first=1):
    """Answers one prompt after the other; returns the prompts."""
    prompts = []
    for count, line in enumerate(lines, first):
        prompts.append(cell.prompt(count))
        cell.answer(line)
    return prompts


@pytest.mark.parametrize("metadata", [LAB, None], ids=["JupyterLab", "console"])
def test_a_line_is_typed_in_the_notebooks_own_field(notebook, metadata):
    source = "name = input('Your name? ') if rank == 2 else 'nobody'\nbarrier()\nname"
    with patched(notebook.run, LINE_HOLD, 60):
        cell = ask(notebook, source, metadata=metadata)
        assert typed(cell, "Ada") == ["rank 2 │ Your name? "]
        assert cell.wait().text == "ranks 0–1, 3 → 'nobody'\nrank 2       → 'Ada'\n"


def test_a_password_is_hidden_and_what_was_written_stands_above(notebook):
    cell = ask(notebook, "import getpass\nlen(getpass.getpass())", "-r 3")
    assert typed(cell, "secret") == ["rank 3 │ Password: "]
    assert cell.prompts[0]["content"]["password"] is True
    assert cell.wait().text == "rank 3 → 6\n"
    source = "print('before')\nbarrier()\nif rank == 0: input()\nbarrier()\nprint('after')"
    with patched(notebook.run, f"{PROMPTS}._ABOVE_SECONDS", 60):
        cell = ask(notebook, source)
        cell.prompt()
        cell.wait_for("ranks 0–3 │ before")
        cell.answer("")
        cell.wait()
    assert [shown["text/plain"] for shown in cell.displays] == [
        "ranks 0–3 │ before",
        "ranks 0–3 │ after",
    ]


SESSION = """
import os, time
def mean(values):
    total = sum(values)
    breakpoint()
    return total / len(values)

while rank != 1 and not os.path.exists({asks!r}): time.sleep(0.02)
found = mean([1, 2, 6]) if rank == 1 else 0.0
barrier()
found
"""


def test_a_debugger_on_one_rank_while_the_others_wait_and_say_for_whom(notebook, tmp_path):
    asks = tmp_path / "asks"
    # So that a busy rank has told its line in time:
    with patched(notebook.on_ranks, "allranks.collectives.calls.watch._ASK_BEFORE_SECONDS", 4):
        cell = ask(notebook, SESSION.format(asks=str(asks)))
        prompts = typed(cell, "p total")
        cell.prompt(2)
        asks.touch()
        cell.wait_for("waits for rank 1, which is waiting for input:\n")
        cell.wait_for("rank 1 is at In[")
        cell.lacks("has waited")
        prompts += typed(cell, "total = 12", "w", "n", "c", first=2)
        cell.wait()
    assert cell.status == "ok"
    assert set(prompts) == {"rank 1 │ ipdb> "}
    cell.says("rank 1 │ 9", "> In[", "----> 7     return total / len(values)", "rank 1       → 4.0")


@pytest.mark.parametrize(
    "stop",
    ["import pdb\npdb.set_trace()", "from IPython.core.debugger import set_trace\nset_trace()"],
)
def test_every_debugger_asks_in_the_field(notebook, stop):
    cell = ask(notebook, f"seen = 7\n{stop}\nseen", "-r 0")
    assert typed(cell, "seen = 8", "c") == ["rank 0 │ ipdb> "] * 2
    assert cell.wait().text.endswith("rank 0 → 8\n")


FAILS = """
def divide(by):
    mine = 100 + rank
    return mine / by

if rank == 2:
    divide(0)
barrier()
"""


def test_a_failure_can_be_looked_at_again(notebook):
    assert notebook.on_ranks(FAILS).error_name == "CellFailed"
    debug = notebook.start("%distributed debug", typing=True, metadata=LAB)
    prompts = typed(debug, "p mine, by", "u", "p rank", "q")
    debug.wait()
    assert set(prompts) == {"rank 2 │ ipdb> "}
    assert "(102, 0)" in debug.text
    # Again, and another rank, which waited.
    debug = notebook.start("%distributed debug -r 0", typing=True, metadata=LAB)
    assert typed(debug, "q") == ["rank 0 │ ipdb> "]
    assert debug.wait().status == "ok"
    notebook.on_ranks(FAILS)
    debug = notebook.start("%distributed debug", typing=True, metadata=LAB)
    debug.prompt()
    notebook.interrupt()
    assert debug.wait().error_name == "CellInterrupted"
    debug = notebook.start("%distributed debug", typing=True, metadata=LAB)
    typed(debug, "p mine", "q")
    assert "102" in debug.wait().text
    notebook.on_ranks("x = rank\n1 / 0", "-r 3")
    cell = ask(notebook, "%debug", "-r 3")
    assert typed(cell, "p x", "q") == ["rank 3 │ ipdb> "] * 2
    assert "rank 3 │ 3" in cell.wait().text


def test_where_no_cell_has_failed_there_is_nothing_to_debug(notebook):
    notebook.run("%distributed restart")
    notebook.on_ranks("kept = 10 * rank")
    notebook.run("%distributed debug").says("expected a cell that has failed, found none")
    assert "found 2" in notebook.run("%distributed debug -r 0-1").text


def test_ranks_that_ask_at_once_take_turns_and_one_answer_may_go_to_all(notebook):
    cell = ask(notebook, "input(f'of {rank}? ')")
    seen = []
    for count in range(1, 5):
        rank = re.fullmatch(r"rank (\d) │ of \1\? ", cell.prompt(count))[1]
        seen.append(rank)
        cell.answer(f"answer {rank}")
    cell.wait()
    assert sorted(seen) == list("0123")
    for rank in range(4):
        assert re.search(rf"rank {rank} +→ 'answer {rank}'", cell.text)
    source = "first = input('Go? ')\nbarrier()\nfirst, input('Go? ') if rank == 2 else None"
    cell = ask(notebook, source)
    assert cell.prompt().endswith("Go? ")
    cell.answer("%distributed all yes")
    # Rank 2 has had the answer once.
    assert cell.prompt(2) == "rank 2 │ Go? "
    cell.answer("no")
    cell.wait()
    # A rank that replies later has a line of its own.
    values = re.findall(r"^ranks? ([\d–, ]*\d) +→ (.*)$", cell.text, re.M)
    assert [value for ranks, value in values if ranks == "2"] == ["('yes', 'no')"]
    others = [(ranks, value) for ranks, value in values if ranks != "2"]
    assert {value for _, value in others} == {"('yes', None)"}
    assert sorted("".join(re.findall(r"\d", str([ranks for ranks, _ in others])))) == list("013")


#: For a notebook: a debugger has a minute for its next prompt, and none once there is this file.
PATIENT = """
import os
class Patience:
    def __radd__(self, now): return now + 60.0 * (not os.path.exists({over!r}))
"""


def test_debuggers_keep_their_turn_and_another_rank_can_be_chosen(notebook, tmp_path):
    over = tmp_path / "over"
    notebook.run(PATIENT.format(over=str(over))).ok()
    with patched(notebook.run, f"{PROMPTS}._GOES_ON_SECONDS", "Patience()"):
        try:
            check_turns(notebook, over)
        finally:
            over.touch()
            notebook.settle()  # the restoring cell would wait behind one that asks


def check_turns(notebook, over):
    cell = ask(notebook, "breakpoint()\nmine = 5 * rank\nbarrier()\nmine")
    first = cell.prompt()
    other = "3" if first != "rank 3 │ ipdb> " else "0"
    counts = itertools.count(2)
    while True:  # a rank can be chosen once it asks, which on a busy machine may be later
        cell.answer(f"%distributed debug -r {other}")
        if cell.prompt(next(counts)) == f"rank {other} │ ipdb> ":
            break
        cell.wait_for(f"rank {other} is not asking for input")
    cell.answer("n")
    assert cell.prompt(next(counts)) == f"rank {other} │ ipdb> "
    over.touch()
    cell.answer("c")
    left = {cell.prompt(next(counts))}
    while len(left) < 3:
        cell.answer("c")
        left.add(cell.prompt(next(counts)))
    cell.answer("c")
    cell.wait()
    assert cell.status == "ok"
    assert re.search("rank 3 +→ 15", cell.text)


@pytest.mark.parametrize(
    "source",
    [
        "import asyncio\nawait asyncio.sleep(0)\ninput()",
        "def f():\n    import pdb; pdb.set_trace()\n    return 1\nf()",
    ],
    ids=["in a cell that awaits", "in a function"],
)
def test_an_interrupt_ends_a_cell_that_asks(notebook, source):
    cell = ask(notebook, source + "\nbarrier()")
    cell.prompt()
    notebook.interrupt()
    assert cell.wait().error_name == "CellInterrupted"
    # What is typed too late belongs to nobody.
    cell.answer("late")
    cell = ask(notebook, "input()", "-r 0")
    assert typed(cell, "in time") == ["rank 0 │ "]
    assert cell.wait().text == "rank 0 → 'in time'\n"


@pytest.mark.parametrize("source", ["input('Your name? ')", "breakpoint()\npass"])
def test_where_nobody_can_type_it_is_said_at_once(notebook, source):
    cell = notebook.on_ranks(source)
    assert cell.status == "error"
    assert "this notebook runs without one" in cell.error_value
    assert "%distributed push NAME" in cell.error_value


def test_time_at_a_prompt_and_its_end(notebook, tmp_path):
    with time_that_jumps(notebook, tmp_path) as jump:
        cell = ask(notebook, "if rank == 0: input()\nbarrier()\n'ended'", "--timeout 300")
        cell.prompt()
        jump()
        cell.answer("")
        cell.wait().ok().says("ranks 0–3 → 'ended'\n")
    cell = ask(notebook, "input()", "-r 0")
    typed(cell, "\x04")
    assert "EOFError" in cell.wait().error_value


def test_a_thread_may_ask_and_forked_processes_and_members_may_not(notebook):
    cell = ask(
        notebook,
        "import threading\ngot = []\n"
        "thread = threading.Thread(target=lambda: got.append(input('in a thread? ')))\n"
        "thread.start(); thread.join()\ngot",
        "-r 0",
    )
    assert typed(cell, "yes") == ["rank 0 │ in a thread? "]
    assert cell.wait().text == "rank 0 → ['yes']\n"
    cell = ask(
        notebook,
        "import os\nchild = os.fork()\nif not child: input()\nos.waitpid(child, 0)[1] > 0",
        "-r 0",
    )
    assert cell.wait().text.endswith("→ True\n")
    assert "a forked process cannot ask for input" in cell.text
    cell = notebook.start("%%ensemble x=1,2\ninput()", typing=True, metadata=LAB).wait()
    assert "cannot ask for input in an ensemble" in cell.text


def test_a_debugger_at_each_exception_does_not_hide_it_where_nobody_can_type(notebook):
    notebook.on_ranks("%pdb on")
    cell = notebook.on_ranks("1 / 0", "-r 1")
    notebook.on_ranks("%pdb off")
    assert cell.error_value == "rank 1 of 4 at line 2: ZeroDivisionError: division by zero"
    assert "input('ipdb> ') needs a user who can type" in cell.text
