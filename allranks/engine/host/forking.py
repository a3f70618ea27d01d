"""Forks a process of its own from the one that has imported what all need."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence

from allranks.engine import processes


def fork(
    live: Callable[[], None],
    environment: dict[str, str],
    log: str,
    work_dir: str,
    keep: Sequence[int] = (),
) -> int:
    """Returns the id of a new process that runs ``live`` and dies with this one.

    Args:
        live: what it runs; its exit code is 0 when that returns.
        environment: all of its environment variables.
        log: the file that it writes to.
        work_dir: the folder in which it runs.
        keep: descriptors that stay open in it.
    """
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        processes.die_with_parent(parent)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(environment)
        os.makedirs(os.path.dirname(log), mode=0o700, exist_ok=True)  # it may have been removed
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        processes.close_all_but({0, 1, 2, *keep})
        os.chdir(work_dir)
        live()
        code = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)
