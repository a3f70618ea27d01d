"""The job of a launcher: one command on every host, from the request to its end everywhere."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil

from allranks import python_path
from allranks.records import limits
from allranks.records.config import Invitation, version

Tell = Callable[[str, str], None]
"""Called, in any thread, with a host and why the command has ended there."""
_SHOWN_LINES = 5

RELAY = (sys.executable, "-P", "-m", "allranks.relay")
"""The command that runs once on every host. The same Python is there at the same path."""


@dataclass(frozen=True)
class Host:
    """A host by the name that its launcher uses, and its number of ranks.

    ``login`` is the host for ssh if the user's name differs there: ``me@h1``.
    """

    name: str
    ranks: int
    login: str = ""


class Job:
    """One command on every host, from the request until it has ended everywhere."""

    _hosts: Sequence[Host] = ()
    #: The file with the invitation, of a job that reads it there.
    _invitation = ""

    def hosts(self) -> Sequence[Host]:
        """Returns its hosts; none while it waits. Raises StartFailed if it will not run."""
        return self._hosts

    def waits(self) -> str:
        """Returns the reason of its wait, in a line; empty if there is none."""
        return ""

    def all_came(self) -> None:
        """Called when every host has connected: the invitation is no longer needed."""
        if self._invitation:
            with suppress(FileNotFoundError):
                os.unlink(self._invitation)

    def give_up(self, host: str) -> None:
        """Called when a host is cut off: the end of the command there is not waited for."""

    def why_ended(self) -> str:
        """Returns what ended it, where its launcher can find out: ``reached its time limit``."""
        return ""

    def outlives(self) -> dict[str, Any]:
        """Returns how another process can end it, for `MultiHostLauncher.take_over`, if it goes on
        when this process is killed; empty if it does not.
        """
        return {}

    def close(self) -> None:
        """Ends it on all hosts."""
        raise NotImplementedError


class CommandJob(Job):
    """A command on this machine for every host, which runs `RELAY` there, as ssh does.

    It passes its standard input on, with the invitation, and ends when the relay does. The relay
    ends when its standard input does. ``program`` is the command's name in messages; ``tell`` is
    called with each host whose command has ended.
    """

    def __init__(
        self,
        program: str,
        commands: Mapping[Host, Sequence[str]],
        invitation: Invitation,
        tell: Tell,
    ) -> None:
        self._hosts = tuple(commands)
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        for host, command in commands.items():
            started = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                # A session of its own: an interrupt goes to the kernel's whole process group.
                start_new_session=True,
                # With a display, ssh would open a window to ask for a password.
                env={
                    name: value
                    for name, value in python_path.without_current_folder(os.environ).items()
                    if name != "DISPLAY"
                },
            )
            self._running[host.name] = started
            line = dataclasses.replace(invitation, host=host.name).to_json()
            assert started.stdin is not None
            with suppress(BrokenPipeError):  # it has ended: its last lines have the reason
                started.stdin.write(line.encode() + b"\n")
                started.stdin.flush()
            watch_command(program, started, [host], tell)

    def give_up(self, host: str) -> None:
        self._running[host].kill()

    def outlives(self) -> dict[str, Any]:
        return {host: _mark_of(started.pid) for host, started in self._running.items()}

    def close(self) -> None:
        """Ends every command; a relay that still runs then ends its host's ranks."""
        for started in self._running.values():
            assert started.stdin is not None
            with suppress(BrokenPipeError):
                started.stdin.close()
        # A command for a host that is cut off would wait for that host.
        deadline = time.monotonic() + limits.COMMANDS_SECONDS
        for started in self._running.values():
            try:
                started.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                started.kill()
                started.wait()


class TakenCommandJob(Job):
    """Commands that another notebook has started, by the process ids and start times of each host.
    They have no standard input any more, and end when the relay does.
    """

    def __init__(self, hosts: Sequence[Host], marks: Mapping[str, Sequence[float]]) -> None:
        self._hosts = hosts
        self._marks = dict(marks)
        self._running = {
            host: found for host, mark in marks.items() if (found := _process_of(mark))
        }

    def give_up(self, host: str) -> None:
        if host in self._running:
            with suppress(psutil.NoSuchProcess):
                self._running[host].kill()

    def outlives(self) -> dict[str, Any]:
        return self._marks

    def close(self) -> None:
        _, left = psutil.wait_procs(self._running.values(), limits.COMMANDS_SECONDS)
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()


def _mark_of(pid: int) -> tuple[int, float]:
    try:
        return pid, psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:
        return 0, 0.0


def _process_of(mark: Sequence[float]) -> psutil.Process | None:
    # A later process may have the same number.
    try:
        found = psutil.Process(int(mark[0])) if mark[0] else None
    except psutil.NoSuchProcess:
        return None
    return found if found is not None and found.create_time() == mark[1] else None


def last_lines(text: str) -> str:
    """Returns the end of what a program has written."""
    return "\n".join(text.strip().splitlines()[-_SHOWN_LINES:])


def other_version(text: str, who_has: str) -> str:
    """Returns a line about a host whose allranks has no `RELAY`, if its ``text`` shows that; else
    "": the relay itself reports the version of its host.
    """
    if f"No module named {RELAY[-1]}" not in text:
        return ""
    return f"\n{who_has} another allranks; the notebook has {version()}. Install this there"


def watch_command(
    program: str, started: subprocess.Popen[bytes], hosts: Sequence[Host], tell: Tell
) -> None:
    """Waits in a thread for the end of a command that serves hosts, and reports it for each."""

    def watch() -> None:
        assert started.stderr is not None
        with started.stderr as written:
            text = written.read().decode("utf-8", "replace")
        code = started.wait()
        lines = last_lines(text) + other_version(text, "It has")
        what = f"was lost: {program} ended with exit code {code}"
        for host in hosts:
            tell(host.name, f"{what}: {lines}" if lines else what)

    threading.Thread(target=watch, name=f"allranks-{program}", daemon=True).start()
