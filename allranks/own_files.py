"""Folders and files of this user alone, opened without following links. Standard library only.

Any account of a machine can take a name in ``/tmp`` or ``/dev/shm``. What allranks reads back from
such a place may be a pickle, which can run any code. So it is opened here: a link, a pipe, and a
folder or file that belongs to another user or that others may use, is refused. The check is of the
descriptor, and files are opened relative to the descriptor of their folder, so nothing can be
exchanged between the check and the use.
"""

from __future__ import annotations

import errno
import functools
import glob
import grp
import os
import pwd
import re
import shutil
import socket
import stat
import struct
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

#: A pipe would make the open wait for its other end.
_SAFE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_ANY_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_CREDENTIALS = struct.Struct("3i")
_KEPT_DAYS = 7
#: With which the name of a folder of logs begins.
LOGS_TIME = "%Y%m%d-%H%M%S-"
_LOGS_OF_ONE = re.compile(r"\d{8}-\d{6}-\w+")
_ACCESS_LIST = "system.posix_acl_access"
_MOST_LINKS = 40
"""Linux follows as many."""


def open_folder(path: str, others: int = 0) -> int:
    """Returns a descriptor of a folder of this user alone.

    ``others`` are the bits of the rights that others may have. Raises PermissionError if it is
    another user's or others have more rights, and OSError if it is no folder.
    """
    return _checked(os.open(path, os.O_RDONLY | os.O_DIRECTORY | _SAFE), path, others)


@contextmanager
def own_folder(path: str) -> Iterator[int]:
    """Within, the descriptor of a folder of this user alone is open; raises as `open_folder`."""
    descriptor = open_folder(path)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def is_own_folder(path: str, others: int = 0) -> bool:
    """Whether there is a folder of this user alone; ``others`` as in `open_folder`."""
    try:
        os.close(open_folder(path, others))
    except OSError:
        return False
    return True


def make_folder(path: str) -> None:
    """Makes a folder for this user alone, if there is none yet; raises as `open_folder`."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        os.close(open_folder(path))


def make_folders(path: str) -> None:
    """Makes a folder and those above it that are missing, all for this user alone."""
    above = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(above):
        make_folders(above)
    # Unlike os.makedirs, which makes those above with all rights that the umask leaves.
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)


def temporary_folder(purpose: str) -> str:
    """Returns a folder of this user alone in the temporary folder: always the same one.

    If another user has taken its name, it has a longer one. It is in ``/tmp`` if others can
    exchange folders in ``TMPDIR``.
    """
    parent = tempfile.gettempdir()
    if exposed_part(parent) and os.access("/tmp", os.W_OK):
        parent = "/tmp"
    place = os.path.join(parent, f"allranks-{purpose}-{os.getuid()}")
    try:
        make_folder(place)
    except OSError:
        longer = sorted(glob.glob(f"{glob.escape(place)}-*"))
        made = next(filter(is_own_folder, longer), "")
        return made or tempfile.mkdtemp(prefix=f"{os.path.basename(place)}-", dir=parent)
    return place


def end_of(path: str, nbytes: int, start: int = 0) -> str:
    """Returns the last bytes of a log as text, not before ``start``.

    Raises OSError if it cannot be read; it may be on another host.
    """
    with open(path, "rb") as log:
        log.seek(max(start, log.seek(0, os.SEEK_END) - nbytes))
        return log.read().decode("utf-8", "replace")


def remove_old_logs(place: str) -> None:
    """Removes folders of logs to which nothing was written for seven days."""
    oldest = time.time() - _KEPT_DAYS * 86400
    # Names begin with the time. A start waits for this, and there may be thousands of folders.
    recent = time.strftime(LOGS_TIME, time.localtime(oldest))
    try:
        found = [Path(place, name) for name in os.listdir(place) if name < recent]
    except OSError:  # it may be written and not read
        return
    for folder in found:
        try:
            # The user may have chosen the place: it may contain other files.
            if not _LOGS_OF_ONE.fullmatch(folder.name):
                continue
            newest = max((f.stat().st_mtime for f in folder.iterdir()), default=0.0)
            if max(newest, folder.stat().st_mtime) < oldest:
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue


def open_file(path: str, folder: int | None = None) -> int:
    """Returns a descriptor to read a file of this user alone, in the folder of a descriptor if any.

    Raises PermissionError if it is another user's or others have any rights, and OSError if it is
    a link or no file.
    """
    return _checked(open_any_file(path, folder), path, 0)


def open_any_file(path: str, folder: int | None = None) -> int:
    """Returns a descriptor to read any user's file. Raises OSError if it is a link or no file."""
    descriptor = os.open(path, os.O_RDONLY | _SAFE, dir_fd=folder)
    kind = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(kind):
        os.close(descriptor)
        number = errno.EISDIR if stat.S_ISDIR(kind) else errno.EPERM
        raise OSError(number, f"{os.strerror(number)}, expected a file", path)
    return descriptor


def create_file(name: str, folder: int) -> int:
    """Returns a descriptor to write a new file for this user alone; the name must be free."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE
    return os.open(name, flags, 0o600, dir_fd=folder)


def exposed_part(path: str) -> str:
    """Returns the first folder or link on a path that other users can exchange, or whose content
    they can; "" if there is none. Parts that do not exist yet are not exposed.

    Root is trusted, and so is the user's home: others who can write there can run code anyway. So
    can a group below it, to which the volumes of some clusters give all files. In a folder with the
    sticky bit, as ``/tmp``, others can exchange only what belongs to them.
    """
    home, exposed = os.path.realpath(os.path.expanduser("~")), ""
    for part, found in _way(path):
        is_trusted = found.st_uid in (os.geteuid(), 0)
        if stat.S_ISLNK(found.st_mode):
            if not is_trusted:
                return part  # also if it leads to the home: it may lead elsewhere later
        elif part == home:
            exposed = ""
        elif not (is_trusted and stat.S_ISDIR(found.st_mode)) or (
            (
                found.st_mode & stat.S_IWOTH
                if part.startswith(f"{home}/")
                else others_can_write(found, part)
            )
            and not found.st_mode & stat.S_ISVTX
        ):
            exposed = exposed or part
    return exposed


def _way(path: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yields each folder and each link that the system visits for a path, as far as they exist."""
    at, links = "/", 0
    rest = [*Path(os.path.abspath(path)).parts[:0:-1]]
    yield at, os.lstat(at)
    while rest:
        name = rest.pop()
        if name == "..":
            at = os.path.dirname(at)
            continue
        part = os.path.join(at, name)
        try:
            found = os.lstat(part)
        except FileNotFoundError:
            return
        yield part, found
        if stat.S_ISLNK(found.st_mode):
            links += 1
            if links > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            target = Path(os.readlink(part))
            rest += [one for one in reversed(target.parts) if one != "/"]
            at = "/" if target.is_absolute() else at
        else:
            at = part


def others_can_write(found: os.stat_result, at: str | int) -> bool:
    """Whether users other than the owner can write to a file or folder.

    ``at`` is its path or descriptor. A group of this user alone does not count, unless a POSIX
    access control list names further users: then the group's bits are the most that each of them
    has. macOS and NFSv4 have lists beside the bits, which are not read.
    """
    if not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return False
    return bool(
        found.st_mode & stat.S_IWOTH or not _is_own_group(found.st_gid) or _has_access_list(at)
    )


def _has_access_list(at: str | int) -> bool:
    if not hasattr(os, "getxattr"):
        return False
    try:
        return bool(os.getxattr(at, _ACCESS_LIST))
    except OSError:  # there is none, or the file system has none
        return False


def _is_own_group(gid: int) -> bool:
    """Whether a group is of this user alone: many systems make one of the same name for each user.

    The name is part of the check, because the users of a large directory cannot always be listed.
    """
    try:
        user, group = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(gid)
    except KeyError:
        return False
    if group.gr_name != user or not set(group.gr_mem) <= {user}:
        return False
    return _users_with_group(gid) <= {user}


@functools.cache  # of a directory with many users this takes long
def _users_with_group(gid: int) -> frozenset[str]:
    """Returns the users with this first group, which the group's own list does not name."""
    return frozenset(user.pw_name for user in pwd.getpwall() if user.pw_gid == gid)


def check_owner(descriptor: int, path: str) -> None:
    """Raises PermissionError if an open file or folder belongs to another user."""
    owner = os.fstat(descriptor).st_uid
    if owner != os.geteuid():
        raise PermissionError(f"expected {path} to be yours, found that user {owner} has made it")


def peer(connection: socket.socket) -> tuple[int, int]:
    """Returns the process and the user at the other end of a socket, as the system knows them: 0 if
    it does not know the process, as in another container, and 0 and -1 on macOS.
    """
    if not hasattr(socket, "SO_PEERCRED"):
        return 0, -1
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(found)
    return process, user


def check_peer(connection: socket.socket, path: str) -> None:
    """Raises PermissionError if the process at the other end of a socket is another user's.

    It checks nothing on macOS: there the rights of the socket's folder have to suffice.
    """
    _, user = peer(connection)
    if hasattr(socket, "SO_PEERCRED") and user not in (os.geteuid(), 0):
        raise PermissionError(f"expected a process of yours at {path}, found one of user {user}")


def _checked(descriptor: int, path: str, others: int) -> int:
    try:
        check_owner(descriptor, path)
        if more := os.fstat(descriptor).st_mode & _ANY_OTHERS & ~others:
            raise PermissionError(
                f"expected {path} for you alone, found rights {more:03o} of others"
            )
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
