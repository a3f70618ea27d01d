"""The options of a profile, on the lines of the magics."""

from types import SimpleNamespace

import pytest

from allranks.cluster import options
from allranks.cluster.features import NotebookHooks
from allranks.errors import StartFailed, UsageError
from allranks.features.profile.notebook import NotebookProfile
from allranks.magics.distributed import DistributedMagics
from allranks.magics.options import by_command, cell_parser, parse_cell, parse_command


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    for option in NotebookProfile.cell_options:
        monkeypatch.setitem(options.CELL_OPTIONS, option.name, option)
    for command in NotebookProfile.line_commands:
        monkeypatch.setitem(options.LINE_COMMANDS, command.name, command)
    cell_parser.cache_clear()
    yield
    cell_parser.cache_clear()


def test_a_cell_with_a_profile_is_run_by_ranks():
    cell = parse_cell("--profile --save stacks.txt")
    assert cell.for_running() == {}
    asked = {"profile_cell": {"profile": True, "save": "stacks.txt"}}
    assert by_command(cell.for_preparing()) == asked


def test_a_profile_of_a_cell_that_ranks_do_not_run_is_refused(monkeypatch):
    grid = options.CellOption("grid", "ensemble", {"metavar": "GRID"})
    monkeypatch.setitem(options.CELL_OPTIONS, grid.name, grid)
    refused = "--profile needs a cell that ranks run, found --grid. Leave out --profile"
    with pytest.raises(UsageError, match=refused):
        parse_cell("--grid a=1,2 --profile")


def test_a_file_without_a_profile_is_refused():
    with pytest.raises(UsageError, match=r"--save needs --profile\. Type: --profile --save a\.svg"):
        NotebookProfile().command("profile_cell", {"save": "a.svg"})


def submitted(line, cluster):
    """Submits a cell with these options where ``cluster`` starts its ranks; returns the feature."""
    hooks = NotebookHooks([NotebookProfile])
    magics = SimpleNamespace(session=SimpleNamespace(hooks=hooks, cluster=cluster))
    (feature,) = hooks.features
    try:
        DistributedMagics._submit_to_ranks(magics, parse_cell(line), "pass", 1)
    except StartFailed:
        return feature


def test_a_wrong_option_starts_no_ranks():
    started = []
    with pytest.raises(UsageError, match="--save needs --profile"):
        submitted("--save a.svg", started.append)
    assert started == []


def test_a_profile_ends_with_the_start_of_the_ranks_if_that_fails():
    def fail(_options):
        raise StartFailed("no ranks")

    assert not submitted("--profile", fail).in_cells


def test_the_command_takes_seconds_and_a_file():
    name, found = parse_command("profile 3 --save a.svg")
    assert (name, found.features) == ("profile", {"seconds": 3.0, "save": "a.svg"})
    text = NotebookProfile().command("profile", {"seconds": 3.0, "save": None})
    assert text == "The first 3 s of the next cell on the ranks will be profiled."
    with pytest.raises(UsageError, match="profile"):
        NotebookProfile().command("profile", {"seconds": -1.0, "save": None})


def test_the_button_of_the_panel_profiles_the_cell_and_says_what_came_of_it():
    (button,) = NotebookProfile.panel_buttons
    feature, shown = NotebookProfile(), []
    show = lambda picture, line: shown.append((picture, line))  # noqa: E731
    feature.cell = SimpleNamespace(pending=lambda: (0,), poll=lambda step: None)
    assert feature.command(button.command, show) == "profiling the next 5 s"
    assert feature.command(button.command, show).startswith("this cell is being profiled")
    feature.cell.ask = lambda *_: {}
    feature.cell_finished()
    assert shown == [(None, "this cell has no samples of a rank, so there is no flame graph")]
