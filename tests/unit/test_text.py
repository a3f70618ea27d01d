"""Labelled text as a person reads it."""

import io
import sys

import pytest

from allranks.widgets.field import TerminalField
from allranks.widgets.fold import Line, Row
from allranks.widgets.text import RankText, render


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
