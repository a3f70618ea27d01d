"""A rank keeps the last of what cells print, show and raise, and not all of it."""

import pytest

HELD = "import weakref\nclass Held: pass\nheld = weakref.WeakValueDictionary()"
FAIL = """
def fail(name):
    large = held[name] = Held()
    {raises}
fail({name!r})
"""
RAISES = {
    "an exception": "raise ValueError",
    "a chain": ("try: 1 / 0\n    except ZeroDivisionError as error: raise ValueError from error"),
    "an exception that its frame holds": (
        "try: raise ValueError\n    except ValueError as error: mine = error; raise"
    ),
    "sys.exit": "raise SystemExit(1)",
    "an interrupt": "raise KeyboardInterrupt",
    "a mismatch": "import numpy as np; large.array = np.ones(rank + 1); allreduce(large.array)",
}
NAMES = "sorted(held)"


@pytest.fixture(autouse=True)
def _held(notebook):
    notebook.on_ranks(HELD)


def test_frames_of_the_last_cell_or_call_that_failed_are_kept_and_no_others(notebook):
    for name, raises in RAISES.items():
        for first in ("", "import asyncio; await asyncio.sleep(0)"):
            cell = notebook.on_ranks(first + FAIL.format(raises=raises, name=name + first))
            assert cell.status == "error"
            assert notebook.on_ranks(NAMES).text == f"ranks 0–3 → {[name + first]}\n"
    post_mortem = (
        "import sys\nframe = sys.last_traceback\nwhile frame.tb_next: frame = frame.tb_next"
    )
    assert notebook.on_ranks(f"{post_mortem}\ndel frame").status == "ok"
    notebook.on_ranks(FAIL.format(raises="raise ValueError", name="of a cell"))
    notebook.run(
        "import allranks\ndef fails():\n    mine = held['of a call'] = Held()\n    1 / 0\n"
        "allranks.run(fails, np=4)"
    )
    assert notebook.on_ranks(NAMES).text == "ranks 0–3 → ['of a call']\n"


def test_values_are_kept_as_far_as_the_last_three_and_output_in_the_log_alone(notebook):
    for name in "abcde":
        notebook.on_ranks(f"{name} = held[{name!r}] = Held()\n{name}")
        notebook.on_ranks(f"del {name}")
    assert notebook.on_ranks(f"print({NAMES})").text == "ranks 0–3 │ ['c', 'd', 'e']\n"
    assert notebook.on_ranks("print(_ is held['e'], len(Out))").text == "ranks 0–3 │ True 3\n"
    notebook.on_ranks("for i in range(1000): print('printed', i)")
    kept = "sum(map(len, get_ipython().history_manager.outputs.values()))"
    assert notebook.on_ranks(f"print({kept})").text == "ranks 0–3 │ 0\n"
