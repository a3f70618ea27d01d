"""Magics inside a cell for the ranks do there what they do in a notebook's own cell."""

import re
import shutil

import pytest

from tests.kernel import lines_of_two

PNG = "image/png"


def on_two(notebook, source):
    cell = notebook.on_ranks(source, "-r 0-1").ok()
    return cell


@pytest.mark.parametrize("magic", ["%matplotlib inline", "%pylab inline --no-import-all", "%gui"])
def test_figures_are_drawn_into_the_notebook(notebook, magic):
    pytest.importorskip("matplotlib")
    cell = on_two(notebook, f"{magic}\nimport matplotlib.pyplot as plt\nplt.plot([0, rank]);")
    assert [PNG in data for data in cell.displays].count(True) == 2


def test_a_figures_format_can_be_set_and_a_window_is_refused(notebook):
    pytest.importorskip("matplotlib")
    cell = on_two(
        notebook,
        "%matplotlib inline\n%config InlineBackend.figure_formats = ['svg']\n"
        "import matplotlib.pyplot as plt\nplt.plot([0, rank]);",
    )
    assert ["image/svg+xml" in data for data in cell.displays].count(True) == 2
    on_two(notebook, "%config InlineBackend.figure_formats = ['png']")
    notebook.on_ranks("%gui qt").says("a rank opens no windows. Type: %matplotlib inline")


def test_a_changed_module_is_read_again_and_an_extension_loaded_on_the_ranks(notebook):
    notebook.run("open('changes.py', 'w').write('def told(): return 1\\n')")
    on_two(notebook, "%load_ext autoreload\n%autoreload 2\nimport changes\nchanges.told()")
    notebook.run("open('changes.py', 'w').write('def told(): return 2  # newer\\n')")
    assert on_two(notebook, "changes.told()").text == "ranks 0–1 → 2\n"
    on_two(notebook, "%autoreload 0")
    notebook.run(
        "open('extends.py', 'w').write("
        '\'def load_ipython_extension(shell): shell.user_ns["loaded"] = "here"\')'
    )
    assert on_two(notebook, "%load_ext extends\nloaded").text == "ranks 0–1 → 'here'\n"
    notebook.run(
        "import os, shutil; os.remove('changes.py'); os.remove('extends.py')\n"
        "shutil.rmtree('__pycache__', True)"
    )


def test_a_reset_leaves_what_every_rank_has_and_the_doctor_looks_at_the_machine(notebook):
    cell = notebook.run("%distributed doctor").ok()
    assert re.search(r"^ok +MPI .*: 2 processes are 2 ranks$", cell.text, re.MULTILINE)
    on_two(notebook, "own = 1\n%reset -f")
    told = on_two(notebook, "'own' in globals(), size, callable(allreduce), comm.size").text
    assert told == "ranks 0–1 → (False, 4, True, 4)\n"
    on_two(notebook, "kept = 10 * rank")


@pytest.mark.parametrize("magic", ["%%time\n", "%time "])
def test_a_cell_and_a_line_are_timed_on_each_rank(notebook, magic):
    seen = on_two(notebook, f"{magic}sum(range(10))").text
    for lines in lines_of_two(seen).values():
        assert [line.split(":")[0] for line in lines[:2]] == ["CPU times", "Wall time"]
    assert seen.endswith(" → 45\n")  # its label is not said again where both took as long


def test_what_is_captured_and_what_fails_there(notebook):
    cell = on_two(notebook, "%%capture got\nprint('text', rank)\ndisplay('shown')\n'value'")
    assert cell.text == ""
    told = on_two(notebook, "got.stdout, len(got.outputs)").text
    assert told == "rank 0 → ('text 0\\n', 2)\nrank 1 → ('text 1\\n', 2)\n"
    shown = on_two(notebook, "got.show()").text
    assert "rank 0    │ text 0" in shown
    assert "'shown'" in shown
    source = "%%capture got\nprint('text')\nif rank == 1:\n    int('x')\nbarrier()"
    cell = notebook.on_ranks(source, "-r 0-1").fails("CellFailed")
    assert re.search(r"^rank 1 .* raised ValueError", cell.text)
    cell.says("----> 3     int('x')", "rank 0 was waiting").lacks("interactiveshell.py")
    assert notebook.on_ranks("got.stdout", "-r 0-1").text == "ranks 0–1 → 'text\\n'\n"
    cell = notebook.on_ranks("%%capture\nimport asyncio\nawait asyncio.sleep(0)", "-r 0-1")
    assert "RuntimeError: This event loop is already running" in cell.error_value
    cell = notebook.on_ranks("%%capture got\nimport time\ntime.sleep(60)", "--timeout 1")
    assert cell.error_name == "CellTimeout"
    # Python warns of what was not awaited, once the cells that failed are forgotten.
    notebook.on_ranks("pass", "-r 0-1")


def test_the_code_of_a_cell_runs_another_cell_on_the_ranks(notebook):
    cell = notebook.run(
        "get_ipython().run_cell('%%distributed -r 0-1\\nprint(40 + rank)')\nprint('then')"
    ).ok()
    assert cell.text == "rank 0 │ 40\nrank 1 │ 41\nthen\n"


def test_a_file_is_written_and_a_script_is_run_by_each_rank(notebook):
    try:
        cell = notebook.on_ranks("%%writefile made.txt\nof the cell", "-r 0")
        assert cell.text == "rank 0 │ Writing made.txt\n"
        cell = on_two(notebook, "%%bash\ncat made.txt\necho wrong >&2")
        assert cell.text == "ranks 0–1 │ of the cell\n          ! wrong\n"
    finally:
        notebook.run("import os; os.remove('made.txt')")
    cell = notebook.on_ranks("%%bash\nexit 3", "-r 0")
    assert re.search("rank 0 .* raised CalledProcessError", cell.text)


FAILS = """
import sys
before = 7
def fail():
    {line}
fail()
"""


@pytest.fixture(scope="module")
def script(notebook):
    """Writes the script that fails in this line."""
    path = notebook.cwd / "fails_here.py"

    def write(line):
        path.write_text(FAILS.format(line=line))

    yield write
    path.unlink()
    shutil.rmtree(notebook.cwd / "__pycache__", ignore_errors=True)  # of -m


@pytest.mark.parametrize(
    "options", ["fails_here.py", "-i fails_here", "-m fails_here", "-p fails_here"]
)
@pytest.mark.parametrize("line", ["raise ValueError('why')", "sys.exit(3)", "sys.exit('why')"])
def test_a_script_that_fails_fails_the_cell_as_its_code_would(notebook, script, options, line):
    script(line)
    cell = notebook.on_ranks(f"before = 0\n%run {options}\nprint('went', 'on')", "-r 0-1")
    cell.fails("CellFailed").lacks("went on", "IPython", "site-packages", "Unknown failure")
    name = "SystemExit" if "exit" in line else "ValueError"
    assert re.search(rf"ranks 0–1 .* raised {name}", cell.text, re.MULTILINE)
    assert "fail()" in cell.text or name == "SystemExit"
    # As those of a cell, up to the failure.
    known = "7" if "-m" not in options else "0"
    assert on_two(notebook, "before").text == f"ranks 0–1 → {known}\n"
    assert on_two(notebook, "__name__").text == "ranks 0–1 → '__main__'\n"


def test_a_script_that_is_repeated_and_fails_is_not_run_again(notebook, script):
    notebook.on_ranks("runs = 0", "-r 0-1")
    script("global runs; runs += 1; raise ValueError('why')")
    notebook.on_ranks("%run -i -t -N3 fails_here", "-r 0-1").fails("CellFailed")
    assert on_two(notebook, "runs").text == "ranks 0–1 → 1\n"


def test_the_others_wait_for_the_rank_whose_script_has_failed(notebook, script):
    script("if rank == 1: raise ValueError('why')")
    cell = notebook.on_ranks("%run -i fails_here.py\nbarrier()", "-r 0-1").fails("CellFailed")
    assert re.search(r"^rank 1 .* raised ValueError", cell.text, re.MULTILINE)
    cell.says("rank 0 was waiting")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ("fails_here", "sys.exit()"),
        ("-m fails_here", "sys.exit(0)"),
        ("-e fails_here", "sys.exit(3)"),
    ],
)
def test_a_script_that_ends_by_exit_lets_the_cell_go_on(notebook, script, options, line):
    script(line)
    assert on_two(notebook, f"%run {options}\n'went on'").text == "ranks 0–1 → 'went on'\n"


def test_an_exception_of_a_script_can_be_caught_and_a_script_may_run_another(notebook, script):
    script("raise ValueError('why')")
    source = "try:\n    get_ipython().run_line_magic('run', 'fails_here.py')\n"
    source += "except ValueError as error:\n    caught = str(error)\n"
    assert on_two(notebook, f"{source}caught").text == "ranks 0–1 → 'why'\n"
    (notebook.cwd / "outer.ipy").write_text("%run fails_here.py\nafter = 1")
    cell = notebook.on_ranks("%run outer.ipy\nprint('went', 'on')", "-r 0-1").fails("CellFailed")
    cell.says("raised ValueError", "why").lacks("went on")
    (notebook.cwd / "outer.ipy").unlink()


@pytest.mark.parametrize("magic", ["%load fails_here.py", "%recall 1"])
def test_a_magic_that_fills_a_cell_is_refused(notebook, script, magic):
    script("pass")
    cell = notebook.on_ranks(magic, "-r 0-1").fails("CellFailed")
    cell.says("raised UsageError", "Type it in a cell of its own, or for a script: %run FILE")


@pytest.mark.parametrize(
    "source",
    ["1 / 0\n%rerun", "%timeit -n1 -r1 1 / 0", "%time 1 / 0", "%prun 1 / 0", "%%capture\n1 / 0"],
)
def test_magics_that_run_code_fail_with_it(notebook, source):
    first, *rest = source.splitlines()
    if first == "1 / 0":
        notebook.on_ranks(first, "-r 0-1").fails("CellFailed")
        source = "\n".join(rest)
    cell = notebook.on_ranks(f"{source}\n", "-r 0-1").fails("CellFailed")
    cell.says("raised ZeroDivisionError", "1 / 0").lacks("exceptions.py")


def test_the_variables_of_the_notebook_are_never_touched_and_values_cross_as_asked_for(notebook):
    notebook.run("kept, rank, mine = 'the notebook’s', -1, [1, 2]")
    before = notebook.value("sorted(name for name in globals() if not name.startswith('_'))")
    notebook.on_ranks("mine = rank\nmine += 1\nfresh = mine\ndel fresh").ok()
    assert notebook.value("kept, rank, mine") == "('the notebook’s', -1, [1, 2])"
    after = notebook.value("sorted(name for name in globals() if not name.startswith('_'))")
    assert after == before
    notebook.run("del kept, rank, mine")
    notebook.on_ranks("secret = rank * 2\nsecret", "-o wanted -r 1,3")
    assert notebook.value("wanted") == "[2, 6]"
    assert notebook.run("secret").error_name == "NameError"
    cell = notebook.run("import numpy as np\npushed = np.arange(3)\n%distributed push pushed")
    assert cell.text == "pushed is on ranks 0–3\n"
    assert (
        notebook.on_ranks("int(pushed.sum()) + rank", "-r 0-1").text == "rank 0 → 3\nrank 1 → 4\n"
    )
    cell = notebook.run("got = %distributed pull kept\ngot")
    assert cell.displays[-1]["text/plain"] == "{0: 0, 1: 10, 2: 20, 3: 30}"
    shown = notebook.run("class Shy:\n    def __repr__(self): raise ValueError\nShy()")
    assert shown.status == "error"
    assert notebook.on_ranks("rank", "-r 1").status == "ok"


CELLS = {
    "its output": ("lines = !echo one; echo two\nlines", "rank 2 → ['one', 'two']\n"),
    # Lightning refuses to use several processes from an interactive Python, which has ps1.
    "no prompt": ("import sys\nhasattr(sys, 'ps1')", "rank 2 → False\n"),
    "a comment": ("# nothing\n", ""),
    "nothing": ("\n\n", ""),
    "a semicolon": ("rank;", ""),
}


@pytest.mark.parametrize(("source", "shown"), CELLS.values(), ids=CELLS.keys())
def test_a_cell_is_what_it_is_in_ipython(notebook, source, shown):
    cell = notebook.on_ranks(source, "-r 2")
    assert (cell.status, cell.text) == ("ok", shown)


def test_the_next_cell_has_numpys_options_and_other_context_variables(notebook):
    notebook.on_ranks(
        "import decimal\nimport numpy as np\nbefore = np.geterr()\n"
        "np.seterr(over='raise')\nnp.set_printoptions(precision=2)\n"
        "decimal.setcontext(decimal.Context(prec=6))"
    ).ok()
    cell = notebook.on_ranks("np.geterr()['over'], decimal.getcontext().prec, str(np.ones(1) / 3)")
    assert cell.text == "ranks 0–3 → ('raise', 6, '[0.33]')\n"
    notebook.on_ranks(
        "np.seterr(**before)\nnp.set_printoptions(precision=8)\ndecimal.setcontext(decimal.Context())"
    ).ok()


def test_commands_that_fail_and_deprecations_are_shown(notebook):
    cell = notebook.on_ranks("!ls /nowhere/at/all\n_exit_code != 0", "-r 0")
    assert cell.status == "ok"
    assert "No such file or directory" in cell.text
    assert cell.text.endswith("→ True\n")
    cell = notebook.on_ranks("import warnings\nwarnings.warn('old', DeprecationWarning)")
    assert "DeprecationWarning: old" in cell.text


def test_figures_of_a_function_are_shown_with_its_call_and_closed(notebook):
    pytest.importorskip("matplotlib")
    notebook.run(
        "def draws():\n    import matplotlib.pyplot as plt\n    plt.plot([0, 1])\n"
        "    return plt.get_fignums()"
    )
    for _ in range(2):
        called = notebook.run("ranks.run(draws, ranks=[0])").ok()
        assert [PNG in data for data in called.displays].count(True) == 1
    nothing = notebook.on_ranks("import matplotlib.pyplot as plt\nplt.get_fignums()")
    assert nothing.text == "ranks 0–3 → []\n"
