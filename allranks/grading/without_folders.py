"""Runs a command that cannot read some folders and files of its user, nor change others. Linux;
standard library only.

python without_folders.py SHOWN HIDDEN... -- FIXED... -- COMMAND...

In a mount namespace an empty folder lies over each hidden folder, and an empty file over each
hidden file. Fixed folders can be read, and not written to. Nothing on the disk is changed.
``SHOWN``, which may be below a hidden or a fixed folder, stays as it is and is the command's
current folder; the temporary folder stays as it is, too. Root's command runs without the
capabilities to unmount the empty folders, and to look at the files of a process outside. Other
users have none of them in a user namespace, which the system must allow.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

_NEW_MOUNTS, _NEW_USER = 0x20000, 0x10000000  # CLONE_NEWNS, CLONE_NEWUSER
_DROP_CAPABILITY = 24  # PR_CAPBSET_DROP
_DROPPED = (2, 16, 17, 18, 19, 21, 27, 40)
"""CAP_DAC_READ_SEARCH, CAP_SYS_MODULE, CAP_SYS_RAWIO, CAP_SYS_CHROOT, CAP_SYS_PTRACE,
CAP_SYS_ADMIN, CAP_MKNOD, CAP_CHECKPOINT_RESTORE. Not a user namespace for root: there, some systems
refuse packet filters, without which dead ranks are not replaced."""
_BIND, _RECURSIVE, _PRIVATE = 0x1000, 0x4000, 0x40000  # MS_BIND, MS_REC, MS_PRIVATE
_READ_ONLY, _AGAIN, _RELATIVE_TIMES = 1, 0x20, 0x200000  # MS_RDONLY, MS_REMOUNT, MS_RELATIME


def command(shown: Path, hidden: Sequence[Path], fixed: Sequence[Path]) -> list[str]:
    """Returns the beginning of a command, which keeps these from the rest of it."""
    paths = map(str, (shown, *hidden, "--", *fixed))
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), *paths, "--"]


def problem(shown: Path, hidden: Sequence[Path], fixed: Sequence[Path]) -> str:
    """Returns why they cannot be hidden or fixed; empty if they can."""
    if sys.platform != "linux":
        return "only Linux can"
    tried = subprocess.run(
        [*command(shown, hidden, fixed), "/bin/true"], capture_output=True, text=True, check=False
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


def _fix(folder: str) -> None:
    """Makes a folder read-only."""
    _mount(folder, folder, "", _BIND | _RECURSIVE)
    flags = os.statvfs(folder).f_flag
    # A user namespace has to keep what the mount has; all but one have the same numbers.
    same = flags & (os.ST_NOSUID | os.ST_NODEV | os.ST_NOEXEC | os.ST_NOATIME | os.ST_NODIRATIME)
    times = _RELATIVE_TIMES if flags & os.ST_RELATIME else 0
    _mount("", folder, "", _BIND | _AGAIN | _READ_ONLY | same | times)


def _show(kept: int, folder: str) -> None:
    """Puts a folder, as its descriptor has it, over what covers it."""
    os.makedirs(folder, exist_ok=True)
    _mount(f"/proc/self/fd/{kept}", folder, "", _BIND | _RECURSIVE)


def main() -> None:
    """Hides and fixes the folders, and becomes the command."""
    split = sys.argv.index("--")
    shown, *hidden = sys.argv[1:split]
    end = sys.argv.index("--", split + 1)
    fixed = sys.argv[split + 1 : end]
    temporary = os.path.realpath(tempfile.gettempdir())
    in_user_namespace = _begin_mounts()
    _mount("", "/", "", _RECURSIVE | _PRIVATE)
    opens = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
    kept, kept_temporary = os.open(shown, opens), os.open(temporary, opens)
    for path in fixed:
        _fix(path)
        if os.path.commonpath((path, temporary)) == path:
            _show(kept_temporary, temporary)
    for path in hidden:
        if os.path.isdir(path):
            _mount("tmpfs", path, "tmpfs", 0, "size=1m,mode=755")
        else:
            _mount("/dev/null", path, "", _BIND)
    _show(kept, shown)
    # The old current folder leads to the folders below the empty ones.
    os.chdir(shown)
    if in_user_namespace:
        _enter_user_namespace()  # where the mounts belong to the one before
    else:
        for capability in _DROPPED:
            _call("prctl", _DROP_CAPABILITY, capability, 0, 0, 0)
    os.execvp(sys.argv[end + 1], sys.argv[end + 1 :])


if __name__ == "__main__":
    main()
