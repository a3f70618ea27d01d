"""The lines between a notebook and the agents of its hosts."""

import json

import pytest

from allranks.records.agent import (
    Again,
    Exit,
    HostConnected,
    Join,
    LauncherText,
    SeatSpares,
    Stop,
    read_command,
    read_event,
    to_line,
)

EVENTS = Exit(1, 7, -9, True, "out of memory"), Again(), HostConnected("a", {"h1": "refused"})
COMMANDS = Stop(), Join({"hosts": [["h1", 1]]}), SeatSpares(1, [1], [[3, 1]])


def test_events_and_commands_are_read_as_they_were_written():
    assert [read_event(to_line(event)) for event in EVENTS] == [*EVENTS]
    assert [read_command(to_line(command)) for command in COMMANDS] == [*COMMANDS]


@pytest.mark.parametrize("line", [b"text", b"", b"\xff", b"[1]", b'{"a": 1}', b"[" * 9000])
def test_what_is_no_event_was_printed_by_a_module(line):
    assert read_event(line) == LauncherText(line.decode("utf-8", "replace"))


UNREADABLE = (
    {"event": "reboots"},
    {"event": ["exit"]},
    {"event": "again", "rank": 1},
    {"event": "exit", "rank": 1},
    {"event": "host_event"},
    {"event": "admitted", "rank": "3"},
    {"event": "admitted", "rank": 1 << 70},
)


@pytest.mark.parametrize("fields", UNREADABLE, ids=range(len(UNREADABLE)))
def test_an_event_that_is_unknown_or_does_not_fit_is_an_error(fields):
    with pytest.raises(ValueError, match="expected a known event and its fields, found"):
        read_event(json.dumps(fields).encode())


@pytest.mark.parametrize("line", [b"", b"stop", b'{"event": "stopped"}', b'{"command": "exit"}'])
def test_a_command_that_is_unknown_is_an_error(line):
    with pytest.raises(ValueError, match="expected a known command and its fields, found"):
        read_command(line)
