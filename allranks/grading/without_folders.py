"""Runs a command that cannot read some folders and files of its user. Linux; standard library only.

python without_folders.py SHOWN HIDDEN... -- COMMAND...

In a mount namespace an empty folder lies over each hidden folder, and an empty file over each
hidden file. Nothing on the disk is changed. ``SHOWN``, which may be below a hidden folder, stays as
it is and is the command's current folder. The command then runs in a user namespace of its own: so
it can neither unmount the empty folders nor look at the files of a process outside. This needs no
root, but a system that allows user namespaces.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_NEW_MOUNTS, _NEW_USER = 0x20000, 0x10000000  # CLONE_NEWNS, CLONE_NEWUSER
_BIND, _RECURSIVE, _PRIVATE = 0x1000, 0x4000, 0x40000  # MS_BIND, MS_REC, MS_PRIVATE


def command(shown: Path, hidden: Sequence[Path]) -> list[str]:
    """Returns the beginning of a command, which hides these from the rest of it."""
    paths = map(str, (shown, *hidden))
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), *paths, "--"]


def problem(shown: Path, hidden: Sequence[Path]) -> str:
    """Returns why they cannot be hidden; empty if they can."""
    if sys.platform != "linux":
        return "only Linux can"
    tried = subprocess.run(
        [*command(shown, hidden), "/bin/true"], capture_output=True, text=True, check=False
    )
    return "" if tried.returncode == 0 else (tried.stderr.strip().splitlines() or ["?"])[-1]


def _call(name: str, *arguments: object) -> None:
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    if function(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    _call("mount", source.encode(), target.encode(), kind.encode(), flags, options.encode())


def _enter_user_namespace(more: int = 0) -> None:
    """Begins a user namespace with the same users: root keeps all, others have only themselves."""
    own, is_root = os.getpid(), os.geteuid() == 0
    entered, go = os.pipe()
    # Root's maps can only be written by a process outside.
    writer = os.fork()
    if writer == 0:
        os.close(go)
        os.read(entered, 1)
        status = 1
        try:
            if not is_root:
                Path(f"/proc/{own}/setgroups").write_text("deny")
            for name, one in (("uid_map", os.geteuid()), ("gid_map", os.getegid())):
                known = Path("/proc/self", name).read_text().splitlines()
                lines = [f"{first} {first} {count}" for first, _, count in map(str.split, known)]
                text = "\n".join(lines) if is_root else f"{one} {one} 1"
                Path(f"/proc/{own}", name).write_text(f"{text}\n")
            status = 0
        finally:
            os._exit(status)
    os.close(entered)
    _call("unshare", _NEW_USER | more)
    os.close(go)
    if os.waitpid(writer, 0)[1] != 0:
        raise PermissionError("the users of a user namespace cannot be set")


def main() -> None:
    """Hides the folders, and becomes the command."""
    split = sys.argv.index("--")
    shown, *hidden = sys.argv[1:split]
    _enter_user_namespace(_NEW_MOUNTS)
    _mount("", "/", "", _RECURSIVE | _PRIVATE)
    kept = os.open(shown, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    for path in hidden:
        if os.path.isdir(path):
            _mount("tmpfs", path, "tmpfs", 0, "size=1m,mode=755")
        else:
            _mount("/dev/null", path, "", _BIND)
    if not os.path.isdir(shown):
        os.makedirs(shown)
        _mount(f"/proc/self/fd/{kept}", shown, "", _BIND | _RECURSIVE)
    # The old current folder leads to the folders below the empty ones.
    os.chdir(shown)
    _enter_user_namespace()
    os.execvp(sys.argv[split + 1], sys.argv[split + 1 :])


if __name__ == "__main__":
    main()
