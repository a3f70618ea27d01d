"""Labelled text as a person reads it, and the rows that several ranks' lines become."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.records.wire import Output
from allranks.widgets.notebook import shown_as
from allranks.widgets.text import (
    Line,
    RankText,
    Row,
    TerminalView,
    described,
    merge,
    render,
    shows_updates,
)


def fed(*pieces: tuple[str, str]) -> list[Line]:
    text = RankText()
    for kind, piece in pieces:
        text.feed(kind, piece)
    return text.lines


NESTED = "\router 0%\n\rinner 50%\x1b[A\n\rinner 99%\x1b[A\router 1%"


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        (["a", "b\nc"], ["ab", "c"]),
        (["10 %\r20 %\r30 %", "\r40 %\n"], ["40 %"]),
        (["text\r\n"], ["text"]),
        (["a\n\nb\n"], ["a", "", "b"]),
        ([NESTED], ["outer 1%", "inner 99%"]),
        ([NESTED, "\n\rinner 100%\x1b[A", "\router 2%\n\n"], ["outer 2%", "inner 100%"]),
        (["a\x1b[A\x1b[A\x1b[Ab"], ["ab"]),
        (
            # As rich draws two bars, and what is printed between, in a terminal.
            [
                "\x1b[?25lone 1%\ntwo 1%",
                "\r\x1b[2K\x1b[1A\x1b[2Kone 2%\ntwo",
                "\r\x1b[2K\x1b[1A\x1b[2Ksaid\none 3%\ntwo 3%",
                "\n\x1b[?25h",
            ],
            ["said", "one 3%", "two 3%"],
        ),
    ],
    ids=[
        "pieces of a line", "a carriage return", "the line end of Windows", "an empty line",
        "bars below each other", "the same, updated", "nothing above the first line",
        "lines erased and written again",
    ],
)  # fmt: skip
def test_text_becomes_the_lines_that_a_terminal_shows(pieces: list[str], lines: list[str]) -> None:
    assert fed(*(("err", piece) for piece in pieces)) == [Line("err", line) for line in lines]


def test_lines_that_may_still_change_are_kept_back_where_asked() -> None:
    # Nor does standard error end up in a line of standard output.
    assert fed(("out", "a"), ("err", "b\n")) == [Line("out", "a"), Line("err", "b")]
    text = RankText()
    text.feed("out", "a\nb")
    assert text.take(ended_only=True) == [Line("out", "a")]
    text.feed("out", "c\n")
    assert text.take(ended_only=True) == [Line("out", "bc")]
    text.feed("err", "ended\nouter\ninner\x1b[A")
    assert text.take(ended_only=True) == [Line("err", "ended")]
    text.feed("err", "\router 1\n\rinner 1\n")
    assert text.take(ended_only=True) == [Line("err", "outer 1"), Line("err", "inner 1")]


def test_a_bar_that_was_erased_leaves_no_line() -> None:
    # As tqdm draws a bar with leave=False below another one.
    erased = "\router 0%\n\rinner 9%\x1b[A\n\r         \x1b[A\router 9%\n"
    text = RankText()
    text.feed("err", erased)
    assert text.shown == [Line("err", "outer 9%")]
    assert text.take(ended_only=False) == [Line("err", "outer 9%")]
    text.feed("err", f"{erased}\rinner 1%")
    assert [line.text for line in text.shown] == ["outer 9%", "inner 1%"]
    text = RankText()
    text.feed("out", "a\n\n")
    assert [line.text for line in text.shown] == ["a", ""]


def test_a_run_of_rows_is_labelled_once_and_only_colours_are_left_in_it() -> None:
    rows = [
        Row((0, 1), Line("out", "x")),
        Row((0, 1), Line("err", "y")),
        Row((2,), Line("value", "3")),
    ]
    assert render(rows) == "ranks 0–1 │ x\n          ! y\nrank 2    → 3"
    row = Row((0,), Line("out", "\x1b[31mred\x1b[0m \x07\x1b[2Jbell"))
    assert render([row]) == "rank 0 │ \x1b[31mred\x1b[0m \ufffd\ufffdbell"


def test_short_text_stays_text_and_long_text_has_a_scroller() -> None:
    short, tall, wide = "a line\n" * 9, "a line\n" * 99, "a word " * 999
    assert shown_as(short) == {"text/plain": short}
    for text in (tall, wide):
        shown = shown_as(text)
        assert shown["text/plain"] == text
        assert "overflow: auto" in shown["text/html"]


@pytest.mark.parametrize(
    ("codes", "style"),
    [
        ("1;31", "font-weight: bold; color: #d04437"),
        ("91", "color: #d04437"),
        ("38;2;1;2;3", "color: rgb(1, 2, 3)"),
        ("48;5;1;4", "text-decoration: underline"),
        ("1;4;32ma\x1b[39mb\x1b[22", "text-decoration: underline"),  # what ends a colour
    ],
)
def test_colour_codes_of_long_text_are_styles(codes: str, style: str) -> None:
    html = shown_as(f"\x1b[{codes}m<a>\x1b[0m & b" + "\n" * 99)["text/html"]
    assert f'<span style="{style}">&lt;a&gt;</span> &amp; b' in html


def out(*texts: str) -> list[Line]:
    return [Line("out", text) for text in texts]


def rows(lines: dict[int, list[Line]]) -> list[tuple[tuple[int, ...], str]]:
    return [(row.ranks, row.line.text) for row in merge(lines)]


@pytest.mark.parametrize(
    ("lines", "merged"),
    [
        ([["a"], ["a"], ["a"]], [((0, 1, 2), "a")]),
        ([["loading", "ready"], ["ready"]], [((0,), "loading"), ((0, 1), "ready")]),
        (
            [["a0", "b0", "end"], ["a1", "b1", "end"]],
            [((0,), "a0"), ((0,), "b0"), ((1,), "a1"), ((1,), "b1"), ((0, 1), "end")],
        ),
    ],
    ids=["identical", "a common line waits", "a block for each rank"],
)
def test_equal_lines_of_ranks_become_one_row(lines, merged) -> None:
    assert rows({rank: out(*texts) for rank, texts in enumerate(lines)}) == merged
    # Lines that differ in their stream are not equal.
    assert len(merge({0: [Line("out", "x")], 1: [Line("err", "x")]})) == 2


@pytest.mark.parametrize(
    "one",
    [
        ["[0.11 0.12", " 0.0016]"],
        ["tensor([[1, 2],", "", "        [0, 4]])"],
        ["{'a': 1,", " 'b': 0}"],
        ["\x1b[1m[\x1b[0m1,", "0]"],
    ],
    ids=["array", "tensor", "dictionary", "coloured"],
)
def test_the_lines_of_a_printed_value_are_folded_together_or_not_at_all(one) -> None:
    other = [one[0].replace("1", "7"), *one[1:]]
    lines = {0: out("x", *one, "y"), 1: out("x", *other, "y"), 2: out("x", *one, "y")}
    assert rows(lines) == [
        ((0, 1, 2), "x"),
        *(((0, 2), text) for text in one),
        *(((1,), text) for text in other),
        ((0, 1, 2), "y"),
    ]


def test_the_lines_of_a_result_are_folded_together_or_not_at_all() -> None:
    lines = {rank: fed(("value", f"   a  b\n0  1  {rank}\n1  1  1\n")) for rank in range(2)}
    assert [row.ranks for row in merge(lines)] == 3 * [(0,)] + 3 * [(1,)]


@pytest.mark.parametrize("first", ["[1, 2", "[WARNING it ends here", "call(", ":("])
def test_lines_behind_a_bracket_that_stays_open_are_folded_one_by_one(first) -> None:
    lines = {rank: out(first, f"own {rank}", "y") for rank in range(2)}
    assert rows(lines) == [((0, 1), first), ((0,), "own 0"), ((1,), "own 1"), ((0, 1), "y")]


LINES = st.lists(st.sampled_from(["a", "b", "c", "[", "]", "([", "])"]), max_size=6)


@given(st.dictionaries(st.integers(0, 4), LINES, max_size=4))
def test_every_rank_keeps_its_lines_and_their_order(texts: dict[int, list[str]]) -> None:
    merged: list[Row] = merge({rank: out(*lines) for rank, lines in texts.items()})
    for rank, lines in texts.items():
        assert [row.line.text for row in merged if rank in row.ranks] == lines


def request(allow_stdin=True, kind="execute_request", **metadata):
    return {
        "header": {"msg_type": kind},
        "metadata": metadata,
        "content": {"allow_stdin": allow_stdin},
    }


@pytest.mark.parametrize(
    ("message", "known"),
    [
        (request(cellId="5e1a", recordTiming=False), True),
        (request(deletedCells=[]), True),
        (request(allow_stdin=False), True),
        ({"header": {"msg_type": "comm_msg"}, "metadata": {}, "content": {"data": {}}}, True),
        (request(), False),
        ({}, False),
    ],
    ids=["JupyterLab", "older JupyterLab", "nbclient", "a button", "qtconsole", "no request"],
)
def test_front_ends_that_change_displays_in_place_are_known(message, known):
    assert shows_updates(message) is known


@given(st.lists(st.tuples(st.sets(st.integers(0, 12), min_size=1), st.sampled_from(["a", ""]))))
def test_a_front_end_finds_the_lines_of_each_rank_without_reading_labels(given_rows):
    rows = [Row(tuple(sorted(ranks)), Line("out", text)) for ranks, text in given_rows]
    whose = described(rows)["allranks"]
    lines = iter(render(rows).split("\n"))
    found = [
        (tuple(r for first, last in spans for r in range(first, last + 1)), next(lines)[indent:])
        for indent in [whose["indent"]]
        for spans, count in whose["lines"]
        for _ in range(count)
    ]
    assert found == [(row.ranks, row.line.text) for row in rows]


def test_members_of_an_ensemble_are_no_ranks_to_a_front_end():
    assert described([Row((0,), Line("out", "a"))], "member") == {}


def test_a_note_about_a_wait_takes_the_place_of_the_one_before() -> None:
    text = RankText()
    call = "allreduce(Sum) at In[5]:3: allreduce(x)"

    def wait(seconds: int, ranks: str = "rank 2", at: str = call) -> None:
        text.feed("note", f"{at} has waited {seconds} s for {ranks}:\n  {ranks} runs In[5]:1\n")

    def shown() -> list[str]:
        return [line.text for line in text.shown]

    text.feed("out", "begins\n")
    wait(5, "ranks 1–2")
    wait(10)
    assert shown() == ["begins", f"{call} has waited 10 s for rank 2:", "  rank 2 runs In[5]:1"]
    # One of another call, and one after other output, are new.
    wait(5, at="barrier at In[5]:4: barrier()")
    text.feed("out", "of a thread\n")
    wait(10, at="barrier at In[5]:4: barrier()")
    assert [line.rpartition(" has waited ")[2] for line in shown() if "waited" in line] == [
        "10 s for rank 2:",
        "5 s for rank 2:",
        "10 s for rank 2:",
    ]
    text.clear()
    wait(20)
    assert len(shown()) == 2


def test_what_is_left_out_of_long_lines_is_said_in_bytes(capsys) -> None:
    view = TerminalView([0], "/logs")
    for lines, nbytes in ((0, 4_976_000), (1, 2_500), (2, 200_000)):
        view.output(Output(0, 1, (["hidden", lines, nbytes],), 0, 0, 0))
    view.finish()
    log = "the whole output is in /logs/rank-0.log"
    assert capsys.readouterr().out.splitlines() == [
        f"rank 0 · … 5.0 MB of long lines are not shown; {log}",
        f"       · … 1 line (2.5 kB) is not shown; {log}",
        f"       · … 2 lines (0.2 MB) are not shown; {log}",
    ]
