"""The socket between students and their teacher, and the account on its other end.

The teacher's notebook listens. A student's notebook connects only after ``%distributed join``, so
nothing of a notebook is visible without that. The kernel of the system gives each side the account
of the other one; a name in a message could be false. A student sends lines
(`allranks.features.classroom.states`); the teacher sends a line that admits or refuses the
notebook, and then lines with requests.
"""

from __future__ import annotations

import glob
import grp
import json
import os
import pwd
import socket
import stat
import struct
import tempfile
from pathlib import Path
from typing import Any

from allranks import own_files
from allranks.cluster.session_folder import answers
from allranks.errors import UsageError
from allranks.features.classroom.states import RefusedMessage, one_line, read_admission

_ANSWER_NBYTES = 4096
#: The time of a connection that waits, because many students join at once; and no limit.
_CONNECT_SECONDS, _FOR_EVER = 5, 0
_TIME = struct.Struct("ll")


def folder_of(account: str) -> Path:
    """Returns the folder of a teacher's socket, which students of the same machine can find.

    ``ALLRANKS_CLASS_DIR`` names another parent, for accounts that have no common /tmp. Any account
    can take the folder's name, but only the teacher's account can make a folder that belongs to it:
    so a longer name counts as well, and a folder of another account does not.
    """
    place = Path(os.environ.get("ALLRANKS_CLASS_DIR", "/tmp"))
    name = f"allranks-class-{account}"
    uid = os.getuid() if account == own_account() else pwd.getpwnam(account).pw_uid
    longer = sorted(place.glob(f"{glob.escape(name)}-*"))
    return next((each for each in (place / name, *longer) if _is_of(each, uid)), place / name)


def _is_of(folder: Path, uid: int) -> bool:
    """Whether only this account can make files in a folder."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == uid and not found.st_mode & 0o022


def _make_folder() -> Path:
    folder = folder_of(own_account())
    if not _is_of(folder, os.getuid()):
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:  # another account has taken the name
            folder = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
        folder.chmod(0o711)  # whatever the umask is
    return folder


def own_account() -> str:
    return account_name(os.getuid())


def account_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def full_name(uid: int) -> str:
    """Returns the name that the system has for an account, and the account if it differs."""
    account = account_name(uid)
    try:
        name = one_line(pwd.getpwuid(uid).pw_gecos.split(",")[0])
    except KeyError:
        name = ""
    # Accounts can often change their name themselves, to that of another one.
    return f"{name} ({account})" if name not in ("", account) else account


def _check_system() -> None:
    if not hasattr(socket, "SO_PEERCRED"):
        raise UsageError("a class needs Linux: no other system names the account of a connection")


def listen(group: str | None) -> socket.socket:
    """Opens this account's socket, for all accounts of the machine or those of a group."""
    _check_system()
    folder = _make_folder()
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
    """Connects to the class of an account, after a check that this account has opened it.

    Raises UsageError, with the reason, if the class is not open or does not admit this notebook.
    """
    _check_system()
    try:
        uid = pwd.getpwnam(teacher).pw_uid
    except KeyError:
        raise UsageError(
            f"expected the account of your teacher on this machine, found {teacher!r}. The "
            "teacher's notebook shows what to type, for example: %distributed join ana"
        ) from None
    folder = folder_of(teacher)
    # The socket of another account could keep this waiting.
    by_another = os.path.lexists(folder) and not _is_of(folder, uid)
    connection = socket.socket(socket.AF_UNIX)
    try:
        if not by_another:
            _set_limit(connection, socket.SO_SNDTIMEO, _CONNECT_SECONDS)
            connection.connect(str(folder / "door"))
            _set_limit(connection, socket.SO_SNDTIMEO, _FOR_EVER)
        if by_another or own_files.peer(connection)[1] != uid:
            raise UsageError(
                f"the class of {teacher} was opened by another account. Tell {teacher}"
            )
        _set_limit(connection, socket.SO_RCVTIMEO, _CONNECT_SECONDS)
        answer = connection.recv(_ANSWER_NBYTES)  # the teacher sends no more before a state
        _set_limit(connection, socket.SO_RCVTIMEO, _FOR_EVER)
        if not answer:
            raise UsageError(
                f"expected the class of {teacher} to answer, found that it has closed the "
                "connection: it has just ended, or its notebook has too many files open. Type "
                f"again: %distributed join {teacher}"
            )
        if refused := read_admission(answer):
            raise UsageError(f"the class of {teacher} does not admit this notebook: {refused}")
    except RefusedMessage:
        connection.close()
        raise UsageError(
            f"expected the answer of a class of {teacher}, found another program's. Tell {teacher}"
        ) from None
    except BlockingIOError:
        connection.close()
        raise UsageError(
            f"expected the class of {teacher} to answer, found too many students that join at "
            f"once, or a busy notebook, for {_CONNECT_SECONDS} s. Type again: "
            f"%distributed join {teacher}"
        ) from None
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


def _set_limit(connection: socket.socket, what: int, seconds: int) -> None:
    # With settimeout, a connection to a full queue would be refused at once.
    connection.setsockopt(socket.SOL_SOCKET, what, _TIME.pack(seconds, 0))


def send(connection: socket.socket, message: dict[str, Any] | str) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")
