"""The socket between students and their teacher, and the account on its other end.

The teacher's notebook listens. A student's notebook connects only after ``%distributed join``, so
nothing of a notebook is visible without that. The kernel of the system gives each side the account
of the other one; a name in a message could be false. A student sends lines
(`allranks.features.classroom.states`); the teacher sends lines with requests.
"""

from __future__ import annotations

import grp
import json
import os
import pwd
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

from allranks.cluster.folders import answers, check_own
from allranks.errors import UsageError
from allranks.features.classroom.states import one_line

_CREDENTIALS = struct.Struct("3i")


def folder_of(account: str) -> Path:
    """Returns the folder of a teacher's socket, which students of the same machine can find.

    ``ALLRANKS_CLASS_DIR`` names another parent, for accounts that have no common /tmp.
    """
    return Path(os.environ.get("ALLRANKS_CLASS_DIR", "/tmp")) / f"allranks-class-{account}"


def own_account() -> str:
    return account_name(os.getuid())


def account_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def full_name(uid: int) -> str:
    """Returns the name that the system has for an account; without one, the account's."""
    try:
        # Accounts can often change it themselves.
        return one_line(pwd.getpwuid(uid).pw_gecos.split(",")[0]) or account_name(uid)
    except KeyError:
        return account_name(uid)


def peer_uid(connection: socket.socket) -> int:
    """Returns the account of the process at the other end, as the system knows it."""
    if not hasattr(socket, "SO_PEERCRED"):
        raise UsageError("a class needs Linux: no other system names the account of a connection")
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(found)
    return int(uid)


def listen(group: str | None) -> socket.socket:
    """Opens this account's socket, for all accounts of the machine or those of a group."""
    folder = folder_of(own_account())
    with suppress(FileExistsError):
        folder.mkdir(mode=0o711)
    try:
        check_own(str(folder))
    except PermissionError:
        raise UsageError(f"{folder} belongs to another account. Ask who made it") from None
    path, new = folder / "door", folder / f"door-{os.getpid()}"
    if answers(path):
        raise UsageError(
            "another notebook of yours has the class. Type there: %distributed class close"
        )
    new.unlink(missing_ok=True)
    door = socket.socket(socket.AF_UNIX)
    try:
        door.bind(str(new))
        if group is not None:
            try:
                os.chown(new, -1, grp.getgrnam(group).gr_gid)
            except (KeyError, PermissionError):
                raise UsageError(
                    f"expected a group of your account, found {group!r}. Type: id"
                ) from None
        new.chmod(0o666 if group is None else 0o660)
        door.listen(64)
        new.replace(path)
    except BaseException:
        door.close()
        new.unlink(missing_ok=True)
        raise
    return door


def connect(teacher: str) -> socket.socket:
    """Connects to the class of an account, after a check that this account has opened it."""
    try:
        uid = pwd.getpwnam(teacher).pw_uid
    except KeyError:
        raise UsageError(f"expected the account of your teacher, found {teacher!r}") from None
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(folder_of(teacher) / "door"))
        if peer_uid(connection) != uid:
            raise UsageError(
                f"the class of {teacher} was opened by another account. Tell {teacher}"
            )
    except OSError as error:
        connection.close()
        why = "does not admit your account" if isinstance(error, PermissionError) else "is not open"
        raise UsageError(
            f"the class of {teacher} {why}. {teacher} types: %distributed class"
        ) from None
    except BaseException:
        connection.close()
        raise
    return connection


def send(connection: socket.socket, message: dict[str, Any] | str) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")
