"""What stands behind the magics, and what is said of what cannot be understood."""

import re

import pytest

from allranks.cluster.options import check_preload
from allranks.errors import UsageError
from allranks.magics.options import (
    CellOptions,
    HelpShown,
    cell_parser,
    chosen_ranks,
    commands,
    parse_cell,
    parse_command,
)
from allranks.magics.shell import words_for


def test_options_of_a_cell_and_of_a_command_are_read():
    options = parse_cell("-n 4 -r [0, 2-3] -o runs --timeout 2.5 --no-fold")
    assert (options.cluster.n, options.ranks, options.out) == (4, "[0,2-3]", "runs")
    assert (options.timeout, options.fold) == (2.5, False)
    name, options = parse_command("pull -r 0,1 x, y")
    assert (name, options.names, options.ranks) == ("pull", ["x", "y"], "0,1")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--foo", "unrecognized arguments: --foo. Expected: %%distributed"),
        (
            "--time-out 3",
            r"arguments: --time-out 3. Did you mean --timeout\? Expected: %%distributed",
        ),
        ("''", "unrecognized arguments: . Expected: %%distributed"),
        ("-n four", "invalid int value"),
        ("--timeout soon", "invalid float value: 'soon'"),
        ("-r", "expected one argument"),
        ("-o 1x", "expected the name of a variable after -o"),
        ("-o class", "expected the name of a variable after -o, found 'class'"),
        ("--timeout 0", "expected --timeout in seconds above 0"),
        ("-o 'x", "expected options, found .* Close each quotation mark"),
    ],
)
def test_a_line_that_cannot_be_understood_says_what_was_expected(line, said):
    with pytest.raises(UsageError, match=said.replace("%%", "%%")):
        parse_cell(line)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("push", "expected the names of variables, found none"),
        ("status x", "unrecognized arguments: x. Expected: %distributed status"),
        ("start -r 0", "unrecognized arguments: -r 0. Expected: %distributed start"),
        ("stop -n 3", "unrecognized arguments: -n 3. Expected: %distributed stop"),
        ("strat -n 4", "found 'strat'. Type: %distributed start -n 4"),
        ("-n 4 --gpus 0", "found '-n'. Type: %distributed start -n 4 --gpus 0"),
        ("--on=ssh:h1", "found '--on=ssh:h1'. Type: %distributed start --on=ssh:h1"),
        ("-r 0", "found '-r'. Type: %distributed start | stop"),
        ("nonsense", "found 'nonsense'. Type: %distributed start | stop"),
        ("interrupt -r 1", "unrecognized arguments: -r 1. Expected: %distributed interrupt"),
    ],
)
def test_a_command_that_cannot_be_understood_is_refused(line, said):
    with pytest.raises(UsageError, match=re.escape(said)):
        parse_command(line)


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        (CellOptions(ranks="4"), "-r 3, or for 4 ranks: -n 4"),
        (CellOptions(ranks="0,4"), "-r 3"),
        (CellOptions(ranks="7", chosen_by="%%rank"), "%%rank 3"),
        (CellOptions(ranks="x", chosen_by="--targets"), "--targets 0"),
    ],
)
def test_ranks_that_are_not_there_are_refused_with_what_can_be_typed_there(options, advice):
    with pytest.raises(UsageError, match=rf"^expected ranks .*Type for example: {advice}$"):
        chosen_ranks(options, 4)
    assert chosen_ranks(CellOptions(ranks=" 1-2"), 4) == (1, 2)
    assert chosen_ranks(CellOptions(), 2) == (0, 1)


@pytest.mark.parametrize("line", ["", "help", "--help"])
def test_a_command_that_is_left_out_lists_them_all(line, capsys):
    with pytest.raises(HelpShown):
        parse_command(line)
    shown = capsys.readouterr().out
    assert all(f"\n  {command} " in shown for command in commands())


def test_help_names_every_option(capsys):
    with pytest.raises(HelpShown):
        parse_cell("-n 4 --help")
    shown = capsys.readouterr().out
    assert all(word in shown for word in cell_parser().words)
    assert "%(" not in shown


@pytest.mark.parametrize(
    ("line", "word", "offered"),
    [
        ("%distributed ", "status", True),
        ("%distributed st", "--on", False),
        ("%distributed start --o", "--on", True),
        ("%distributed start -n 4 -", "-n", False),
        ("%distributed stop --o", "--on", False),
        ("%%distributed --", "--timeout", True),
        ("%%distributed -o na", "--timeout", False),
        ("%distributed", "status", False),
        ("%time --", "--timeout", False),
    ],
)
def test_what_is_offered_for_a_line(line, word, offered):
    assert (word in words_for(line)) == offered


@pytest.mark.parametrize("names", [5, [5], ["wave", None], "a-b"])
def test_what_names_no_module_is_refused(names):
    with pytest.raises(UsageError, match=r"^expected names of modules, found .*--preload pandas"):
        check_preload(names)


@pytest.mark.parametrize("line", ["", " "])
def test_a_cell_without_options_has_those_that_a_parser_gives(line):
    assert parse_cell(line) == parse_cell("--view auto")
