"""The rows that several ranks' lines become."""

from hypothesis import given
from hypothesis import strategies as st

from allranks.widgets.text import Line, Row, merge


def out(*texts: str) -> list[Line]:
    return [Line("out", text) for text in texts]


def rows(lines: dict[int, list[Line]]) -> list[tuple[tuple[int, ...], str]]:
    return [(row.ranks, row.line.text) for row in merge(lines)]


def test_identical_lines_become_one_row() -> None:
    assert rows({0: out("a"), 1: out("a"), 2: out("a")}) == [((0, 1, 2), "a")]


def test_a_common_line_waits_for_the_rank_that_writes_something_before_it() -> None:
    merged = rows({0: out("loading", "ready"), 1: out("ready")})
    assert merged == [((0,), "loading"), ((0, 1), "ready")]


def test_lines_of_their_own_stand_in_a_block_a_rank() -> None:
    merged = rows({0: out("a0", "b0", "end"), 1: out("a1", "b1", "end")})
    assert [ranks for ranks, _ in merged] == [(0,), (0,), (1,), (1,), (0, 1)]


def test_lines_that_differ_in_their_stream_only_are_not_the_same() -> None:
    assert len(merge({0: [Line("out", "x")], 1: [Line("err", "x")]})) == 2


def test_crossing_orders_lose_no_line() -> None:
    merged = rows({0: out("a", "b"), 1: out("b", "a")})
    assert sorted(text for ranks, text in merged for _ in ranks) == ["a", "a", "b", "b"]


LINES = st.lists(st.sampled_from("abc"), max_size=6)


@given(st.dictionaries(st.integers(0, 4), LINES, max_size=4))
def test_every_rank_keeps_its_lines_and_their_order(texts: dict[int, list[str]]) -> None:
    merged: list[Row] = merge({rank: out(*lines) for rank, lines in texts.items()})
    for rank, lines in texts.items():
        assert [row.line.text for row in merged if rank in row.ranks] == lines


def bar(percent: int, rest: str = "", name: str = "train", total: str = "200") -> str:
    filled = "█" * (percent // 10)
    return (
        f"{name}: {percent:3}%|{filled:10}| {2 * percent}/{total} [00:0{percent // 20}<00:04{rest}]"
    )


def test_the_same_bar_of_several_ranks_is_the_slowest_ones_and_tells_the_mean() -> None:
    lines = {rank: out("before", bar(at)) for rank, at in enumerate((50, 20, 80))}
    assert rows(lines) == [
        ((0, 1, 2), "before"),
        ((0, 1, 2), bar(20) + "  slowest: 1, mean 50%"),
    ]


def test_bars_that_have_ended_differ_in_their_speed_only() -> None:
    fast, slow = bar(100, ", 9it/s"), bar(100, ", 7it/s").replace("00:05", "01:05")
    assert rows({0: out(fast), 1: out(slow)}) == [((0, 1), slow)]


def test_bars_of_another_name_or_total_are_others() -> None:
    lines = {0: out(bar(50)), 1: out(bar(50, name="test")), 2: out(bar(50, total="300"))}
    assert [ranks for ranks, _ in rows(lines)] == [(0,), (1,), (2,)]


def test_a_bar_of_one_rank_and_a_line_that_is_none_stay_as_they_are() -> None:
    lines = {0: out(bar(50)), 1: out("100%| of it")}
    assert rows(lines) == [((0,), bar(50)), ((1,), "100%| of it")]


def keras(done: int, loss: float = 0.5, seconds: str = "0s 14ms/step") -> str:
    return (
        f"\x1b[1m{done:2}/20\x1b[0m \x1b[32m━━━━━━━━━━\x1b[0m\x1b[37m━━━━━━━━━━\x1b[0m "
        f"\x1b[1m{seconds}\x1b[0m - loss: {loss:.4f}"
    )


def test_bars_of_keras_that_are_not_full_are_the_slowest_ones() -> None:
    lines = {rank: out("Epoch 1/2", keras(at, 1 / at)) for rank, at in enumerate((10, 5))}
    assert rows(lines) == [
        ((0, 1), "Epoch 1/2"),
        ((0, 1), f"{keras(5, 0.2)}  slowest: 1, mean 38%"),
    ]


def test_full_bars_of_keras_are_one_where_their_metrics_are_the_same() -> None:
    lines = {0: out(keras(20)), 1: out(keras(20, 0.5, "3s")), 2: out(keras(20, 0.7))}
    assert [ranks for ranks, _ in rows(lines)] == [(0, 1), (2,)]


def test_bars_of_older_keras_are_known_too() -> None:
    text = "{}/20 [====>...............] - ETA: {}s - loss: 0.4"
    assert rows({0: out(text.format(8, 3)), 1: out(text.format(4, 5))}) == [
        ((0, 1), f"{text.format(4, 5)}  slowest: 1, mean 30%")
    ]


def test_bars_of_rich_are_the_slowest_ones() -> None:
    text = "working ━━━━━━━━━━╸━━━━━━━━━  {}% 0:00:0{}"
    assert rows({0: out(text.format(40, 2)), 1: out(text.format(20, 3))}) == [
        ((0, 1), f"{text.format(20, 3)}  slowest: 1, mean 30%")
    ]
