"""A folder that every member is written to at once when it has ended, so that a rerun goes on.

One file a member, written beside and moved into place, so that it is there whole or not at all: a
line of JSON, then its result, packed. ``ensemble.json`` says which source they have run.
"""

from __future__ import annotations

import fcntl
import json
import os
from array import array
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from allranks.ensemble.arrays import InFile, Shared, is_foreign, write
from allranks.ensemble.fingerprint import key_of
from allranks.ensemble.member import ENDED, FAILED, Member
from allranks.errors import UsageError

_ABOUT = "ensemble.json"
_SUFFIX = ".member"
_VERSION = 1


class Store:
    """A folder of ended members; open until :meth:`close`.

    Args:
        path: the folder, made if need be.
        source: the cell's source, without its first line.
        trusted: whether what other users have stored there is read.

    Raises:
        UsageError: another source has written it, another notebook is writing it, it is no such
            folder, another user has stored members there, or it cannot be written.
    """

    def __init__(self, path: str, source: str, trusted: bool = False) -> None:
        self._trusted = trusted
        self._names: dict[int, str] = {}
        self._seen: Counter[str] = Counter()
        self.shown = path
        self.oldest: float | None = None
        """When the oldest of the members that were read had ended, in seconds since 1970."""
        try:
            self.path = Path(path).expanduser().resolve()
            self._open(normal(source))
        except (OSError, RuntimeError) as error:
            raise UsageError(
                f"--store {path} cannot be written: {error}. Type another folder."
            ) from error

    def _open(self, source: str) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        about = self.path / _ABOUT
        if not about.exists() and any(self.path.iterdir()):
            raise UsageError(
                f"--store expected a new folder, or one of an ensemble, found {self.shown} with "
                "other files in it. Type another folder."
            )
        self._lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._check_owners()
            self._check(about, source)
            for left in self.path.glob("*.tmp"):
                with suppress(OSError):  # it is not one of ours
                    left.unlink()
        except BlockingIOError:
            os.close(self._lock)
            raise UsageError(
                f"--store {self.shown} is being written by another notebook. "
                "Type another folder, or interrupt the cell there."
            ) from None
        except BaseException:
            os.close(self._lock)
            raise

    def _check_owners(self) -> None:
        owners = [path.stat() for path in self.path.glob(f"*{_SUFFIX}")]
        foreign = [owner.st_uid for owner in owners if is_foreign(owner)]
        if foreign and not self._trusted:
            raise UsageError(
                f"--store {self.shown} expected members that you have stored, found "
                f"{len(foreign)} of user {foreign[0]}: results are pickles, which may run any code "
                "when they are read. If you trust who wrote them, add: --trust-store"
            )

    def _check(self, about: Path, source: str) -> None:
        if not about.exists():
            self._replace(about, json.dumps({"version": _VERSION, "source": source}).encode())
            return
        try:
            before = json.loads(about.read_text("utf-8"))
            kept, version = str(before["source"]), before["version"]
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{about} cannot be read: {error}. Type another folder.") from error
        if version != _VERSION:
            raise UsageError(
                f"--store {self.shown} was written by another version of allranks: expected "
                f"format {_VERSION}, found {version}. Type another folder."
            )
        if kept != source:
            count = len(list(self.path.glob(f"*{_SUFFIX}")))
            raise UsageError(
                f"--store {self.shown} holds {count} members of another cell: "
                f"{_first_difference(kept, source)}\n"
                f"Type another folder, as --store {self.shown}-2, or, to forget what is in this "
                f"one: !rm -r {self.shown}"
            )

    def close(self) -> None:
        """Lets others write it."""
        os.close(self._lock)

    def forget_failed(self) -> None:
        """Has the members that failed run again.

        Raises:
            UsageError: what is stored there cannot be read or removed.
        """
        for path in self.path.glob(f"*{_SUFFIX}"):
            try:
                with path.open("rb") as file:
                    line = file.readline()
                try:
                    failed = json.loads(line)["state"] == FAILED
                except (ValueError, KeyError, TypeError):
                    failed = True  # not whole
                if failed:
                    path.unlink()
            except OSError as error:
                raise UsageError(
                    f"--store {self.shown} cannot be written: {error}. Type another folder."
                ) from error

    def read(self, members: Sequence[Member]) -> list[Member]:
        """Fills in the members that have ended before; returns those."""
        return [member for member in members if self._read(member)]

    def _read(self, member: Member) -> bool:
        path = self._path(member)
        try:
            with path.open("rb") as file:
                line = file.readline()
            head = json.loads(line)
            if head["state"] not in ENDED or path.stat().st_size != len(line) + head["nbytes"]:
                return False
            found = Member(member.number, member.values, head["state"], tuple(head["ranks"]))
            for name, (steps, values) in head["history"].items():
                found.log(name, array("d", steps), array("d", values))
            found.seconds, found.numbers = head["seconds"], dict(head["numbers"])
            found.text, found.problem = head["text"], head["problem"]
            found.error, found.traceback = head["error"], head["traceback"]
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return False  # not there, or not whole: it runs
        member.become(found)
        ended = path.stat().st_mtime
        self.oldest = min(ended, self.oldest or ended)
        if head["nbytes"]:
            member.place = InFile(path, len(line), head["nbytes"], self._trusted)
        return True

    def write(self, member: Member, packed: bytes | Shared) -> None:
        """Writes a member that has ended; its result is read from there from now on.

        Raises:
            UsageError: it cannot be written.
        """
        path = self._path(member)
        head = {
            "number": member.number,
            "values": {name: repr(value) for name, value in member.values.items()},
            "state": member.state,
            "seconds": member.seconds,
            "ranks": member.ranks,
            "numbers": member.numbers,
            "text": member.text,
            "problem": member.problem,
            "error": member.error,
            "traceback": member.traceback,
            "history": {
                name: _points(series.steps, series.values, series.last)
                for name, series in member.series.items()
            },
            "nbytes": len(packed),
        }
        line = json.dumps(head).encode() + b"\n"
        try:
            self._replace(path, line, packed)
        except OSError as error:
            raise UsageError(
                f"--store {self.shown} cannot be written any more: {error}. Members that ended "
                "before are kept; free some space, and run the cell again."
            ) from error
        if len(packed):
            member.place = InFile(path, len(line), len(packed))

    def _replace(self, path: Path, head: bytes, packed: bytes | Shared = b"") -> None:
        beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            write(descriptor, head)
            write(descriptor, packed)
            os.fsync(descriptor)
            os.replace(beside, path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)

    def _path(self, member: Member) -> Path:
        if member.number not in self._names:
            key = key_of(member.values)
            again = f"-{self._seen[key]}" if self._seen[key] else ""
            self._seen[key] += 1
            self._names[member.number] = f"{key}{again}{_SUFFIX}"
        return self.path / self._names[member.number]


def _points(
    steps: array[float], values: array[float], last: tuple[float, float]
) -> tuple[list[float], list[float]]:
    told = list(steps), list(values)
    if steps and steps[-1] != last[0]:
        told[0].append(last[0])
        told[1].append(last[1])
    return told


def normal(source: str) -> str:
    """Returns a cell's source without what does not change what it does."""
    return "\n".join(line.rstrip() for line in source.strip("\n").splitlines())


def _first_difference(kept: str, source: str) -> str:
    before, now = kept.splitlines(), source.splitlines()
    for number, (old, new) in enumerate(zip(before, now, strict=False), 2):
        if old != new:
            return f"line {number} was {old.strip()!r} there, and is {new.strip()!r} here."
    return f"it had {len(before)} lines there, and has {len(now)} here."
