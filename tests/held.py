"""New processes of ranks that are held at a step, for tests of what happens meanwhile."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def held(folder: Path, where: str, act: Callable[[], object]) -> Iterator[None]:
    """Within, the first new rank that comes to a step goes on once ``act`` has been called.

    ``folder`` is the ranks' ALLRANKS_HOLDS, ``where`` the name of the step.
    """
    pipe = folder / where
    os.mkfifo(pipe)
    came = []

    def attend() -> None:
        with pipe.open("wb"):  # once a rank reads it
            if pipe.exists():
                pipe.unlink()
                act()
                came.append(where)

    thread = threading.Thread(target=attend)
    thread.start()
    try:
        yield
    finally:
        with suppress(FileNotFoundError):
            reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
            pipe.unlink()
            os.close(reader)
        thread.join()
    assert came == [where], f"expected a new rank at {where}, found none"
