"""``%load_ext allranks.px``: the magics of ipyparallel and nbdistributed, on our ranks."""

import re

import pytest

from tests.kernel import Kernel


@pytest.fixture(scope="module")
def px(tmp_path_factory):
    with Kernel(tmp_path_factory.mktemp("px")) as kernel:
        assert kernel.run("%load_ext allranks.px").status == "ok"
        assert "started ranks 0–2" in kernel.run("%dist_init --num-processes 3").text
        yield kernel


def test_px_runs_a_cell_or_a_line_on_every_rank(px):
    assert px.run("%%px\nimport os\nrank * 2").text == "rank 0 → 0\nrank 1 → 2\nrank 2 → 4\n"
    assert px.run("%px rank + 1").text == "rank 0 → 1\nrank 1 → 2\nrank 2 → 3\n"


@pytest.mark.parametrize(
    ("targets", "said"),
    [("0", "rank 0"), ("[0,2]", "ranks 0, 2"), ("1:", "ranks 1–2"), ("::2", "ranks 0, 2")],
)
def test_px_takes_targets_as_ipyparallel_writes_them(px, targets, said):
    assert px.run(f"%%px --targets {targets}\n'x'").text == f"{said} → 'x'\n"


@pytest.mark.parametrize("magic", ["%%px", "%%rank 0", "%%distributed -r 0"])
@pytest.mark.parametrize("below", ["%%timeit -n1 -r1", "%%time"])
def test_a_magic_of_ipythons_may_stand_below_ours(px, magic, below):
    cell = px.run(f"{magic}\n{below}\nrank")
    assert cell.status == "ok", cell.text
    assert re.search(r"\d [nmµμ]?s", cell.text)


def test_cells_run_in_the_notebook_as_well(px):
    cell = px.run("%%px --local -o values --block\ntwice = 2\nimport os\ntwice * 21")
    assert cell.status == "ok", cell.text
    assert px.run("values, twice").displays[0]["text/plain"] == "([42, 42, 42], 2)"
    cell = px.run("%%distributed --local\nhere = 'rank' in globals()\nprint('said')")
    assert cell.text == "ranks 0–2 │ said\nsaid\n"
    assert px.run("here").displays[0]["text/plain"] == "False"
    assert px.run("%distributed pull here").displays[0]["text/plain"] == (
        "{0: True, 1: True, 2: True}"
    )
    cell = px.run("%%px --local\nprint(rank if 'rank' in globals() else nowhere)")
    assert cell.status == "error"
    assert "NameError: name 'nowhere' is not defined" in cell.text
    assert "the notebook itself raised NameError" in cell.text


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--noblock", "the cell waits for its ranks. Leave out --noblock"),
        ("--no-stream", "Leave out --no-stream"),
        ("--signal-on-interrupt SIGKILL", "Leave out --signal-on-interrupt"),
        ("--targets 0:x", "expected targets, found '0:x'"),
    ],
)
def test_what_is_otherwise_here_is_refused_with_words(px, line, said):
    cell = px.run(f"%%px {line}\nprint('ran')")
    assert "UsageError" in cell.text
    assert said in cell.text
    assert "ran\n" not in cell.text


def test_autopx_and_dist_mode_send_the_following_cells(px):
    px.run("%autopx")
    assert px.run("size").text == "ranks 0–2 → 3\n"
    px.run("%autopx")
    px.run("%dist_mode -e")
    assert px.run("size").text == "ranks 0–2 → 3\n"
    px.run("%dist_mode -d")
    assert px.run("1 + 1").displays[0]["text/plain"] == "2"
    assert "has nothing to show" in px.run("%pxresult").text
    assert "Type options on each cell" in px.run("%pxconfig --targets 0").text


def test_nbdistributeds_magics_are_there(px):
    assert px.run("%%rank [0,2]\nrank").text == "rank 0 → 0\nrank 2 → 2\n"
    assert px.run("%sync").status == "ok"
    assert "3 ranks" in px.run("%dist_status").text
    assert px.run("%%rank [7]\nrank").error_name == "UsageError"
    assert "started ranks 0–2" in px.run("%dist_reset").text
    assert "The ranks are stopped" in px.run("%dist_shutdown").text


def test_the_extension_can_be_taken_away_by_itself(px):
    assert px.run("%unload_ext allranks.px").status == "ok"
    assert px.run("%%px\n1").status == "error"
    assert px.run("%%distributed -n 2\nsize").text.endswith("ranks 0–1 → 2\n")


def test_px_is_ipyparallels_where_a_view_was_activated(px):
    kernel = px
    kernel.run("%load_ext allranks.px")
    kernel.run(
        "import ipyparallel as ipp\nview = ipp.Client()[:]\nview.block = True\nview.activate()"
    )
    cell = kernel.run("%%px\nby_ipyparallel = rank")
    assert cell.status == "ok", cell.text
    assert kernel.run("view['by_ipyparallel']").displays[0]["text/plain"] == "[0, 1]"
    assert kernel.run("%%distributed\n'by allranks'").text == "ranks 0–1 → 'by allranks'\n"
