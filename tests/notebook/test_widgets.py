"""Widgets on a rank: drawn below its label, told what it does, and heard, as a kernel's own are."""

import re

import pytest

from tests.kernel import LINE_HOLD, Cell, Kernel, patched

LAB = {"cellId": "5e1a"}
VIEW = "application/vnd.jupyter.widget-view+json"


@pytest.fixture(scope="module")
def notebook(notebook):
    notebook.run("%%distributed\nimport time\nimport ipywidgets as w")
    return notebook


def on_ranks(kernel: Kernel, source: str, options: str = "") -> Cell:
    return start(kernel, source, options).wait()


def start(kernel: Kernel, source: str, options: str = "") -> Cell:
    return kernel.start(f"%%distributed {options}\n{source}", typing=True, metadata=LAB)


def views(cell: Cell) -> list[str]:
    return [data[VIEW]["model_id"] for data in cell.displays if VIEW in data]


def state(kernel: Kernel, name: str) -> dict:
    found: dict = {}
    for message in kernel.comms:
        if message["comm_id"] == name and message["msg_type"] in ("comm_open", "comm_msg"):
            found |= message["data"].get("state", {})
    return found


def moved(kernel: Kernel, name: str, **values: object) -> None:
    kernel.say(name, {"method": "update", "state": values, "buffer_paths": []})


def test_each_rank_has_its_own_widget_and_hears_in_the_next_cell(notebook):
    cell = on_ranks(notebook, "s = w.IntSlider(value=3 + rank)\ns")
    one, other = views(cell)
    assert (state(notebook, one)["value"], state(notebook, other)["value"]) == (3, 4)
    assert cell.text == "rank 0:\nIntSlider(value=3)\nrank 1:\nIntSlider(value=4)\n"
    one, _ = views(on_ranks(notebook, "s = w.IntSlider()\ns"))
    moved(notebook, one, value=42)
    cell = on_ranks(
        notebook,
        "end = time.monotonic() + 60\nwhile s.value != 42 and time.monotonic() < end: "
        "time.sleep(0.01)\ns.value",
        "-r 0",
    )
    assert cell.text == "rank 0 → 42\n"
    assert on_ranks(notebook, "s.value", "-r 1").text == "rank 1 → 0\n"


def test_it_is_heard_while_the_cell_runs(notebook):
    cell = start(
        notebook, "s = w.IntSlider()\ndisplay(s)\nwhile not s.value: time.sleep(0.01)\ns.value"
    )
    notebook.pump(lambda: len(views(cell)) == 2, 60, "sliders", cell)
    for name, value in zip(views(cell), (5, 6), strict=True):
        moved(notebook, name, value=value)
    assert cell.wait().text.endswith("rank 0 → 5\nrank 1 → 6\n")


def test_widgets_work_between_two_cells(notebook):
    cell = on_ranks(
        notebook,
        "s, told = w.IntSlider(), w.Label()\n"
        "s.observe(lambda change: setattr(told, 'value', f'moved to {change.new}'), 'value')\n"
        "display(s, told)",
        "-r 1",
    )
    slider, label = views(cell)
    moved(notebook, slider, value=8)
    notebook.pump(lambda: state(notebook, label)["value"] == "moved to 8", 60, "the label", cell)
    cell = on_ranks(
        notebook,
        "b, out = w.Button(), w.Output()\n"
        "@out.capture(clear_output=True)\n"
        "def pressed(_):\n    print('pressed on', rank)\n    display('shown')\n"
        "b.on_click(pressed)\ndisplay(b, out)",
        "-r 0",
    )
    button, output = views(cell)
    for _ in range(2):
        notebook.say(button, {"method": "custom", "content": {"event": "click"}})
    notebook.pump(lambda: len(state(notebook, output).get("outputs", ())) == 2, 60, "output", cell)
    text, shown = state(notebook, output)["outputs"]
    assert text["text"] == "pressed on 0\n"
    assert shown["data"]["text/plain"] == "'shown'"
    assert on_ranks(notebook, "'nothing is left'", "-r 0").text == "rank 0 → 'nothing is left'\n"


def test_what_is_written_into_an_output_stands_there_whole_and_nowhere_else(notebook):
    cell = on_ranks(
        notebook,
        "import sys\nouter, inner = w.Output(), w.Output()\ndisplay(outer)\nprint('before')\n"
        "with outer:\n    print('outer', rank)\n    with inner: print('inner')\n"
        "    print('error', file=sys.stderr)\n    h = display('old', display_id=True)\n"
        "    h.update('new')\nprint('after')",
    )
    shown = state(notebook, views(cell)[1])["outputs"]
    assert [one.get("text") or one["data"]["text/plain"] for one in shown] == [
        "outer 1\n",
        "error\n",
        "'new'",
    ]
    assert cell.text.count("before") == cell.text.count("after") == 1
    assert "outer" not in cell.text
    inner = [m["comm_id"] for m in cell.comms if "inner" in str(m["data"].get("state"))]
    assert len(set(inner)) == 2
    assert not set(inner) & set(views(cell))
    cell = on_ranks(
        notebook,
        "o = w.Output()\ndisplay(o)\nwith o:\n    for i in range(2000):\n"
        "        print(i, 'x' * 10)\n        time.sleep(0.0005)",
        "-r 0",
    )
    (name,) = views(cell)
    last = "1999 xxxxxxxxxx\n"
    notebook.pump(
        lambda: last in str(state(notebook, name).get("outputs")).replace("\\n", "\n"),
        60,
        last,
        cell,
    )
    (shown,) = state(notebook, name)["outputs"]
    assert shown["text"] == "".join(f"{i} xxxxxxxxxx\n" for i in range(2000))
    cell = on_ranks(
        notebook,
        "o = w.Output()\ndisplay(o)\nprint('stays')\nfor i in range(200):\n    with o:\n"
        "        o.clear_output(wait=True)\n        display({'text/html': str(i)}, raw=True)",
    )
    for name in views(cell):
        (shown,) = state(notebook, name)["outputs"]
        assert shown["data"]["text/html"] == "199"
    cell.says("ranks 0–1 │ stays").lacks("not shown")


def test_buffers_go_both_ways(notebook):
    cell = on_ranks(
        notebook,
        "import anywidget, traitlets\nclass Bytes(anywidget.AnyWidget):\n"
        "    _esm = 'export default {}'\n    data = traitlets.Any().tag(sync=True)\n"
        "b = Bytes(data=b'old')\nb.data = bytes([rank, 255])\nb",
        "-r 1",
    )
    (name,) = views(cell)
    sent = [m for m in cell.comms if m["comm_id"] == name and m["buffers"]]
    assert sent[-1]["buffers"] == [b"\x01\xff"]
    told = {"method": "update", "state": {}, "buffer_paths": [["data"]]}
    notebook.say(name, told, b"\x00typed")
    cell = on_ranks(
        notebook, "while b.data[0]: time.sleep(0.01)\nbytes(b.data)", "-r 1 --timeout 60"
    )
    assert cell.text == "rank 1 → b'\\x00typed'\n"


def test_a_flood_of_messages_is_cut_counted_and_holds_up_no_output(notebook):
    cell = on_ranks(
        notebook,
        "p = w.IntProgress(max=20_000)\ndisplay(p)\n"
        "for i in range(20_001): p.value = i\nprint('ended')",
    )
    for name in views(cell):
        assert state(notebook, name)["value"] == 20_000
        assert sum(m["comm_id"] == name for m in cell.comms) < 2_000
    assert "ranks 0–1 │ ended" in cell.text
    cell = on_ranks(
        notebook,
        "b = w.Button()\nfor i in range(3000): b.send({'number': i})\nprint('ended')",
        "-r 0",
    )
    came = sum("number" in m["data"].get("content", {}) for m in cell.comms)
    assert 0 < came < 3000
    told = re.findall(r"([\d,]+) widget messages? w", cell.text)
    assert sum(int(number.replace(",", "")) for number in told) == 3000 - came
    assert "│ ended" in cell.text


def test_a_page_that_is_loaded_anew_has_the_ranks_widgets_until_they_are_closed(notebook):
    cell = on_ranks(notebook, "s = w.IntSlider(value=11)\ndisplay(s)\ns.value = 12", "-r 1")
    (name,) = views(cell)
    notebook.run("import ipywidgets")
    notebook.say("0" * 32, {}, kind="comm_open", target_name="jupyter.widget.control")
    notebook.say("0" * 32, {"method": "request_states"})
    notebook.pump(lambda: notebook.comms[-1]["comm_id"] == "0" * 32, 60, "the states", cell)
    (told,) = [m["data"]["states"] for m in notebook.comms if m["comm_id"] == "0" * 32]
    assert told[name]["state"]["value"] == 12
    assert told[name]["model_name"] == "IntSliderModel"
    cell = on_ranks(notebook, "s = w.Label()\ndisplay(s)\ns.close()", "-r 0")
    (name,) = views(cell)
    assert [m["msg_type"] for m in cell.comms if m["comm_id"] == name][-1] == "comm_close"


def test_a_page_that_is_opened_while_a_cell_runs_is_answered(notebook, tmp_path):
    """JupyterLab asks nothing else before, and shows no widgets without the list of comms."""
    go = tmp_path / "go"
    cell = notebook.start(
        "%%distributed -r 0\nimport os, time\ns = w.IntSlider()\ndisplay(s)\n"
        f"print('here')\nwhile not os.path.exists({str(go)!r}): time.sleep(0.05)"
    ).wait_for("here")
    assert set(views(cell)) <= notebook.open_page()
    assert not cell.done
    go.touch()
    cell.wait().ok()


def test_an_exception_in_a_callback_is_in_the_log_and_the_widget_lives_on(notebook):
    cell = on_ranks(
        notebook,
        "s = w.IntSlider()\nseen = []\n"
        "def fails(change):\n    seen.append(change.new)\n    raise ValueError('of a callback')\n"
        "s.observe(fails, 'value')\ns",
        "-r 0",
    )
    for value in (1, 2):
        moved(notebook, views(cell)[0], value=value)
    cell = on_ranks(notebook, "while len(seen) < 2: time.sleep(0.01)\nseen", "-r 0 --timeout 60")
    assert "→ [1, 2]\n" in cell.text
    assert "of a callback" in notebook.run("%distributed log -r 0").text


def test_where_no_widgets_are_drawn_they_are_text(notebook):
    with patched(notebook.run, LINE_HOLD, 60):
        cell = notebook.start(
            "%%distributed\no = w.Output()\nbarrier()\nprint('before')\n"
            "with o: print('inside', rank)\nprint('after')",
            typing=True,
        ).wait()
    assert cell.comms == []
    assert sorted(re.findall("(?:│|  ) ?(\\w+ ?\\d?)$", cell.text, re.MULTILINE)) == [
        "after",
        "before",
        "inside 0",
        "inside 1",
    ]


@pytest.mark.parametrize("shown", ["s", "w.VBox([w.HBox([s])])"])
def test_who_uses_a_widget_of_a_rank_that_is_gone_is_told_above_it(notebook, shown):
    cell = on_ranks(notebook, f"s = w.IntSlider()\ndisplay({shown})", "-r 1")
    (slider,) = {
        message["comm_id"]
        for message in cell.comms
        if message["data"].get("state", {}).get("_model_name") == "IntSliderModel"
    }
    notebook.run("%distributed restart")
    assert "is gone" not in cell.text
    moved(notebook, slider, value=3)
    said = "· rank 1 has ended, and this widget no longer works: run the cell again.\n"
    notebook.pump(lambda: said in cell.text, 60, said, cell)
    assert cell.text.startswith(f"rank 1:\n{said}")
    assert on_ranks(notebook, "rank").text == "rank 0 → 0\nrank 1 → 1\n"
    notebook.run("%%distributed\nimport time\nimport ipywidgets as w")


def drawn_bar(kernel, name):
    parts = [child.removeprefix("IPY_MODEL_") for child in state(kernel, name)["children"]]
    before, done, after = [state(kernel, part)["value"] for part in parts]
    return before.replace("\N{FIGURE SPACE}", " "), done, after


DRAWN = "from tqdm.notebook import tqdm\n"


def test_bars_that_tqdm_draws_on_several_ranks_are_one(notebook):
    cell = on_ranks(
        notebook,
        f"{DRAWN}for i in tqdm(range(30), 'train'):\n    if i == 15 * (1 + rank) : break\n"
        "for i in tqdm(range(30), 'train'): pass",
    )
    first, second = views(cell)
    before, done, after = drawn_bar(notebook, first)
    assert (before, done) == ("train:  50%", 15)
    assert after.endswith("slowest: 0, mean 75%")
    assert drawn_bar(notebook, second)[:2] == ("train: 100%", 30)
    assert "ranks 0–1:" not in cell.text


@pytest.mark.parametrize("options", ["-r 1", "--no-fold"])
def test_bars_of_one_rank_and_those_that_are_not_to_be_folded_are_the_ranks_own(notebook, options):
    cell = on_ranks(notebook, f"{DRAWN}for i in tqdm(range(30)): pass", options)
    assert len(views(cell)) == (1 if options == "-r 1" else 2)
    for name in views(cell):
        assert drawn_bar(notebook, name)[:2] == ("100%", 30)


RICH = """
from rich.progress import Progress, track
barrier()
for i in track(range(20), "working"):
    if i == 10 + 5 * rank: break
with Progress() as bars:
    one, other = bars.add_task("one", total=4), bars.add_task("other", total=4)
    bars.advance(one, 4)
    bars.advance(other, 1)
    print("said in between")
print("ended")
"""


@pytest.mark.parametrize("metadata", [LAB, None], ids=["JupyterLab", "console"])
def test_bars_of_rich_are_lines_of_the_slowest_and_the_mean(notebook, metadata):
    pytest.importorskip("rich")
    with patched(notebook.run, LINE_HOLD, 60):
        cell = notebook.start(f"%%distributed\n{RICH}", typing=True, metadata=metadata).wait()
    assert cell.comms == []
    assert "�" not in cell.text
    first, between, *drawn, last = cell.text.splitlines()
    assert first.startswith("ranks 0–1 │ working ━")
    assert re.search(r" 50% .*slowest: 0, mean 6\d%$", first)
    assert (between.split("│ ")[1], last.split("│ ")[1]) == ("said in between", "ended")
    assert [(line.split()[1], re.search("\\d+%", line)[0]) for line in drawn] == [
        ("one", "100%"),
        ("other", "25%"),
    ]
