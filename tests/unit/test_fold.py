"""The rows that several ranks' lines become."""

from hypothesis import given
from hypothesis import strategies as st

from allranks.widgets.fold import Line, Row, merge


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
