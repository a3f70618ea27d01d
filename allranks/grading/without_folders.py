"""Runs a command that cannot read some folders and files of its user. Linux; standard library only.

python without_folders.py SHOWN HIDDEN... -- COMMAND...

In a mount namespace an empty folder lies over each hidden folder, and an empty file over each
hidden file. Nothing on the disk is changed. ``SHOWN``, which may be below a hidden folder, stays as
it is and is the command's current folder. Root's command runs without the capabilities to unmount
the empty folders, and to look at the files of a process outside. Other users have none of them in a
user namespace, which the system must allow.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_NEW_MOUNTS, _NEW_USER = 0x20000, 0x10000000  # CLONE_NEWNS, CLONE_NEWUSER
_DROP_CAPABILITY = 24  # PR_CAPBSET_DROP
_DROPPED = (2, 16, 17, 18, 19, 21, 27, 40)
"""CAP_DAC_READ_SEARCH, CAP_SYS_MODULE, CAP_SYS_RAWIO, CAP_SYS_CHROOT, CAP_SYS_PTRACE,
CAP_SYS_ADMIN, CAP_MKNOD, CAP_CHECKPOINT_RESTORE. Not a user namespace for root: there, some systems
refuse packet filters, without which dead ranks are not replaced."""
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
    """Begins a user namespace in which only this user exists."""
    own = {"uid_map": os.geteuid(), "gid_map": os.getegid()}
    _call("unshare", _NEW_USER | more)
    Path("/proc/self/setgroups").write_text("deny")
    for name, one in own.items():
        Path("/proc/self", name).write_text(f"{one} {one} 1\n")


def _begin_mounts() -> bool:
    """Begins a mount namespace; returns whether it is in a user namespace too."""
    try:
        _call("unshare", _NEW_MOUNTS)
    except PermissionError:
        _enter_user_namespace(_NEW_MOUNTS)
        return True
    return False


def main() -> None:
    """Hides the folders, and becomes the command."""
    split = sys.argv.index("--")
    shown, *hidden = sys.argv[1:split]
    in_user_namespace = _begin_mounts()
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
    if in_user_namespace:
        _enter_user_namespace()  # where the mounts belong to the one before
    else:
        for capability in _DROPPED:
            _call("prctl", _DROP_CAPABILITY, capability, 0, 0, 0)
    os.execvp(sys.argv[split + 1], sys.argv[split + 1 :])


if __name__ == "__main__":
    main()
