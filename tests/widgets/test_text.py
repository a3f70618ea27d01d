"""Labelled text as a person reads it."""

import io
import sys

import pytest

from allranks.features.prompts.notebook import TerminalField
from allranks.widgets.notebook import shown_as
from allranks.widgets.text import Line, RankText, Row, render


def fed(*pieces: tuple[str, str]) -> list[Line]:
    text = RankText()
    for kind, piece in pieces:
        text.feed(kind, piece)
    return text.lines


def test_a_line_that_comes_in_pieces_is_one_line() -> None:
    assert fed(("out", "a"), ("out", "b\nc")) == [Line("out", "ab"), Line("out", "c")]


def test_a_carriage_return_starts_the_line_anew() -> None:
    assert fed(("err", "10 %\r20 %\r30 %"), ("err", "\r40 %\n")) == [Line("err", "40 %")]


def test_a_windows_line_end_does_not_empty_the_line() -> None:
    assert fed(("out", "text\r\n")) == [Line("out", "text")]


def test_an_empty_line_is_a_line() -> None:
    assert fed(("out", "a\n\nb\n")) == [Line("out", "a"), Line("out", ""), Line("out", "b")]


def test_standard_error_does_not_end_up_in_a_line_of_standard_output() -> None:
    assert fed(("out", "a"), ("err", "b\n")) == [Line("out", "a"), Line("err", "b")]


def test_an_unended_line_is_kept_back_where_asked() -> None:
    text = RankText()
    text.feed("out", "a\nb")
    assert text.take(ended_only=True) == [Line("out", "a")]
    text.feed("out", "c\n")
    assert text.take(ended_only=True) == [Line("out", "bc")]


def test_a_run_of_rows_is_labelled_once() -> None:
    rows = [
        Row((0, 1), Line("out", "x")),
        Row((0, 1), Line("err", "y")),
        Row((2,), Line("value", "3")),
    ]
    assert render(rows) == "ranks 0–1 │ x\n          ! y\nrank 2    → 3"


def test_control_characters_are_shown_and_colours_kept() -> None:
    row = Row((0,), Line("out", "\x1b[31mred\x1b[0m \x07\x1b[2Jbell"))
    assert render([row]) == "rank 0 │ \x1b[31mred\x1b[0m \ufffd\ufffdbell"


def test_bars_below_each_other_are_drawn_where_they_stand() -> None:
    nested = "\router 0%\n\rinner 50%\x1b[A\n\rinner 99%\x1b[A\router 1%"
    assert fed(("err", nested)) == [Line("err", "outer 1%"), Line("err", "inner 99%")]
    assert fed(("err", nested), ("err", "\n\rinner 100%\x1b[A"), ("err", "\router 2%\n\n")) == [
        Line("err", "outer 2%"),
        Line("err", "inner 100%"),
    ]


def test_lines_above_which_a_rank_writes_are_kept_back_where_asked() -> None:
    text = RankText()
    text.feed("err", "ended\nouter\ninner\x1b[A")
    assert text.take(ended_only=True) == [Line("err", "ended")]
    text.feed("err", "\router 1\n\rinner 1\n")
    assert text.take(ended_only=True) == [Line("err", "outer 1"), Line("err", "inner 1")]


def test_nobody_writes_above_the_first_line() -> None:
    assert fed(("out", "a\x1b[A\x1b[A\x1b[Ab")) == [Line("out", "ab")]


def test_lines_that_are_erased_and_written_again_are_shown_once() -> None:
    """As rich draws two bars, and what is printed between, in a terminal."""
    text = RankText()
    text.feed("out", "\x1b[?25lone 1%\ntwo 1%")
    text.feed("out", "\r\x1b[2K\x1b[1A\x1b[2Kone 2%\ntwo")
    text.feed("out", "\r\x1b[2K\x1b[1A\x1b[2Ksaid\none 3%\ntwo 3%")
    text.feed("out", "\n\x1b[?25h")
    assert [line.text for line in text.lines] == ["said", "one 3%", "two 3%"]


def test_a_prompt_that_nobody_answers_is_a_line_of_its_own(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    field = TerminalField()
    field.ask("ipdb> ", hidden=False)
    assert capsys.readouterr().out == "ipdb> \n"
    with pytest.raises(EOFError):
        field.typed()


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
    ],
)
def test_colour_codes_of_long_text_are_styles(codes: str, style: str) -> None:
    html = shown_as(f"\x1b[{codes}m<a>\x1b[0m & b" + "\n" * 99)["text/html"]
    assert f'<span style="{style}">&lt;a&gt;</span> &amp; b' in html


def test_what_ends_a_colour_leaves_the_rest_of_the_style() -> None:
    html = shown_as("\x1b[1;4;32ma\x1b[39mb\x1b[22mc\x1b[24md" + "\n" * 99)["text/html"]
    assert html.partition("<pre")[2].count("<span") == 3
    assert '<span style="text-decoration: underline">c</span>d' in html
