"""The row that the bars of several ranks become."""

from __future__ import annotations

import pytest

from allranks.features.progress_bars.notebook import BarFolder
from allranks.widgets import text as widgets_text
from allranks.widgets.text import Line, merge


@pytest.fixture(autouse=True)
def folds_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(widgets_text, "LINE_FOLDERS", [BarFolder()])


def out(*texts: str) -> list[Line]:
    return [Line("out", text) for text in texts]


def rows(lines: dict[int, list[Line]]) -> list[tuple[tuple[int, ...], str]]:
    return [(row.ranks, row.line.text) for row in merge(lines)]


def bar(percent: int, rest: str = "", name: str = "train", total: str = "200") -> str:
    filled = "█" * (percent // 10)
    return (
        f"{name}: {percent:3}%|{filled:10}| {2 * percent}/{total} [00:0{percent // 20}<00:04{rest}]"
    )


def keras(done: int, loss: float = 0.5, seconds: str = "0s 14ms/step") -> str:
    return (
        f"\x1b[1m{done:2}/20\x1b[0m \x1b[32m━━━━━━━━━━\x1b[0m\x1b[37m━━━━━━━━━━\x1b[0m "
        f"\x1b[1m{seconds}\x1b[0m - loss: {loss:.4f}"
    )


SLOW = bar(100, ", 7it/s").replace("00:05", "01:05")
OLDER_KERAS = "{}/20 [====>...............] - ETA: {}s - loss: 0.4"
RICH = "working ━━━━━━━━━━╸━━━━━━━━━  {}% 0:00:0{}"


@pytest.mark.parametrize(
    ("bars", "merged"),
    [
        ([bar(50), bar(20), bar(80)], [((0, 1, 2), bar(20) + "  slowest: 1, mean 50%")]),
        ([bar(100, ", 9it/s"), SLOW], [((0, 1), SLOW)]),
        ([bar(50), "100%| of it"], [((0,), bar(50)), ((1,), "100%| of it")]),
        ([keras(10, 0.1), keras(5, 0.2)], [((0, 1), f"{keras(5, 0.2)}  slowest: 1, mean 38%")]),
        (
            [OLDER_KERAS.format(8, 3), OLDER_KERAS.format(4, 5)],
            [((0, 1), f"{OLDER_KERAS.format(4, 5)}  slowest: 1, mean 30%")],
        ),
        (
            [RICH.format(40, 2), RICH.format(20, 3)],
            [((0, 1), f"{RICH.format(20, 3)}  slowest: 1, mean 30%")],
        ),
    ],
    ids=["tqdm", "ended", "one bar", "Keras", "older Keras", "rich"],
)
def test_the_same_bar_of_several_ranks_is_the_slowest_ones_and_tells_the_mean(bars, merged) -> None:
    every = tuple(range(len(bars)))
    lines = {rank: out("before", text) for rank, text in enumerate(bars)}
    assert rows(lines) == [(every, "before"), *merged]


@pytest.mark.parametrize(
    ("bars", "together"),
    [
        ([bar(50), bar(50, name="test"), bar(50, total="300")], [(0,), (1,), (2,)]),
        ([keras(20), keras(20, 0.5, "3s"), keras(20, 0.7)], [(0, 1), (2,)]),
    ],
)
def test_bars_of_another_name_total_or_result_are_others(bars, together) -> None:
    assert [ranks for ranks, _ in rows({rank: out(one) for rank, one in enumerate(bars)})] == (
        together
    )
