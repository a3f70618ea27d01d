"""The kernel that ``allranks install-kernel`` installs: every cell is for the ranks."""

import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager

from tests.kernel import Kernel, lines_of_two, wait_until

COMMAND = [sys.executable, "-m", "allranks.command.main", "install-kernel"]


def install(prefix: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, "--prefix", str(prefix), *words]
    return subprocess.run(command, capture_output=True, text=True)


def spec_in(prefix: Path, name: str = "allranks") -> KernelSpec:
    folder = str(prefix / "share" / "jupyter" / "kernels")
    return KernelSpecManager(kernel_dirs=[folder]).get_kernel_spec(name)


def complete(kernel: Kernel, source: str) -> list[str]:
    """Presses Tab until something is offered: the first Tab of a user is not answered in time,
    while jedi reads the names of Python.
    """
    deadline = time.monotonic() + 60
    while not (found := kernel.complete(source)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return found


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def kernel(tmp_path_factory, cache):
    """The kernel of a prefix, with two ranks, for all tests of this file."""
    prefix = tmp_path_factory.mktemp("prefix")
    done = install(prefix, "-n", "2")
    assert done.returncode == 0, done.stderr
    assert f"Installed the kernel 'allranks' in {prefix}" in done.stdout
    env = {"XDG_CACHE_HOME": str(cache)}
    with Kernel(tmp_path_factory.mktemp("kernel"), env, spec=spec_in(prefix)) as kernel:
        first = kernel.run("print('rank', rank)")
        assert first.text.startswith("allranks started ranks 0–1 on ")
        assert lines_of_two(first.text.split("\n", 2)[2]) == {0: ["rank 0"], 1: ["rank 1"]}
        yield kernel


def test_cells_run_on_all_ranks_and_local_ones_in_the_notebook(kernel):
    kernel.run("x = 10 * rank")
    assert kernel.run("allreduce(x, op=Sum)").text == "ranks 0–1 → 10\n"
    cell = kernel.run("%%local\nimport asyncio\nawait asyncio.sleep(0)\nhere = 'rank' in globals()")
    assert (cell.status, cell.text) == ("ok", "")
    assert kernel.run("%%local\nhere").text == "False\n"
    assert kernel.run("'here' in globals()").text == "ranks 0–1 → False\n"
    text = kernel.run("%%local\n\n1 / 0").text
    assert "----> 3 1 / 0" in text
    assert kernel.start("print('rank' in globals())", history=False).wait().text == "False\n"
    assert kernel.run("%%capture said\nprint(rank)").text == ""
    said = lines_of_two(kernel.run("print(said.stdout.strip())").text)
    assert said == {0: ["0"], 1: ["1"]}
    assert kernel.run("%%local\n%%capture said\nprint('here')").text == ""
    assert kernel.run("%%local\nsaid.stdout").text == "'here\\n'\n"
    assert "2 ranks" in kernel.run("%distributed status").text
    assert kernel.run("%%distributed -r 1\nprint('one')").text == "rank 1 │ one\n"
    assert kernel.run("%load_ext allranks").status == "ok"


def test_the_values_of_a_cell_are_its_result_unless_a_rank_has_failed(kernel):
    cell = kernel.run("print('said')\n5 * rank")
    said, result = cell.outputs
    assert (said["output_type"], cell.displays[0]["text/plain"]) == (
        "display_data",
        "ranks 0–1 │ said",
    )
    assert (result["output_type"], result["data"]["text/plain"]) == (
        "execute_result",
        "rank 0 → 0\nrank 1 → 5",
    )
    number = result["execution_count"]
    assert number == cell.execution_count
    assert kernel.run(f"%%local\nOut[{number}]").text == "rank 0 → 0\nrank 1 → 5\n"
    assert kernel.run("%distributed last").text == "ranks 0–1 │ said\nrank 0 → 0\nrank 1 → 5\n"
    failed = kernel.run("if rank: 1 / 0\n5")
    assert failed.text.startswith("rank 0 → 5\n")
    assert [one["output_type"] for one in failed.outputs].count("execute_result") == 0
    assert [one["output_type"] for one in kernel.run("5 * rank;").outputs] == []


@pytest.mark.parametrize(
    ("source", "status"),
    [("print(rank)", "complete"), ("for i in range(3):", "incomplete"), ("1 +* 2", "invalid")],
)
def test_a_console_learns_whether_a_cell_is_complete(kernel, source, status):
    assert kernel.is_complete(source) == status


def test_tab_and_shift_tab_ask_a_rank_unless_the_cell_is_local(kernel):
    kernel.run("there = 7\nif rank: only_on_one = 1")
    kernel.run("%%local\nhere = 8")
    assert complete(kernel, "ther") == ["there"]
    assert complete(kernel, "%%local\nher") == ["here"]
    assert complete(kernel, "%%rank 1\nonly_") == ["only_on_one"]
    # An answer that takes longer than 2 s is not awaited.
    wait_until(lambda: "7" in kernel.inspect("there"))
    wait_until(lambda: kernel.inspect("%%rank 1\nonly_on_one").endswith("\nRank: 1"))
    asked = kernel.run("there?")
    (paged,) = asked.payload
    shown = re.sub(r"\x1b\[[\d;]*m", "", paged["data"]["text/plain"])
    assert (asked.text, paged["source"]) == ("", "page")
    assert re.match(r"Type:\s+int\n", shown), shown
    assert shown.endswith("Rank: 0")


def test_a_tab_that_takes_too_long_leaves_no_part_of_a_file_in_the_users_cache(kernel, cache):
    shutil.rmtree(cache)
    kernel.run(
        "import pickle\ntried, dump = [], pickle.dump\n"
        "def cut_short(item, file, *_):\n"
        "    tried.append(file.write(b'part'))\n    raise KeyboardInterrupt\n"
        "pickle.dump = cut_short"
    )

    def was_tried():
        kernel.complete("%%rank 1\nimport asyncio\nasyncio.ru")
        return kernel.run("len(tried) > 0").text.count("True") == 1

    wait_until(was_tried, seconds=60)
    kernel.run("pickle.dump = dump")
    files = [path for path in cache.rglob("*") if path.is_file()]  # those of the notebook
    assert [path for path in files if path.read_bytes() == b"part"] == []


def test_fresh_ranks_are_what_was_installed_again(kernel):
    kernel.run("%distributed stop")
    assert kernel.run("size").text.endswith("ranks 0–1 → 2\n")


def test_the_specification_says_how_ranks_are_started(tmp_path):
    words = ["--name", "two", "--on", "local", "-n", "2", "--display-name", "Two ranks"]
    assert install(tmp_path, *words).returncode == 0
    spec = spec_in(tmp_path, "two")
    assert (spec.display_name, spec.language) == ("Two ranks", "python")
    assert shlex.split(spec.env["ALLRANKS_START"]) == ["-n", "2", "--on", "local"]
    assert spec.argv[0] == sys.executable
    assert json.loads(json.dumps(spec.metadata))["debugger"] is True


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--on", "nowhere"], "nowhere"), (["-n", "0"], "expected 1 rank or more, found 0")],
)
def test_what_could_never_start_is_refused_before_anything_is_written(tmp_path, words, said):
    done = install(tmp_path, *words)
    assert done.returncode != 0
    assert said in done.stderr
    assert list(tmp_path.iterdir()) == []
