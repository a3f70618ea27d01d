"""Messages in a terminal: what a user copies from them stands on one line."""

from __future__ import annotations

import os
import sys

import pytest

from allranks.cluster.failures import plain
from allranks.errors import CellFailed, UsageError, whole_commands
from allranks.widgets.text import TerminalView

START = "%distributed start -n 4"


@pytest.mark.parametrize("command", [START, "pip install 'allranks[lab,tensorflow]'", "%%px -t 0"])
@pytest.mark.parametrize("before", range(30, 90))
def test_a_command_is_not_broken_wherever_the_line_ends(command, before):
    told = f"{'x ' * (before // 2)}found none. Type: {command}, or leave it out"
    lines = whole_commands(told, 80).split("\n")
    assert any(command in line for line in lines)
    assert max(map(len, lines)) <= 80
    assert " ".join(lines) == told


def test_other_lines_are_left_to_the_terminal():
    table = f"{'a  b' * 30}\n    x = '{START}'"
    assert whole_commands(table, 80) == table
    long = f"Type: %distributed push {'name ' * 30}".strip()
    assert whole_commands(long, 80).replace("\n", " ") == long


def test_colours_take_no_room_and_a_format_is_no_command():
    source = (
        "\x1b[32m----> 4\x1b[39m \x1b[38;5;28;01mraise\x1b[39;00m E(\x1b[33m'%d of %s'\x1b[39m)"
    )
    assert len(source) > 60
    assert whole_commands(f"{source}  # %distributed", 60) == f"{source}  # %distributed"
    long = f"print('%s of {'many ' * 20}' % name)"
    assert whole_commands(long, 60) == long


def test_errors_and_notices_are_broken_in_a_terminal_only(monkeypatch, capsys):
    told = f"{'expected ' * 7}ranks, found none. Type: {START}"
    errors = UsageError(told), CellFailed(told)
    assert all("\n" not in "".join(one._render_traceback_()) for one in errors)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((80, 24)))
    for one in errors:
        (shown,) = one._render_traceback_()
        assert f"\n{START}" in plain(shown) or f" {START}" in plain(shown)
        assert max(map(len, shown.split("\n"))) <= 80
    TerminalView((0, 1)).notice(told)
    shown = capsys.readouterr().out.strip()
    assert START in shown
    assert max(map(len, shown.split("\n"))) <= 80
