"""Output where displays are not changed in place: each line once, labelled, and nothing lost."""

import os
import re
import sys

import pexpect
import pytest

from allranks.features.toolbar.notebook import TARGET
from tests.kernel import ANSI, LINE_HOLD, Kernel, lines_of_two, patched

LAB = {"cellId": "5e1a"}
PNG = "iVBORw0KGgo="


def in_console(kernel: Kernel, source: str, options: str = "") -> str:
    """Runs a cell as qtconsole sends it, which drops updates; returns what is seen."""
    cell = kernel.start(f"%%distributed {options}\n{source}", typing=True).wait()
    assert not any("display_id" in shown.get("transient", {}) for shown in cell.outputs)
    assert cell.comms == []
    return cell.text


PRINTS = "import time\nfor i in range(4):\n    print('line', i)\n    time.sleep(0.4)"
LINES = [f"line {i}" for i in range(4)]


@pytest.mark.parametrize("view", ["auto", "plain", "full"])
def test_a_console_shows_every_line_once(notebook, view):
    seen = in_console(notebook, PRINTS, f"--view {view}")
    assert lines_of_two(seen) == {0: LINES, 1: LINES}


def test_a_notebook_is_shown_displays_that_change_and_figures_between_the_lines(notebook):
    cell = notebook.start(f"%%distributed\n{PRINTS}", typing=True, metadata=LAB).wait()
    (shown,) = cell.displays
    assert shown["text/plain"].split("\n") == [
        "ranks 0–1 │ line 0",
        *(f"          │ line {i}" for i in range(1, 4)),
    ]
    with patched(notebook.run, LINE_HOLD, 60):
        cell = notebook.start(
            "%%distributed\nbarrier()\nprint('before')\n"
            f"display({{'image/png': '{PNG}', 'text/plain': '<a figure>'}}, raw=True)\n"
            "display({'text/html': f'<b>{rank}</b>', 'text/plain': f'<of {rank}>'}, raw=True)\n"
            "print('after')",
            typing=True,
        ).wait()
    assert cell.text == (
        "ranks 0–1 │ before\nranks 0–1:\n<a figure>\nrank 0:\n<of 0>\nrank 1:\n<of 1>\n"
        "ranks 0–1 │ after\n"
    )
    assert [next(iter(data)) for data in cell.displays] == ["image/png", "text/html", "text/html"]


@pytest.mark.parametrize(("said", "displays"), [("notebook", 1), ("console", 0)])
def test_the_environment_says_it_either_way(notebook, said, displays):
    notebook.run(f"%env ALLRANKS_FRONT_END={said}")
    try:
        with patched(notebook.run, LINE_HOLD, 60):
            cells = [
                notebook.start(
                    "%%distributed\nbarrier()\nprint('here')", typing=True, metadata=told
                ).wait()
                for told in (None, LAB)
            ]
        assert [len(cell.displays) for cell in cells] == [displays, displays]
        assert [cell.text for cell in cells] == ["ranks 0–1 │ here\n"] * 2
    finally:
        notebook.run("%env ALLRANKS_FRONT_END=auto")


def test_the_page_hears_which_cells_ranks_have_run(notebook):
    def heard():
        begin = len(notebook.comms)

        def states():
            found = [one["data"] for one in notebook.comms[begin:] if one["comm_id"] == TARGET]
            return [one["ran"] for one in found if "ran" in one]

        notebook.say(TARGET, {})
        notebook.pump(states, 60, "the state of the ranks")
        return states()[-1]

    heard()  # of the cells of other tests
    notebook.run("%distributed on")
    for name, source in (("plain", "x = 1"), ("local", "%%local\n1"), ("magic", "%%rank 1\n1")):
        notebook.start(source, metadata={"cellId": name}).wait().ok()
    notebook.run("%distributed off")
    notebook.start("1", metadata={"cellId": "plain, and off"}).wait().ok()
    assert heard() == ["plain", "magic"]
    assert heard() == []


SLOW = """import asyncio
begun, go, handled = asyncio.Event(), asyncio.Event(), asyncio.Event()
handlers = get_ipython().kernel.shell_handlers
async def slow(*_):
    begun.set()
    await go.wait()
    handled.set()
whole, handlers["comm_msg"] = handlers["comm_msg"], slow"""


def test_a_message_of_a_widget_may_begin_in_one_cell_and_end_in_the_next(notebook):
    notebook.run(SLOW).ok()
    first = notebook.start("await begun.wait()")
    first.wait_for_begin()
    notebook.say("a widget", {})
    first.wait().ok()
    # Its end is that of this cell: else a front end shows that it runs forever.
    notebook.run("go.set()\nawait handled.wait()\nawait asyncio.sleep(0.1)").ok()
    notebook.run("handlers['comm_msg'] = whole").ok()


def test_a_console_is_shown_the_end_of_updates_logs_and_members(notebook):
    # However slow the machine is, no more than the first update is printed before the end.
    with patched(notebook.run, "allranks.widgets.text._UPDATE_SECONDS", 60):
        seen = in_console(
            notebook,
            "import time\nh = display({'text/plain': 'step 0'}, raw=True, display_id=True)\n"
            "for i in range(1, 301):\n"
            "    h.update({'text/plain': f'step {i}'}, raw=True)\n"
            "    time.sleep(0.001)\n"
            "print('after')",
        )
    lines = re.findall(r"│ (.*)", seen)
    assert lines[0] == "step 0"
    assert lines[-2:] == ["step 300", "after"]
    assert len(lines) <= 8
    with patched(notebook.run, LINE_HOLD, 60):
        seen = in_console(notebook, "barrier()\nlog(loss=0.5)\nprint('logged')")
    assert "ranks 0–1 │ logged\n" in seen
    assert re.search(r"loss +0 +0\.5 +0\.5 +0\.5 +0\.5 +0\.5\n", seen)
    cell = notebook.start("%%ensemble x=1,2\nprint('x is', x)\nresult = x", typing=True).wait().ok()
    assert re.search(r"member 1 \(x=2\) finished on rank \d", cell.text), cell.text
    assert "member 0 │ x is 1" in cell.text
    assert not any("display_id" in shown.get("transient", {}) for shown in cell.outputs)


def test_jupyter_console_shows_all_that_the_ranks_write(tmp_path):
    command = [
        *("-m", "jupyter_console", "--simple-prompt", "--no-confirm-exit"),
        "--ZMQTerminalInteractiveShell.banner=",
    ]
    env = os.environ | {"IPYTHONDIR": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)}
    with pexpect.spawn(
        sys.executable, command, cwd=str(tmp_path), env=env, encoding="utf-8", timeout=120
    ) as shell:
        shell.setwinsize(50, 200)
        for number, line in enumerate(
            [
                "%load_ext allranks",
                "%distributed start -n 2",
                "get_ipython().run_cell_magic('distributed', '', "
                "'for i in range(4): print(chr(97 + i) * 3, rank)')",
            ],
            1,
        ):
            shell.expect(rf"In \[{number}\]: ")
            shell.sendline(line)
        shell.expect(r"In \[4\]: ")
        seen = ANSI.sub("", shell.before)
        shown = lines_of_two(seen.replace("\r", ""))
        for rank in (0, 1):
            assert shown[rank] == [f"{letter * 3} {rank}" for letter in "abcd"]
        debug_on_rank_1(shell, 4)
        shell.sendline("exit")
        shell.expect(pexpect.EOF)


def debug_on_rank_1(shell: pexpect.spawn, number: int) -> None:
    """Types a debugging session; ``In [number]`` is the prompt that the shell is at."""
    shell.sendline(
        "get_ipython().run_cell_magic('distributed', '', "
        "'x = 3\\nif rank: breakpoint()\\nbarrier()\\nx')"
    )
    shell.expect("rank 1 │ ipdb> ")
    shell.sendline("x = 40 + x")
    shell.expect("rank 1 │ ipdb> ")
    shell.sendline("c")
    shell.expect("rank 1 → 43")
    shell.expect(rf"In \[{number + 1}\]: ")


def test_a_terminals_ipython_shows_tables_and_members_and_asks_in_the_terminal(tmp_path):
    command = f"{sys.executable} -m IPython --simple-prompt --no-banner --colors=NoColor"
    with pexpect.spawn(command, cwd=str(tmp_path), encoding="utf-8", timeout=120) as shell:
        shell.setwinsize(50, 200)
        for number, line in enumerate(
            [
                "%load_ext allranks",
                "%distributed start -n 2",
                "run = get_ipython().run_cell_magic; "
                "import allranks.widgets.text as text; text._LINE_HOLD_SECONDS = 60",
                "run('distributed', '', 'log(loss=0.5)\\n1')",
            ],
            1,
        ):
            shell.expect(rf"In \[{number}\]: ")
            shell.sendline(line)
        shell.expect(r"ranks 0–1 → 1\r\n")
        shell.expect(r"loss +0 +0\.5 +0\.5 +0\.5 +0\.5 +0\.5\r\n")
        shell.sendline("run('distributed', '--view plain', 'log(x=1)\\n2')")
        shell.expect(r"ranks 0–1 → 2\r\n(.*)In \[6\]: ")
        assert "last value" not in shell.match.group(1)
        shell.sendline("run('ensemble', 'x=0:3', 'result = x * x')")
        shell.expect(r"· member 0 \(x=0\) finished on rank \d in .*: result 0")
        shell.expect(r"3 of 3 finished, ")
        shell.expect(r"2 +2 +finished +\d +4 ★")
        shell.sendline("from allranks.widgets import ring; print(ring(values=[[1, 2], [10, 20]]))")
        shell.expect(r"ring allreduce of 2 int64 over 2 ranks\r\nmeasured: .* simulated: ")
        shell.expect(r"reduce-scatter  rank 0 → 1  0      10 \+ 1 = 11\r\n")
        shell.expect(r"every rank has \(11, 22\)\r\n")
        shell.expect(r"In \[8\]: ")
        debug_on_rank_1(shell, 8)
        shell.sendline("run('distributed', '', 'input()')")
        shell.expect("rank [01] │ ")
        shell.sendintr()
        shell.expect("raised KeyboardInterrupt")
        shell.expect(r"In \[10\]: ")
        shell.sendline("exit")
        shell.expect(pexpect.EOF)
